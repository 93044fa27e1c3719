"""What runs in the container, once per pod: ``safedist-execute``.

    safedist-execute --additional-distribution URI --dest-dir DIR -- pyflyte-execute ...
    safedist-execute -- pyflyte-execute ...

The arguments are those of flytekit's ``pyflyte-fast-execute`` (flytekit.bin.entrypoint.fast_execute_task_cmd), and so
is what the task finds: code importable, working directory as it was. The task runs in this very process.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .. import envvars, lastwords, log, stopping, termination
from ..agent import life
from ..config.registered import Registered, grace_pinned
from ..errors import CodeNotFoundError, ConfigError, LaunchError, Problem, SafedistError
from ..rank import backends
from ..rank_server.client import RankServer
from ..record.summary import EARLIER
from ..texts import public
from . import other_command, scratch
from .command_line import command_line, is_flytekits, parse
from .parents import deaf_parent

if TYPE_CHECKING:
    from ..rank_server.launch import Launched
    from .staging import Options

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
        is_open = stopping.stop_requested() or error.is_platforms
        code = stopping.EXIT_UNDECIDED if is_open else stopping.EXIT_FAILED
        termination.say(lastwords.text_of(error))
    except BaseException as error:
        # From flytekit: what a task raises is uploaded there and never comes here, but the upload itself can fail.
        if not stopping.stop_requested():
            _show_infrastructure(error)
        code = stopping.EXIT_UNDECIDED if isinstance(error, Exception) else stopping.EXIT_FAILED
    _say_last_words()
    life.end(code)
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
    _write(f"{leaving.code}\n")
    return stopping.EXIT_FAILED


def _write(text: str) -> None:
    """Write to standard error, if anybody takes it: nothing that this process ends with depends on that."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, end="", flush=True)  # noqa: T201


def _show_infrastructure(error: BaseException) -> None:
    _write(public(traceback.format_exc()))
    said = public(" ".join(str(error).split()))
    text = f"infrastructure failure, for Flyte to retry: {type(error).__name__}: {said}"
    termination.say(lastwords.first_line(text))  # what could not be uploaded follows
    logger.error(text)


def _say_last_words() -> None:
    line = lastwords.take()
    if line is not None:
        # Not through the log, which users may route elsewhere: Kubernetes shows the end of standard error.
        _write(f"{log.PREFIX}{line}\n")


def _run(arguments: list[str], launched: Launched | LaunchError | None) -> int:
    with ExitStack() as own:
        if isinstance(launched, LaunchError):
            raise launched
        server = None if launched is None else own.enter_context(RankServer(launched))
        invocation = parse(arguments)
        stopping.reckon_with(grace_pinned(os.environ))
        scratch.have_temporary_files(own)
        is_a_task = is_flytekits(invocation.command)
        if is_a_task:
            life.begin(os.environ)
            _warn_of_a_deaf_parent(os.environ)
        registered = trouble = None
        try:
            registered = Registered.from_env(os.environ)
            _tell(server, registered if is_a_task else None)
            if registered is not None:
                stopping.leave_within(registered.timeouts.exit)
            if invocation.distribution is not None:
                _bring_code(invocation.distribution, invocation.dest, registered, own)
        except SafedistError as error:
            if stopping.stop_requested() or not is_a_task:  # what unwinding looked like to somebody; or its end
                raise
            trouble = error
            logger.error(f"{type(error).__name__}: {error}")
        command = command_line(invocation)
        if not is_a_task:
            return other_command.run(command)
        from .task_command import execute_and_leave  # and fsspec, for which nobody waits before

        return execute_and_leave(command, registered, server, trouble)


def _warn_of_a_deaf_parent(environment: Mapping[str, str]) -> None:
    """Before anything is lost to it: outside Kubernetes, whoever starts this process tells it to stop as well."""
    if "KUBERNETES_SERVICE_HOST" in environment and (parent := deaf_parent()) is not None:
        logger.warning(
            f"a pod that is told to stop saves nothing: {parent}, which has started this process, keeps SIGTERM to "
            "itself. Fix: end the image's entrypoint with exec; in the place of conda run, put the environment's bin "
            "directory first in PATH"
        )


def _tell(server: RankServer | None, registered: Registered | None) -> None:
    """Tell the rank server what the job needs; where there is none, it ends."""
    if server is None:
        return
    if registered is None:
        server.close()
    elif registered.start_method == "preload":
        libraries = backends.create(registered.backend).libraries
        server.take_needed(libraries, backends.inherited(registered, os.environ))


def _bring_code(distribution: str, asked: Path, registered: Registered | None, own: ExitStack) -> None:
    """Fetch the code, verify, unpack and put it in place; say so in one line.

    Raises:
        SafedistError: it is not there, whole.
    """
    from .staging import stage

    if distribution.startswith("{{"):
        raise CodeNotFoundError(
            "The task was registered with a placeholder in the place of its code archive",
            where={"argument": distribution},
            hint="register packages made by 'pyflyte package --fast' with 'flytectl register files'",
        )
    options = options_from(os.environ, registered)
    dest = scratch.place_for_code(asked, own)
    started = time.monotonic()
    with stopping.unwinding():
        code = stage(distribution, dest, options)
    seconds = time.monotonic() - started
    how = "fetched" if code.new else "fetched, nothing to change"
    logger.info(f"code {code.digest[:12]} {how}: {code.files} files, {code.raw / 1e6:.1f} MB, {seconds:.1f} s")
    EARLIER.value = {"staging": (started, seconds)}
    make_importable(dest, asked)


_OPTIONS: dict[str, tuple[str, type]] = {
    "max_bytes": (envvars.CODE_MAX_BYTES, int),
    "max_files": (envvars.CODE_MAX_FILES, int),
    "max_ratio": (envvars.CODE_MAX_RATIO, float),
    "deadline": (envvars.CODE_TIMEOUT, float),
}


def options_from(environment: Mapping[str, str], registered: Registered | None = None) -> Options:
    """Staging options from the pod's variables, and the job's own patience.

    Raises:
        ConfigError: values that are not positive numbers, all of them.
    """
    from .staging import Options

    values: dict[str, Any] = {} if registered is None else {"deadline": registered.timeouts.code}
    problems = []
    for field, (name, kind) in _OPTIONS.items():
        if name not in environment:
            continue
        values[field] = 0
        with suppress(ValueError):
            values[field] = kind(environment[name])
        if not values[field] > 0:
            problems.append(Problem(name, environment[name], "is not a positive number", "set one, or unset it"))
    if problems:
        raise ConfigError(problems)
    return Options(**values)


def make_importable(dest: Path, of_image: Path) -> None:
    """As the stock command: the destination directory behind what PYTHONPATH names, for this process and those it
    starts.

    Args:
        dest: where the code is.
        of_image: the destination as it was asked for: where *dest* is another one, the image may have other code there.
    """
    importlib.invalidate_caches()  # Python may have looked for it before it came, or within the resolution of its time
    named = os.environ.get("PYTHONPATH", "")
    paths = [*(named.split(os.pathsep) if named else ()), str(of_image)]
    os.environ["PYTHONPATH"] = os.pathsep.join(_before_the_images(dest, of_image, paths))
    if str(of_image) not in sys.path:
        sys.path.insert(_behind_pythonpath(), str(of_image))
    sys.path[:] = _before_the_images(dest, of_image, sys.path)


def _before_the_images(dest: Path, of_image: Path, paths: Sequence[str]) -> list[str]:
    """The paths with *dest*, or what it has in its place, before each that is *of_image* or in it. PYTHONPATH names
    that in most images (flytekit's have ``/root``), and what was built into them is not to run in the code's place."""
    found: list[str] = []
    for path in paths:
        there = Path(os.path.realpath(path))
        if dest != of_image and there.is_relative_to(of_image):
            code = dest / there.relative_to(of_image)
            if code.exists() and str(code) not in found:
                found.append(str(code))
        found.append(path)
    return found


def _behind_pythonpath() -> int:
    """Where in sys.path the interpreter's own entries begin."""
    own = {os.path.realpath(path) for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))}
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    for at, entry in enumerate(sys.path):
        if os.path.realpath(entry) in own or entry.endswith(zipped):
            return at
    return len(sys.path)
