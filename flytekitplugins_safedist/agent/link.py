"""A node's way to its job's leader: found by node 0's name, lost, and found again, wherever that leads by then.

What is heard is put into an inbox, for the agent's loop. Nothing here trusts an address for longer than it is the
name's: a connection to a machine that is gone, or to a process that is frozen, is given up when the name leads
elsewhere.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from .. import frames
from ..coordinator import wire
from ..coordinator.messages import Status, Want
from ..coordinator.ports import is_own
from ..coordinator.rules import Rules
from ..coordinator.server import Inbox
from ..coordinator.wire import HangEvidence, Refusal
from ..errors import NodeLostError, NotReplacedError, RendezvousError, RendezvousTimeoutError
from ..jitter import jittered
from ..record.clocks import Ahead
from ..topology import Endpoint
from .meeting_place import MeetingPlace

logger = logging.getLogger(__name__)

WAIT_LINE_SECONDS = 30.0
"""Between two lines about who is waited for."""

_PAUSE, _LONGEST_PAUSE = 0.25, 2.0
"""Seconds between two looks for node 0: at first, and when it takes minutes. Each look asks DNS several times, and
every node of the job looks."""

_PATIENT_AFTER = 10.0
"""Seconds of looking, after which the pauses grow."""

_SHORT = 1.0
"""Seconds that a connection lasted, below which the next one is not made at once."""

_PROBE = 2.0
"""Seconds that a machine is given to accept a connection, at each look."""

_TURN = 5.0
"""Seconds that a leader is given to answer where the name has other addresses as well."""

_SLICE = 0.5
"""Seconds between two looks at the name while a leader is slow to answer."""

_LAST_WORDS_SECONDS = 2.0
"""At the end, for what was said last to be on its way to a leader that may be slow."""


class Missing(NamedTuple):
    """No leader is found: what was seen instead, and what Kubernetes may be waiting for."""

    seen: str
    awaits: str


NO_ADDRESS = Missing(
    "its name has no address", "a machine with room for the pod, the end of the pod before it, or its readiness probes"
)
REFUSED = Missing("nothing listens there", "the container's image; or its agent still fetches the code, or imports")
NO_ANSWER = Missing("no answer from there", "its machine to be given up: the process there is frozen, or cut off")
_STRANGER_LEAVES = "the end of that job's pod, or this job's name to lead to its own"


@dataclass(frozen=True)
class LinkLost:
    """In the inbox: the leader is not heard any more. Another is looked for when :meth:`Link.begin` is called again."""

    why: str


class Link:
    """One node's connection to its leader.

    Args:
        rules: of the job.
        endpoint: where node 0 is.
        inbox: takes what is heard: wants, evidence, :class:`LinkLost`, errors.
        own: connects to the leader where that is in this process; it is looked for nowhere else.
        may_lead: node 0's name had no address when this process began: it may be its own.
    """

    def __init__(
        self,
        rules: Rules,
        endpoint: Endpoint,
        *,
        inbox: Inbox,
        own: Callable[[], socket.socket] | None = None,
        may_lead: bool = False,
    ) -> None:
        self._own, self._may_lead = own, may_lead
        self.place: MeetingPlace | None = None
        """Where this node's ranks call."""
        self._endpoint = endpoint
        self._who = "node 0" if rules.is_fixed else f"the pod at {endpoint.host}, which leads the job,"
        self._timeout = rules.rendezvous
        self._heartbeat = rules.heartbeat
        self._inbox = inbox
        self.status: Status | None = None
        """As it was said last."""
        self._may_look = threading.Event()
        self._sock: socket.socket | None = None
        self._saying = threading.Lock()
        self._out: queue.SimpleQueue[tuple[socket.socket, bytes] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._since = self._told = time.monotonic()
        self._met_stranger = self._has_met = self._is_left = self._was_short = False
        self._missing = NO_ADDRESS
        self._address = ""
        self.behind = Ahead()
        """Of this node's clock against the leader's."""
        self._beat = rules.beat
        self._sender = threading.Thread(target=self._keep_sending, name="safedist heartbeat", daemon=True)
        for thread in (threading.Thread(target=self._run, name="safedist link", daemon=True), self._sender):
            thread.start()

    def begin(self, status: Status) -> None:
        """Look for the leader, with this to say: at first, and whenever it was lost."""
        self.status = status
        self._may_look.set()

    def tell(self, status: Status) -> None:
        """Send it, if it is another; while the leader is looked for, it is what the next connection begins with."""
        with self._saying:
            if status != self.status:
                self.status = status
                self.put(wire.frame(wire.STATUS, status.dump()))

    def put(self, frame: bytes) -> None:
        """Put a value beside the status; nothing while the leader is looked for. Nobody waits for a leader that reads
        nothing: a thread sends."""
        sock = self._sock
        if sock is not None:
            self._out.put((sock, frame))

    def drop(self) -> None:
        """This leader is not the job's any more."""
        self._is_left = True
        self._shut()

    def close(self) -> None:
        """Let go, when what was said is on its way."""
        self._closed.set()
        self._may_look.set()
        self._out.put(None)
        self._sender.join(_LAST_WORDS_SECONDS)
        self._shut()

    def missing_error(self) -> RendezvousTimeoutError:
        """That it was not found in time, with what was seen last in its place; or was, and does not lead."""
        where = {"node 0": str(self._endpoint), "host": socket.gethostname()}
        if self._sock is not None:
            return RendezvousTimeoutError(
                f"{self._who} is there, and has not begun to lead the job within {self._timeout:g} s",
                where=where,
                seen="it is connected, and wants nothing",
                expected="its sign in the store, which it reads back",
                hint="see its log: what keeps that pod from the store, which this one can read",
            )
        if self._missing.awaits == _STRANGER_LEAVES:
            what = f"another job's node is at this job's address, and {self._who} did not come there"
        elif self._has_met:
            what = f"{self._who} was lost, and none took its place"
        else:
            what = f"{self._who} is missing"
        kind = NotReplacedError if self._has_met else RendezvousTimeoutError
        return kind(
            f"{what} within {self._timeout:g} s",
            where=where,
            seen=self._missing.seen,
            expected="node 0's agent to answer under that name",
            hint="see what Kubernetes waits for: kubectl describe the pod of that name, its service, a network policy "
            "that blocks the port; or raise timeouts.rendezvous",
        )

    def _shut(self) -> None:
        sock = self._sock
        if sock is not None:
            _shut(sock)

    # --- threads ------------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._may_look.wait()
                self._may_look.clear()
                sock = self._find()
                if sock is None:
                    return
                began = time.monotonic()
                why = self._listen(sock)
                self._since = self._told = time.monotonic()
                self._was_short = self._since - began < _SHORT
                self._inbox.put(LinkLost(why))
        except BaseException as error:  # else nobody would hear that nothing more will come
            self._inbox.put(error)

    def _keep_sending(self) -> None:
        due = time.monotonic() + self._beat
        while True:
            with suppress(queue.Empty):
                said = self._out.get(timeout=max(0.0, due - time.monotonic()))
                if said is None:
                    return
                self._send(*said)
            if time.monotonic() >= due:
                due = time.monotonic() + self._beat
                self.put(wire.beat(time.monotonic()))

    def _send(self, sock: socket.socket, frame: bytes) -> None:
        try:
            sock.sendall(frame)
        except OSError:  # it is closed, say: what is left of a connection that was lost was said to nobody
            _shut(sock)  # part of a frame may be on its way: nothing may follow it there

    def _listen(self, sock: socket.socket) -> str:
        """Take in what the leader says until it is lost, and why it is."""
        self._has_met, self._is_left = True, False
        sock.settimeout(self._heartbeat if self._own is None else None)  # this process hears itself when it wakes
        with self._saying:
            self._sock = sock
            if self.status is not None:  # once more: it may be another by now
                self.put(wire.frame(wire.STATUS, self.status.dump()))
        self.put(wire.beat(time.monotonic()))
        if self.place is not None:
            self.place.say_again()
        try:
            while True:
                self._take(frames.receive(sock, frames.NODE_BYTES))
        except TimeoutError:
            return f"no sign of life for {self._heartbeat:g} s"
        except (OSError, ValueError) as error:
            return str(error) or type(error).__name__
        finally:
            self._sock = None
            sock.close()

    def _take(self, frame: bytes) -> None:
        kind, content = frame[:1], frame[1:]
        if kind == wire.BEAT:
            self.behind.note(float(content))
        elif kind == wire.WANT:
            self._inbox.put(Want.parse(content))
        elif kind == wire.ANSWER and self.place is not None:
            self.place.take(content)
        elif kind == wire.EVIDENCE:
            self._inbox.put(HangEvidence.parse(content))
        else:
            raise ValueError(f"a frame of kind {kind!r}")

    # --- looking for the leader ---------------------------------------------------------------------------------------
    def _find(self) -> socket.socket | None:
        """Look until a leader answers; None where this link is closed meanwhile.

        Raises:
            RendezvousError: it speaks another version of the protocol; or it is to be in this very process.
        """
        if self._own is not None:
            return None if self._closed.is_set() else self._own()
        last = (self._address,) if self._address and not self._is_left else ()  # a reset is no reason to wait for DNS
        # After a connection that was short most likely the next one will be no longer.
        pause = _LONGEST_PAUSE if self._is_left else _PAUSE if self._was_short else 0.0
        self._closed.wait(jittered(pause, 0.75, 1.25))
        while not self._closed.is_set():
            missing = NO_ADDRESS
            addresses = last or whereabouts(self._endpoint) or ()
            self._leave_if_it_leads(addresses)
            for address in addresses:
                found = self._look(address)
                if not isinstance(found, Missing):
                    return found
                missing = found
            if last:
                last = ()
                continue
            self._say_who_is_missing(missing)
            self._closed.wait(pause_after(time.monotonic() - self._since))
        return None

    def _leave_if_it_leads(self, addresses: Sequence[str]) -> None:
        if not self._may_lead or not addresses:
            return
        self._may_lead = False
        if any(map(is_own, addresses)):
            raise NodeLostError(
                "this pod leads the job, and did not know: its name had no address when it started",
                where={"node 0": str(self._endpoint), "host": socket.gethostname()},
                hint="it leads when it is started again",
            )

    def _look(self, address: str) -> socket.socket | Missing:
        try:
            sock = socket.create_connection((address, self._endpoint.port), timeout=_PROBE)
        except ConnectionRefusedError:
            return REFUSED
        except OSError:
            return NO_ANSWER
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answer = self._greeted(sock, address)
            if answer and answer[:1] != wire.REFUSAL:
                if self._address != address:
                    self.behind = Ahead()
                self._address = address
                return sock
            refusal = Refusal.parse(answer[1:]) if answer else None
        except (OSError, ValueError):
            refusal = None
        sock.close()
        if refusal is None:
            return NO_ANSWER
        if refusal.is_stranger:
            return self._note_stranger(refusal.text)
        raise RendezvousError(
            "node 0 leads another group than this node's",
            where={"node 0": str(self._endpoint), "host": socket.gethostname()},
            seen=refusal.text,
            hint="every pod of the job must run the same image and configuration",
        )

    def _note_stranger(self, text: str) -> Missing:
        found = Missing(f"another job's node answers at this job's address: {text}", _STRANGER_LEAVES)
        if not self._met_stranger:
            self._met_stranger = True
            logger.info(f"{found.seen}; waiting for {found.awaits}")
        return found

    def _greeted(self, sock: socket.socket, address: str) -> bytes:
        """Say what this node is, and wait for an answer while the name leads there; b"" where there is none."""
        status = self.status
        assert status is not None  # noqa: S101  (begin() was called)
        sock.sendall(wire.frame(wire.STATUS, status.dump()))
        started = time.monotonic()
        sock.settimeout(_SLICE)
        while True:
            try:
                sock.recv(1, socket.MSG_PEEK)
                break
            except TimeoutError:
                self._say_who_is_missing(NO_ANSWER)
                there, now = whereabouts(self._endpoint), time.monotonic()
                turn = _TURN if there is not None and len(there) > 1 else self._heartbeat
                is_elsewhere = there is not None and address not in there
                if now > started + turn or is_elsewhere or self._closed.is_set():
                    return b""
        sock.settimeout(self._heartbeat)
        return frames.receive(sock, frames.NODE_BYTES)  # a sign of life, or a refusal

    def _say_who_is_missing(self, missing: Missing) -> None:
        self._missing = missing
        now = time.monotonic()
        if now - self._told < WAIT_LINE_SECONDS:
            return
        self._told = now
        waited = now - self._since
        left = self._timeout - waited
        ends = f"{left:.0f} s more at most" if left > 0 else "until the store can be read: it may say how the job ended"
        times = f"{waited:.0f} s, {ends}"
        awaits = f"Kubernetes may be waiting for {missing.awaits}"
        logger.info(f"waiting for {self._who} for {times} ({missing.seen}); {awaits}")


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def pause_after(waited: float) -> float:
    """Seconds until the next look for node 0, after some of looking."""
    return jittered(min(_LONGEST_PAUSE, _PAUSE * max(1.0, waited / _PATIENT_AFTER)), 0.75, 1.25)


def whereabouts(endpoint: Endpoint) -> tuple[str, ...] | None:
    """Where node 0 may be: what its name stands for now; None where nobody can say, for DNS fails."""
    try:
        entries = socket.getaddrinfo(endpoint.host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return () if error.errno in _NO_NAME else None
    except OSError:
        return None
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))


_NO_NAME = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
"""What the resolver says of a name that has no address now."""
