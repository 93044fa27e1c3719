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
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

from ..errors import CheckpointError
from ..failures import Outlook, outlook
from .group import JobRanks, failure_of
from .store import Store

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
METADATA = ".metadata"
"""torch's own record, for its tools: the file before the last."""
FORMAT = 1
_WORD = b"a rank can write here"
_SAVE = re.compile(r"step-(?P<step>\d{12,})\.(?P<ms>\d{13,})\.[0-9a-f]{8}")

Directories = list[tuple[str, set[str]]]
"""What a place holds: see :func:`directories`."""


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
        attempt: of that job, from 0.
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
    attempt: int = 0
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
    return whole(directories(store))


def whole(there: Directories) -> list[str]:
    """Those of them that have a manifest, the newest first. Pure."""
    return [name for name, files in there if MANIFEST in files]


def directories(store: Store) -> Directories:
    """The directories of saves, whole or not, with what is in each, the newest first. What has another name is somebody
    else's."""
    there = [(name, files) for name, files in store.saves().items() if _SAVE.fullmatch(name)]
    return sorted(there, key=lambda each: time_of(each[0]), reverse=True)


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


def commit(store: Store, name: str, manifest: Manifest) -> None:
    """Make a save of what has been written.

    Raises:
        CheckpointError, OSError: the store says that it did not; it may have done it.
    """
    store.put(f"{name}/{MANIFEST}", manifest.to_bytes())


def prove(store: Store, probe: str, ranks: JobRanks, call: str) -> None:
    """See that all ranks can write to a place, and rank 0 can read that: a wrong place is an error of the first step,
    not of the first save that is due. A collective.

    Args:
        store: the place.
        probe: a directory in it that is nobody else's.
        ranks: of the job.
        call: that they are in.

    Raises:
        CheckpointError, FsError: no save can be made there. What may pass is only said: the first save will tell.
    """
    sizes = {str(rank): len(_WORD) for rank in range(ranks.size)}
    failure = failure_of(lambda: store.put(f"{probe}/{ranks.rank}", _WORD))

    def look(written: Sequence[bool]) -> None:
        if all(written):
            try:
                deque(store.read(probe, sizes, [(name, 0, size) for name, size in sizes.items()]), maxlen=0)
            except FileNotFoundError as error:
                raise not_shared(store, str(error)) from None

    def decide(written: Sequence[bool]) -> None:
        lasting = _lasting(store, failure_of(lambda: look(written)))
        if any(written):  # else a store that is away is waited for once more
            failure_of(lambda: store.remove(probe))
        if lasting is not None:
            raise lasting

    try:
        ranks.agree(call, failure is None, decide, failure=_lasting(store, failure))
    except Exception:
        failure_of(lambda: store.withdraw(probe, str(ranks.rank)))  # where rank 0 does not see it
        raise


def _lasting(store: Store, failure: BaseException | None) -> BaseException | None:
    """The failure, but for one that another error caused, of a kind that passes; that is said in the log."""
    if failure is None or failure.__cause__ is None or outlook(failure) is not Outlook.TRANSIENT:
        return failure
    logger.warning(f"whether saves can be made in {store.url} is not known yet: {failure}")
    return None


def not_shared(store: Store, seen: str) -> CheckpointError:
    """The error of ranks that do not see each other's files."""
    return CheckpointError(
        "rank 0 does not see what other ranks have written: the nodes do not share the place",
        where={"place": store.url},
        seen=seen,
        hint="give Checkpoints a directory on a file system that all nodes mount, or an address (s3://...)",
    )


def latest_before(there: Directories, before: int | None) -> int:
    """The latest time in a name that is of an earlier life; what has a later one, and is not this life's, is somebody
    else's. Pure.

    Args:
        there: what the place holds, before this life has saved.
        before: what this was when this life first looked; None: it does so now, and all that is there is of earlier
            lives. What has come since is, too, up to the first save that is not whole: somebody writes that just now.
    """
    latest = max((time_of(name) for name, _ in there), default=0)
    in_work = [time_of(name) for name, files in there if MANIFEST not in files]
    return latest if before is None else min([latest, *(at - 1 for at in in_work if at > before)])


def of_others(there: Directories, mine: Sequence[str], before: int) -> list[str]:
    """Saves that somebody else has committed, the newest first. Pure.

    Args:
        there: what the place holds.
        mine: the names of this life's saves.
        before: see :func:`latest_before`.
    """
    return [name for name, files in there if MANIFEST in files and _is_of_another(name, mine, before)]


def _is_of_another(name: str, mine: Sequence[str], before: int) -> bool:
    return name not in mine and time_of(name) > before


def surplus(
    there: Directories,
    keep: int | None,
    mine: Sequence[str],
    *,
    before: int,
    back_to: int | None = None,
    damaged: Collection[str] = (),
) -> list[str]:
    """All but the newest ``keep`` saves, and what has failed, or an earlier life has left. Pure.

    What is somebody else's is left alone: it is perhaps being written, or all that he has.

    Args:
        there: what the place holds.
        keep: how many saves stay; None: all.
        mine: the names of this life's saves, in their order; the last of them stays.
        before: see :func:`latest_before`.
        back_to: the step that training has gone back to, which stays.
        damaged: saves that are known not to be whole: they do not count.
    """
    count, names = 0, []
    for name, files in there:
        if _is_of_another(name, mine, before):
            continue
        is_whole = {MANIFEST, METADATA} <= files  # a manifest that comes late stands alone in what was removed
        stays = is_whole and (keep is None or count < keep or step_of(name) == back_to)
        count += is_whole and name not in damaged
        if not stays and name != mine[-1]:
            names.append(name)
    return names


def prune(store: Store, names: Sequence[str]) -> None:
    """Remove saves.

    Raises:
        CheckpointError, OSError: one cannot be removed; the others are.
    """
    for failure in filter(None, [failure_of(partial(discard, store, name)) for name in names]):
        raise failure
