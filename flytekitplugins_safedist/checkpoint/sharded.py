"""Sharded saves: every rank writes its part of the tensors (torch.distributed.checkpoint), rank 0 what is not a tensor.

The ranks' writing threads meet four times: to begin, with rank 0's name for the save; when each sees its room; with the
parts that each has written; and with rank 0's word that they are committed. A rank that fails comes to the meeting all
the same, with its error, so that all fail alike and nobody waits for ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, FsError
from ..fs import exchange, wait_for
from . import dcp, full, points, stores
from . import manifest as manifests
from .crew import Crew, broadcast_file
from .manifest import Part
from .parts import fetch, measure, write_file, write_object
from .saves import Order, Save, commit
from .stores import Store

PLAIN = "plain.pt"
PATIENCE_SECONDS = 6 * 3600.0


def write(order: Order, tensors: dict[str, Any], plain: Any, crew: Crew) -> Save | None:
    """Write and commit. A collective, of the ranks' writing threads; the save is returned in rank 0.

    Args:
        order: the same in all ranks, but for the directory.
        tensors: by flat name, alike in all ranks.
        plain: what rank 0 writes of everything else.
        crew: all ranks.

    Raises:
        CheckpointError: in every rank: what the first one failed with.
    """
    begun = meet("begin", lambda: {"step": order.step, "name": order.begin() if crew.rank == 0 else None})
    if len({report["step"] for report in begun}) > 1:
        raise CheckpointError(
            "the ranks save different steps together",
            seen=", ".join(f"rank {rank}: {report['step']}" for rank, report in enumerate(begun)),
            hint="call step() with the same numbers in every rank",
        )
    name = begun[0]["name"]
    # Rank 0 has made it, and another node may not see that yet. By a meeting: who fails alone before torch's own
    # collectives, which come next, would have the others wait there.
    meet("room", lambda: order.store.make(name))
    told = meet("parts", lambda: [asdict(part) for part in _write(order, name, tensors, plain, crew)])
    parts = [Part(**part) for of_rank in told for part in of_rank]
    made: list[Save] = []

    def end() -> None:
        if crew.rank == 0:
            _all_here(order.store, name, parts)
            made.append(commit(order, name, manifests.SHARDED, parts))

    meet("end", end)
    return made[0] if made else None


def meet(point: str, work: Callable[[], object]) -> list[Any]:
    """What every rank's ``work`` has returned, in the order of ranks. A collective.

    Raises:
        CheckpointError: in every rank, if ``work`` has failed in any.
    """
    failure: Exception | None = None
    try:
        mine: dict[str, object] = {"value": work()}
    except Exception as error:
        failure, mine = error, {"error": f"{type(error).__name__}: {error}"}
    texts = exchange(f"checkpoint/{point}", json.dumps(mine), timeout=PATIENCE_SECONDS)
    if failure is not None:
        raise failure
    answers = [json.loads(text) for text in texts]
    for rank, answer in enumerate(answers):
        if "error" in answer:
            raise CheckpointError(
                "a rank could not do its part of a checkpoint", where={"rank": rank}, seen=answer["error"]
            )
    return [answer["value"] for answer in answers]


def _write(order: Order, name: str, tensors: dict[str, Any], plain: Any, crew: Crew) -> list[Part]:
    store = order.store
    shared = store.local(name)
    directory = shared if shared is not None else order.room
    dcp.save(tensors, directory, crew)
    mine = [path for path in sorted(directory.iterdir()) if _is_of(path.name, crew.rank)]
    parts = [measure(path) if shared is not None else write_file(store, name, path) for path in mine]
    points.reached(points.PART_WRITTEN)
    if crew.rank == 0:
        parts.append(write_object(store, name, PLAIN, plain))
    return parts


def _is_of(name: str, rank: int) -> bool:
    return name.startswith(f"__{rank}_") or (rank == 0 and name == dcp.METADATA)


def _all_here(store: Store, name: str, parts: list[Part]) -> None:
    """Rank 0 must see what the others have written: a directory that nodes do not share is no place for a save."""
    for part in parts:
        path = store.local(f"{name}/{part.name}")
        if path is None:
            return
        try:
            wait_for(path, size=part.bytes, timeout=stores.LATE_SECONDS)
        except FsError as error:
            raise CheckpointError(
                "rank 0 does not see what another rank has written",
                where={"part": path},
                seen=str(error),
                hint="save to a directory that all nodes share, or to an object store",
            ) from error


# --- resume -----------------------------------------------------------------------------------------------------------
def fetched(crew: Crew, save: Save, room: Path) -> list[str]:
    """Compare all parts with the manifest, each rank its share; return what is wrong. A collective."""
    parts = save.manifest.parts

    def check() -> list[str]:
        wrong = []
        common = [save.manifest.part(name) for name in (PLAIN, dcp.METADATA)] if crew.rank == 0 else []
        others = [part for part in parts if part.name not in (PLAIN, dcp.METADATA)]
        for part in [*common, *others[crew.rank :: crew.world_size]]:
            try:
                found = fetch(save.store, save.name, part, room)
                if found.parent != room:
                    (room / part.name).symlink_to(found)
            except CheckpointError as error:
                wrong.append(str(error))
        return wrong

    wrong: list[str] = [problem for of_rank in meet("check", check) for problem in of_rank]
    if not wrong:
        for name in (PLAIN, dcp.METADATA):
            broadcast_file(crew, room / name, save.manifest.part(name).bytes)
    return wrong


def load_plain(room: Path, *, weights_only: bool) -> Any:
    """What rank 0 wrote of everything else."""
    return full.load_object(room / PLAIN, weights_only=weights_only)


def load_tensors(save: Save, tensors: dict[str, Any], room: Path, crew: Crew) -> None:
    """Read into the given tensors. A collective."""

    def bring(name: str) -> None:
        if not (room / name).exists():
            found = fetch(save.store, save.name, save.manifest.part(name), room)
            if found.parent != room:
                (room / name).symlink_to(found)

    dcp.load(tensors, room, room / dcp.METADATA, bring, crew)
