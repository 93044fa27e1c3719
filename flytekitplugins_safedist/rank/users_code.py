"""Around the user's code: it runs in a process whose end means something to others, and may fork and end it."""

from __future__ import annotations

import ast
import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from .. import stopping
from ..errors import PayloadError
from ..texts import said

T = TypeVar("T")

_TRIES = 5


class UsersError(BaseException):
    """Carries what the user's code has raised to where it is told. ``contextlib`` sets the ``__traceback__`` of what
    comes through it, which a frozen dataclass refuses: that refusal would be told in its place.

    Attributes:
        error: what was raised.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def without_children() -> Iterator[None]:
    """Inside, the user's code runs: a child that it forks, and that returns from it or raises, ends with the status
    that a script would have, and does nothing that is this process's to do.

    Raises:
        UsersError: whatever was raised inside.
    """
    process, status = os.getpid(), 1
    try:
        yield
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        raise UsersError(leaving) from None
    except BaseException as error:
        if os.getpid() != process:
            traceback.print_exception(error)
        raise UsersError(_as_raised(error)) from None
    finally:
        if os.getpid() != process:
            stopping.end_now(status & 0xFF)


def undisturbed(action: Callable[[], T]) -> T:
    """What ``action`` returns, which is begun anew where something is raised in the middle of it: by a handler of a
    signal's, the user's (``sys.exit`` at SIGTERM) or torch's (a DataLoader's worker was killed)."""
    for _ in range(_TRIES):
        with suppress(BaseException):
            return action()
    return action()


def _as_raised(error: BaseException) -> BaseException:
    """What was raised, where a block that it came through (ours, a library's, the user's own) has made that refusal of
    it."""
    is_refusal = isinstance(error, FrozenInstanceError) and "__traceback__" in str(error)
    return error.__context__ if is_refusal and error.__context__ is not None else error


def parsed(file: Path) -> ast.Module:
    """A file, of which nothing runs. Python 3.11 counts for all threads at once how deep it is in a tree, and finds
    another depth where a finalizer lets a second thread begin one; that is over when it is tried again.

    Raises:
        OSError, SyntaxError, ValueError, RecursionError: it cannot be read, or is not Python's.
    """
    source = file.read_bytes()
    for _ in range(_TRIES):
        with suppress(SystemError):
            return ast.parse(source)
    return ast.parse(source)


def imported(load: Callable[[], T]) -> T:
    """What ``load`` returns, which imports the user's module.

    Raises:
        UsersError: what that raises, with frames of the module on only.
        PayloadError: it would have ended this process.
    """
    try:
        with without_children():
            return load()
    except UsersError as raised:
        error = raised.error.with_traceback(_from_users_code_on(raised.error.__traceback__))
        if isinstance(error, Exception):
            raise
        text = said(error)
        raise PayloadError(
            f"importing the task's module would have ended this process by {type(error).__name__}"
            f"{text and f': {text}'}",
            expected="a module that can be imported by every rank",
            hint="put what only a script is to do below: if __name__ == '__main__'",
        ) from error


def _from_users_code_on(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames that led to the import: Python's own, flytekit's and ours."""
    while trace is not None and _LEADS_THERE.search(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


_LEADS_THERE = re.compile(r"^<frozen |/importlib/|/flytekit/|/flytekitplugins_safedist/")
