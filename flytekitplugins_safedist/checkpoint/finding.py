"""The newest complete save, found by rank 0 and handed to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from . import full, places
from .crew import Crew, broadcast_file, broadcast_json
from .log import say
from .saves import Save, is_damaged, newest_of
from .stores import Store, open_store


@dataclass(frozen=True)
class Found:
    """A whole save, on this rank's disk.

    Attributes:
        step: the last step that is in it.
        label: for the log.
        bytes: its size.
        path: its one part.
    """

    step: int
    label: str
    bytes: int
    path: Path


def sources(facts: places.Facts, own: Store, resume_from: str | None) -> list[list[Store]]:
    """The places to look at: those of this execution, then those that the user named; the first with saves counts."""
    first = [own, *(open_store(url) for url in places.known_before(facts))]
    if resume_from is None:
        return [first]
    if "/" in resume_from:
        named = [resume_from, *places.known_before(places.Facts(own=resume_from))]
    else:
        named = places.known_before(facts, records_at=places.outputs_of(facts, resume_from))
        if not named:
            raise CheckpointError(
                "that execution has left no record of checkpoints",
                where={"resume_from": resume_from},
                seen=f"no {places.RECORD} beside the outputs of its attempts",
                hint="see whether it has saved, at the same node of the workflow, or give the address of its place",
            )
    return [first, [open_store(url) for url in named]]


def find(crew: Crew, places_of: Callable[[], list[list[Store]]], room: Path) -> Found | None:
    """The newest complete save, fetched; None where nothing was ever saved. A collective.

    Args:
        crew: all ranks.
        places_of: where to look; asked in rank 0 only.
        room: a directory of this rank for the save.

    Raises:
        CheckpointError: in every rank: there are saves and none is whole, or the store does not answer.
    """
    answer: dict[str, Any] = {}
    failure: BaseException | None = None
    path = room / full.PART
    if crew.rank == 0:
        try:
            best = _best(places_of(), room)
            if best is not None:
                save, path = best
                answer = {"step": save.manifest.step, "label": str(save), "bytes": path.stat().st_size}
        except Exception as error:  # the others wait for an answer, whatever it is
            failure, answer = error, {"error": f"{type(error).__name__}: {error}"}
    answer = broadcast_json(crew, answer)
    if failure is not None:
        raise failure
    if "error" in answer:
        raise CheckpointError("rank 0 could not find what to resume from", seen=answer["error"])
    if not answer:
        return None
    broadcast_file(crew, path, answer["bytes"])
    return Found(answer["step"], answer["label"], answer["bytes"], path)


def _best(tiers: Sequence[Sequence[Store]], room: Path) -> tuple[Save, Path] | None:
    faults: list[str] = []
    for stores in tiers:
        for save in newest_of(stores):
            if is_damaged(save):  # said when it was read
                faults.append(f"{save.store.url}/{save.name}: its manifest cannot be read")
                continue
            try:
                return save, full.fetched(save, room)
            except CheckpointError as error:
                say(f"{save} is passed over: {error}")
                faults.append(str(error))
    if faults:
        raise CheckpointError(
            "there are checkpoints, and none of them is whole",
            seen="; ".join(faults),
            hint="restore one of them, or remove them (or save at another place) to begin anew",
        )
    return None
