"""What the ranks of one round tell each other: keys and values, in the coordinator's process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

OVER: dict[str, Any] = {"refused": "the round of this rank is over"}
"""The answer to a call of a round that is over."""

Answered = tuple[dict[str, Any], bytes]


class KeyValues:
    """Those of one round. For one asyncio loop."""

    def __init__(self) -> None:
        self.answers: dict[str, dict[int, bytes]] = {}
        """To each node's calls, for whoever answers them: b"" while one waits."""
        self._values: dict[str, bytes] = {}
        self._changes: dict[str, asyncio.Event] = {}
        self._closed = False

    async def answer(self, call: Mapping[str, Any], body: bytes) -> Answered:
        """What a call comes to.

        Raises:
            ValueError: it is none.
        """
        if self._closed:
            return OVER, b""
        try:
            key, op = str(call["key"]), call["op"]
            if op == "wait":
                return await self._wait(key, float(call["seconds"]))
            return self._changed(key, op, call, body)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a call: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """The round is over: whoever waits is told."""
        self._closed = True
        for event in self._changes.values():
            event.set()

    async def _wait(self, key: str, seconds: float) -> Answered:
        if key not in self._values and seconds > 0:
            event = self._changes.setdefault(key, asyncio.Event())
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(event.wait(), seconds)
        if self._closed:
            return OVER, b""
        return {"there": key in self._values}, self._values.get(key, b"")

    def _changed(self, key: str, op: object, call: Mapping[str, Any], body: bytes) -> Answered:
        if op == "set":
            self._put(key, body)
            return {}, b""
        if op == "add":
            count = int(self._values.get(key, b"0")) + int(call["amount"])
            self._put(key, str(count).encode())
            return {"count": count}, b""
        if op == "compare_set":
            first = int(call["first"])
            if self._values.get(key, b"") == body[:first]:
                self._put(key, body[first:])
            return {}, self._values.get(key, b"")
        if op == "delete":
            self._values.pop(key, None)
            return {}, b""
        raise ValueError(f"no such call: {op!r}")

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        event = self._changes.pop(key, None)
        if event is not None:
            event.set()
