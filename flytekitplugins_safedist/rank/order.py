"""What ranks are told: each its own order, and one that all of a job share. Values, which travel as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mashumaro.config import BaseConfig
from mashumaro.mixins.dict import DataClassDictMixin

from .context import RankContext
from .places import RankFiles


class Record(DataClassDictMixin):
    """A dataclass as JSON's values."""

    class Config(BaseConfig):
        """Agent and ranks have one version of this package: what one of them does not know is damage."""

        forbid_extra_keys = True


@dataclass(frozen=True)
class RankOrder(Record):
    """All that one rank of a round is told.

    Attributes:
        context: identity and scratch directory.
        environment: the rank's whole environment; nothing else is inherited.
        files: what it and its agent hand each other.
        log: file for standard output, and for standard error where that is not apart.
        ran_before: ranks may have run before in this attempt, and saved.
        errors: file for standard error, where it is apart.
        terminal: at which the job was started, for ``breakpoint()``; "": none.
        profile: the first and the last step that torch.profiler looks into, where it does.
    """

    context: RankContext
    environment: dict[str, str]
    files: RankFiles
    log: Path
    ran_before: bool
    errors: Path | None = None
    terminal: str = ""
    profile: tuple[int, int] | None = None

    @property
    def logs(self) -> tuple[Path, ...]:
        """All that it prints, what it prints of errors last."""
        return (self.log,) if self.errors is None else (self.log, self.errors)


@dataclass(frozen=True)
class TaskSource(Record):
    """Where ranks get the task from (:mod:`.task`).

    Attributes:
        name: of the task in its module or script.
        module: that is imported.
        script: a script's file, which is run as ``multiprocessing`` does in the processes that it spawns.
        run_as: the module that ``python -m`` named, where the script is one.
        pickled: the task by value, base64, where it can be had in no other way.
        resolver: of flytekit, which finds the task, in a pod.
        arguments: of the resolver.
        mapped: the task is mapped over a list; Flyte's variables say which element this pod has.
        imports: modules that its imports are looked for in, where neither of these names one.
    """

    name: str = ""
    module: str | None = None
    script: str | None = None
    run_as: str | None = None
    pickled: str | None = None
    resolver: str | None = None
    arguments: tuple[str, ...] = ()
    mapped: bool = False
    imports: tuple[str, ...] = ()

    @property
    def is_script(self) -> bool:
        """Whether it is the task of ``python -m flytekitplugins_safedist.run``, whose streams stay apart."""
        return self.name == "flytekitplugins_safedist.run.script"

    @property
    def shown(self) -> str:
        """What is imported, for messages."""
        return self.module or self.run_as or (self.script and Path(self.script).name) or next(iter(self.imports), "")


@dataclass(frozen=True)
class FlyteSnapshot:
    """Flyte's side of a running task; every field is text, a switch or None.

    Attributes:
        mode: name of ``ExecutionState.Mode``.
        raw_output_prefix: where offloaded data (files, data frames) go.
        users_raw_output_prefix: the same, as ``current_context()`` has it: with no ``/`` at its end in a pod.
        output_metadata_prefix: where ``outputs.pb`` goes.
        execution_id: project, domain and name of the workflow execution.
        task_id: project, domain, name and version of the task.
        execution_date: ISO 8601.
        checkpoint_dest, checkpoint_src: of the task's checkpoint, None where there is none.
        enable_deck: whether decks are made.
        serialization: ``SerializationSettings.serialized_context``, for tasks that register or launch others.
        metadata: what flytekit hands to object stores about the execution.
    """

    mode: str
    raw_output_prefix: str
    users_raw_output_prefix: str | None
    output_metadata_prefix: str | None
    execution_id: tuple[str, str, str]
    task_id: tuple[str, str, str, str]
    execution_date: str
    checkpoint_dest: str | None
    checkpoint_src: str | None
    enable_deck: bool
    serialization: str | None
    metadata: dict[str, str]


@dataclass(frozen=True)
class JobOrder(Record):
    """What all ranks of a job share.

    Attributes:
        source: of the task.
        cwd: the working directory.
        sys_path: the module search path.
        argv: the agent's command line, for code that reads ``sys.argv``.
        inputs: file with the serialized ``LiteralMap``.
        flyte: the Flyte context.
        upload_timeout: seconds that an upload may take.
        shared_inputs: where the ranks of the node have what they download of the inputs; None: each for itself.
    """

    source: TaskSource
    cwd: Path
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    inputs: Path
    flyte: FlyteSnapshot
    upload_timeout: float
    shared_inputs: Path | None = None
