"""What ranks do together: all pass, or all learn who did not come, or why the one that works has failed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Literal, TypeVar

from ..errors import FsError, FsTimeoutError, WorkFailedError
from ..texts import ask, named
from .identity import timeout_s
from .store import Group, ranks

T = TypeVar("T")

WORK_SECONDS = 3600.0
"""For work that one rank does for others, where nobody has said how long."""
_FAREWELL_SECONDS = 10.0
_LIMIT = 1 << 18
RESULT_BYTES = 1 << 20
"""Of a result that is handed to other ranks, as JSON."""
_MARK = "__safedist__"


def barrier(name: str = "", *, timeout: float | None = None) -> None:
    """Return when every rank of the job has called this (with this name, as often as this one).

    Args:
        name: sets apart barriers that different threads wait at.
        timeout: seconds; without it SAFEDIST_FS_TIMEOUT, without that five minutes. The first rank whose time is up
            ends it for all.

    Raises:
        FsTimeoutError: in every rank, naming those that did not come.
    """
    began, limit = time.monotonic(), timeout_s(timeout)
    group = ranks(timeout)
    if group is None:
        return
    turn, met = group.turn(f"barrier/{name}"), group.meeting
    met.set(_key("came", group.rank, name), str(turn).encode())
    # Who sees that all have come, and who runs out of patience, leave one verdict, and the first wins: so it cannot be
    # that some pass and others fail.
    end = _key("end", turn, name)
    if met.add(_key("count", turn, name), 1) >= group.size:
        verdict: bytes | None = met.compare_set(end, b"", b"{}")
    else:
        verdict = met.wait(end, max(0.0, began + limit - time.monotonic()))
    if verdict is None:
        at = [int(met.wait(_key("came", rank, name), 0) or -1) for rank in range(group.size)]
        missing = [rank for rank, its_turn in enumerate(at) if its_turn < turn]
        said = {"missing": missing, "waited": f"{limit:.1f} s by {group}"}
        verdict = met.compare_set(end, b"", json.dumps(said).encode())
    outcome = json.loads(verdict)
    if group.ends_with_rank_0:
        see_off(group, _key("read", turn, name), group.size - len(outcome.get("missing", ())))
    if outcome:
        raise _gave_up(group, f"barrier/{name}/{turn}", outcome)
    if turn > 0 and group.rank == 0:  # whoever is here has left the turn before: nobody will ask for it again
        with contextlib.suppress(FsError):
            for what in ("count", "end", "read"):
                met.delete(_key(what, turn - 1, name))


def _key(what: str, number: int, name: str) -> str:
    """The name comes last: one may begin with another."""
    return f"barrier/{what}/{number}/{name}"


def see_off(group: Group, key: str, came: int) -> None:
    """Say that an answer is read. Rank 0 waits until all who came say so: it may end next, and the store with it."""
    with contextlib.suppress(FsError):  # rank 0 has seen this rank's word, and is gone before its answer is here
        read = group.meeting.add(key, 1)
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while group.rank == 0 and read < came and time.monotonic() < deadline:
            time.sleep(0.001)
            read = group.meeting.add(key, 0)


def _gave_up(group: Group, place: str, outcome: dict[str, Any]) -> FsTimeoutError:
    missing = ", ".join(map(str, outcome["missing"])) or "none, but too late"
    return FsTimeoutError(
        f"ranks did not come to the meeting point: {missing}",
        where={"point": place, "rank": str(group), "store": group.meeting.where},
        seen=f"waited {outcome['waited']}",
        expected=f"{group.size} ranks",
        hint="see what these ranks do instead: a hang before this point, an early return, a death, or the same call "
        "with another name",
        of_another=True,
    )


@contextmanager
def rank_zero_first(per: Literal["job", "node"] = "job", *, timeout: float | None = None) -> Iterator[None]:
    """Run the block in the first rank, then, if that went well, in all others: to fill a cache that all then read.

    Every rank must come here, as often as the others.

    Args:
        per: the first rank of the "job", or of each "node".
        timeout: seconds to wait for the first rank; without it SAFEDIST_FS_TIMEOUT, without that five minutes until it
            comes here, and an hour for its block.

    Raises:
        WorkFailedError: in the others, if the block failed in the first rank, which raises its own error.
        FsTimeoutError: in the others, if it did not come, or was not done.
    """
    group = ranks(timeout)
    if group is None:
        yield
        return
    which = "job" if per == "job" else group.node
    place, what = f"first/{which}/{group.turn(f'first/{per}')}", f"rank_zero_first(per={per!r})"
    if group.rank == 0 if per == "job" else group.leads_node:
        group.meeting.set(f"{place}/begun", str(group).encode())
        try:
            yield
        except BaseException as error:
            tell(group, place, failure=error)
            raise
        tell(group, place)
        return
    leader = group.meeting.wait(f"{place}/begun", timeout_s(timeout))
    if leader is None:
        raise FsTimeoutError(
            f"the first rank of the {per} did not come",
            where={"point": what, "rank": str(group), "store": group.meeting.where},
            seen=f"waited {timeout_s(timeout):.1f} s",
            hint="every rank must come here, the first of them too: see what it does instead",
            of_another=True,
        )
    heed(group, place, what, leader.decode(), timeout_s(timeout, WORK_SECONDS))
    yield


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
    tried, met, me = group.failed[key], group.meeting, [threading.get_ident()]
    place = f"once/{key}/{tried}"
    mine = f"{group} (pid {os.getpid()}) {group.token}"
    worker = met.compare_set(f"{place}/worker", b"", mine.encode()).decode()
    # The claim is this process's, be it that the answer to it was lost the last time; of its threads one works.
    at_work = group.at_work.setdefault(place, me) if worker == mine else None
    try:
        if at_work is me and met.wait(f"{place}/end", 0) is None:
            done: T = again(_work(group, place, key, work))
            return done
        if at_work is not me and at_work == me:
            raise FsError("this work waits for itself", where={"key": key}, hint="use another key inside the work")
        result: T = heed(group, place, key, worker.rpartition(" ")[0], timeout_s(timeout, WORK_SECONDS))
    except WorkFailedError:
        group.failed[key] = max(group.failed[key], tried + 1)
        raise
    finally:
        if at_work is me:
            del group.at_work[place]
    return result


def _work(group: Group, place: str, key: str, work: Callable[[], Any]) -> str:
    try:
        result = plain(work())
    except BaseException as error:
        said = tell(group, place, failure=error)
        group.failed[key] += 1
        if not isinstance(error, Exception):
            raise  # KeyboardInterrupt and SystemExit stay what they are where they happened
        raise _failed(key, said) from error
    tell(group, place, result)
    return result


# --- what one rank tells the others ----------------------------------------------------------------------------------
def tell(group: Group, place: str, result: str = "null", *, failure: BaseException | None = None) -> dict[str, str]:
    """Leave the result of work that others wait for, as :func:`plain` makes it, or its error; what they are told."""
    said = {"by": str(group), "result": result}
    if failure is not None:
        lines = partial(traceback.format_exception, type(failure), failure, failure.__traceback__)
        said.update(error=named(failure)[:_LIMIT], traceback=ask(lambda: "".join(lines()), str)[-_LIMIT:])
    # An error says more than that the place to tell it is gone.
    with contextlib.suppress(*([] if failure is None else [FsError])):
        group.meeting.set(f"{place}/end", json.dumps(said).encode())
    return said


def heed(group: Group, place: str, what: str, worker: str, seconds: float) -> Any:
    """The result of work that another rank does.

    Raises:
        WorkFailedError: its error.
        FsTimeoutError: it was not done in ``seconds``.
    """
    told = group.meeting.wait(f"{place}/end", seconds)
    if told is None:
        raise FsTimeoutError(
            "the work that one rank does for the others was not done in time",
            where={"work": what, "worker": worker, "rank": str(group), "store": group.meeting.where},
            seen=f"no result within {seconds:.1f} s",
            hint="give long work a longer timeout=, or see what the worker is waiting for",
            of_another=True,
        )
    said = json.loads(told)
    if "error" in said:
        raise _failed(what, said, of_another=True)
    return again(said["result"])


def _failed(what: str, said: dict[str, str], *, of_another: bool = False) -> WorkFailedError:
    return WorkFailedError(
        "the work that one rank does for the others has failed",
        where={"work": what, "worker": said["by"]},
        seen=f"{said['error']}\n{said['traceback']}",
        of_another=of_another,
    )


def plain(value: Any) -> str:
    """``value`` as JSON, with paths, bytes and tuples marked. Never a pickle.

    Raises:
        FsError: it holds something else, or is too large.
    """
    try:
        text = json.dumps(_marked(value))
        wrong = f"too large: {len(text)} characters of JSON" if len(text) > RESULT_BYTES else ""
    except (TypeError, ValueError, RecursionError) as error:
        text, wrong = "", f"{type(value).__name__}: {error}"
    if wrong:
        raise FsError(
            "this result cannot be handed to the other ranks",
            seen=wrong,
            expected="None, numbers, text, bytes, paths, and lists, tuples or dicts (with text keys) of these, "
            f"in all at most {RESULT_BYTES} characters of JSON",
            hint="write it to a file and return the path",
        )
    return text


def _marked(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, PurePath):
        return {_MARK: "path", "of": str(value)}
    if isinstance(value, bytes):
        return {_MARK: "bytes", "of": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {_MARK: "tuple", "of": [_marked(item) for item in value]}
    if isinstance(value, list):
        return [_marked(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) and key != _MARK for key in value):
        return {key: _marked(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} is not one of the types that can be handed over")


_OF_MARK: dict[str, Callable[[Any], Any]] = {"path": Path, "bytes": base64.b64decode, "tuple": tuple}


def again(text: str) -> Any:
    """What :func:`plain` was given."""
    return json.loads(text, object_hook=lambda found: _OF_MARK[found[_MARK]](found["of"]) if _MARK in found else found)
