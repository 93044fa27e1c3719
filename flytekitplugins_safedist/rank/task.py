"""How ranks get the task: said by the agent, done in each rank.

By the name of its module, as any interpreter would import it. A task of a script: the script is run again, as
``multiprocessing`` does in the processes that it spawns (``__name__`` is ``"__mp_main__"``). What can be had in neither
way (notebooks, nested functions) is pickled by value. In a pod flytekit's resolver finds it, as its command says.
"""

from __future__ import annotations

import ast
import base64
import dataclasses
import importlib
import importlib.util
import inspect
import io
import linecache
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import PayloadError
from ..fs import identity
from ..handoff import Slot
from .order import TaskSource
from .users_code import parsed

if TYPE_CHECKING:
    from flytekit.core.python_function_task import PythonFunctionTask

MAIN = "__mp_main__"
"""What a script is called in a process that has not been started for it, as in ``multiprocessing``."""

MAX_BYTES = 1 << 31
"""Of a task that travels by value: a frame to the rank server holds twice as much."""


# --- in the agent of a local run --------------------------------------------------------------------------------------
def source_of(task: PythonFunctionTask[Any], modules: Mapping[str, Any]) -> TaskSource:
    """Where ranks get a task from that is in this process.

    Args:
        task: the task.
        modules: ``sys.modules``: what ranks import must give this very object back.

    Raises:
        PayloadError: it can neither be imported nor pickled; or this process has no working directory to run it in.
    """
    see_working_directory()
    function = task.task_function
    home = function.__module__
    own = function.__name__ if hasattr(function, "__name__") else ""
    for name in dict.fromkeys((own, str(task.name).rpartition(".")[2])):
        if not name or getattr(modules.get(home), name, None) is not task:
            continue
        if home != "__main__":
            return TaskSource(name, module=home)
        file, run_as = _main(modules["__main__"])
        if file is not None and _comes_again(function, file):
            return TaskSource(name, script=file, run_as=run_as)
    return TaskSource(str(task.name), pickled=_pickled(task, modules), imports=imports_of(function, modules))


def see_working_directory() -> None:
    """Look whether this process has one.

    Raises:
        PayloadError: it was deleted.
    """
    try:
        Path.cwd()
    except OSError as error:
        raise PayloadError(
            "the working directory of this process, in which ranks are to run, is not there any more",
            seen=f"{type(error).__name__}: {error}",
            hint="change to a directory that is there: cd in the shell, or os.chdir(...) before the task is called",
        ) from error


def _main(main: Any) -> tuple[str | None, str | None]:
    """Where a ``__main__`` came from: its file, and the module that ``python -m`` named. None where it cannot be run
    again: a package's ``__main__.py`` is for one process only, and a notebook has no file."""
    file, spec = vars(main).get("__file__"), vars(main).get("__spec__")
    run_as = None if spec is None else str(spec.name)
    if file is None or (run_as or "").rpartition(".")[2] == "__main__":
        return None, run_as
    return str(Path(file).absolute()), run_as


def _comes_again(function: Callable[..., Any], file: str) -> bool:
    """Whether a script that is run again, and is not ``__main__`` then, defines a function: it was written there (an
    interactive session may have run another file before), and not below ``if __name__ == "__main__"``."""
    inner = inspect.unwrap(function)
    if not inspect.isfunction(inner) or os.path.realpath(inner.__code__.co_filename) != os.path.realpath(file):
        return False
    line = inner.__code__.co_firstlineno
    with suppress(OSError, SyntaxError, ValueError):  # ranks will say so
        for node in parsed(Path(file)).body:
            if isinstance(node, ast.If) and node.lineno < line <= (node.end_lineno or 0):
                return "__name__" not in ast.unparse(node.test)
    return True


def _pickled(task: PythonFunctionTask[Any], modules: Mapping[str, Any]) -> str:
    """The task by value, with all classes of its session, some of which are only named by others, be it as text."""
    main = vars(modules["__main__"]) if task.task_function.__module__ == "__main__" else {}
    classes = {name: each for name, each in main.items() if isinstance(each, type) and each.__module__ == "__main__"}
    classes |= {name: main[name] for each in classes.values() for name in _named_as_text(each) if name in main}
    where = {"task": task.name, "module": task.task_function.__module__}
    of_no_file = {name: entry for name, entry in linecache.cache.items() if len(entry) > 1 and entry[1] is None}
    try:
        pickled = _dumped((task, {name: each for name, each in classes.items() if _can_be_pickled(each)}, of_no_file))
    except Exception as error:
        raise PayloadError(
            "the task function can neither be imported by its ranks nor pickled for them",
            where=where,
            seen=f"{type(error).__name__}: {error}",
            expected="a function at module level, in a module that ranks can import",
            hint="move the task (or what its closure holds: locks, sockets, open files) to module level",
        ) from error
    if len(pickled) > MAX_BYTES:
        raise PayloadError(
            "the task function is too large to be pickled for its ranks, with the globals that it uses",
            where=where,
            seen=f"{len(pickled)} bytes",
            expected=f"at most {MAX_BYTES} bytes",
            hint="read large data inside the function, from a file or an input",
        )
    return pickled


def _named_as_text(annotated: type) -> list[str]:
    """What the annotations of a class may name below ``from __future__ import annotations``."""
    with suppress(Exception):  # whatever its module has made of them
        texts = [each for each in inspect.get_annotations(annotated).values() if isinstance(each, str)]
        return re.findall(r"\w+", " ".join(texts))
    return []


def _can_be_pickled(value: object) -> bool:
    with suppress(Exception):  # whatever a class's members raise
        return bool(_dumped(value))
    return False


def _dumped(value: object) -> str:
    import cloudpickle

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # cloudpickle is untyped to mypy
        def reducer_override(self, obj: Any) -> Any:
            """A dataclass that travels by value holds marks of Python's own, which must stay the one object."""
            for name in ("MISSING", "KW_ONLY"):
                if obj is getattr(dataclasses, name):
                    return name
            return super().reducer_override(obj)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return base64.b64encode(file.getvalue()).decode()


def imports_of(function: Callable[..., Any], modules: Mapping[str, Any]) -> tuple[str, ...]:
    """The module of a function that ranks cannot import by its name, and what that has imported, as modules or from
    them, in that order.

    Args:
        function: of a task.
        modules: ``sys.modules``.
    """
    inner = inspect.unwrap(function)
    values = list(inner.__globals__.values()) if inspect.isfunction(inner) else []
    named = [_home(inner), *(each.__name__ if inspect.ismodule(each) else _home(each) for each in values)]
    found = [name for name in dict.fromkeys(named) if name is not None and name != "__main__"]
    return tuple(name for name in found if name in modules)


def _home(value: Any) -> str | None:
    name = value.__module__ if inspect.isclass(value) or inspect.isroutine(value) else None
    return name if isinstance(name, str) else None


def search_path(module: str | None, modules: Mapping[str, Any], path: Sequence[str]) -> tuple[str, ...]:
    """The module search path under which ranks find ``module`` as the agent did.

    ``pyflyte run`` imports the user's file with its project on the path and takes it off again, so the directory that
    the module came from is put in front where it is missing.
    """
    file = getattr(modules.get(module or ""), "__file__", None)
    if module is None or file is None:
        return tuple(path)
    is_package = Path(file).stem == "__init__" != module.rpartition(".")[2]  # which pyflyte run names PACKAGE.__init__
    depth = module.count(".") + is_package
    root = str(Path(file).resolve().parents[depth])
    return tuple(path) if root in map(os.path.realpath, path) else (root, *path)


# --- in a pod's agent -------------------------------------------------------------------------------------------------
def source_by(resolver: str, arguments: Sequence[str], *, mapped: bool) -> TaskSource:
    """Where ranks get a task from, by the words of its command."""
    given = list(arguments)
    modules = [given[given.index(_MODULE) + 1]] if _MODULE in given[:-1] else []
    if not resolver.startswith("flytekit."):
        modules.append(resolver.rpartition(".")[0])
    name = given[-1] if given else ""
    return TaskSource(name, resolver=resolver, arguments=tuple(given), mapped=mapped, imports=tuple(modules))


_MODULE = "task-module"
"""Of flytekit's usual resolver, before the module's name."""


# --- in a rank --------------------------------------------------------------------------------------------------------
def load(source: TaskSource) -> Any:
    """The task, or the task that maps it. What importing the user's module raises comes through as it is.

    Raises:
        PayloadError: it is not where it was in the agent, or something else is there.
    """
    _LOADING.value = source
    try:
        entity = _loaded(source)
    finally:
        _LOADING.value = None
    if not hasattr(entity, "python_interface"):
        name = source.name.rpartition(".")[2]
        raise PayloadError(
            "what a rank finds under the task's name is not the task",
            where={"module": source.shown, "task": source.name},
            seen=f"a {type(entity).__name__}",
            hint="make @task(task_config=...) the outermost decorator, or give the task the name of its function: "
            f"{name} = task(task_config=...)({name})",
        )
    return entity


def _loaded(source: TaskSource) -> Any:
    if source.resolver is not None:
        return _resolved(source)
    if source.pickled is not None:
        import cloudpickle

        task, classes, lines = cloudpickle.loads(base64.b64decode(source.pickled))
        linecache.cache.update(lines)  # a traceback shows them
        if task.task_function.__module__ == "__main__":
            _stand_in(task.task_function, classes)
        return task
    module: Any = importlib.import_module(source.module) if source.module is not None else _run_again(source)
    try:
        return getattr(module, source.name)
    except AttributeError as error:
        raise PayloadError(
            "the task is not in its module when a rank imports it",
            where={"module": source.shown, "task": source.name, "file": getattr(module, "__file__", None)},
            expected="the same code in the agent and in its ranks",
            hint="do not define the task under a condition that differs between processes",
        ) from error


def task_of(entity: Any) -> Any:
    """The task itself, of one that maps it."""
    return entity if hasattr(entity, "task_function") else entity.python_function_task


def _resolved(source: TaskSource) -> Any:
    from flytekit.tools.module_loader import load_object_from_module

    resolver = load_object_from_module(source.resolver)
    if source.mapped:
        return resolver().load_task(loader_args=list(source.arguments), max_concurrency=0)
    return resolver.load_task(loader_args=list(source.arguments))


class MainRunsError(BaseException):
    """A script calls its task as it is run again for a rank: what stands above the call is all that the rank needs."""


_LOADING: Slot[TaskSource] = Slot()
"""What is being imported: to the task, which may be called as it is."""


def is_called() -> None:
    """Called by a task that is called.

    Raises:
        MainRunsError: by its own script, which is run again.
        PayloadError: by its own module, as a rank imports it: the rank would start ranks, and these others. Or by the
            function of a task, in a rank.
    """
    source = _LOADING.value
    if source is None:
        if identity.OF_RANK.value is None:
            return
        raise PayloadError(
            "a task with ranks of its own is called in a rank",
            where={"rank": identity.OF_RANK.value.rank},
            hint="call it from a workflow, beside this task; or its function, in this rank: NAME.task_function(...)",
        )
    if source.script is not None:
        raise MainRunsError
    raise PayloadError(
        "the task is called as a rank imports its module",
        where={"module": source.shown},
        hint="put the call below: if __name__ == '__main__'",
    )


def _run_again(source: TaskSource) -> ModuleType:
    module = ModuleType(MAIN)
    module.__file__ = source.script
    sys.modules[f"{__name__}.main"] = sys.modules["__main__"]  # its functions may still run, and need their module
    sys.modules[MAIN] = sys.modules["__main__"] = module
    code: Any
    if source.run_as is not None:
        spec = importlib.util.find_spec(source.run_as)
        if spec is None or spec.loader is None:
            raise ModuleNotFoundError(f"No module named {source.run_as!r}", name=source.run_as)
        module.__spec__, module.__package__ = spec, spec.parent
        code = spec.loader.get_code(source.run_as)  # type: ignore[attr-defined]  # of every loader that -m takes
    else:
        with open(str(source.script), "rb") as file:
            code = compile(file.read(), str(source.script), "exec")
    with suppress(MainRunsError):
        exec(code, module.__dict__)  # noqa: S102  (the user's script)
    return module


def _stand_in(function: Callable[..., Any], classes: Mapping[str, Any]) -> None:
    """Give this process a ``__main__`` with all that *function*, which came here by value, has from its own.

    What the function hands to ``multiprocessing`` (a dataset to the workers of a ``DataLoader``, say) is pickled by
    name: pickle looks for it in ``__main__``, which here is a module of safedist. The very objects, because pickle
    compares. Functions and classes that travelled together share their globals.
    """
    module = ModuleType("__main__")
    inner = inspect.unwrap(function)
    names = inner.__globals__ if inspect.isfunction(inner) else {}
    module.__dict__.update({**classes, **{name: value for name, value in names.items() if not name.startswith("__")}})
    module.__spec__ = None
    sys.modules[f"{__name__}.main"] = sys.modules["__main__"]
    sys.modules["__main__"] = module
