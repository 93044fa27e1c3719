"""A node's way to its job's coordinator: found by node 0's name, lost, and found again, wherever that leads by then.

What is heard is put into an inbox, for the agent's loop. Nothing here trusts an address for longer than it is the
name's: a connection to a machine that is gone, or to a process that is frozen, is given up when the name leads
elsewhere.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from .. import frames
from ..errors import NotReplacedError, RendezvousError, RendezvousTimeoutError
from ..jitter import jittered
from ..record.clocks import Ahead
from ..topology import Endpoint
from . import messages
from .facts import Rules
from .messages import Beat, Go, Hello, Leaves, Message, Refused, Waits, Welcome
from .nodes import wait_line

WAIT_LINE_SECONDS = 30.0
"""Between two lines about who is waited for."""

_PAUSE, _LONGEST_PAUSE = 0.25, 2.0
"""Seconds between two looks for node 0: at first, and when it takes minutes. Each look asks DNS several times, and
every node of the job looks."""

_PATIENT_AFTER = 10.0
"""Seconds of looking, after which the pauses grow."""

_PROBE = 2.0
"""Seconds that a machine is given to accept a connection, at each look."""

_ANSWER = 10.0
"""Seconds that whoever is asked who coordinates may take to answer."""

_TURN = 5.0
"""Seconds that a coordinator is given to answer where the name has other addresses as well."""

_SLICE = 0.5
"""Seconds between two looks at the name while a coordinator is slow to answer."""


class Missing(NamedTuple):
    """No coordinator is found: what was seen instead, and what Kubernetes may be waiting for."""

    seen: str
    awaits: str


NO_ADDRESS = Missing("its name has no address", "a machine with room for the pod, or the end of the pod before it")
REFUSED = Missing("nothing listens there", "the container's image; or its agent still fetches the code, or imports")
NO_ANSWER = Missing("no answer from there", "its machine to be given up: the process there is frozen, or cut off")
LEFT = Missing("an older coordinator answers, which this node has left", "the end of the pod before it")
_STRANGER_LEAVES = "the end of that job's pod, or this job's name to lead to its own"


@dataclass(frozen=True)
class LinkLost:
    """In the inbox: the coordinator is not heard any more; it, or the one that takes its place, is looked for."""

    seen: str


@dataclass(frozen=True)
class GivenUp:
    """In the inbox: it was not found in time; nothing more will come."""

    error: RendezvousError


Heard = Message | LinkLost | GivenUp | BaseException
"""What an inbox holds."""

Inbox = queue.SimpleQueue[object]


class Link:
    """One node's connection to a coordinator in another process.

    Args:
        rules: of the job: for ``timeout`` seconds, at most, node 0 is looked for, at first, and when it was lost until
            a round has come together again; after ``heartbeat`` seconds of silence it is lost.
        endpoint: where node 0 is.
        hello: this node as it is now; called at each connection.
        inbox: takes what is heard.
        say: takes a sentence for the node's log.
    """

    def __init__(
        self,
        rules: Rules,
        endpoint: Endpoint,
        *,
        hello: Callable[[], Hello],
        inbox: Inbox,
        say: Callable[[str], object],
    ) -> None:
        self._endpoint = endpoint
        self._who = "node 0" if rules.fixed else f"the pod at {endpoint.host}, which leads the job,"
        self._hello = hello
        self._timeout = rules.timeout
        self._heartbeat = rules.heartbeat
        self._inbox = inbox
        self._log = say
        self._sock: socket.socket | None = None
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._since = self._told = time.monotonic()
        self._met_stranger = False
        self.is_searching = False
        """Whether the coordinator was lost, and no round has come together since: one search, with one time."""
        self.coordinator = self._address = ""
        self.behind = Ahead()
        """Of this node's clock against the coordinator's."""
        self.lost: tuple[str, ...] = ()
        """Ids of coordinators that this node has left."""
        for work, name in ((self._run, "link"), (self._keep_beating, "heartbeat")):
            threading.Thread(target=work, name=f"safedist {name}", daemon=True).start()

    def say(self, message: Message) -> None:
        """Send; while the coordinator is looked for, nothing: the next hello says how this node is then. Who says that
        it leaves makes no other connection when this one is lost."""
        if isinstance(message, Leaves):
            self._closed.set()
        frame = frames.packed(message.dump())
        with self._sending:
            sock = self._sock
            if sock is None:
                return
            try:
                sock.sendall(frame)
            except OSError:
                with suppress(OSError):  # part of a frame may be on its way: nothing may follow it there
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go."""
        self._closed.set()
        self._drop()

    # --- threads ---------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._find_and_listen()
        except RendezvousError as error:
            self._inbox.put(GivenUp(error))
        except BaseException as error:  # else nobody would hear that nothing more will come
            self._inbox.put(error)

    def _find_and_listen(self) -> None:
        while not self._closed.is_set():
            found = self._find()
            if found is None:
                return
            sock, welcome = found
            since = time.monotonic()
            seen = self._listen(sock, welcome)
            self._drop()
            if seen is None:
                return
            if time.monotonic() - since > self._heartbeat:
                self.is_searching = False  # it was found, though this node waits, and no round has begun here
            if not self.is_searching:
                self._since = self._told = time.monotonic()
                self.is_searching = True
            self._inbox.put(LinkLost(seen))

    def _supersede(self, older: Endpoint, process: str) -> None:
        """A node 0 that was frozen or cut off may wake: tell it that it has been left. Its own name, in its own pod,
        still leads to itself."""
        until = time.monotonic() + self._timeout
        while time.monotonic() < until and not self._closed.wait(1.0):
            if who_coordinates(older, self._hello().run, lost=(process,)) is not None:
                return

    def _keep_beating(self) -> None:
        while not self._closed.wait(max(0.05, min(5.0, self._heartbeat / 6))):
            self.say(Beat(time.monotonic()))

    def _listen(self, sock: socket.socket, welcome: Welcome) -> str | None:
        """Take in what the coordinator says until it is lost; why it is, or None where this node is turned away."""
        address = str(sock.getpeername()[0])
        if self.coordinator and welcome.coordinator != self.coordinator:
            self.lost = (*self.lost, self.coordinator)
            if self._address != address:
                older = Endpoint(self._address, self._endpoint.port), self.coordinator
                threading.Thread(target=self._supersede, args=older, name="safedist older node 0", daemon=True).start()
        if welcome.coordinator != self.coordinator:
            self.behind = Ahead()
        self._address = address
        self.coordinator = welcome.coordinator
        sock.settimeout(self._heartbeat)
        with self._sending:
            self._sock = sock
        self._inbox.put(welcome)  # only now: who hears it may say something at once
        try:
            while True:
                message = messages.parse(frames.receive(sock, frames.NODE_BYTES))
                if isinstance(message, Beat):
                    self.behind.note(message.clock)
                    continue
                if isinstance(message, Go):
                    self.is_searching = False
                self._inbox.put(message)
                if isinstance(message, Refused):
                    return None
                if isinstance(message, Waits) and self._has_moved():
                    return "a newer node 0 answers under its name"
        except TimeoutError:
            return f"no sign of life for {self._heartbeat:g} s"
        except (OSError, ValueError) as error:
            return str(error) or type(error).__name__

    def _has_moved(self) -> bool:
        """Where this node waits: others may have gone to another coordinator, and wait there."""
        found = who_coordinates(self._endpoint, self._hello().run)
        return found is not None and found != self.coordinator and found not in self.lost

    def _drop(self) -> None:
        with self._sending:
            sock, self._sock = self._sock, None
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    # --- looking for node 0 ----------------------------------------------------------------------------------------
    def _find(self) -> tuple[socket.socket, Welcome] | None:
        """Look until a coordinator answers; None where this link is closed meanwhile, or this node turned away.

        Raises:
            RendezvousTimeoutError: none did in time.
        """
        last = (self._address,) if self._address else ()  # a reset is no reason to wait for DNS
        while not self._closed.is_set():
            missing = NO_ADDRESS
            for address in last or whereabouts(self._endpoint):
                found = self._look(address)
                if isinstance(found, Refused):
                    self._inbox.put(found)
                    return None
                if not isinstance(found, Missing):
                    return found
                missing = found
            if last:
                last = ()
                continue
            self._say_who_is_missing(missing)
            if time.monotonic() >= self._since + self._timeout:
                raise self._not_found(missing)
            self._closed.wait(pause_after(time.monotonic() - self._since))
        return None

    def _look(self, address: str) -> tuple[socket.socket, Welcome] | Refused | Missing:
        try:
            sock = socket.create_connection((address, self._endpoint.port), timeout=_PROBE)
        except ConnectionRefusedError:
            return REFUSED
        except OSError:
            return NO_ANSWER
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answer = self._greeted(sock, address)
        except (OSError, ValueError):
            answer = None
        if isinstance(answer, Welcome) and answer.coordinator not in self.lost:
            return sock, answer
        sock.close()
        if isinstance(answer, Welcome):
            return LEFT
        if isinstance(answer, Refused) and answer.why == "stranger":
            return self._stranger(answer.text)
        return answer or NO_ANSWER

    def _stranger(self, text: str) -> Missing:
        found = Missing(f"another job's node answers at this job's address: {text}", _STRANGER_LEAVES)
        if not self._met_stranger:
            self._met_stranger = True
            self._log(f"{found.seen}; waiting for {found.awaits}")
        return found

    def _greeted(self, sock: socket.socket, address: str) -> Welcome | Refused | None:
        """Say hello, and wait for an answer while the name leads there; None where there is none."""
        hello = self._hello()
        lost = (*self.lost, self.coordinator) if self.coordinator else self.lost
        sock.sendall(frames.packed(replace(hello, lost=lost, clock=time.monotonic()).dump()))
        started = time.monotonic()
        sock.settimeout(_SLICE)
        while True:
            try:
                sock.recv(1, socket.MSG_PEEK)
                break
            except TimeoutError:
                self._say_who_is_missing(NO_ANSWER)
                there, now = whereabouts(self._endpoint), time.monotonic()
                turn = _TURN if len(there) > 1 else self._heartbeat
                if now > started + turn or address not in there or self._closed.is_set():
                    return None
        sock.settimeout(self._heartbeat)
        answer = messages.parse(frames.receive(sock, frames.NODE_BYTES))
        return answer if isinstance(answer, Welcome | Refused) else None

    def _say_who_is_missing(self, missing: Missing) -> None:
        now = time.monotonic()
        if now - self._told < WAIT_LINE_SECONDS:
            return
        self._told = now
        waited = now - self._since
        self._log(wait_line(self._who, waited=waited, limit=self._timeout, seen=missing.seen, awaits=missing.awaits))

    def _not_found(self, missing: Missing) -> RendezvousTimeoutError:
        if missing.awaits == _STRANGER_LEAVES:
            what = f"another job's node is at this job's address, and {self._who} did not come there"
        elif self.coordinator:
            what = f"{self._who} was lost, and none took its place"
        else:
            what = f"{self._who} is missing"
        kind = NotReplacedError if self.coordinator else RendezvousTimeoutError
        return kind(
            f"{what} within {self._timeout:g} s",
            where={"node 0": str(self._endpoint), "host": socket.gethostname()},
            seen=missing.seen,
            expected="node 0's agent to answer under that name",
            hint="see what Kubernetes waits for: kubectl describe the pod of that name, its service, a network policy "
            "that blocks the port; or raise timeouts.rendezvous",
        )


def pause_after(waited: float) -> float:
    """Seconds until the next look for node 0, after some of looking."""
    return jittered(min(_LONGEST_PAUSE, _PAUSE * max(1.0, waited / _PATIENT_AFTER)), 0.75, 1.25)


def whereabouts(endpoint: Endpoint) -> tuple[str, ...]:
    """Where node 0 may be: what its name stands for now."""
    try:
        entries = socket.getaddrinfo(endpoint.host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))


def who_coordinates(endpoint: Endpoint, run: str, lost: tuple[str, ...] = ()) -> str | None:
    """The id of the process that coordinates this job, as its name leads there now; None where nobody says. If it is in
    ``lost`` it hears that it has been left for a newer one."""
    looks = Hello(run, f"looks-{os.getpid()}", None, time.time_ns(), socket.gethostname(), lost=lost, state="looks")
    for address in whereabouts(endpoint):
        with suppress(OSError, ValueError), socket.create_connection((address, endpoint.port), timeout=_PROBE) as sock:
            sock.settimeout(_ANSWER)
            sock.sendall(frames.packed(looks.dump()))
            answer = messages.parse(frames.receive(sock, frames.NODE_BYTES))
            if isinstance(answer, Welcome):
                return answer.coordinator
    return None
