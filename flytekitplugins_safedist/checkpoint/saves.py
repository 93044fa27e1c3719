"""The saves of a place: each in a directory of its own name, committed by its manifest, removed after a commit only.

The manifest is the last thing written, is all that a restore needs to know, and has a digest of everything, itself
included. A directory without a whole one is no save.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, fields
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
        job: that saved it; "" outside a task.
        back_to: the step to which training had gone back by its user's word; None where it had not.
        sizes: bytes of each file, by its name.
        items: of each value: its path; a tensor's size and dtype; and its chunks, each with its offsets and sizes in
            the tensor, and with file, offset, length and CRC-32.
        torch: the version of torch that wrote it.
        format: of this record.
    """

    step: int
    world_size: int
    names: list[str]
    per_rank: list[str]
    job: str = ""
    back_to: int | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    items: list[dict[str, Any]] = field(default_factory=list)
    torch: str = ""
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """As JSON, with its own digest."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f'{{"manifest": {text}, "sha256": "{_digest(text)}"}}'.encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """The inverse of :meth:`to_bytes`. Fields that this version does not know are passed over.

        Raises:
            DamagedError: it is cut, changed, or of a format that this version does not know.
        """
        try:
            outer = json.loads(data)
            record = outer["manifest"]
            whole = outer["sha256"] == _digest(json.dumps(record, sort_keys=True))
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError("a manifest cannot be read", seen=f"{type(error).__name__}: {error}") from error
        if not whole:
            raise DamagedError("a manifest does not have the digest that it names: it was changed or damaged")
        if record.get("format") != FORMAT:
            raise DamagedError(
                "a manifest has a format that this version does not know",
                seen=record.get("format"),
                expected=FORMAT,
                hint="resume with the version of safedist that saved it, or a newer one",
            )
        return cls(**{each.name: record[each.name] for each in fields(cls) if each.name in record})


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def new_name(step: int, after: int = 0) -> str:
    """A directory's name for a save of ``step`` that no other save has, so that files of two never mix.

    Args:
        step: that is saved.
        after: the time in the newest name there is: a later save has a later one, whatever its node's clock says.
    """
    return f"step-{step:012d}.{max(time.time_ns() // 1_000_000, after + 1):013d}.{secrets.token_hex(4)}"


def step_of(name: str) -> int:
    """The step in a save's name; -1 of what is none."""
    match = _SAVE.fullmatch(name)
    return int(match["step"]) if match else -1


def time_of(name: str) -> int:
    """The milliseconds in it; -1 of what is none."""
    match = _SAVE.fullmatch(name)
    return int(match["ms"]) if match else -1


def committed(store: Store) -> list[str]:
    """The names of the saves that have a manifest, the newest first."""
    return sorted((name for name, files in _directories(store) if MANIFEST in files), key=time_of, reverse=True)


def newest_time(store: Store) -> int:
    """The latest milliseconds in a name, of a save that is whole or perhaps still written; 0 where there is none."""
    return max((time_of(name) for name, _ in _directories(store)), default=0)


def _directories(store: Store) -> list[tuple[str, set[str]]]:
    """The directories of saves, whole or not, with what is in each. What has another name is somebody else's."""
    return [(name, files) for name, files in store.saves().items() if _SAVE.fullmatch(name)]


def read_manifest(store: Store, name: str) -> Manifest:
    """The manifest of a save.

    Raises:
        DamagedError: it is not there, or not whole.
    """
    data = store.get(f"{name}/{MANIFEST}")
    if data is None:
        raise DamagedError("a save has no manifest", where={"save": f"{store.url}/{name}"})
    return Manifest.from_bytes(data)


def discard(store: Store, name: str) -> None:
    """Remove a save. Its manifest goes first: whoever dies after that leaves files that are no save."""
    store.remove(f"{name}/{MANIFEST}")
    store.remove(name)


def prune(
    store: Store, keep: int | None, mine: Sequence[str], needed: Collection[str], damaged: Collection[str]
) -> list[str]:
    """Remove all but the newest ``keep`` saves of a place, and what earlier lives of the job have left.

    Args:
        store: the place.
        keep: how many saves stay; None: all.
        mine: the names of this life's saves, in their order; the last of them stays.
        needed: what stays in any case.
        damaged: saves that are known not to be whole: they do not count.

    Returns:
        Saves that somebody else has committed since this life's first one was begun, the newest first.

    Raises:
        CheckpointError, OSError: something cannot be removed; what can be is.
    """
    count, failures, began = 0, list[Exception](), time_of(mine[0])
    there = sorted(_directories(store), key=lambda each: time_of(each[0]), reverse=True)
    for name, files in there:
        # What has no manifest, and is not older, is perhaps being written.
        stays = keep is None or count < keep if MANIFEST in files else time_of(name) >= began
        count += MANIFEST in files and name not in damaged
        if not stays and name != mine[-1] and name not in needed:
            try:
                discard(store, name)
            except Exception as error:
                failures.append(error)
    if failures:
        raise failures[0]
    return [name for name, files in there if MANIFEST in files and time_of(name) > began and name not in mine]
