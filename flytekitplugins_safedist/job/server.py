"""The coordinator's process as the others reach it: one server in node 0's agent, one connection for each node.

An asyncio loop on a thread of its own, which alone touches the coordinator. Nothing that arrives is unpickled. Whoever
sends what is no message, or too much of it, loses its own connection; an unknown peer holds a few kilobytes, for some
seconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from .. import frames
from ..errors import RendezvousError
from ..record.clocks import Ahead, Offset
from ..topology import Endpoint
from . import messages
from .connections import Connected, Own, Way, allow_open_files, frame_of, peer_of, superseded
from .coordinator import Coordinator, Disconnected, Said, Tick
from .corner import Corner
from .facts import Rules
from .link import Inbox, who_coordinates
from .messages import Beat, Go, Hello, Message, Noted, Refused, Welcome
from .ports import BACKLOG, listener

logger = logging.getLogger(__name__)

HELLO_SECONDS = 20.0
"""How long a connection may take to say who it is."""

SHUTDOWN_SECONDS = 10.0
"""How long, at most, the server stays after the end, so that nodes that are connected hear of it."""

_TICK_SECONDS = 0.25
"""Between two times that the coordinator is told of time."""

_BEATS = 6
"""Signs of life within the time after which their absence counts."""

_NAMED_STRANGERS = 256
"""Peers of no part of this job that are named in the log, one line each."""

_LOOK_SECONDS = 2.0
"""Between two looks at whom this node's own name leads to."""

_ACCEPTS = 100
"""Connections that are accepted in a row, before those that there are have their turn."""

_OWN_FILES = 256
"""Open files that node 0's agent needs besides."""

Prepare = Callable[[int], Mapping[str, str]]
"""Called before each round with its number of nodes; what every node finds in its :class:`.messages.Go`."""


class Server:
    """Holds the coordinator, and brings it what nodes say.

    Args:
        rules: of the job.
        process: the id of this process.
        inbox: takes what the node of this very process is told, and any error of this server.
        prepare: opens what ranks meet at, for each round.
    """

    def __init__(self, rules: Rules, process: str, inbox: Inbox, prepare: Prepare) -> None:
        self._rules = rules
        self._coordinator = Coordinator(rules, process, time.monotonic())
        self._came: set[int | str] = set()
        self._process = process
        self._inbox = inbox
        self._own = Own(inbox.put)
        self._beat = max(0.05, min(5.0, rules.heartbeat / _BEATS))
        self._prepare = prepare
        self._ways: dict[str, Way] = {}
        self._corner = Corner()
        self._clocks: dict[str, Ahead] = {}
        self._notes: dict[str, Noted] = {}
        self._beaten = 0.0
        self._round = -1
        self._values: Mapping[str, str] = {}
        self._strangers: set[str] = set()
        self._endpoint: Endpoint | None = None
        self._looking = False
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.base_events.Server] = []
        self._others_gone = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="safedist coordinator", daemon=True)
        self._thread.start()
        self._loop.call_soon_threadsafe(self._tick)

    # --- from this process's other threads -------------------------------------------------------------------------
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
        self._endpoint = endpoint
        found: int = sock.getsockname()[1]
        return found

    def listen_at(self, path: Path) -> None:
        """Listen for this node's ranks alone.

        Raises:
            OSError: the socket cannot be made.
        """
        self._serve(asyncio.start_unix_server(self._connected, path=path, limit=1 << 16))

    def say(self, message: Message) -> None:
        """Take a message of the node of this very process."""
        with suppress(RuntimeError):  # the loop is closed: the job is over here
            self._loop.call_soon_threadsafe(self._hear, self._process, message, self._own)

    @property
    def others(self) -> int:
        """Nodes of other processes that are connected."""
        return len(self._ways) - (self._process in self._ways)

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
            self._loop.call_soon_threadsafe(self._note_departure)
            self._others_gone.wait(seconds)
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._loop.close()

    # --- on the loop -----------------------------------------------------------------------------------------------
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
        self._on(Tick())
        now = time.monotonic()
        if now - self._beaten >= self._beat:
            self._beaten = now
            for process, way in list(self._ways.items()):
                if process != self._process:
                    way.send(Beat(time.monotonic()))
            self._look_for_a_newer_one()

    def _hear(self, process: str, message: Message, way: Way) -> None:
        before = self._ways.get(process)
        if isinstance(message, Hello):
            self._ways[process] = way
            self._came.add(process if message.node is None else message.node)
            if before is not None and before is not way:
                before.drop()
        elif before is not way:
            return  # said on a connection that has been replaced, or by a process that was turned away
        if isinstance(message, Hello | Beat) and message.clock:
            self._clocks.setdefault(process, Ahead()).note(message.clock)
        if isinstance(message, Noted):
            self._clocks.setdefault(process, Ahead())
            self._notes[process] = message
            self._on(Said(process, Beat()))
            return
        self._on(Said(process, message))

    def _on(self, event: Said | Disconnected | Tick) -> None:
        try:
            for process, message in self._coordinator.on(event, time.monotonic()):
                way = self._ways.get(process)
                if way is None:
                    continue
                way.send(self._filled(message) if isinstance(message, Go) else message)
                if isinstance(message, Refused):
                    del self._ways[process]
        except Exception as error:  # of what opens a round; or a defect of ours, which must not pass in silence
            self._inbox.put(error)

    def _filled(self, go: Go) -> Go:
        if go.round != self._round:
            self._round = go.round
            # What ranks agreed on is void when they start again; those of older rounds that still wait are let go.
            self._corner.close()
            self._corner = Corner()
            self._values = dict(self._prepare(go.nnodes))
        return replace(go, values=self._values)

    def _note_departure(self) -> None:
        """Those who have not come yet are waited for as well: they are to find the end, not a node 0 that never was."""
        if not self.others and len(self._came) >= self._rules.min_nodes:
            self._others_gone.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = peer_of(writer)
        try:
            greeting = _greeting(await asyncio.wait_for(frame_of(reader, frames.HELLO_BYTES), HELLO_SECONDS))
            if not isinstance(greeting, Message):
                await self._meet(greeting, reader, writer, peer)
                return
            way = Connected(writer)
            process = self._admitted(greeting, way, peer)
            del greeting  # it would stay as long as the node
            if process:
                await self._node(process, way, reader)
            else:
                await asyncio.wait_for(writer.drain(), HELLO_SECONDS)
        except (ValueError, RecursionError, frames.FrameError) as error:
            self._stranger(peer, f"what it sent is no message: {str(error)[:200]}")
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, asyncio.CancelledError):
            pass  # gone, or silent; or this server closes, and Python 3.11's streams log a task that was cancelled
        finally:
            with suppress(Exception):
                writer.close()

    def _admitted(self, hello: Message, way: Way, peer: str) -> str:
        """Take a node in, whose process this is; "" for one that has no part in this job, or that only looks."""
        if not isinstance(hello, Hello):
            raise frames.FrameError(f"the first message is {type(hello).__name__}, not Hello")
        refused = self._refusal(hello)
        if refused is not None:
            self._stranger(peer, f"host {hello.host[:100]!r}: {refused.text}", "a node of another job")
        if hello.state == "looks" and self._process in hello.lost:
            self._inbox.put(superseded(hello.host))
        if refused is not None or hello.state == "looks":
            way.send(refused or Welcome(self._process, self._coordinator.history))
            return ""
        self._hear(hello.process, hello, way)
        return hello.process

    async def _node(self, process: str, way: Way, reader: asyncio.StreamReader) -> None:
        way.send(Beat(time.monotonic()))  # at once: the first round may be over before the next one
        try:
            while True:
                self._hear(process, messages.parse(await frame_of(reader, frames.NODE_BYTES)), way)
        finally:
            if self._ways.get(process) is way:
                del self._ways[process]
                self._on(Disconnected(process))
            self._note_departure()

    def _look_for_a_newer_one(self) -> None:
        """A coordinator that has lost its peers asks who answers to its name: it may be another one by now."""
        if self._endpoint is None or self.others or len(self._came) < 2 or self._looking:
            return
        endpoint = self._endpoint

        def look() -> None:
            try:
                found = who_coordinates(endpoint, self._rules.run)
                if found is not None and found != self._process:
                    self._inbox.put(superseded("this node itself"))
            finally:
                time.sleep(_LOOK_SECONDS)
                self._looking = False

        looking = threading.Thread(target=look, name="safedist own name", daemon=True)
        with suppress(RuntimeError):  # the container may have no further thread now
            looking.start()
            self._looking = True

    def _refusal(self, hello: Hello) -> Refused | None:
        if hello.run != self._rules.run:
            return Refused("stranger", f"it is of run id {hello.run!r}, and this is run id {self._rules.run!r}")
        if hello.protocol != messages.PROTOCOL:
            text = f"it speaks version {hello.protocol} of the protocol, and node 0 {messages.PROTOCOL}: other images"
            return Refused("version", text)
        return None

    async def _meet(
        self, head: Mapping[str, object], reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str
    ) -> None:
        if head.get("run") != self._rules.run:
            self._stranger(peer, f"a rank of run id {head.get('run')!r} came to run id {self._rules.run!r}")
            return
        if head.get("round") != self._round:
            gone = {"refused": f"round {head.get('round')} is over: the job is in round {self._round}"}
            writer.write(frames.packed_call(gone))
            return
        corner = self._corner
        while True:
            call, body = frames.parsed_call(await frame_of(reader, frames.RANK_BYTES))
            writer.write(frames.packed_call(*await corner.answer(call, body)))
            await writer.drain()

    def _stranger(self, peer: str, why: str, who: str = "something") -> None:
        """One line for each peer that is none of this job's."""
        if peer in self._strangers or len(self._strangers) >= _NAMED_STRANGERS:
            return
        self._strangers.add(peer)
        logger.warning(
            f"{who} came to this job's coordinator and was turned away: {peer}, {why}. Fix: see why it has this "
            "pod's address: a name that leads here, or a machine's port that two jobs share"
        )


def _greeting(frame: bytes) -> Message | dict[str, object]:
    """A node's first message, or a rank's. One value alone: what else is read here would stay as long as the node."""
    head = json.loads(frame)
    return head if isinstance(head, dict) and head.get("kind") == "Meet" else messages.parse(frame)
