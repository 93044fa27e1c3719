"""The manifest of a save: what it is made of, and a digest of everything, itself included. Pure.

A directory without a whole manifest is no save. The manifest is the last thing written, so one that is there and whole
says that everything it names was there.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from ..errors import CheckpointError

FORMAT = 1
NAME = "manifest.json"
FULL, SHARDED = "full", "sharded"

_SAVE = re.compile(r"step-(?P<step>\d{12})\.(?P<ms>\d{13,})\.[0-9a-f]{8}")


@dataclass(frozen=True)
class Part:
    """One file of a save: its name in the save's directory, its size in bytes, its SHA-256 in hexadecimal."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a save is made of.

    Attributes:
        step: the last step that is in it.
        kind: "full" (one part, written by rank 0) or "sharded" (torch.distributed.checkpoint, each rank its own).
        world_size: ranks of the job that saved it.
        parts: every file but the manifest.
        attempt, round: of the job that saved it.
        written_at: seconds since 1970, by rank 0's clock.
        weights_only: whether it can be loaded without running anything that it holds.
        versions: of torch, Python and the like, for who reads it.
        format: of this record.
    """

    step: int
    kind: str
    world_size: int
    parts: tuple[Part, ...]
    attempt: int
    round: int
    written_at: float
    weights_only: bool
    versions: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(part.bytes for part in self.parts)

    def part(self, name: str) -> Part:
        """The part of that name.

        Raises:
            CheckpointError: there is none.
        """
        for part in self.parts:
            if part.name == name:
                return part
        raise CheckpointError("a save lacks a part", where={"part": name}, seen=[part.name for part in self.parts])

    def to_bytes(self) -> bytes:
        """As JSON, with its own digest."""
        text = json.dumps(asdict(self), sort_keys=True)
        return json.dumps({"manifest": json.loads(text), "sha256": _digest(text)}, sort_keys=True, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """The inverse of :meth:`to_bytes`.

        Raises:
            CheckpointError: it is cut, changed, or of a format that this version does not know.
        """
        try:
            outer = json.loads(data)
            fields = outer["manifest"]
            whole = outer["sha256"] == _digest(json.dumps(fields, sort_keys=True))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError("a manifest cannot be read", seen=f"{type(error).__name__}: {error}") from error
        if not whole:
            raise CheckpointError("a manifest does not have the digest that it names: it was changed or damaged")
        if fields.get("format") != FORMAT:
            raise CheckpointError(
                "a manifest has a format that this version does not know",
                seen=fields.get("format"),
                expected=FORMAT,
                hint="resume with the version of safedist that saved it, or a newer one",
            )
        return cls(**{**fields, "parts": tuple(Part(**part) for part in fields["parts"])})


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def new_name(step: int) -> str:
    """A directory's name for a save of ``step`` that no other save has, so that parts of two never mix.

    Names sort by step, then by time.
    """
    return f"step-{step:012d}.{time.time_ns() // 1_000_000:013d}.{secrets.token_hex(4)}"


def step_of(name: str) -> int | None:
    """The step that a directory's name tells; None where it is not one of ours."""
    match = _SAVE.fullmatch(name)
    return int(match["step"]) if match else None


def newest_first(names: list[str]) -> list[str]:
    """Those of ``names`` that are directories of saves: the highest step first, of one step the latest."""
    return sorted((name for name in names if _SAVE.fullmatch(name)), reverse=True)


def begun_ms(name: str) -> int:
    """When the save of that name was begun: milliseconds since 1970."""
    match = _SAVE.fullmatch(name)
    return int(match["ms"]) if match else 0
