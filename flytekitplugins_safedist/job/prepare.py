"""Before a job's ranks on this node: its place, its scratch, its rank server, and what all of them are told."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import envvars, topology
from ..config.options import SCRATCH_MOUNT, Scratch
from ..config.plan import Plan
from ..errors import ScratchError, TopologyError
from ..flyte import task_context
from ..hangs.gpus import GpuWatch
from ..ranks import backends, disk, literals, memory, prefork, scratch
from ..ranks.disk import DiskLimit
from ..ranks.forkserver_client import RankServer
from ..ranks.order import JobOrder
from ..ranks.prefork import Prefork
from ..ranks.scratch import JobScratch
from ..texts import human
from . import arrival

if TYPE_CHECKING:
    from flytekit.core.python_function_task import PythonFunctionTask
    from flytekit.models.literals import LiteralMap


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One job as this node is called for it.

    Attributes:
        task: the task to run.
        settings: its configuration, with the number of ranks that this pod has room for.
        environment: this process's variables.
        backend: how its ranks meet.
        attempt: Flyte's, and this node's place in it.
        name: see :func:`.arrival.job_name`.
    """

    task: PythonFunctionTask[Any]
    settings: Plan
    environment: Mapping[str, str]
    backend: backends.TorchBackend
    attempt: arrival.Attempt
    name: str

    @classmethod
    def of(cls, task: PythonFunctionTask[Any], settings: Plan, environment: Mapping[str, str]) -> Job:
        """What this process's variables, devices and flytekit say.

        Raises:
            TopologyError: nobody says which node this is, or two contradict each other.
        """
        backend = backends.create(settings.backend)
        try:
            place = topology.from_env(environment, settings, devices=[device.name for device in Path("/dev").iterdir()])
        except TopologyError as error:
            # Uploaded by this node alone it would end, for Flyte, a job that goes on.
            arrival.of_no_task(error, environment, settings)
            raise
        flyte = task_context.take()
        budgets = settings.max_restarts, settings.max_replacements, settings.preflight
        attempt = arrival.Attempt(place, settings.timeouts, *budgets, flyte, arrival.run_id(flyte, environment))
        given = dict(settings.environment)
        if flyte.mode == task_context.IN_POD:
            # The container has them, unless the execution says otherwise (``--env``).
            given |= {name: environment[name] for name in given if name in environment}
        settings = replace(settings, nproc_per_node=place.nproc_per_node, environment=tuple(sorted(given.items())))
        return cls(task, settings, environment, backend, attempt, arrival.job_name(flyte))

    @property
    def ranks_environment(self) -> dict[str, str]:
        """What ranks inherit."""
        return {**prefork.inherited(self.settings, self.environment), **dict(self.settings.environment)}

    @property
    def is_local(self) -> bool:
        """Whether it runs on the user's own machine."""
        return self.attempt.flyte.mode != task_context.IN_POD

    @property
    def number(self) -> int:
        """Of Flyte's attempt, from 0."""
        return int(self.environment.get(envvars.FLYTE_ATTEMPT, "0"))

    @property
    def version(self) -> str:
        """Of the task as it is registered; "" in a local run."""
        flyte = self.attempt.flyte
        return flyte.task_id[3] if flyte.task_id else ""


@dataclass
class Scratched:
    """The job's directory on this node; what stays of it depends on whether the job has ``succeeded``."""

    job: JobScratch
    succeeded: bool = False


@dataclass(frozen=True)
class NodePlan:
    """What a node's agent begins with.

    Attributes:
        job: what it is to run.
        server: starts ranks.
        scratched: the job's directory on this node.
        fork: whether ranks may be forked from the server.
        limit: how much they may write to disk.
        gpus: of this node.
        seconds: that preparing took.
    """

    job: Job
    server: RankServer
    scratched: Scratched
    fork: bool
    limit: DiskLimit | None
    gpus: GpuWatch
    seconds: float

    @property
    def settings(self) -> Plan:
        """The job's."""
        return self.job.settings

    @property
    def scratch(self) -> JobScratch:
        """The job's directory on this node."""
        return self.scratched.job

    def shortage(self) -> str | None:
        """What to warn of where the container's memory is less than its ranks will most likely need."""
        imported = max(self.server.imported(), 0 if self.fork else memory.anonymous())
        return memory.shortage(memory.cgroup(), ranks=self.settings.nproc_per_node, imported=imported)


def prepare(job: Job, inputs: LiteralMap, held: ExitStack, early: Prefork) -> NodePlan:
    """Start what the ranks need; *held* ends it all, in the right order.

    Args:
        job: the job.
        inputs: of the task.
        held: takes over what is started.
        early: what a pod has done before.
    """
    settings = job.settings
    job.backend.find()
    # The server comes first, to guard scratch from its first moment; and ends first, for scratch goes when no rank can
    # write there any more.
    running = early.server or RankServer.spawn(job.ranks_environment)
    root = _scratch_root(settings.scratch, job.environment)
    held.enter_context(running)
    scratched = held.enter_context(_scratch(root, settings))
    # Orders hold every rank's environment, and with it the task's secrets: they never stay. Nor does a link.
    made = scratched.job
    goes = [made.path if settings.scratch.keep == "never" else made.orders]
    running.guard(goes if made.short == made.path else [made.short, *goes])
    told = JobOrder.of(job.task, made.orders / "inputs.pb", job.attempt.flyte, settings.timeouts.upload)
    started = time.monotonic()
    held.enter_context(running)  # again: it ends before scratch goes
    preloads = settings.start_method == "preload"
    if not running.prepared:
        caches = scratch.make_caches(made.preload, settings.shared_caches)
        _prepare(running, job, told, imports=preloads and early.unsafe is None, caches=caches)
    literals.write_literals(inputs, told.inputs)
    (made.orders / JobOrder.FILE).write_text(told.to_json())
    answer = running.ready(settings.timeouts.start)
    unsafe = early.unsafe or answer
    if preloads and unsafe is not None:
        logger.warning(f"ranks start as fresh interpreters (start_method='spawn') instead of 'preload': {unsafe}")
    fork = preloads and unsafe is None
    if not fork:
        job.backend.check()  # nobody has imported it yet: one error here, instead of one from every rank
    limit = disk.limit_of(settings, job.environment)
    gpus = held.enter_context(GpuWatch(logger.warning))
    return NodePlan(job, running, scratched, fork, limit, gpus, time.monotonic() - started)


def _prepare(server: RankServer, job: Job, told: JobOrder, *, imports: bool, caches: Mapping[str, str]) -> None:
    """Have a server that knows nothing yet import what all ranks need, or only be where they are started."""
    backend = job.backend
    names = {"libraries": backend.libraries, "modules": told.imports, "late": backend.late} if imports else {}
    environment = {**job.ranks_environment, **caches, **dict(job.settings.environment)}
    server.prepare(cwd=Path.cwd(), environment=environment, sys_path=told.sys_path, mode=told.flyte.mode, **names)


def _scratch_root(asked: Scratch, environment: Mapping[str, str]) -> Path:
    """Where scratch goes: a pod lacks the volume that registration named when a pod template replaced the task's."""
    named = environment.get(envvars.SCRATCH_ROOT)
    elsewhere = Path(asked.path or named or tempfile.gettempdir())
    is_ours = asked.path is None and asked.volume is not None and named == SCRATCH_MOUNT
    wanted = environment.get(envvars.TMPDIR)
    if wanted and elsewhere == Path(tempfile.gettempdir()) and elsewhere != Path(os.path.abspath(wanted)):  # noqa: PTH100
        why = "it is full, or cannot be written" if Path(wanted).is_dir() else "there is no such directory"
        logger.warning(f"TMPDIR={wanted} is not used ({why}): scratch is in {elsewhere}")
    if not is_ours or elsewhere.is_dir():
        return elsewhere
    logger.warning(
        f"this pod has no scratch volume at {named} (with_overrides(pod_template=...) replaced the pod "
        f"template that brings it): scratch is in {tempfile.gettempdir()}, in the container's own file system"
    )
    return Path(tempfile.gettempdir())


@contextmanager
def _scratch(root: Path, settings: Plan) -> Iterator[Scratched]:
    _check_room(root, settings.size_limit)
    job = scratch.make_job(root)
    scratched = Scratched(job)
    try:
        yield scratched
    finally:
        mode = settings.scratch.keep
        if job.short != job.path:
            scratch.remove(job.short)
        if mode == "always" or (mode == "on_failure" and not scratched.succeeded):
            scratch.remove(job.orders)  # they hold every rank's environment, and with it the task's secrets
            logger.info(f"scratch is kept in {job.path} (Scratch(keep={mode!r}))")
        else:
            left = scratch.remove(job.path)
            if left is not None:
                logger.warning(f"scratch could not be removed completely: {left}")


def _check_room(root: Path, limit: int | None) -> None:
    try:
        free = shutil.disk_usage(root).free
    except OSError as error:
        raise ScratchError(
            "the scratch directory cannot be used",
            where={"path": root},
            seen=str(error.strerror),
            expected="an existing directory that this user may write",
            hint="create it, or set Scratch(path=...) or SAFEDIST_SCRATCH_ROOT to another",
        ) from error
    if limit is not None and free < limit:
        logger.warning(
            f"Scratch(size_limit=...) allows {human(limit)}, but {root} has only "
            f"{human(free)} free: the disk will be full before the limit is reached"
        )
