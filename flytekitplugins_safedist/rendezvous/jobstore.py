"""Counters and notes of the whole job, on the store that the rendezvous runs on.

All of them are single requests or compare_set loops: two nodes that ask at once get one answer. Waits poll with backoff
(a blocked call would occupy the connection and, when it expires, torch writes a stack trace to the log).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from ..errors import GroupClosedError, NodeLostError, RendezvousTimeoutError
from . import departures
from .agreement import RoundAgreement
from .carried import Budget, Carried, Unit, change
from .failure import Failure, propose
from .membership import Membership
from .protocol import End

T = TypeVar("T")

TEXT_LIMIT = 64 * 1024
"""Bytes of one note; of a longer one the middle is cut. The store keeps everything in node 0's memory."""

_POLL_FIRST, _POLL_LAST = 0.02, 0.5
"""Seconds between two looks while waiting, growing from the first to the last."""


class JobStore:
    """What the agents of one job share besides the rendezvous.

    Every method may raise :class:`~flytekitplugins_safedist.errors.StoreLostError`. Get it from
    :attr:`.session.RendezvousSession.jobs`.
    """

    def __init__(self, group: Membership) -> None:
        self._group = group
        self._keys = group.keys
        self._node = group.node_rank

    # --- budgets -------------------------------------------------------------------------------------------------

    def spend_restart(self, limit: int, *, round_no: int, why: str = "") -> int | None:
        """Take one of ``limit`` restarts of the job, for the failure of ``round_no``.

        Nodes that see the same round fail spend once together. Returns the number of the restart (from 1), or None
        when the budget is used up.
        """
        return self._spend("restarts", limit, round_no, why)

    def spend_replacement(self, limit: int, *, round_no: int, why: str = "") -> int | None:
        """The same when ``round_no`` failed because a node was lost: a budget of its own."""
        return self._spend("losses", limit, round_no, why)

    def replaced(self, round_no: int) -> bool:
        """Whether ``round_no`` was ended because a node was lost."""
        return round_no in self.known().losses

    def known(self) -> Carried:
        """What the job knows of its restarts and losses so far."""
        key = self._keys.carried
        return Carried.parse(self._call("reading the losses", lambda store: bytes(store.compare_set(key, "", ""))))

    def made_room(self, round_no: int) -> bool:
        """Whether ``round_no`` was ended because a node wants to join."""
        return self._call("asking who joins", lambda store: departures.made_room(store, self._keys, round_no))

    def _spend(self, budget: Budget, limit: int, round_no: int, why: str) -> int | None:
        unit, granted = Unit(time.time_ns(), why), None

        def spent(now: Carried) -> Carried:
            nonlocal granted
            after, granted = now.spend(budget, limit, round_no, unit)
            return after

        key = self._keys.carried
        self._group.learn(self._call("spending a restart", lambda store: change(store, key, spent)))
        return granted

    # --- failures ------------------------------------------------------------------------------------------------

    def report(self, round_no: int, failure: Failure | None, *, returned: Sequence[int] = ()) -> Failure | None:
        """Say how ``round_no`` ended on this node: its first failure, or None if its ranks were only torn down.

        Args:
            round_no: the round.
            failure: the first failure here.
            returned: ranks of this node that had returned before.

        Returns the failure nearest to the root that any node has reported so far.
        """
        keys, node = self._keys, self._node
        cause = keys.job(f"cause/{round_no}")
        dumped = "" if failure is None else failure.dump()

        def report(store: Any) -> bytes | None:
            departures.note_returned(store, keys, round_no, node, returned)
            best = None if failure is None else propose(store, cause, failure, dumped)
            # Counted after the cause is in place, and once per node: who sees all reports sees the cause.
            departures.report(store, keys, round_no, node)
            if best is None and store.check([cause]):
                best = bytes(store.get(cause))
            return best

        raw = self._call("reporting a failure", report)
        return None if raw is None else Failure.parse(raw)

    def returned(self, round_no: int) -> tuple[int, ...]:
        """Ranks of any node that had returned when ``round_no`` failed. Ask after :meth:`wait_reports`."""
        keys, nodes = self._keys, self._group.nodes
        return self._call("asking who had returned", lambda store: departures.returned(store, keys, round_no, nodes))

    def root_cause(self, round_no: int) -> Failure | None:
        """The failure nearest to the root among those reported for ``round_no``."""
        raw = self._read(self._keys.job(f"cause/{round_no}"))
        return None if raw is None else Failure.parse(raw)

    def wait_reports(self, round_no: int, timeout: float) -> tuple[Failure | None, tuple[int, ...]]:
        """Wait, at most ``timeout`` seconds, until every node that still can has reported for ``round_no``.

        Nobody waits for a node that has left, whose place a new process has taken, or that is known to be gone.

        Returns the root cause, and the nodes that have not reported. Expiry is an answer here, not an error.
        """
        keys, nodes = self._keys, self._group.nodes

        def heard(store: Any) -> bool | None:
            if store.add(departures.words(keys, round_no), 0) >= nodes:
                return True
            gone = self._group.gone()
            return (bool(gone) and set(departures.unheard(store, keys, round_no, nodes)) <= set(gone)) or None

        with_all = self._poll(heard, timeout)
        overdue = () if with_all and not self._group.gone() else self._call("reading reports", self._unheard(round_no))
        return self.root_cause(round_no), tuple(sorted({*overdue, *self.left(round_no)}))

    def _unheard(self, round_no: int) -> Callable[[Any], tuple[int, ...]]:
        return lambda store: departures.unheard(store, self._keys, round_no, self._group.nodes)

    def leave_round(self, round_no: int, why: str, *, with_store: bool = False) -> None:
        """Say that this node leaves ``round_no`` and will not report on it: the others neither wait for it nor miss
        its heartbeat. ``with_store``: the store goes with it, and its loss is counted when another is there."""

        def leave(store: Any) -> None:
            if with_store:
                departures.take_store(store, self._keys, round_no)
            departures.note(store, self._keys, round_no, self._node, why)

        self._call("leaving a round", leave)

    def store_leaves(self, round_no: int) -> bool:
        """Whether the node that holds the store has said that it leaves ``round_no``."""
        return self._call("asking who left", lambda s: departures.takes_store(s, self._keys, round_no))

    def left(self, round_no: int) -> dict[int, str]:
        """Why each node that has left ``round_no`` did, by node rank."""
        return self._call("asking who left", lambda s: departures.left(s, self._keys, round_no, self._group.nodes))

    # --- the end -------------------------------------------------------------------------------------------------

    def close(self, kind: Literal["done", "failed", "replacements"], outcome: str) -> End:
        """End the job for every node, with its outcome as text; the first one to end it decides. Returns that end."""
        return self._group.close(kind, _bounded(outcome))

    def finish(self, round_no: int) -> bool:
        """End the job as done, when every node's ranks have succeeded in ``round_no``. Whether it has ended so: no,
        when a new round was asked for before."""
        return self._group.finish(round_no)

    def end(self) -> End | None:
        """How the job ended, or None while it runs."""
        return self._group.read_end()

    def mark_done(self, round_no: int) -> None:
        """Say that this node's ranks have succeeded in ``round_no``. Saying it twice counts once."""
        self._call("saying that this node is done", lambda s: departures.mark_done(s, self._keys, round_no, self._node))

    def done_among(self, round_no: int, nodes: Sequence[int]) -> tuple[int, ...]:
        """Those of *nodes* whose ranks have succeeded in ``round_no``."""
        return self._call("asking who is done", lambda s: departures.done(s, self._keys, round_no, nodes))

    def all_done(self, round_no: int) -> bool:
        """Whether every node's ranks have succeeded in ``round_no``."""
        key = departures.done_count(self._keys, round_no)
        done: int = self._call("asking who is done", lambda store: store.add(key, 0))
        return done >= self._group.nodes

    def set_uploaded(self, note: str = "") -> None:
        """Node 0: the outputs (or the one error) are safely uploaded; the other nodes may leave."""
        text = _bounded(note) or "yes"
        self._call("saying that outputs are uploaded", lambda s: s.compare_set(self._keys.job("uploaded"), "", text))

    def set_not_uploaded(self, reason: str) -> None:
        """Node 0: nothing was uploaded, and nothing will be; the other nodes need not wait."""
        text = _bounded(reason)
        self._call("saying that nothing is uploaded", lambda s: s.set(self._keys.job("not-uploaded"), text))

    def wait_uploaded(self, timeout: float) -> str:
        """Wait until node 0 says that it has uploaded; returns its note.

        The end of the job does not end the wait: outputs, and the one error, are uploaded after it.

        Raises:
            GroupClosedError: node 0 says that nothing is uploaded.
            NodeLostError: node 0 sends no heartbeat, while the store is still there.
            RendezvousTimeoutError: not within ``timeout`` seconds.
        """
        yes, no = self._keys.job("uploaded"), self._keys.job("not-uploaded")
        beats = self._group.uploader_beat()
        last, since = -1, time.monotonic()

        def look(store: Any) -> tuple[bool, bytes] | None:
            nonlocal last, since
            for key in (yes, no):
                if store.check([key]):
                    return key == yes, bytes(store.get(key))
            count = last if beats is None else int(store.add(beats, 0))
            if beats is None or count != last:
                last, since = count, time.monotonic()
            elif time.monotonic() - since > self._group.heartbeat_timeout:
                raise NodeLostError(
                    "node 0 sends no heartbeat, and has not reported its upload",
                    where={"node": self._node},
                    seen=f"no sign of life for {self._group.heartbeat_timeout:g} s",
                    hint="look at the pod of that node: killed, evicted, paused, or cut off by the network",
                )
            return None

        found = self._poll(look, timeout, past_the_end=True)
        if found is None:
            raise self._waited_without_success("node 0 to upload the outputs", timeout)
        uploaded, text = found
        if not uploaded:
            raise GroupClosedError("node 0 uploaded nothing", where={"node": self._node}, seen=text.decode())
        return text.decode()

    # --- saving together ----------------------------------------------------------------------------------------------

    def agreement(self, round_no: int) -> RoundAgreement:
        """How the nodes of ``round_no`` come to one step at which all ranks save."""
        return RoundAgreement(self._call, self._keys, round_no=round_no, nodes=self._group.nodes)

    def _waited_without_success(self, what: str, timeout: float) -> RendezvousTimeoutError:
        return RendezvousTimeoutError(
            f"waited without success for {what}",
            where={"node": self._node},
            seen=f"nothing for {timeout:g} s",
            hint="look at node 0's log: its upload may hang, or its agent may have died",
        )

    # --- who is alive --------------------------------------------------------------------------------------------

    def beats(self) -> tuple[int, ...]:
        """Heartbeat counter of every node, 0 for a node that never came. A request for each: meant for node 0, where
        they are local, and for ranges, which are small."""
        keys = self._group.beat_keys()
        return self._call("reading heartbeats", lambda s: tuple(int(s.add(key, 0)) for key in keys))

    # --- small things --------------------------------------------------------------------------------------------

    def _call(self, what: str, op: Callable[[Any], T]) -> T:
        return self._group.control.call(what, op)

    def _read(self, key: str) -> bytes | None:
        return self._call("reading a note", lambda store: bytes(store.get(key)) if store.check([key]) else None)

    def _poll(self, look: Callable[[Any], T | None], timeout: float, *, past_the_end: bool = False) -> T | None:
        """Look until there is something, the job has ended (unless ``past_the_end``), or time is up."""
        deadline, pause, never = time.monotonic() + timeout, _POLL_FIRST, threading.Event()
        while True:
            found = self._call("waiting for a note", look)
            left = deadline - time.monotonic()
            if found is not None or left <= 0 or (not past_the_end and self.end() is not None):
                return found
            never.wait(min(pause, left))
            pause = min(_POLL_LAST, pause * 1.5)


def _bounded(text: str) -> str:
    """At most ``TEXT_LIMIT`` bytes of a text, and such as can be sent; both ends of a longer one."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= TEXT_LIMIT:
        return data.decode()
    cut = "\n... [cut] ...\n"
    half = (TEXT_LIMIT - len(cut)) // 2
    return f"{data[:half].decode(errors='ignore')}{cut}{data[-half:].decode(errors='ignore')}"
