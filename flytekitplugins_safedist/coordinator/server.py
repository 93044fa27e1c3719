"""The coordinator's process as the others reach it: one server in node 0's agent, one connection for each node.

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
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from .. import frames
from ..errors import RendezvousError
from ..hangs.judge import Hang, judge
from ..hangs.picture import text
from ..hangs.snapshot import Snapshot
from ..record.clocks import Ahead, Offset
from ..topology import Endpoint
from . import wire
from .coordinator import Coordinator, JudgeReports
from .kv import KeyValues
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

BEATS = 6
"""Signs of life within the time after which their absence counts."""

_NAMED_STRANGERS = 256
"""Peers of no part of this job that are named in the log, one line each."""

_ACCEPTS = 100
"""Connections that are accepted in a row, before those that there are have their turn."""

_OWN_FILES = 256
"""Open files that node 0's agent needs besides."""

_MOST_FILES = 1 << 20
"""Open files, where nothing limits them: Linux' own limit (``fs.nr_open``) as it is delivered."""

_UNSENT_BYTES = 1 << 26
"""What one connection may leave unread before it is closed."""

_PICTURE_LINES = 60
_EVIDENCE_CHARACTERS = 1 << 19
"""They fit one frame (:data:`..frames.NODE_BYTES`), also where each takes four bytes."""

Inbox = queue.SimpleQueue[object]
"""For the loop of an agent."""

CHECKS = -1
"""The number by which the checks before the first rank name their round to the keys and values of it."""


class SignStore(Protocol):
    """Where the leader's sign is, and the attempt's verdict. Each raises whatever the store's client raises."""

    def look(self) -> StoreLook: ...

    def put(self, sign: Sign) -> None: ...


class _Way:
    """The way to one node: its connection; or, of this process's own, its inbox. One of thousands."""

    __slots__ = ("_inbox", "_writer", "want")

    def __init__(self, writer: asyncio.StreamWriter | None, inbox: Inbox | None = None) -> None:
        self._writer, self._inbox = writer, inbox
        self.want: Want | None = None  # that was sent last

    def hand(self, want: Want) -> None:
        """Send it, unless it is what this node knows."""
        if want == self.want:
            return
        self.want = want
        if self._inbox is not None:
            self._inbox.put(want)
        else:
            self.send(wire.frame(wire.WANT, want.dump()))

    def show(self, evidence: HangEvidence) -> None:
        if self._inbox is not None:
            self._inbox.put(evidence)
        else:
            self.send(evidence.frame())

    def send(self, frame: bytes) -> None:
        """Never waits; a node that reads nothing loses its connection."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame)
            if self._writer.transport.get_write_buffer_size() > _UNSENT_BYTES:
                self.drop()

    def drop(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()


class Server:
    """Holds the coordinator, and brings it what nodes say.

    Args:
        rules: the job's.
        process: the id of this process.
        inbox: takes what the node of this very process is told, and any error of this server.
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
        self._is_looking, self._is_well = False, True
        self._beat = max(0.05, min(5.0, rules.heartbeat / BEATS))
        self._ways: dict[str, _Way] = {process: _Way(None, inbox)}
        self._keys, self._of_round = KeyValues(), ""
        self._pictures: dict[str, tuple[str, int, tuple[Snapshot, ...]]] = {}
        self._clocks: dict[str, Ahead] = {}
        self._notes: dict[str, Note] = {}
        self._beaten = 0.0
        self._strangers: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.base_events.Server] = []
        self._others_gone = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="safedist coordinator", daemon=True)
        self._thread.start()
        self._leads = False  # it does from its own node's first word on: of several on one machine only one can listen

    # --- from this process's other threads ----------------------------------------------------------------------------
    def listen(self, endpoint: Endpoint) -> int:
        """Listen for nodes and ranks, on every interface; the port.

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
                hint="another agent of this job may still be running in this pod; choose another port if not",
            ) from error
        # asyncio takes its backlog also for how often it tries to accept in a row, and logs each try that fails.
        self._serve(asyncio.start_server(self._connected, sock=sock, limit=1 << 16, backlog=_ACCEPTS))
        sock.listen(BACKLOG)
        found: int = sock.getsockname()[1]
        return found

    def listen_at(self, path: Path) -> None:
        """Listen for this node's ranks alone.

        Raises:
            OSError: the socket cannot be made.
        """
        self._serve(asyncio.start_unix_server(self._connected, path=path, limit=1 << 16))

    def hear(self, status: Status) -> None:
        """Take the status of this very process's node."""
        self._soon(self._take, self._process, status)

    def take(self, picture: RankPicture) -> None:
        """Take a picture of this very process's ranks."""
        self._soon(self._keep, self._process, picture)

    @property
    def others(self) -> int:
        """Nodes of other processes that are connected."""
        return len(self._ways) - 1

    def notes(self) -> list[tuple[str, Offset]]:
        """What other nodes have noted of the run: as JSON, and what to add to its times for this process's."""
        return [
            (noted.text, Offset.between(self._clocks[process].least, noted.behind))
            for process, noted in list(self._notes.items())
        ]

    def close(self, *, seconds: float = 0.0) -> None:
        """Stop; first wait, at most ``seconds``, until every other node that is connected has left."""
        if not self._thread.is_alive():
            return
        if seconds:
            self._soon(self._note_departure)
            self._others_gone.wait(seconds)
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._loop.close()
        self._stores.shutdown(wait=False)

    def _soon(self, call: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: the job is over here
            self._loop.call_soon_threadsafe(call, *arguments)

    # --- on the loop --------------------------------------------------------------------------------------------------
    def _serve(self, starting: object) -> None:
        async def serve() -> None:
            self._servers.append(await starting)  # type: ignore[misc]

        asyncio.run_coroutine_threadsafe(serve(), self._loop).result()

    async def _stop(self) -> None:
        for server in self._servers:
            server.close()
        tasks = [task for task in asyncio.all_tasks(self._loop) if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.stop()

    def _tick(self) -> None:
        # First: whatever fails here, the coordinator is told of time.
        self._loop.call_later(min(_TICK_SECONDS, self._beat), self._tick)
        now = time.monotonic()
        if now - self._beaten >= self._beat:
            self._beaten = now
            for process, way in list(self._ways.items()):
                if process != self._process:
                    way.send(wire.beat(time.monotonic()))
        self._do(self._coordinator.on_tick)
        if self._coordinator.is_retired:
            self._retire()
        elif self._coordinator.lead.is_due(time.monotonic()):
            self._look()
        look = self._coordinator.look_to_judge()
        if look:
            self._judge(look)

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
        for process, way in list(self._ways.items()):
            if process != self._process:
                self._loop.call_later(_TICK_SECONDS, way.drop)  # when it has heard why

    # --- the store ----------------------------------------------------------------------------------------------------
    def _look(self) -> None:
        store = self._store
        if store is None or self._is_looking:
            return
        self._is_looking = True
        self._in_thread(store.look, self._see)

    def _see(self, look: StoreLook | Exception) -> None:
        self._is_looking = False
        if isinstance(look, Exception):
            self._note_trouble(look)
            return
        self._do(lambda now: self._coordinator.on_look(look, now))
        sign, store = self._coordinator.lead.take_sign(), self._store
        if sign is not None and store is not None and not self._coordinator.is_retired:
            self._is_looking = True
            self._in_thread(lambda: store.put(sign), self._have_put)

    def _have_put(self, outcome: object) -> None:
        self._is_looking = False
        if isinstance(outcome, Exception):
            self._note_trouble(outcome)
            return
        self._is_well = True
        if self._coordinator.lead.in_doubt:  # it is read back at once: the others wait for it
            self._look()

    def _note_trouble(self, error: Exception) -> None:
        if self._is_well:
            seen = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            self._say(f"the sign that this node leads the job cannot be put into the store: {seen}")
        self._is_well = False

    def _in_thread(self, work: Callable[[], object], then: Callable[[Any], object]) -> None:
        def run() -> None:
            try:
                outcome: object = work()
            except Exception as error:  # whatever the store's client raises
                outcome = error
            self._soon(then, outcome)

        with suppress(
            RuntimeError
        ):  # this server closes; or the container may have no further thread: at the next look
            self._stores.submit(run)
            return
        self._is_looking = False

    # --- hangs --------------------------------------------------------------------------------------------------------
    def _judge(self, look: int) -> None:
        """Thousands of ranks take a second: the coordinator hears its nodes meanwhile."""
        round_ = self._coordinator.course.round
        some = {
            process: snapshots
            for process, (name, number, snapshots) in self._pictures.items()
            if (name, number) == (str(round_), look)
        }

        def work() -> None:
            everybody = sorted((each for of_node in some.values() for each in of_node), key=lambda each: each.rank)
            try:
                found: Hang | Exception | None = judge(everybody)
            except Exception as error:  # a defect of ours, which must not pass in silence
                found = error
            self._soon(self._have_judged, round_, look, found, some, everybody)

        threading.Thread(target=work, name="safedist-judge", daemon=True).start()

    def _have_judged(
        self,
        round_: Any,
        look: int,
        found: Hang | Exception | None,
        some: Mapping[str, tuple[Snapshot, ...]],
        everybody: list[Snapshot],
    ) -> None:
        if isinstance(found, Exception):
            self._inbox.put(found)
            found = None
        notice = None if found is None else _notice(found, look, everybody)
        before = self._coordinator.course.hang
        wants: dict[str, Want] = {}

        def act(now: float) -> Mapping[str, Want]:
            wants.update(self._coordinator.on_hang(round_, notice, now))
            hang = self._coordinator.course.hang
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
                self._ways[process].show(HangEvidence(evidence))

    # --- connections --------------------------------------------------------------------------------------------------
    def _take(self, process: str, status: Status) -> None:
        self._came.add(process if status.node is None else status.node)
        if process == self._process and not self._leads:
            self._leads = True
            self._loop.call_soon(self._tick)
        self._do(lambda now: self._coordinator.on(status, now))

    def _keep(self, process: str, picture: RankPicture) -> None:
        self._pictures[process] = picture.round, picture.look, picture.snapshots

    def _note_departure(self) -> None:
        """Those who have not come yet are waited for as well: they are to find the end, not a node 0 that never was."""
        if not self.others and len(self._came) >= self._rules.min_nodes:
            self._others_gone.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = _peer_of(writer)
        try:
            greeting = await asyncio.wait_for(_frame_of(reader, frames.HELLO_BYTES), HELLO_SECONDS)
            if greeting[:1] != wire.STATUS:
                await self._meet(_head(greeting), reader, writer, peer)
                return
            status, way = Status.parse(greeting[1:]), _Way(writer)
            del greeting  # it would stay as long as the node
            if self._admits(status, way, peer):
                process = status.process
                self._welcome(status, way)
                del status
                await self._node(process, way, reader)
            else:
                await asyncio.wait_for(writer.drain(), HELLO_SECONDS)
        except (ValueError, RecursionError, frames.FrameError) as error:
            self._note_stranger(peer, f"what it sent is no message: {str(error)[:200]}")
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, asyncio.CancelledError):
            pass  # gone, or silent; or this server closes, and Python 3.11's streams log a task that was cancelled
        finally:
            with suppress(Exception):
                writer.close()

    def _admits(self, status: Status, way: _Way, peer: str) -> bool:
        why = status.refusal(self._rules.job)
        if why:
            self._note_stranger(peer, f"host {status.host[:100]!r}: {why}", "a node of another job")
            way.send(Refusal(why, is_stranger=status.job != self._rules.job).frame())
        return not why and status.process != self._process and not self._coordinator.is_retired

    def _welcome(self, status: Status, way: _Way) -> None:
        before = self._ways.get(status.process)
        self._ways[status.process] = way
        if before is not None:
            before.drop()
        way.send(wire.beat(time.monotonic()))  # at once: the first round may be over before the next one
        self._take(status.process, status)

    async def _node(self, process: str, way: _Way, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                frame = await _frame_of(reader, frames.NODE_BYTES)
                if self._ways.get(process) is not way:
                    return  # what is said on a connection that has been replaced
                self._read(process, way, frame[:1], frame[1:])
        finally:
            if self._ways.get(process) is way:
                del self._ways[process]
                self._do(lambda now: self._coordinator.on_disconnect(process, now))
            self._note_departure()

    def _read(self, process: str, way: _Way, kind: bytes, content: bytes) -> None:
        if kind == wire.STATUS:
            status = Status.parse(content)
            if status.process != process:
                raise ValueError(f"the status of {status.process[:64]!r} on the connection of {process[:64]!r}")
            self._take(process, status)
            return
        if kind == wire.BEAT:
            self._clocks.setdefault(process, Ahead()).note(float(content))
        elif kind == wire.NOTE:
            self._clocks.setdefault(process, Ahead())
            self._notes[process] = Note.parse(content)
        elif kind == wire.PICTURE:
            self._keep(process, RankPicture.parse(content))
        else:
            raise ValueError(f"a frame of kind {kind!r}")
        if not self._coordinator.on_beat(process, time.monotonic()):
            way.drop()  # it was given up meanwhile: it says what it is on the next one

    async def _meet(
        self, head: Mapping[str, object], reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str
    ) -> None:
        if head.get("run") != self._rules.job:
            self._note_stranger(peer, f"a rank of run id {head.get('run')!r} came to run id {self._rules.job!r}")
            return
        course = self._coordinator.course
        number = CHECKS if course.is_checks else course.books.number
        if head.get("round") != number:
            gone = {"refused": f"round {head.get('round')} is over: the job is in round {number}"}
            writer.write(frames.packed_call(gone))
            return
        keys = self._keys
        while True:
            call, body = frames.parsed_call(await _frame_of(reader, frames.RANK_BYTES))
            writer.write(frames.packed_call(*await keys.answer(call, body)))
            await writer.drain()

    def _note_stranger(self, peer: str, why: str, who: str = "something") -> None:
        """One line for each peer that is none of this job's."""
        if peer in self._strangers or len(self._strangers) >= _NAMED_STRANGERS:
            return
        self._strangers.add(peer)
        logger.warning(
            f"{who} came to this job's coordinator and was turned away: {peer}, {why}. Fix: see why it has this "
            "pod's address: a name that leads here, or a machine's port that two jobs share"
        )


def _head(frame: bytes) -> dict[str, object]:
    """A rank's first frame."""
    head = json.loads(frame)
    if not isinstance(head, dict) or head.get("kind") != "Meet":
        raise ValueError("neither a node's status nor a rank's greeting")
    return head


def _notice(hang: Hang, look: int, everybody: list[Snapshot]) -> HangNotice:
    """What all nodes hear of it: with a picture for a screen."""
    main = [_with_main_thread(each) for each in everybody]
    shown = {**hang.__dict__, "picture": "\n".join(text(main).splitlines()[:_PICTURE_LINES]), "evidence": ""}
    return HangNotice(look, hang.key, hang.rank, json.dumps(shown, ensure_ascii=False), hang.seconds)


def _with_main_thread(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, threads=snapshot.threads[:1])


async def _frame_of(reader: asyncio.StreamReader, limit: int) -> bytes:
    return await reader.readexactly(frames.length(await reader.readexactly(4), limit))


def _peer_of(writer: asyncio.StreamWriter) -> str:
    name = writer.get_extra_info("peername")
    return str(name[0]) if isinstance(name, tuple) and name else "a process of this node"


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
    # As many as there may be, and not as many as there are nodes: each thread of each rank may have a connection, too.
    most = max(needed, _MOST_FILES) if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
