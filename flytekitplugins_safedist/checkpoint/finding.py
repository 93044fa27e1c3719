"""The saves that there are, found by rank 0; and the newest of them that every rank finds whole."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from . import full, places, sharded
from . import manifest as manifests
from .crew import Crew, broadcast_json
from .manifest import Manifest
from .saves import Save, is_damaged, newest_of
from .stores import Store, open_store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A whole save: what of it this rank will load is on its disk.

    Attributes:
        save: which one.
        room: this rank's directory, where copies of its parts are.
    """

    save: Save
    room: Path


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
    """The newest complete save; None where nothing was ever saved. A collective.

    Args:
        crew: all ranks.
        places_of: where to look; asked in rank 0 only.
        room: a directory of this rank for what it fetches.

    Raises:
        CheckpointError: in every rank: there are saves and none is whole, or the store does not answer.
    """
    saves, faults = _listed(crew, places_of)
    for number, save in enumerate(saves):
        below = room / str(number)
        below.mkdir()
        wrong = full.fetched(crew, save, below) if _is_full(save) else sharded.fetched(crew, save, below)
        if not wrong:
            return Found(save, below)
        if crew.rank == 0:
            logger.warning(f"{save} is passed over: {'; '.join(wrong)}")
        faults += wrong
    if faults:
        raise CheckpointError(
            "there are checkpoints, but none of them is complete",
            seen="; ".join(faults),
            hint="restore one of them, or remove them (or save at another place) to begin anew",
        )
    return None


def _is_full(save: Save) -> bool:
    return save.manifest.kind == manifests.FULL


def _all_in(looked_at: list[list[Store]]) -> list[Save]:
    """The saves of this execution, then those of the place that the user named, if one was."""
    found = [save for stores in looked_at for save in newest_of(stores)]
    if not found and len(looked_at) > 1:
        raise CheckpointError(
            "nothing was saved where to resume from",
            where={"resume_from": ", ".join(store.url for store in looked_at[1])},
            hint="see whether the address is right, or leave out resume_from to begin anew",
        )
    return found


def _listed(crew: Crew, places_of: Callable[[], list[list[Store]]]) -> tuple[list[Save], list[str]]:
    """The saves that rank 0 sees, the one to take first in front, and what is wrong with others. A collective."""
    answer: dict[str, Any] = {}
    failure: BaseException | None = None
    if crew.rank == 0:
        try:
            found = _all_in(places_of())
            answer["saves"] = [
                (save.store.url, save.name, save.manifest.to_bytes().decode()) for save in found if not is_damaged(save)
            ]
            answer["faults"] = [f"{save.store.url}/{save.name}: no manifest" for save in found if is_damaged(save)]
        except Exception as error:  # the others wait for an answer, whatever it is
            failure, answer = error, {"error": f"{type(error).__name__}: {error}"}
    answer = broadcast_json(crew, answer)
    if failure is not None:
        raise failure
    if "error" in answer:
        raise CheckpointError("rank 0 could not find what to resume from", seen=answer["error"]).echoing()
    saves = [Save(open_store(url), name, Manifest.from_bytes(text.encode())) for url, name, text in answer["saves"]]
    return saves, answer["faults"]
