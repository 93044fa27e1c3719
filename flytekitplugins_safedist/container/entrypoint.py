"""What runs in the container, once per pod: ``safedist-execute``.

    safedist-execute --additional-distribution URI --dest-dir DIR -- pyflyte-execute ...
    safedist-execute -- pyflyte-execute ...

The arguments are those of flytekit's ``pyflyte-fast-execute`` (flytekit.bin.entrypoint.fast_execute_task_cmd), and so
is what the task finds: code importable, working directory as it was. The task runs in this very process.
"""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .. import envvars, lastwords, log, stopping, termination
from ..config.registered import Registered, grace_pinned
from ..errors import ConfigError, LaunchError, Problem, SafedistError
from ..rank import backends
from ..rank_server.client import RankServer
from ..record.node import EARLIER
from ..texts import public
from . import early, readonly
from .invocation import Invocation, command_line, parse
from .task_command import EXIT_FAILED, execute_and_leave, is_flytekits

if TYPE_CHECKING:
    from ..pod.staging import Options
    from ..rank_server.launch import Launched

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None, *, launched: Launched | LaunchError | None = None) -> NoReturn:
    """The console script. Exit codes: upstream's contract (0 also for a task that failed and has said so by an
    uploaded ``error.pb``), 137 for what is not the user's (``stopping.EXIT_UNDECIDED``), else what the user's own error
    asks for, with one message on standard error.

    Args:
        arguments: the command line's.
        launched: the rank server that was started for this pod, or why it could not be.
    """
    stopping.listen()
    _have_stderr()
    log.install()
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments), launched)
    except SystemExit as leaving:
        code = _exit_code(leaving)
    except SafedistError as error:
        if not stopping.stop_requested():  # else it is what unwinding looked like to somebody
            logger.error(f"{type(error).__name__}: {error}")
        given = sys.argv[1:] if arguments is None else arguments
        code = stopping.EXIT_UNDECIDED if stopping.stop_requested() else early.settle(error, given)
        termination.say(lastwords.text_of(error))
    except BaseException as error:
        # From flytekit: what a task raises is uploaded there and never comes here, but the upload itself can fail.
        if not stopping.stop_requested():
            _show_infrastructure(error)
        code = stopping.EXIT_UNDECIDED if isinstance(error, Exception) else EXIT_FAILED
    _say_last_words()
    stopping.leave(code)


def _have_stderr() -> None:
    """Where none is open, messages go to standard output, and the next file that is opened does not become it."""
    if sys.stderr is not None:
        return
    try:
        os.dup2(1, 2)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115  (for good)


def _exit_code(leaving: SystemExit) -> int:
    """As an interpreter reads it: texts are printed."""
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    print(leaving.code, file=sys.stderr, flush=True)  # noqa: T201
    return EXIT_FAILED


def _show_infrastructure(error: BaseException) -> None:
    print(public(traceback.format_exc()), file=sys.stderr, end="", flush=True)  # noqa: T201
    said = public(" ".join(str(error).split()))
    text = f"infrastructure failure, for Flyte to retry: {type(error).__name__}: {said}"
    termination.say(lastwords.first_line(text))  # what could not be uploaded follows
    logger.error(text)


def _say_last_words() -> None:
    line = lastwords.take()
    if line is not None:
        # Not through the log, which users may route elsewhere: Kubernetes shows the end of standard error.
        print(f"{log.PREFIX}{line}", file=sys.stderr, flush=True)  # noqa: T201


def _run(arguments: list[str], launched: Launched | LaunchError | None) -> int:
    with ExitStack() as own:
        if isinstance(launched, LaunchError):
            raise launched
        server = None if launched is None else own.enter_context(RankServer(launched))
        invocation = parse(arguments)
        stopping.reckon_with(grace_pinned(os.environ))
        registered = Registered.from_env(os.environ)
        options = options_from(os.environ, registered)
        made = readonly.temporary_directory(os.environ, own)
        if made is not None:  # flytekit and every rank ask for it
            os.environ[envvars.TMPDIR] = str(made)
            tempfile.tempdir = None  # asked for again
        if registered is not None:
            stopping.leave_within(registered.timeouts.exit)
        is_task = is_flytekits(invocation.command)
        if server is not None and not (is_task and registered is not None):
            server.close()
        elif server is not None and registered is not None and registered.start_method == "preload":
            libraries = backends.create(registered.backend).libraries
            server.take_needed(libraries, backends.inherited(registered, os.environ))
        placed = with_place(invocation, own) if invocation.distribution is not None else invocation
        with stopping.unwinding():
            arrival = arrive(placed, options)
        if arrival.is_over:
            stopping.decided(0)
            return 0
        if arrival.staged is not None:
            EARLIER.value = {"staging": arrival.staged}
            make_importable(placed.dest, invocation.dest)
        return execute_and_leave(command_line(invocation), registered, server)


def with_place(invocation: Invocation, own: ExitStack) -> Invocation:
    """The invocation with a destination that can be written; the task starts there, where it would have started in the
    other."""
    dest = readonly.destination(invocation.dest, os.environ, own)
    if dest == invocation.dest:
        return invocation
    logger.info(f"{invocation.dest} cannot be written: the code is in {dest}, and the task starts there")
    if Path.cwd() == invocation.dest:
        os.chdir(dest)
    return replace(invocation, dest=dest)


def options_from(environment: Mapping[str, str], registered: Registered | None = None) -> Options:
    """Staging options from the pod's variables, and the job's own patience.

    Raises:
        ConfigError: values that are not positive numbers, all of them.
    """
    from ..pod.staging import Limits, Options

    names = {
        "max_bytes": (envvars.CODE_MAX_BYTES, int),
        "max_files": (envvars.CODE_MAX_FILES, int),
        "max_ratio": (envvars.CODE_MAX_RATIO, float),
        "deadline": (envvars.CODE_TIMEOUT, float),
    }
    values: dict[str, Any] = {}
    problems = []
    for field, (name, kind) in names.items():
        if name not in environment:
            continue
        with suppress(ValueError):
            values[field] = kind(environment[name])
        if not values.get(field, 0) > 0:
            problems.append(Problem(name, environment[name], "is not a positive number", "set one, or unset it"))
    if problems:
        raise ConfigError(problems)
    own = {name: values.pop(name) for name in ("deadline",) if name in values}
    if registered is not None:
        own.setdefault("deadline", registered.timeouts.code)
    return Options(limits=Limits(**values), **own)


@dataclass(frozen=True)
class Arrival:
    """What a pod finds out, or does, before its task.

    Attributes:
        is_over: the verdict of its attempt is in the store: it comes too late.
        staged: when staging began, by the monotonic clock, and its seconds; None where there was nothing to stage.
    """

    is_over: bool = False
    staged: tuple[float, float] | None = None


def arrive(invocation: Invocation, options: Options) -> Arrival:
    """Look whether there is anything to do; then fetch the code, verify, unpack and put it in place; say so in one
    line."""
    if early.is_over(invocation.command, os.environ):
        return Arrival(is_over=True)
    if invocation.distribution is None:
        return Arrival()
    from ..pod.staging import stage

    started = time.monotonic()
    code = stage(invocation.distribution, invocation.dest, options)
    how = "fetched" if code.new else "fetched, nothing to change"
    seconds = time.monotonic() - started
    logger.info(f"code {code.digest[:12]} {how}: {code.files} files, {code.raw / 1e6:.1f} MB, {seconds:.1f} s")
    return Arrival(staged=(started, seconds))


def make_importable(dest: Path, of_image: Path) -> None:
    """As the stock command: the destination directory behind what PYTHONPATH names, for this process and those it
    starts.

    Args:
        of_image: the destination as it was asked for: where *dest* is another one, modules of the image are there.
    """
    places = list(dict.fromkeys([str(dest), str(of_image)]))
    named = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([named, *places] if named else places)
    at = _behind_pythonpath()
    sys.path[at:at] = [place for place in places if place not in sys.path]


def _behind_pythonpath() -> int:
    """Where in sys.path the interpreter's own entries begin."""
    own = {os.path.realpath(path) for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))}
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    for at, entry in enumerate(sys.path):
        if os.path.realpath(entry) in own or entry.endswith(zipped):
            return at
    return len(sys.path)
