"""What the workers of one test session share: made by the first that needs it, ended by the last that leaves.

Workers (pytest-xdist) are processes that know nothing of each other. What says that one of them uses a thing is a lock
on a file, which the kernel drops with the process, however it ends: nothing is counted, so no count can be wrong.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

import pytest

T = TypeVar("T")


def directory_of_all_workers(factory: pytest.TempPathFactory) -> Path:
    """A temporary directory that is the same in every worker of a session, and another in every session."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@contextlib.contextmanager
def shared(directory: Path, name: str, make: Callable[[], T], end: Callable[[T], None] = lambda _: None) -> Iterator[T]:
    """What *make* gives, which must pickle, in whichever worker comes first; the others wait for it, and get the same.

    The last to leave calls *end*. Whoever comes after that makes another one.
    """
    with (directory / f"{name}.turn").open("w") as turn, (directory / f"{name}.users").open("w") as users:
        record = directory / f"{name}.pickle"
        with one_at_a_time(turn):
            if nobody_has(users):
                # What is still there belongs to workers that were killed.
                _end(record, end)
                made = make()
                record.write_bytes(pickle.dumps(made))
            value: T = pickle.loads(record.read_bytes())
            fcntl.flock(users, fcntl.LOCK_SH)
        try:
            yield value
        finally:
            with one_at_a_time(turn):
                # Explicitly: a process forked by a test may hold a copy of this file, and with it the lock.
                fcntl.flock(users, fcntl.LOCK_UN)
                if nobody_has(users):
                    _end(record, end)


@contextlib.contextmanager
def one_at_a_time(turn: IO[str]) -> Iterator[None]:
    fcntl.flock(turn, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(turn, fcntl.LOCK_UN)


def nobody_has(users: IO[str]) -> bool:
    """Whether no worker uses the thing; asked in turn, so that the answer stays true."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _end(record: Path, end: Callable[[T], None]) -> None:
    try:
        value = pickle.loads(record.read_bytes())
    except FileNotFoundError:
        return
    record.unlink()
    end(value)
