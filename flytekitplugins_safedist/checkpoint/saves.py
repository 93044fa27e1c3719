"""The saves of a place: each in a directory of its own name, committed by its manifest, pruned after a commit only.

The manifest is the last thing written, and has a digest of everything, itself included. A directory without a whole one
is no save.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import CheckpointError
from .store import Store

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
_SAVE = re.compile(r"step-(?P<step>\d{12})\.(?P<ms>\d{13,})\.[0-9a-f]{8}")


class DamagedError(Exception):
    """What is wrong with one save; another one may be whole, so it is no error of a user's yet."""

    def __init__(self, what: str, **facts: Any) -> None:
        super().__init__(str(CheckpointError(what, **facts)))


@dataclass(frozen=True)
class Manifest:
    """What a save is made of.

    Attributes:
        step: the last step that is in it.
        world_size: ranks of the job that saved it.
        names: of the state.
        per_rank: those of them of which each rank has its own.
        sizes: bytes of each file, by its name.
        items: of each file, where the items in it lie: offset, length, CRC-32.
        versions: of torch, for who reads it.
        format: of this record.
    """

    step: int
    world_size: int
    names: list[str]
    per_rank: list[str]
    sizes: dict[str, int] = field(default_factory=dict)
    items: dict[str, list[list[int]]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """As JSON, with its own digest."""
        text = json.dumps(asdict(self), sort_keys=True)
        return json.dumps({"manifest": json.loads(text), "sha256": _digest(text)}, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """The inverse of :meth:`to_bytes`.

        Raises:
            DamagedError: it is cut, changed, or of a format that this version does not know.
        """
        try:
            outer = json.loads(data)
            fields = outer["manifest"]
            whole = outer["sha256"] == _digest(json.dumps(fields, sort_keys=True))
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError("a manifest cannot be read", seen=f"{type(error).__name__}: {error}") from error
        if not whole:
            raise DamagedError("a manifest does not have the digest that it names: it was changed or damaged")
        if fields.get("format") != FORMAT:
            raise DamagedError(
                "a manifest has a format that this version does not know",
                seen=fields.get("format"),
                expected=FORMAT,
                hint="resume with the version of safedist that saved it, or a newer one",
            )
        return cls(**fields)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def new_name(step: int) -> str:
    """A directory's name for a save of ``step`` that no other save has, so that files of two never mix.

    Names sort by step, then by time.
    """
    return f"step-{step:012d}.{time.time_ns() // 1_000_000:013d}.{secrets.token_hex(4)}"


def step_of(name: str) -> int:
    """The step that a save's name tells."""
    return _parts(name)[0]


def _parts(name: str) -> tuple[int, int]:
    """Step and milliseconds of a save's name; -1 of what is none."""
    match = _SAVE.fullmatch(name)
    return (int(match["step"]), int(match["ms"])) if match else (-1, -1)


def committed(store: Store) -> list[str]:
    """The names of the saves that have a manifest, newest first: the highest step, of one step the latest."""
    return sorted((name for name, files in store.saves().items() if MANIFEST in files and _SAVE.fullmatch(name)))[::-1]


def read_manifest(store: Store, name: str) -> Manifest:
    """The manifest of a save.

    Raises:
        DamagedError: it is not there, or not whole.
    """
    data = store.get(f"{name}/{MANIFEST}")
    if data is None:
        raise DamagedError("a save has no manifest", where={"save": f"{store.url}/{name}"})
    return Manifest.from_bytes(data)


def prune(store: Store, just_made: str, keep: int) -> None:
    """Remove all but the newest ``keep`` saves of a place, and what crashes have left; never what was just made.

    A save's manifest goes first: whoever dies after that leaves files that are no save, and no manifest without them.
    """
    whole = 0
    found = {name: MANIFEST in files for name, files in store.saves().items() if _SAVE.fullmatch(name)}
    for name in sorted(found, reverse=True):
        whole += found[name]
        if name == just_made or (found[name] and whole <= keep):
            continue
        if not found[name] and _parts(name)[1] >= _parts(just_made)[1]:
            continue  # perhaps being written: by the next save
        if found[name]:
            store.remove(f"{name}/{MANIFEST}")
        store.remove(name)
