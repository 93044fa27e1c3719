"""What goes over the one connection between a node and its job's leader: frames, each of a kind.

A node sends its status, signs of life, and what is put beside them: pictures of its ranks, notes for the record of the
run, and its ranks' calls to the keys and values of their round. The leader sends wants, signs of life, answers to these
calls, and the evidence of a hang to the node whose rank is to fail for it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from mashumaro.config import BaseConfig
from mashumaro.mixins.dict import DataClassDictMixin

from .. import frames
from ..hangs.snapshot import Snapshot

STATUS, NOTE, PICTURE, CALL = b"S", b"N", b"P", b"C"
WANT, EVIDENCE, REFUSAL, ANSWER = b"W", b"E", b"R", b"A"
BEAT = b"B"
"""Kinds, of a node, of the leader, of both: the first byte of a frame's content."""


def frame(kind: bytes, content: bytes = b"") -> bytes:
    """As sent."""
    return frames.packed(kind, content)


def beat(clock: float) -> bytes:
    """A sign of life, with the sender's monotonic clock in seconds."""
    return frame(BEAT, repr(clock).encode())


_Self = TypeVar("_Self", bound="Value")


@dataclass(frozen=True)
class Value(DataClassDictMixin):
    """What is put beside statuses and wants."""

    class Config(BaseConfig):
        """Most of these are never sent: what reads and writes them is made when the first one is."""

        lazy_compilation = True

    kind: ClassVar[bytes]

    def frame(self) -> bytes:
        """As sent."""
        return frame(self.kind, json.dumps(self.to_dict(), ensure_ascii=False).encode("utf-8", "backslashreplace"))

    @classmethod
    def parse(cls: type[_Self], content: bytes) -> _Self:
        """The inverse, of a frame's content behind its kind.

        Raises:
            ValueError: it is none.
        """
        try:
            return cls.from_dict(json.loads(content))
        except Exception as error:  # mashumaro's, json's, of any type that the sender made up
            raise ValueError(f"not a {cls.__name__}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Note(Value):
    """The record of a node's part in the run so far, as JSON; and by how many seconds its clock is behind the leader's,
    at most; None where nobody knows."""

    kind = NOTE
    text: str
    behind: float | None = None


@dataclass(frozen=True)
class RankPicture(Value):
    """Of the ranks of a node, for a look in a round."""

    kind = PICTURE
    round: str
    look: int
    snapshots: tuple[Snapshot, ...]


@dataclass(frozen=True)
class HangEvidence(Value):
    """All that pictures have shown of a hang, as text."""

    kind = EVIDENCE
    text: str


@dataclass(frozen=True)
class Refusal(Value):
    """The answer to who has no part in this job, whatever it is; ``is_stranger``: it is another job's."""

    kind = REFUSAL
    text: str
    is_stranger: bool
