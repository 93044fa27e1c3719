"""What ranks are told: each its own order, and one that all of a job share, with the way to the task. Values.

The task travels as a module and a name wherever it can be imported; only what cannot (``__main__``, nested functions,
lambdas) is pickled by value, with cloudpickle.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from mashumaro.config import BaseConfig
from mashumaro.mixins.dict import DataClassDictMixin

from ..errors import PayloadError
from ..flyte.task_context import FlyteSnapshot
from .context import RankContext
from .scratch import JobScratch

if TYPE_CHECKING:
    from flytekit.core.python_function_task import PythonFunctionTask

R = TypeVar("R", bound="Record")


class Record(DataClassDictMixin):
    """A dataclass as one line of JSON."""

    class Config(BaseConfig):
        """Agent and ranks have one version of this package: what one of them does not know is damage."""

        forbid_extra_keys = True

    def to_json(self) -> str:
        """In ASCII, whatever bytes a name or a variable is made of."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls: type[R], text: str) -> R:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: the text is no whole record of this kind.
        """
        try:
            return cls.from_dict(json.loads(text))
        except Exception as error:  # mashumaro's and json's, which have no class in common
            raise ValueError(f"not a {cls.__name__}: {type(error).__name__}: {error}") from error


EVENTS = ".events"


def order_file(job: JobScratch, round_no: int, rank: int) -> Path:
    """Where the agent leaves a rank's order."""
    return job.orders / f"round-{round_no}-rank-{rank}.json"


@dataclass(frozen=True)
class RankOrder(Record):
    """All that one rank of a round is told, as the agent wrote it.

    Attributes:
        context: identity and scratch directory.
        environment: the rank's whole environment; nothing else is inherited.
        file: where the agent leaves this order. The files beside it are named by it.
        log: file for standard output and error.
        records: the socket at which torch tells of the rank's collectives.
        terminal: at which the job was started, for ``breakpoint()``; "": none.
        profile: the first and the last step that torch.profiler looks into, where it does.
    """

    context: RankContext
    environment: dict[str, str]
    file: Path
    log: Path
    records: Path
    terminal: str = ""
    profile: tuple[int, int] | None = None

    @classmethod
    def of(
        cls,
        context: RankContext,
        environment: Mapping[str, str],
        job: JobScratch,
        terminal: str = "",
        profile: tuple[int, int] | None = None,
    ) -> RankOrder:
        """The order of a rank in the job's scratch."""
        file = order_file(job, context.round, context.rank)
        return cls(
            context=context,
            environment=dict(environment),
            file=file,
            log=job.log(context.round, context.rank),
            records=job.short / job.orders.name / file.with_suffix(".fr").name,
            terminal=terminal,
            profile=profile,
        )

    @property
    def job(self) -> Path:
        """The :class:`JobOrder` that all ranks share."""
        return self.file.with_name(JobOrder.FILE)

    @property
    def page(self) -> Path:
        """The memory that the rank shares with its agent, where it says how it ended."""
        return self.file.with_suffix(".page")

    @property
    def result(self) -> Path:
        """Where rank 0 leaves its outputs."""
        return self.file.with_suffix(".result.pb")

    @property
    def events(self) -> Path:
        """Where the rank notes what it does (:mod:`..record.events`)."""
        return self.file.with_suffix(EVENTS)

    @property
    def stacks(self) -> Path:
        """Where the rank writes the stacks of its threads when it is asked to."""
        return self.file.with_suffix(".stacks")


@dataclass(frozen=True)
class JobOrder(Record):
    """What all ranks of a job share.

    Attributes:
        module, name: where the task object is imported from, or both None.
        pickled: the task object by value, base64, where it cannot be imported.
        imports: modules worth importing once for all ranks: the task's; of a task that travels by value those that its
            own module, a script or a notebook, has imported.
        sys_path: the agent's module search path.
        argv: the agent's command line, for code that reads ``sys.argv``.
        inputs: file with the serialized ``LiteralMap``.
        flyte: the Flyte context.
        upload_timeout: seconds that an upload may take.
        main: the agent's ``__main__``: its file (None in a notebook or an interactive interpreter), and the module that
            ``python -m`` named (None for a script).
    """

    FILE: ClassVar[str] = "job.json"
    """Its name, among the ranks' orders."""

    module: str | None
    name: str | None
    pickled: str | None
    imports: tuple[str, ...]
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    inputs: Path
    flyte: FlyteSnapshot
    upload_timeout: float
    main: tuple[str | None, str | None] = (None, None)

    @classmethod
    def of(
        cls,
        task: PythonFunctionTask[Any],
        inputs: Path,
        flyte: FlyteSnapshot,
        upload_timeout: float,
    ) -> JobOrder:
        """The order for a task of this process; raises PayloadError where ranks cannot get it."""
        # What travels by value may still refer to its module by name (a class, a helper): ranks must find that as well.
        home = task.task_function.__module__
        path = search_path(None if home == "__main__" else home, sys.modules, sys.path)
        by, main = reference(task, sys.modules), _main()
        imports = (by[0],) if by[0] is not None else imports_of(task.task_function, sys.modules)
        return cls(*by, imports, path, tuple(sys.argv), inputs, flyte, upload_timeout, main)


def reference(task: PythonFunctionTask[Any], modules: Mapping[str, Any]) -> tuple[str | None, str | None, str | None]:
    """How ranks get the task object: ``(module, name, pickled)``.

    Args:
        task: the task.
        modules: ``sys.modules``: importing ``module`` must give this very object back under ``name``.

    Raises:
        PayloadError: it can neither be imported nor pickled.
    """
    function = task.task_function
    module = function.__module__
    if module and module != "__main__" and module in modules:
        own = function.__name__ if hasattr(function, "__name__") else ""
        for name in dict.fromkeys((own, str(task.name).rsplit(".", 1)[-1])):
            if name and getattr(modules[module], name, None) is task:
                return module, name, None
    import cloudpickle

    try:
        return None, None, base64.b64encode(cloudpickle.dumps(task)).decode()
    except Exception as error:
        raise PayloadError(
            "the task function can neither be imported by its ranks nor pickled for them",
            where={"task": task.name, "module": module},
            seen=f"{type(error).__name__}: {error}",
            expected="a function at module level, in a module that ranks can import",
            hint="move the task (or what its closure holds: locks, sockets, open files) to module level",
        ) from error


def imports_of(function: Callable[..., Any], modules: Mapping[str, Any]) -> tuple[str, ...]:
    """The module of a function that is not imported by name itself, unless it is ``__main__``, and what that has
    imported, as modules or from them, in that order.

    Args:
        function: of a task.
        modules: ``sys.modules``.
    """
    inner = inspect.unwrap(function)
    values = list(inner.__globals__.values()) if inspect.isfunction(inner) else []
    named = [_home(inner), *(each.__name__ if inspect.ismodule(each) else _home(each) for each in values)]
    found = [name for name in dict.fromkeys(named) if name is not None and name != "__main__"]
    return tuple(name for name in found if name in modules and _can_be_found(name))


def _can_be_found(name: str) -> bool:
    """Not all that is in ``sys.modules`` can be imported elsewhere."""
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        return importlib.util.find_spec(name) is not None
    return False


def _home(value: Any) -> str | None:
    name = value.__module__ if inspect.isclass(value) or inspect.isroutine(value) else None
    return name if isinstance(name, str) else None


def search_path(module: str | None, modules: Mapping[str, Any], path: Sequence[str]) -> tuple[str, ...]:
    """The module search path under which ranks find ``module`` as the agent did.

    ``pyflyte run`` imports the user's file with its project on the path and takes it off again, so the directory that
    the module came from is put in front where it is missing.
    """
    file = _file_of(modules.get(module or ""))
    if module is None or file is None:
        return tuple(path)
    depth = module.count(".") + (1 if Path(file).stem == "__init__" else 0)
    root = str(Path(file).resolve().parents[depth])
    return tuple(path) if root in map(os.path.realpath, path) else (root, *path)


def _file_of(module: Any) -> str | None:
    file: str | None = module.__file__ if hasattr(module, "__file__") else None
    return file


def load_task(order: JobOrder) -> PythonFunctionTask[Any]:
    """The task object, in a rank; errors of importing the user's module are the user's and come through as they are."""
    if order.pickled is not None:
        import cloudpickle

        task: PythonFunctionTask[Any] = cloudpickle.loads(base64.b64decode(order.pickled))
        if task.task_function.__module__ == "__main__":
            _stand_in(*order.main, task.task_function)
        return task
    module = importlib.import_module(str(order.module))
    try:
        found: PythonFunctionTask[Any] = getattr(module, str(order.name))
    except AttributeError as error:
        raise PayloadError(
            "the task is not in its module when a rank imports it",
            where={"module": order.module, "task": order.name, "file": _file_of(module)},
            expected="the same code in the agent and in its ranks",
            hint="do not define the task under a condition that differs between processes",
        ) from error
    return found


def _main() -> tuple[str | None, str | None]:
    """Where this process's ``__main__`` came from."""
    main = vars(sys.modules["__main__"])
    file, spec = main.get("__file__"), main.get("__spec__")
    return None if file is None else str(Path(file).absolute()), None if spec is None else spec.name


def _stand_in(file: str | None, name: str | None, function: Callable[..., Any]) -> None:
    """Give this process a ``__main__`` with all that *function*, which came here by value, has from its own.

    What the function hands to ``multiprocessing`` (a dataset to the workers of a ``DataLoader``, say) is pickled by
    name: pickle looks for it in ``__main__``, which here is a module of safedist, and a spawned child imports the
    script again by the file or name that ``__main__`` has. The very objects, because pickle compares. Functions and
    classes that travelled together share their globals.
    """
    module = ModuleType("__main__")
    inner = inspect.unwrap(function)
    names = inner.__globals__ if inspect.isfunction(inner) else {}
    module.__dict__.update({name: value for name, value in names.items() if not name.startswith("__")})
    if file is not None:
        module.__file__ = file
    # The only part of it that multiprocessing reads (multiprocessing/spawn.py, get_preparation_data).
    module.__spec__ = None if name is None else ModuleSpec(name, None)
    sys.modules[f"{__name__}.main"] = sys.modules["__main__"]  # its functions may still run, and need their module
    sys.modules["__main__"] = module
