"""Where the ranks of this node come to meet those of others: their agent carries each call to the leader.

Over the one link of the node. A call that is under way when the link is lost is said again on the next one, with the
same number, and the leader does it once: a rank does not notice. It ends when its round is over here, or this process.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import frames
from ..coordinator import wire
from ..coordinator.books import Round
from ..coordinator.kv import OVER
from ..meeting import end_of


class MeetingPlace:
    """A socket of this node's scratch, and the calls of ranks that no answer has come to yet.

    Args:
        path: of the socket.
        job: names the job.
        put: sends a frame to the leader; nothing while it is looked for.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(self, path: Path, job: str, put: Callable[[bytes], object]) -> None:
        self._job, self._put = job, put
        self._round, self._number = "", -1
        self._next = 0
        self._calls: dict[int, tuple[dict[str, Any], bytes, asyncio.Future[bytes]]] = {}
        self._ends: dict[int, asyncio.Task[bytes]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="safedist meeting", daemon=True)
        self._thread.start()
        starting = asyncio.start_unix_server(self._greet, path=path, limit=1 << 16)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()

    def open(self, round_: Round, number: int) -> None:
        """Its ranks may come; what those of the round before have not been answered is over."""
        asyncio.run_coroutine_threadsafe(self._open(str(round_), number), self._loop).result()

    def note_ends(self, ranks: Iterable[int]) -> None:
        """Tell whoever waits for these ranks of this round that they have ended, and will not come."""
        self._soon(lambda: self._note_ends(ranks))

    def say_again(self) -> None:
        """There is a leader again."""
        self._soon(self._say_all)

    def take(self, answer: bytes) -> None:
        """What the leader says to a call.

        Raises:
            ValueError: it is none.
        """
        number = int(frames.parsed_call(answer)[0]["id"])
        self._soon(lambda: self._answer(number, answer))

    def close(self) -> None:
        """Whoever waits here hears that this agent has ended."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
            self._thread.join(5.0)
        if not self._thread.is_alive() and not self._loop.is_closed():
            self._loop.close()

    # --- on the loop --------------------------------------------------------------------------------------------------
    def _soon(self, call: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)

    async def _open(self, round_: str, number: int) -> None:
        self._round, self._number = round_, number
        self._ends.clear()
        for pending in list(self._calls):
            self._answer(pending, frames.call(OVER))

    def _note_ends(self, ranks: Iterable[int]) -> None:
        for rank in set(ranks) - set(self._ends):
            call = {"op": "set", "key": end_of(rank), "round": self._round}
            self._ends[rank] = self._loop.create_task(self._carry(call, b"1"))

    async def _stop(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks(self._loop) if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.call_soon(self._loop.stop)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # What is no call, or too long, ends like a rank that is gone: only this node's own processes reach this socket.
        # A task that was cancelled would be logged by Python 3.11's streams.
        errors = (OSError, ValueError, KeyError, TypeError, asyncio.IncompleteReadError, asyncio.CancelledError)
        try:
            with suppress(*errors):
                await self._serve(reader, writer)
        finally:
            with suppress(Exception):
                writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        why = self._refusal(json.loads(await _frame_of(reader, frames.HELLO_BYTES)))
        if why:
            await _frame_of(reader, frames.RANK_BYTES)  # to which this is the answer
            writer.write(frames.packed(frames.call({"refused": why})))
            return
        round_ = self._round
        while True:
            call, body = frames.parsed_call(await _frame_of(reader, frames.RANK_BYTES))
            writer.write(frames.packed(await self._carry({**call, "round": round_}, body)))
            await writer.drain()

    def _refusal(self, head: Mapping[str, object]) -> str:
        if head["run"] != self._job:
            return f"this agent is of run id {self._job!r}, and the rank of {head['run']!r}"
        if head["round"] != self._number:
            return f"round {head['round']} is over: this node is in round {self._number}"
        return ""

    async def _carry(self, call: dict[str, Any], body: bytes) -> bytes:
        number, self._next = self._next, self._next + 1
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._calls[number] = (call, body, answer)
        try:
            self._say(number)
            return await answer
        finally:
            del self._calls[number]

    def _say_all(self) -> None:
        for number in list(self._calls):
            self._say(number)

    def _say(self, number: int) -> None:
        """The leader forgets what it has answered before the oldest call that waits here."""
        call, body, _ = self._calls[number]
        head = {**call, "id": number, "oldest": next(iter(self._calls))}
        self._put(wire.frame(wire.CALL, frames.call(head, body)))

    def _answer(self, number: int, content: bytes) -> None:
        if number in self._calls:
            answer = self._calls[number][2]
            if not answer.done():
                answer.set_result(content)


async def _frame_of(reader: asyncio.StreamReader, limit: int) -> bytes:
    return await reader.readexactly(frames.length(await reader.readexactly(frames.PREFIX_BYTES), limit))
