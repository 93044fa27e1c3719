"""``once_per_job`` and ``once_per_node``: one caller does the work, all have its result, or its error, at once.

Each attempt at the work is a *generation* with two notes in the coordination store: who works, and how it ended. Both
are left by "the first wins", so there is one worker and one verdict, whoever is slow, dead, or comes back from the
dead: a worker that was declared lost finds that verdict in the place of its own, and its result counts for nothing.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from ..errors import FsError, FsTimeoutError, WorkerLostError, WorkFailedError
from . import mount_info
from .codec import decode, encode
from .context import says_timeout, timeout_s
from .group import Group, default_group
from .process import ProcessRecord, boot_id, is_provably_dead, pid_namespace, this_process
from .scope import shared_scope
from .wakeups import Sleeper, WakeUp

T = TypeVar("T")
OnDeath = Literal["fail", "takeover"]

LOOK_S = 0.5
"""How often waiters look after the worker's health. A worker that died on their own machine is noticed within this."""
PULSE_S = 5.0
MOST_WORKERS = 3
"""Work that kills three workers kills the fourth too."""


def once_per_job(
    key: str,
    work: Callable[[], T],
    *,
    on_death: OnDeath = "fail",
    timeout: float | None = None,
    group: Group | None = None,
) -> T:
    """Have ``work`` done by exactly one rank of the job; return its result in every rank that calls this.

    The first to come works. A later call with the same key, from any rank or thread, returns the same result: it is
    once per job (once per round, after a restart of the ranks). After a failure, a rank that has had the error and
    calls again begins another try, which all ranks that call again take part in.

    Args:
        key: names the work; the same in all ranks.
        work: makes a small value that can be written down (numbers, text, bytes, paths, lists, dicts). With
            ``on_death="takeover"`` it may run again after a worker died in the middle: let it publish what it makes
            with ``atomic_write`` or ``atomic_dir``.
        on_death: when the worker dies, every caller fails at once ("fail"), or one of them takes over ("takeover").
            Its death is noticed within ``LOOK_S`` seconds by callers on its machine, and told to all; when nobody can
            judge (its whole machine is gone), after the coordination store's lease: 60 s over torch, 180 s over network
            files. A takeover after that may overlap with a worker that was only frozen: its result is void.
        timeout: seconds to wait for another's work; without it SAFEDIST_FS_TIMEOUT; without that for as long as the
            worker is alive, and five minutes from its last sign of life.
        group: the ranks; without it ``default_group()``.

    Raises:
        WorkFailedError: the work raised. Every caller gets this, with type, message and traceback of the one error.
        WorkerLostError: the worker died or showed no sign of life (``on_death="fail"``), or three in a row did.
        FsTimeoutError: it was not done in time.
    """
    return _once(group or default_group(), f"job/{key}", work, on_death, timeout)


def once_per_node(
    key: str,
    work: Callable[[], T],
    *,
    path: str | os.PathLike[str] | None = None,
    on_death: OnDeath = "fail",
    timeout: float | None = None,
    group: Group | None = None,
) -> T:
    """As ``once_per_job``, but on every node one of its ranks works and the others of that node have its result.

    Args:
        key: as for ``once_per_job``.
        work: as for ``once_per_job``.
        path: the directory that the work fills. Then it is done once for each file system that the ranks see there, as
            ``shared_scope`` finds out: once on every node whose directory is its own, and once in all on a volume that
            the nodes share. Every rank of the job must call this, at the same point, with the same key and path.
        on_death: as for ``once_per_job``.
        timeout: as for ``once_per_job``.
        group: as for ``once_per_job``.

    Raises:
        WorkFailedError, WorkerLostError, FsTimeoutError: as for ``once_per_job``.
        FsError: the directory cannot be made or written; see ``shared_scope``.
    """
    group = group or default_group()
    if path is not None:
        scope = shared_scope(path, timeout=timeout, key=f"once/{key}", group=group)
        part = f"part{scope.part}of{len(scope.parts)}"
        return once_per_part(part, key, work, on_death=on_death, timeout=timeout, group=group)
    return _once(group, f"node{group.identity.node_rank}/{key}", work, on_death, timeout)


def once_per_part(
    part: str, key: str, work: Callable[[], T], *, on_death: OnDeath, timeout: float | None, group: Group
) -> T:
    """As ``once_per_job``, for the ranks that name the same ``part`` of the job (those that share a file system)."""
    return _once(group, f"{part}/{key}", work, on_death, timeout)


@dataclass(frozen=True)
class _Worker:
    process: ProcessRecord
    rank: int
    thread: int
    token: str
    wakeup: str

    def to_text(self) -> str:
        return json.dumps({**vars(self), "process": self.process.to_dict()})

    @classmethod
    def from_text(cls, text: str) -> _Worker:
        values = json.loads(text)
        process = ProcessRecord.from_dict(values["process"])
        return cls(process, int(values["rank"]), int(values["thread"]), str(values["token"]), str(values["wakeup"]))

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.process})"


def _once(group: Group, key: str, work: Callable[[], T], on_death: OnDeath, timeout: float | None) -> T:
    patience = _Patience(timeout_s(timeout), says_timeout(timeout))
    with WakeUp() as wakeup:
        me = _Worker(this_process(), group.identity.rank, threading.get_ident(), secrets.token_hex(16), wakeup.address)
        first = group.failures(key)
        for generation in range(first, first + MOST_WORKERS):
            place = f"once/{key}/{generation}"
            worker = _Worker.from_text(group.coordination.put_once(f"{place}/worker", me.to_text()))
            if worker.token == me.token:
                try:
                    verdict = _work(group, place, key, me, work)
                except BaseException:
                    group.failed(key, generation)
                    raise
                finally:
                    wakeup.wake()
            else:
                _refuse_own_work(group, place, key, me, worker)
                verdict = _await(group, place, key, worker, patience)
            if "value" in verdict:
                result: T = decode(verdict["value"])
                return result
            if "error" in verdict:
                group.failed(key, generation)
                raise _failed(key, verdict).echoing()
            if on_death == "fail":
                break
    group.failed(key, generation)
    raise WorkerLostError(
        "the rank that did the work for the others is lost",
        where={"key": key, "worker": verdict["worker"], "store": group.coordination.where},
        seen=verdict["lost"],
        hint="see why it ended (out of memory?); on_death='takeover' lets another rank do the work",
    )


@dataclass(frozen=True)
class _Patience:
    """How long to wait for another's work: in all, where somebody has said so; else since its last sign of life."""

    seconds: float
    in_all: bool
    began: float = field(default_factory=time.monotonic)

    def left(self, last_alive: float) -> float:
        """Seconds, given when (by this clock) the worker last showed that it lives."""
        return (self.began if self.in_all else max(self.began, last_alive)) + self.seconds - time.monotonic()


def _refuse_own_work(group: Group, place: str, key: str, me: _Worker, worker: _Worker) -> None:
    if (worker.process, worker.thread) == (me.process, me.thread) and group.coordination.get(f"{place}/end") is None:
        raise FsError("this work waits for itself", where={"key": key}, hint="use another key inside the work")


def _work(group: Group, place: str, key: str, me: _Worker, work: Callable[[], Any]) -> dict[str, str]:
    facts_of_me = {"worker": str(me)}
    failure: BaseException | None = None
    with _Pulse(group, place):
        try:
            verdict = {**facts_of_me, "value": encode(work())}
        except BaseException as error:
            failure = error
            text = "".join(traceback.format_exception(error))[-20_000:]
            summary = f"{type(error).__name__}: {error}"
            verdict = {**facts_of_me, "error": summary, "traceback": text}
        agreed: dict[str, str] = json.loads(group.coordination.put_once(f"{place}/end", json.dumps(verdict)))
    if "lost" in agreed:
        raise WorkerLostError(
            "this rank was declared lost while it worked, and its result is void",
            where={"key": key, "worker": str(me)},
            seen=agreed["lost"],
            hint="it was frozen or cut off; the ranks that still counted on it have failed or taken over",
        ) from failure
    if failure is not None:
        if not isinstance(failure, Exception):
            raise failure  # KeyboardInterrupt and SystemExit stay what they are where they happened
        raise _failed(key, agreed) from failure
    return agreed


def _await(group: Group, place: str, key: str, worker: _Worker, patience: _Patience) -> dict[str, str]:
    watch = _Watch(group, place, worker)
    with Sleeper(worker.wakeup if watch.judges else "") as sleeper:
        for look in _looks(sleeper, lambda: patience.left(watch.last_alive)):
            text = group.coordination.wait(f"{place}/end", look)
            if text is None and (lost := watch.lost()):
                verdict = {"worker": str(worker), "lost": f"{lost}, says rank {group.identity.rank}"}
                text = group.coordination.put_once(f"{place}/end", json.dumps(verdict))
            if text is not None:
                agreed: dict[str, str] = json.loads(text)
                return agreed
            if patience.left(watch.last_alive) <= 0:
                break
    raise FsTimeoutError(
        "the work that one rank does for the others was not done in time",
        where={"key": key, "worker": worker, "store": group.coordination.where, "host": mount_info.host()},
        seen=watch.state,
        hint="give long work a longer timeout=, or see what the worker is waiting for",
    )


def _looks(sleeper: Sleeper, patience: Callable[[], float]) -> Iterator[float]:
    """How long to wait for the verdict, in seconds, before the next look after the worker's health."""
    most = LOOK_S
    while True:
        left = max(0.0, patience())
        if sleeper.can_be_woken:
            sleeper.sleep(min(LOOK_S, left))
            yield 0.0
            most = 0.001  # once it was woken: if there is no verdict, the worker is dying, and dead in a moment
        else:
            yield min(most, left)
            most = min(LOOK_S, 2 * most)


class _Watch:
    """Is the worker alive? By the kernel where it can be asked, by its pulse where not."""

    def __init__(self, group: Group, place: str, worker: _Worker) -> None:
        self._group, self._place, self._worker = group, place, worker
        here = (boot_id(), pid_namespace())
        self.judges = here == (worker.process.boot_id, worker.process.pid_ns) and here[0] != ""
        self._pulse: str | None = None
        self.last_alive = time.monotonic()
        """When the worker was last known to live, by this process's monotonic clock."""
        self.state = "alive, and still at work"

    def lost(self) -> str:
        """Why the worker counts as lost; empty while it does not."""
        if self.judges:
            if is_provably_dead(self._worker.process):
                return f"{self._worker.process} has died"
            self.last_alive = time.monotonic()
            return ""
        pulse = self._group.coordination.get(f"{self._place}/pulse")
        now = time.monotonic()
        if pulse != self._pulse:
            self._pulse, self.last_alive = pulse, now
        quiet_s = now - self.last_alive
        self.state = f"last sign of life {quiet_s:.0f} s ago"
        return f"no sign of life for {quiet_s:.0f} s" if quiet_s > self._group.coordination.lease_s else ""


class _Pulse:
    """Shows every PULSE_S seconds, from a thread, that the worker lives."""

    def __init__(self, group: Group, place: str) -> None:
        self._group, self._place = group, place
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="safedist-fs-pulse", daemon=True)

    def _beat(self) -> None:
        beats = 0
        while not self._done.wait(PULSE_S):
            beats += 1
            try:
                self._group.coordination.put(f"{self._place}/pulse", str(beats))
            except FsError:  # the waiters see no sign of life, and the worker its own error when it is done
                return

    def __enter__(self) -> None:
        if self._group.identity.world_size > 1:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()


def _failed(key: str, verdict: dict[str, str]) -> WorkFailedError:
    return WorkFailedError(
        "the work that one rank does for the others has failed",
        where={"key": key, "worker": verdict["worker"]},
        seen=f"{verdict['error']}\n{verdict['traceback']}",
    )
