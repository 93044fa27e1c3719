"""The command line of ``safedist-execute``, as a value."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import StagingError


@dataclass(frozen=True)
class Invocation:
    """The command line, taken apart.

    Attributes:
        distribution: address of the code archive; None without fast registration.
        dest: where its files go.
        dest_argument: the same as it was written: passed on for tasks that dynamic workflows start.
        command: the command to run afterwards.
    """

    distribution: str | None
    dest: Path
    dest_argument: str
    command: tuple[str, ...]


def parse(arguments: list[str]) -> Invocation:
    """Take the command line apart.

    Raises:
        StagingError: the destination cannot be told from its name.
        SystemExit: the usage is wrong (argparse says how).
    """
    parser = argparse.ArgumentParser(
        prog="safedist-execute",
        usage="safedist-execute [--additional-distribution URI] [--dest-dir DIR] -- pyflyte-execute ...",
        description="Stage a task's code once, then run the task.",
        allow_abbrev=False,
    )
    parser.add_argument("--additional-distribution", metavar="URI", help="the code archive of fast registration")
    parser.add_argument("--dest-dir", metavar="DIR", help="where its files go (default: the working directory)")
    # From the first ``--`` on, or from the first word that is no option of ours: click, which the stock command uses,
    # takes both.
    parser.add_argument("command", nargs=argparse.REMAINDER)
    parsed = parser.parse_args(arguments)
    command = parsed.command[parsed.command[:1] == ["--"] :]
    if not command or not command[0]:
        parser.error("no command is given after --")
    dest = _absolute(parsed.dest_dir or ".")
    dest_argument = parsed.dest_dir or str(dest)
    return Invocation(
        parsed.additional_distribution or None, Path(os.path.realpath(dest)), dest_argument, tuple(command)
    )


def _absolute(path: str) -> Path:
    """*path* from the root, with ``~`` filled in: a task may change its working directory at any time.

    Raises:
        StagingError: there is no home directory, or no working directory.
    """
    try:
        return Path(path).expanduser().absolute()
    except (RuntimeError, OSError) as error:
        raise StagingError(
            "A directory cannot be told from its name",
            where={"path": path},
            seen=f"{type(error).__name__}: {error}",
            hint="name it from the root (/...), or set HOME and start in a directory that exists",
        ) from error


FUNCTIONS = {"pyflyte-execute": "execute_task_cmd", "pyflyte-map-execute": "map_execute_task_cmd"}
"""flytekit's commands for a task, and the click command of each in flytekit.bin.entrypoint."""


def program_of(command: Sequence[str]) -> str:
    """The program that a command runs, without its directory."""
    return os.path.basename(command[0])  # noqa: PTH119


def is_flytekits(command: Sequence[str]) -> bool:
    """Whether the command is one of flytekit's for a task, which runs in this process."""
    return program_of(command) in FUNCTIONS


def resolver_of(command: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """flytekit's resolver that a command names, with its arguments; None where it names none."""
    given = list(command)
    if _RESOLVER not in given[:-1]:
        return None
    at = given.index(_RESOLVER)
    rest = given[at + 2 :]
    return given[at + 1], tuple(rest[rest.index("--") + 1 :] if "--" in rest else rest)


def without_users_resolver(command: Sequence[str]) -> list[str]:
    """The command with flytekit's own resolver in the place of one of the user's, whose module is the ranks' to
    import."""
    given, found = list(command), resolver_of(command)
    if found is not None and not found[0].startswith("flytekit."):
        given[given.index(_RESOLVER) + 1] = _FLYTEKITS
    return given


_RESOLVER = "--resolver"
_FLYTEKITS = "flytekit.core.python_auto_container.default_task_resolver"


def command_line(invocation: Invocation) -> list[str]:
    """The command with what ``@dynamic`` tasks need to start others with the same code, as the stock command adds it:
    before ``--resolver``, because everything behind the resolver's name is the resolver's."""
    command = list(invocation.command)
    if invocation.distribution is None or _RESOLVER not in command:
        return command
    at = command.index(_RESOLVER)
    further = ["--dynamic-addl-distro", invocation.distribution, "--dynamic-dest-dir", invocation.dest_argument]
    return [*command[:at], *further, *command[at:]]
