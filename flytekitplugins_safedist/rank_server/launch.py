"""Start a rank server, before anything else is imported here: it has the most to import."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from .. import package
from ..errors import LaunchError

NEEDED = ("torch", "flytekit", "horovod", "flytekitplugins_safedist")
"""Imported for all ranks wherever they lie: whoever works on one of them is a user of it all the same."""

_BOOT = "from flytekitplugins_safedist.rank_server.server import main; main(int(sys.argv[1]), int(sys.argv[2]))"
"""Arguments are the connection's descriptor, the agent's process id, and the module search path."""


@dataclass(frozen=True)
class Launched:
    """A rank server that was started.

    Attributes:
        connection: to it.
        pid: its process id. It leads a session of its own.
    """

    connection: socket.socket
    pid: int


def launch(environment: Mapping[str, str]) -> Launched:
    """Start a rank server as a fresh interpreter: safe whatever this process has done so far.

    Args:
        environment: its variables until it is told others.

    Raises:
        LaunchError: it cannot be started.
    """
    _, output, errors = map(_stream, range(3))
    ours, theirs = socket.socketpair()
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    where = [str(theirs.fileno()), str(os.getpid()), *path_for_libraries(sys.path)]
    try:
        with theirs:
            child = subprocess.Popen(
                [sys.executable, *flags, *package.program(_BOOT, *where, path="sys.path[:] = sys.argv[3:]")],
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                # Its own session: Ctrl-C in a terminal goes to the agent alone, which then stops ranks in order.
                start_new_session=True,
            )
    except OSError as error:
        ours.close()
        raise LaunchError(
            "the rank server cannot be started",
            where={"host": socket.gethostname()},
            seen=f"{type(error).__name__}: {error}",
            hint="look whether this process may run that file"
            if isinstance(error, (PermissionError, FileNotFoundError))
            else "look at this node's limits of processes, memory and open files",
        ) from error
    child.returncode = 0  # reaped by the server's client, not by subprocess
    return Launched(ours, child.pid)


def _stream(number: int) -> int | None:
    """What a standard stream of the server is: None where it is this process's. Where that is closed (``>&-``), and
    where another file of this process has got its number since, the next file of a rank would get it there, and what
    is printed would be written to that."""
    try:
        return None if os.get_inheritable(number) else subprocess.DEVNULL
    except OSError:
        os.open(os.devnull, os.O_RDWR)  # nor shall the connection get it
        return subprocess.DEVNULL


def path_for_libraries(path: Sequence[str]) -> list[str]:
    """Of a module search path what is installed; and, last, where the libraries that every rank needs are found."""
    found = [each for each in path if each and is_installed(each)]
    for name in NEEDED:
        spec = PathFinder.find_spec(name, [each for each in path if each]) or by_finders(name)
        if spec is not None and spec.origin is not None:
            home = str(Path(spec.origin).parent.parent)
            found += [] if home in found else [home]
    return found


def by_finders(name: str) -> ModuleSpec | None:
    """Of what has a finder of its own, as some editable installs do."""
    with suppress(Exception):  # whatever finders of others raise
        return importlib.util.find_spec(name)
    return None


@cache
def is_installed(directory: str) -> bool:
    """Whether modules in a directory are Python's own, or were put there by an installer."""
    path = Path(directory)
    if {"site-packages", "dist-packages"} & {*path.parts}:
        return True
    own = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    if any(path.is_relative_to(each) for each in own) or directory.endswith(".zip"):
        return True
    with suppress(OSError):
        return any(path.glob("*.dist-info"))  # pip install --target
    return False
