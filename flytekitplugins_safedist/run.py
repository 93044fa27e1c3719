"""An existing script, with a command line of its own, on several ranks.

On this machine, with no change to the script::

    python -m flytekitplugins_safedist.run --nproc-per-node 4 train.py --lr 3
    python -m flytekitplugins_safedist.run --nproc-per-node 4 -m package.train --lr 3

On a cluster, in a task of two lines::

    @task(task_config=SafeTorch(nnodes=2, nproc_per_node=8))
    def train(arguments: list[str]) -> None:
        run_script("train.py", arguments)
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NoReturn

# With python -m the working directory comes first: of a secrets.py of the user's there, what this process imports knows
# nothing, as a launcher's does not. A script has its own directory first all the same.
if __name__ == "__main__":
    with suppress(OSError):  # it is not there any more: main says so
        if sys.path[0] == str(Path.cwd()):
            sys.path.append(sys.path.pop(0))

from .config.caches import CACHES
from .errors import ConfigError, PayloadError, RankFailedError, SafedistError
from .hangs.stacks import raised_at
from .rank import context
from .rank.fork import is_elsewhere
from .rank.task import MAIN, see_working_directory
from .record.writer import RECORDER
from .texts import left_by

_STAY = {
    *("__main__", "flytekit", "flytekitplugins_safedist", "horovod", "torch"),
    *("abc", "codecs", "encodings", "genericpath", "io", "os", "posixpath", "site", "stat"),
}
"""Modules that a script finds imported: what has begun to work for this rank, and what each interpreter begins with."""


class ScriptStatusError(SystemExit):
    """A script has ended with another status than 0.

    Attributes:
        error_code: what Flyte's console shows: ``USER:ScriptStatus2``.
        words: what people read.
    """

    def __init__(self, script: str, leaving: SystemExit) -> None:
        super().__init__(leaving.code)
        status = _status(leaving)
        self.error_code = f"USER:ScriptStatus{status}"
        words = "" if leaving.code is None or isinstance(leaving.code, int) else f": {leaving.code}"
        at = raised_at(leaving)
        self.words = f"{Path(script).name} ended with status {status}{at and f', at {at}'}{words}{left_by(leaving)}"


def _status(leaving: SystemExit) -> int:
    """As an interpreter has it: of a number its last eight bits, and 1 for a text, which is printed."""
    code = 0 if leaving.code is None else leaving.code
    return code & 0xFF if isinstance(code, int) else 1


def run_script(script: str | os.PathLike[str], arguments: Sequence[str] = ()) -> None:
    """Run a script in this process, as ``python SCRIPT ARGUMENTS`` would; in a task's function: on every rank.

    It is ``__main__``, so that what stands below ``if __name__ == "__main__"`` runs, and its directory (of a link, that
    of the file that it leads to) comes first on the module search path. Whether it ends or calls ``sys.exit(0)``, this
    returns. Where it ends the process with status 0 (``os._exit(0)``), and the task has no outputs, that is this rank's
    success.

    Args:
        script: its path; a relative one is looked for in the working directory.
        arguments: its command line, without its own name.

    Raises:
        PayloadError: there is no such file.
        SystemExit: it has ended with another status than 0; that is the task's failure.
        Exception: whatever the script raises.
    """
    path = Path(script).absolute()
    if not path.is_file():
        raise PayloadError(
            "there is no such script here",
            where={"script": str(path)},
            expected="a Python file that is part of what is registered",
            hint="give its path from the working directory, or make it absolute: Path(__file__).with_name(...)",
        )
    run = partial(runpy.run_path, str(path), run_name="__main__")
    _run_as_main(os.fspath(script), arguments, path.resolve().parent, run)


def run_module(module: str, arguments: Sequence[str] = ()) -> None:
    """Run a module in this process, as ``python -m MODULE ARGUMENTS`` would; see :func:`run_script`.

    Args:
        module: its name; it is looked for in the working directory, too.
        arguments: its command line, without its own name.

    Raises:
        ImportError: there is no such module.
        SystemExit: it has ended with another status than 0; that is the task's failure.
        Exception: whatever the module raises.
    """
    run = partial(runpy.run_module, module, run_name="__main__", alter_sys=True)
    _run_as_main(module, arguments, Path.cwd(), run)


def _run_as_main(name: str, arguments: Sequence[str], directory: Path, run: Callable[[], object]) -> None:
    """Run a script with its command line, and with its directory first on the module search path. Within no context
    manager: ``contextlib`` sets the ``__traceback__`` of what comes through one, which a frozen dataclass refuses."""
    argv, search = sys.argv, sys.path[:]
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(directory))
    hidden = _hidden_by(directory)
    for each in hidden:
        del sys.modules[each]
    hidden[MAIN] = sys.modules.get(MAIN, sys.modules["__main__"])
    sys.modules[MAIN] = _main_by(MAIN)
    try:
        context.run_script(run)
    except SystemExit as leaving:
        if _status(leaving):
            raise ScriptStatusError(name, leaving) from None
    finally:
        sys.argv, sys.path[:] = argv, search
        sys.modules.update(hidden)


def _main_by(name: str) -> ModuleType:
    """A module that has what ``__main__`` has. Of a class of the script's, processes that the script spawns know their
    own copy; what they send of it is looked for here by the name that ``__main__`` has there."""
    module = ModuleType(name)
    vars(module)["__getattr__"] = lambda asked: getattr(sys.modules["__main__"], asked)
    return module


def _hidden_by(directory: Path) -> dict[str, ModuleType]:
    """Imported modules of whose names a script's directory has others, which the script is to find, as it does in an
    interpreter of its own; with their submodules."""
    specs = {name: getattr(module, "__spec__", None) for name, module in list(sys.modules.items()) if "." not in name}
    hidden = {
        name
        for name, spec in specs.items()
        if name not in _STAY and spec is not None and spec.origin not in ("built-in", "frozen")
        if is_elsewhere(spec, [str(directory)])
    }
    return {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] in hidden}


def _run_program(program: str, arguments: Sequence[str]) -> None:
    """Run any program in a process of its own, which gets the SIGTERM that this one gets."""
    if (recorder := RECORDER.value) is not None:
        recorder.meet()  # it may: nobody sees into it
    child = subprocess.Popen([program, *arguments])
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    status = child.wait()
    if status:
        raise ScriptStatusError(program, SystemExit(status if status > 0 else 128 - status))


def script(words: str, kind: str) -> None:
    """The function of the task that the command line makes; *words*: its path and command line, as JSON has also what
    is no UTF-8; *kind*: "script", "module" or "program"."""
    path, *arguments = json.loads(words)
    others: dict[str, Callable[[str, Sequence[str]], None]] = {"module": run_module, "program": _run_program}
    others.get(kind, run_script)(path, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flytekitplugins_safedist.run",
        description="Run a script on several ranks of this machine, as a task with SafeTorch or SafeHorovod would.",
    )

    def option(name: str, **more: object) -> None:
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", **more)  # type: ignore[arg-type]

    option("nproc-per-node", type=int, default=1, metavar="N", help="ranks (default: 1)")
    option("max-restarts", type=int, default=0, metavar="N", help="restarts in place (default: 0)")
    parser.add_argument("--horovod", action="store_true", help="ranks meet by Horovod, not by torch.distributed")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-m", "--module", action="store_true", help="the script is a module, as for python -m")
    how.add_argument("--no-python", "--no_python", action="store_true", help="the script is any program")
    parser.add_argument("script", help="a Python file")
    others = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own")
    others.required = False  # before Python 3.12 argparse names them as missing where there is no script
    return parser


def main() -> None:
    """``python -m flytekitplugins_safedist.run``; exits with the script's own status where that is not 0, with 1 where
    a rank has failed otherwise, and with 2 at wrong usage."""
    parser = _parser()
    options, others = parser.parse_known_args()
    if others:
        leave_out = "leave out torchrun's and horovodrun's own: all ranks are on this machine; several nodes are a task"
        parser.error(f"unrecognized arguments: {' '.join(others)} ({leave_out})")
    try:
        see_working_directory()
    except PayloadError as error:
        parser.error(str(error))
    kind = "module" if options.module else "program" if options.no_python else "script"
    if kind == "script" and not Path(options.script).is_file():
        parser.error(f"there is no such file: {Path(options.script).absolute()}")
    from flytekit import task

    from . import SafeHorovod, SafeTorch
    from . import run as here  # noqa: PLW0406  (ranks import the function by its module; this one is __main__)

    config = SafeHorovod if options.horovod else SafeTorch
    try:
        job = config(nproc_per_node=options.nproc_per_node, max_restarts=options.max_restarts)
        words = json.dumps([options.script, *options.arguments])
        # Where the shell names a compile cache, that is the user's word, as a task's environment is.
        caches = {each.variable: place for each in CACHES if (place := os.environ.get(each.variable))}
        task(task_config=job, environment=caches)(here.script)(words=words, kind=kind)
    except RankFailedError as error:  # which may be the script's own ConfigError, too
        _leave(error)
    except ConfigError as error:
        parser.error(str(error))
    except SafedistError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def _leave(error: RankFailedError) -> NoReturn:
    status = re.fullmatch(r"USER:(?:ScriptStatus|Exit)(\d+)", error.error_code)
    print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201  (as an interpreter's end)
    sys.exit(int(status[1]) if status else 1)


if __name__ == "__main__":
    main()
