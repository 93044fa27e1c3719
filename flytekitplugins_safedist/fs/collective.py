"""``barrier`` and ``rank_zero_first``: all ranks pass, or all learn who did not come, or why the first one failed."""

from __future__ import annotations

import base64
import contextlib
import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, Literal

from ..errors import FsError, FsTimeoutError, WorkFailedError
from .identity import timeout_s
from .store import Group, ranks

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
    turn = group.turn(f"barrier/{name}")
    place, met = f"barrier/{name}/{turn}", group.meeting
    met.set(f"{place}/{group.rank}", b"1")
    # Who sees that all have come, and who runs out of patience, leave one verdict, and the first wins: so it cannot be
    # that some pass and others fail.
    if met.add(place, 1) >= group.size:
        verdict = met.compare_set(f"{place}/end", b"", b"{}")
    else:
        try:
            verdict = met.wait(f"{place}/end", max(0.0, began + limit - time.monotonic()))
        except FsError:
            raise
        except TimeoutError:
            missing = [rank for rank in range(group.size) if met.get(f"{place}/{rank}") is None]
            said = {"missing": missing, "waited": f"{limit:.1f} s by {group}"}
            verdict = met.compare_set(f"{place}/end", b"", json.dumps(said).encode())
    outcome = json.loads(verdict)
    if group.ends_with_rank_0:
        _see_off(group, place, group.size - len(outcome.get("missing", ())))
    if outcome:
        raise _gave_up(group, place, outcome)
    if turn > 0:  # whoever is here has left the turn before: nobody will ask for it again
        before = f"barrier/{name}/{turn - 1}"
        gone = [f"{before}/{group.rank}", *([before, f"{before}/end", f"{before}/read"] if group.rank == 0 else [])]
        with contextlib.suppress(FsError):  # rank 0 may have ended, and the store with it
            for key in gone:
                met.delete(key)


def _see_off(group: Group, place: str, came: int) -> None:
    """Say that the verdict is read. Rank 0 waits until all say so: it may end next, and the store with it."""
    with contextlib.suppress(FsError):  # rank 0 has seen this rank's word, and is gone before its answer is here
        read = group.meeting.add(f"{place}/read", 1)
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while group.rank == 0 and read < came and time.monotonic() < deadline:
            time.sleep(0.005)
            read = group.meeting.add(f"{place}/read", 0)


def _gave_up(group: Group, place: str, outcome: dict[str, Any]) -> FsTimeoutError:
    missing = ", ".join(map(str, outcome["missing"])) or "none, but too late"
    return FsTimeoutError(
        f"ranks did not come to the meeting point: {missing}",
        where={"point": place, "rank": str(group), "store": group.meeting.where},
        seen=f"waited {outcome['waited']}",
        expected=f"{group.size} ranks",
        hint="see what these ranks do instead: a hang before this point, an early return, a death, or the same call "
        "with another name",
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
    try:
        leader = group.meeting.wait(f"{place}/begun", timeout_s(timeout)).decode()
    except FsError:
        raise
    except TimeoutError:
        raise FsTimeoutError(
            f"the first rank of the {per} did not come",
            where={"point": what, "rank": str(group), "store": group.meeting.where},
            seen=f"waited {timeout_s(timeout):.1f} s",
            hint="every rank must come here, the first of them too: see what it does instead",
        ) from None
    heed(group, place, what, leader, timeout_s(timeout, WORK_SECONDS))
    yield


# --- what one rank tells the others ----------------------------------------------------------------------------------
def tell(group: Group, place: str, value: Any = None, *, failure: BaseException | None = None) -> dict[str, Any]:
    """Leave the result of work that others wait for, as :func:`plain` makes it, or its error; what they are told."""
    if failure is None:
        said = {"value": value, "by": str(group)}
    else:
        text = "".join(traceback.format_exception(type(failure), failure, failure.__traceback__))
        error = f"{type(failure).__name__}: {failure}"
        said = {"error": error[:_LIMIT], "traceback": text[-_LIMIT:], "by": str(group)}
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
    try:
        said = json.loads(group.meeting.wait(f"{place}/end", seconds))
    except FsError:
        raise
    except TimeoutError:
        raise FsTimeoutError(
            "the work that one rank does for the others was not done in time",
            where={"work": what, "worker": worker, "rank": str(group), "store": group.meeting.where},
            seen=f"no result within {seconds:.1f} s",
            hint="give long work a longer timeout=, or see what the worker is waiting for",
        ) from None
    if "error" in said:
        raise failed(what, said).echoing()
    return again(said["value"])


def failed(what: str, said: dict[str, str]) -> WorkFailedError:
    """What every caller of work that failed is told."""
    return WorkFailedError(
        "the work that one rank does for the others has failed",
        where={"work": what, "worker": said["by"]},
        seen=f"{said['error']}\n{said['traceback']}",
    )


def plain(value: Any) -> Any:
    """``value`` as JSON can say it, with paths, bytes and tuples marked. Never a pickle.

    Raises:
        FsError: it holds something else, or is too large.
    """
    try:
        marked = _marked(value)
        size = len(json.dumps(marked))
    except (TypeError, ValueError, RecursionError) as error:
        raise FsError(
            "this result cannot be handed to the other ranks",
            seen=f"{type(value).__name__}: {error}",
            expected="None, numbers, text, bytes, paths, and lists, tuples or dicts (with text keys) of these",
            hint="write it to a file and return the path",
        ) from error
    if size > RESULT_BYTES:
        raise FsError(
            "this result is too large to be handed to the other ranks",
            seen=f"{size} characters",
            expected=f"at most {RESULT_BYTES}",
            hint="write it to a file and return the path",
        )
    return marked


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


def again(value: Any) -> Any:
    """What :func:`plain` was given."""
    if isinstance(value, list):
        return [again(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: again(item) for key, item in value.items()}
    kind, of = value[_MARK], value["of"]
    return Path(of) if kind == "path" else base64.b64decode(of) if kind == "bytes" else tuple(map(again, of))
