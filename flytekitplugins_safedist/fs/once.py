"""``once_per_job`` and ``once_per_node``: one rank does the work, all have its result, or its error, at once."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import FsError, WorkFailedError
from .collective import WORK_SECONDS, again, failed, heed, plain, tell
from .identity import timeout_s
from .store import Group, ranks

T = TypeVar("T")


def once_per_job(key: str, work: Callable[[], T], *, timeout: float | None = None) -> T:
    """Have ``work`` done by exactly one rank of the job; return its result in every rank that calls this.

    The first to come works. A later call with the same key, from any rank or thread, returns the same result: it is
    once per job (once per round, after a restart of the ranks). After a failure, a rank that has had the error and
    calls again begins another try, which all ranks that call again take part in. In a job of one process, ``work`` is
    called, and that is all.

    A worker that is killed ends the job's round: by safedist's agents, torchrun or horovodrun, which watch their ranks.
    Nothing in the ranks watches a second time; who waits gives up at the deadline.

    Args:
        key: names the work; the same in all ranks.
        work: makes a small value that can be written down (numbers, text, bytes, paths, lists, dicts).
        timeout: seconds to wait for another's work; without it SAFEDIST_FS_TIMEOUT, without that an hour.

    Raises:
        WorkFailedError: the work raised. Every caller gets this, with type, message and traceback of the one error.
        FsTimeoutError: it was not done in time; names the rank that works.
        FsError: the ranks have nothing to meet over yet.
    """
    group = ranks(timeout)
    return work() if group is None else once(group, f"job/{key}", work, timeout)


def once_per_node(key: str, work: Callable[[], T], *, timeout: float | None = None) -> T:
    """As ``once_per_job``, but on every node one of its ranks works and the others of that node have its result."""
    group = ranks(timeout)
    return work() if group is None else once(group, f"{group.node}/{key}", work, timeout)


def once(group: Group, key: str, work: Callable[[], T], timeout: float | None) -> T:
    """As ``once_per_job``, among the ranks that name the same ``key``."""
    tried = group.failed[key]
    place = f"once/{key}/{tried}"
    me = f"{group} (pid {os.getpid()}, thread {threading.get_ident()})"
    mine = f"{me} {secrets.token_hex(8)}"
    worker = group.meeting.compare_set(f"{place}/worker", b"", mine.encode()).decode()
    try:
        if worker == mine:
            done: T = _work(group, place, key, work)
            return done
        if worker.startswith(me) and group.meeting.get(f"{place}/end") is None:
            raise FsError("this work waits for itself", where={"key": key}, hint="use another key inside the work")
        result: T = heed(group, place, key, worker.rpartition(" ")[0], timeout_s(timeout, WORK_SECONDS))
    except WorkFailedError:
        group.failed[key] = max(group.failed[key], tried + 1)
        raise
    return result


def _work(group: Group, place: str, key: str, work: Callable[[], Any]) -> Any:
    try:
        value = plain(work())
    except BaseException as error:
        said = tell(group, place, failure=error)
        group.failed[key] += 1
        if not isinstance(error, Exception):
            raise  # KeyboardInterrupt and SystemExit stay what they are where they happened
        raise failed(key, said) from error
    tell(group, place, value)
    return again(value)
