"""The coordinator's process as the others reach it: one server in node 0's agent, one connection for each
node, its own too.

An asyncio loop on a thread of its own, which alone touches the coordinator. Nothing that arrives is unpickled. Whoever
sends what is no message, or too much of it, loses its own connection; an unknown peer holds a few kilobytes, for some
seconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import resource
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from .. import frames
from ..errors import RendezvousError
from ..failures import Outlook, outlook
from ..hangs.judge import Hang, judge
from ..hangs.picture import text
from ..hangs.processes import Process
from ..hangs.snapshot import Snapshot
from ..record.clocks import Ahead, Offset
from ..store.errors import one_line
from ..topology import Endpoint
from . import wire
from .coordinator import Coordinator, JudgeReports
from .kv import OVER, KeyValues
from .messages import HangNotice, Status, Want
from .ports import BACKLOG, listener
from .rules import Rules
from .sign import Sign, StoreLook
from .wire import HangEvidence, Note, RankPicture, Refusal

logger = logging.getLogger(__name__)

HELLO_SECONDS = 20.0
"""How long a connection may take to say who it is."""

SHUTDOWN_SECONDS = 10.0
"""How long, at most, the server stays after the end, so that nodes that are connected hear of it."""

_TICK_SECONDS = 0.25
"""Between two times that the coordinator is told of time."""

_LAST_WORDS_SECONDS = 1.0
"""Until what this process's own node has said is read."""

_NAMED_STRANGERS = 256
"""Peers of no part of this job that are named in the log, one line each."""

_ACCEPTS = 100
"""Connections that are accepted in a row, before those that there are have their turn."""

_OWN_FILES = 256
"""Open files that node 0's agent needs besides."""

_MOST_FILES = 1 << 20
"""Open files, where nothing limits them: Linux' own limit (``fs.nr_open``) as it is delivered."""

_READ_BYTES = 1 << 18
"""Of one connection, before the next one has its turn."""

_UNSENT_BYTES = 1 << 30
"""What one connection may leave unread before it is closed: as much as 16 ranks may ask for at once."""

_PICTURE_LINES = 60
_EVIDENCE_CHARACTERS = 1 << 19
"""They fit one frame (:data:`..frames.NODE_BYTES`), also where each takes four bytes."""

Inbox = queue.SimpleQueue[object]
"""For the loop of an agent."""


class SignStore(Protocol):
    """Where the leader's sign is, and the attempt's verdict. Each raises whatever the store's client raises."""

    def look(self) -> StoreLook: ...

    def put(self, sign: Sign) -> None: ...


class _Connection(asyncio.BufferedProtocol):
    """The connection of one node. One of thousands: it has no task and no buffer of its own, but for the beginning of a
    frame whose rest is still to come."""

    __slots__ = ("_late", "_rest", "_server", "_transport", "is_own", "limit", "process", "want")

    def __init__(self, server: Server, *, is_own: bool = False) -> None:
        self._server, self.is_own = server, is_own
        self._rest = bytearray()
        self.limit = frames.HELLO_BYTES
        self.process = ""  # whose it is, when it has said so
        self.want: Want | None = None  # that was sent last

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._server.open.add(self)
        self._late = asyncio.get_running_loop().call_later(HELLO_SECONDS, self.drop)

    def get_buffer(self, sizehint: int) -> memoryview:
        """The same for all connections: it is read at once, before the next one is."""
        return self._server.buffer

    def buffer_updated(self, nbytes: int) -> None:
        rest, at = self._rest, 0
        rest += self._server.buffer[:nbytes]
        try:
            while len(rest) - at >= frames.PREFIX_BYTES and not self._transport.is_closing():
                begin = at + frames.PREFIX_BYTES
                end = begin + frames.length(rest[at:begin], self.limit)
                if len(rest) < end:
                    break
                at = end
                self._server.read(self, bytes(rest[begin:end]))
        except (ValueError, RecursionError, frames.FrameError) as error:
            self._server.note_stranger(self.peer, f"what it sent is no message: {str(error)[:200]}")
            self.close()
        del rest[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        self._server.lose(self)

    def accept(self, process: str) -> None:
        """It has said whose it is."""
        self._late.cancel()
        self.process, self.limit = process, frames.NODE_BYTES

    @property
    def peer(self) -> str:
        name = self._transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) and name else "this process"

    def hand(self, want: Want) -> None:
        """Send it, unless it is what this node knows."""
        if want != self.want:
            self.want = want
            self.send(wire.frame(wire.WANT, want.dump()))

    def send(self, frame: bytes) -> None:
        """Never waits; who reads nothing loses its connection."""
        if not self._transport.is_closing():
            self._transport.write(frame)
            if self._transport.get_write_buffer_size() > _UNSENT_BYTES:
                self.drop()

    def close(self) -> None:
        """When what was sent is on its way."""
        self._transport.close()

    def drop(self) -> None:
        self._transport.abort()


class Server:
    """Holds the coordinator, and brings it what nodes say.

    Args:
        rules: the job's.
        process: the id of this process.
        inbox: takes any error of this server.
        store: None where there is one node alone.
        judge_reports: judges the checks of the nodes.
        say: takes a sentence for the node's log.
    """

    def __init__(
        self,
        rules: Rules,
        process: str,
        inbox: Inbox,
        *,
        store: SignStore | None = None,
        judge_reports: JudgeReports | None = None,
        say: Callable[[str], object] = logger.info,
    ) -> None:
        self._rules = rules
        self._coordinator = Coordinator(rules, process, time.monotonic(), judge_reports)
        self._came: set[int | str] = set()
        self._process = process
        self._inbox = inbox
        self._store = store
        self._say = say
        self._stores = ThreadPoolExecutor(1, "safedist leader's sign")
        self._is_renewing, self._is_well = False, True
        self._beat = rules.beat
        self._ways: dict[str, _Connection] = {}
        self.open: set[_Connection] = set()
        """All connections, also of whom nobody knows yet."""
        self._keys, self._of_round = KeyValues(), ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._pictures: dict[str, RankPicture] = {}
        self._clocks: defaultdict[str, Ahead] = defaultdict(Ahead)
        self._notes: dict[str, Note] = {}
        self._beaten = 0.0
        self._strangers: set[str] = set()
        self.buffer = memoryview(bytearray(_READ_BYTES))
        """What comes on any connection is read into it."""
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.base_events.Server] = []
        self._others_gone = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="safedist coordinator", daemon=True)
        self._thread.start()
        self._leads = False  # it does from its own node's first word on: of several on one machine only one can listen

    # --- from this process's other threads ----------------------------------------------------------------------------
    def listen(self, endpoint: Endpoint) -> int:
        """Listen for nodes, on every interface; the port.

        Raises:
            RendezvousError: the port is taken, or this process may not open enough connections.
        """
        allow_open_files(self._rules.max_nodes + _OWN_FILES)
        try:
            sock = listener(endpoint.host, endpoint.port)
        except OSError as error:
            raise RendezvousError(
                "the job's coordinator cannot listen",
                where={"port": endpoint.port},
                seen=error.strerror or str(error),
                expected="a free port on node 0",
                hint="another agent of this job may still be running in this pod; with hostNetwork, another job's on "
                "this machine: name another port in the pod template, as pytorchjob-port",
            ) from error
        # asyncio takes its backlog also for how often it tries to accept in a row, and logs each try that fails.
        starting = self._loop.create_server(partial(_Connection, self), sock=sock, backlog=_ACCEPTS)
        self._servers.append(asyncio.run_coroutine_threadsafe(starting, self._loop).result())
        sock.listen(BACKLOG)
        found: int = sock.getsockname()[1]
        return found

    def connect(self) -> socket.socket:
        """A connection for the node of this very process.

        Raises:
            OSError: this process may open no more files.
        """
        mine, theirs = socket.socketpair()
        theirs.setblocking(False)  # noqa: FBT003
        way = self._loop.create_connection(partial(_Connection, self, is_own=True), sock=theirs)
        asyncio.run_coroutine_threadsafe(way, self._loop).result()
        return mine

    @property
    def others(self) -> int:
        """Nodes of other processes that are connected."""
        return sum(process != self._process for process in list(self._ways))

    def notes(self) -> list[tuple[str, Offset]]:
        """What other nodes have noted of the run: as JSON, and what to add to its times for this process's."""
        return [
            (noted.text, Offset.between(self._clocks[process].least, noted.behind))
            for process, noted in list(self._notes.items())
        ]

    def close(self, *, seconds: float = 0.0) -> None:
        """Stop; first wait, at most ``seconds``, until every other node that is connected has left. This process's own
        is to have left by then."""
        if not self._thread.is_alive():
            return
        if seconds:
            self._loop.call_soon_threadsafe(self._note_departure)
            self._others_gone.wait(seconds)
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._loop.close()
        self._stores.shutdown(wait=False)

    # --- on the loop --------------------------------------------------------------------------------------------------
    async def _stop(self) -> None:
        until = time.monotonic() + _LAST_WORDS_SECONDS
        while self._process in self._ways and time.monotonic() < until:
            await asyncio.sleep(0.001)  # it has left: what it has said last is on its way
        for server in self._servers:
            server.close()
        tasks = [task for task in asyncio.all_tasks(self._loop) if task is not asyncio.current_task()]
        for connection in self.open:
            connection.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.call_soon(self._loop.stop)  # after the connections' own last steps

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tick(self) -> None:
        # First: whatever fails here, the coordinator is told of time.
        self._loop.call_later(min(_TICK_SECONDS, self._beat), self._tick)
        now = time.monotonic()
        if now - self._beaten >= self._beat:
            self._beaten = now
            for way in list(self._ways.values()):
                way.send(wire.beat(time.monotonic()))
        self._do(self._coordinator.on_tick)
        if self._coordinator.is_retired:
            self._retire()
        elif self._store is not None and not self._is_renewing and self._coordinator.lead.is_due(time.monotonic()):
            self._is_renewing = True
            self._begin(self._renew(self._store))
        look = self._coordinator.look_to_judge()
        if look:
            self._begin(self._judge(look))

    def _do(self, act: Callable[[float], Mapping[str, Want]]) -> None:
        """Have the coordinator take something in, and hand out what it wants."""
        try:
            wants = act(time.monotonic())
            self._renew_keys()
            for process, want in wants.items():
                way = self._ways.get(process)
                if way is not None:
                    way.hand(want)
        except Exception as error:  # a defect of ours, which must not pass in silence
            self._inbox.put(error)

    def _renew_keys(self) -> None:
        """What ranks agreed on is void when they start again; those of older rounds that still wait are let go."""
        course = self._coordinator.course
        if course.runs and str(course.round) != self._of_round:
            self._of_round = str(course.round)
            self._keys.close()
            self._keys = KeyValues()
            self._pictures.clear()

    def _retire(self) -> None:
        """Another process leads the job: nobody is to wait here."""
        for server in self._servers:
            server.close()
        for way in self._ways.values():
            if not way.is_own:
                self._loop.call_later(_TICK_SECONDS, way.drop)  # when it has heard why

    # --- the store ----------------------------------------------------------------------------------------------------
    async def _renew(self, store: SignStore) -> None:
        """Look at the store, and put the sign there; while it is in doubt who leads, read it back at once: the others
        wait for that."""
        try:
            while True:
                look = await self._loop.run_in_executor(self._stores, store.look)
                self._do(partial(self._coordinator.on_look, look))
                sign = self._coordinator.lead.take_sign()
                if sign is None or self._coordinator.is_retired:
                    return
                await self._loop.run_in_executor(self._stores, store.put, sign)
                self._is_well = True
                if not self._coordinator.lead.in_doubt:
                    return
        except Exception as error:  # whatever the store's client raises; or the container may have no further thread
            if self._is_well:
                # S3 says so, too, of what is not there yet, to whom may not list.
                is_denied = outlook(error) is Outlook.DENIED
                why = f"{one_line(error)}{' (pods have to get, put and list there)' if is_denied else ''}"
                waits = f"nothing begins or ends meanwhile, for {self._rules.upload:g} s at most"
                follows = waits if self._coordinator.lead.in_doubt else "the job goes on"
                self._say(f"the sign that this node leads the job cannot be put into the store: {why}; {follows}")
            self._is_well = False
        finally:
            self._is_renewing = False

    # --- hangs --------------------------------------------------------------------------------------------------------
    async def _judge(self, look: int) -> None:
        """Thousands of ranks take a second: the coordinator hears its nodes meanwhile."""
        round_, before = self._coordinator.course.round, self._coordinator.course.hang
        some = {
            process: picture.snapshots
            for process, picture in self._pictures.items()
            if (picture.round, picture.look) == (str(round_), look)
        }
        there = [each for of_node in some.values() for each in of_node]
        gone = self._coordinator.gone
        there += [Snapshot(rank, Process(0), returned=True) for rank in gone]
        everybody = sorted(there, key=lambda each: each.rank)
        notice = None
        with suppress(RuntimeError):  # the container may have no further thread: at the next look
            judged = self._loop.run_in_executor(None, judge, everybody)
            try:
                hang = await judged
                if hang is not None and hang.rank in gone:  # it cannot fail any more
                    left = [rank for rank in (*hang.culprits, *hang.waiting) if rank not in gone]
                    hang = replace(hang, rank=left[0]) if left else None
                notice = None if hang is None else _notice(hang, look, everybody)
            except Exception as error:  # a defect of ours, which must not pass in silence
                self._inbox.put(error)

        def act(now: float) -> Mapping[str, Want]:
            wants, hang = self._coordinator.on_hang(round_, notice, now), self._coordinator.course.hang
            if hang is not None and hang != before:
                self._show_evidence(hang, some, everybody)
            return wants

        self._do(act)

    def _show_evidence(
        self, hang: HangNotice, some: Mapping[str, tuple[Snapshot, ...]], everybody: list[Snapshot]
    ) -> None:
        """To the node of the rank that is to fail for it, before it hears so."""
        evidence = text(everybody, whole=True)
        if len(evidence) > _EVIDENCE_CHARACTERS:
            evidence = f"{evidence[:_EVIDENCE_CHARACTERS]}\n[cut: {len(evidence)} characters in all]"
        for process, snapshots in some.items():
            if process in self._ways and any(each.rank == hang.rank for each in snapshots):
                self._ways[process].send(HangEvidence(evidence).frame())

    # --- connections --------------------------------------------------------------------------------------------------
    def _take(self, process: str, status: Status) -> None:
        self._came.add(process if status.node is None else status.node)
        if process == self._process and not self._leads:
            self._leads = True
            self._loop.call_soon(self._tick)
        self._do(partial(self._coordinator.on, status))

    def _note_departure(self) -> None:
        """Those who have not come yet are waited for as well: they are to find the end, not a node 0 that never was."""
        if not self.others and len(self._came) >= self._rules.min_nodes:
            self._others_gone.set()

    def read(self, way: _Connection, frame: bytes) -> None:
        """A frame has come.

        Raises:
            ValueError: it is none of these messages.
        """
        if way.process:
            if self._ways.get(way.process) is way:  # else it is said on a connection that has been replaced
                self._read(way.process, way, frame[:1], frame[1:])
        elif frame[:1] == wire.STATUS:
            self._greet(way, Status.parse(frame[1:]))
        else:
            raise ValueError("not a node's status")

    def lose(self, way: _Connection) -> None:
        """It is closed."""
        self.open.discard(way)
        process = way.process
        if not process:
            return
        if self._ways.get(process) is way:
            del self._ways[process]
            self._do(partial(self._coordinator.on_disconnect, process))
        self._note_departure()

    def _greet(self, way: _Connection, status: Status) -> None:
        process = status.process
        why = status.refusal(self._rules.job)
        if why:
            self.note_stranger(way.peer, f"host {status.host[:100]!r}: {why}", "a node of another job")
            way.send(Refusal(why, is_stranger=status.job != self._rules.job).frame())
        if why or (process == self._process) != way.is_own or (self._coordinator.is_retired and not way.is_own):
            way.close()
            return
        way.accept(process)
        before = self._ways.get(process)
        self._ways[process] = way
        if before is not None:
            before.drop()
        way.send(wire.beat(time.monotonic()))  # at once: the first round may be over before the next one
        self._take(process, status)

    def _read(self, process: str, way: _Connection, kind: bytes, content: bytes) -> None:
        if kind == wire.STATUS:
            status = Status.parse(content)
            if status.process != process:
                raise ValueError(f"the status of {status.process[:64]!r} on the connection of {process[:64]!r}")
            self._take(process, status)
            return
        if kind == wire.BEAT:
            self._clocks[process].note(float(content))
        elif kind == wire.NOTE:
            self._notes[process] = Note.parse(content)
        elif kind == wire.PICTURE:
            self._pictures[process] = RankPicture.parse(content)
        elif kind == wire.CALL:
            self._take_call(process, content)
        else:
            raise ValueError(f"a frame of kind {kind!r}")
        if not self._coordinator.on_beat(process, time.monotonic()):
            way.drop()  # it was given up meanwhile: it says what it is on the next one

    def _take_call(self, process: str, content: bytes) -> None:
        """A call of a node's ranks. What was answered on a connection that is lost is said again, and not done twice.

        Raises:
            ValueError: it is none.
        """
        call, body = frames.parsed_call(content)
        try:
            number, oldest, round_ = int(call["id"]), int(call["oldest"]), str(call["round"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a call: {type(error).__name__}: {error}") from error
        keys = self._keys
        answers = keys.answers.setdefault(process, {})
        for each in [each for each in answers if each < oldest]:
            del answers[each]
        if round_ != self._of_round:
            self._send_answer(process, number, OVER, b"")
        elif number not in answers:
            answers[number] = b""
            # Of this round: the next one may have begun, with keys of its own, before it is done.
            self._begin(self._answer(process, number, keys, call, body))
        elif answers[number]:
            self._ways[process].send(answers[number])

    async def _answer(self, process: str, number: int, keys: KeyValues, call: dict[str, Any], body: bytes) -> None:
        try:
            head, value = await keys.answer(call, body)
        except ValueError as error:
            head, value = {"refused": str(error)[:200]}, b""
        answer = self._send_answer(process, number, head, value)
        if call.get("op") == "wait":  # it may be large, and may be asked again
            keys.answers[process].pop(number, None)
        else:
            keys.answers[process][number] = answer

    def _send_answer(self, process: str, number: int, head: dict[str, Any], value: bytes) -> bytes:
        answer = wire.frame(wire.ANSWER, frames.call({**head, "id": number}, value))
        way = self._ways.get(process)
        if way is not None:
            way.send(answer)
        return answer

    def note_stranger(self, peer: str, why: str, who: str = "something") -> None:
        """One line for each peer that is none of this job's."""
        if peer in self._strangers or len(self._strangers) >= _NAMED_STRANGERS:
            return
        self._strangers.add(peer)
        logger.warning(
            f"{who} came to this job's coordinator and was turned away: {peer}, {why}. Fix: see why it has this "
            "pod's address: a name that leads here, or a machine's port that two jobs share"
        )


def _notice(hang: Hang, look: int, everybody: list[Snapshot]) -> HangNotice:
    """What all nodes hear of it: with a picture for a screen."""
    main = [replace(each, threads=each.threads[:1]) for each in everybody]
    shown = {**hang.__dict__, "picture": "\n".join(text(main).splitlines()[:_PICTURE_LINES])}
    return HangNotice(look, hang.key, hang.rank, json.dumps(shown, ensure_ascii=False), hang.seconds)


def allow_open_files(needed: int) -> None:
    """Raise the limit of open files as far as it goes.

    Raises:
        RendezvousError: it stays below what is needed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RendezvousError(
            "node 0 may not open enough connections for all nodes",
            where={"limit": "RLIMIT_NOFILE"},
            seen=f"{hard} open files at most",
            expected=f"at least {needed}",
            hint="raise the container's limit of open files (ulimit -Hn)",
        )
    # As many as there may be, and not as many as there are nodes: what else this process opens is not counted here.
    most = max(needed, _MOST_FILES) if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
