"""Full-state saves: one part that rank 0 writes, and that all ranks load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from . import manifest as manifests
from .crew import Crew, broadcast_file, broadcast_json
from .parts import fetch, write_object
from .saves import Order, Save, commit

PART = "state.pt"


def write(order: Order, tree: Any) -> Save:
    """Write and commit a tree of plain values and tensors. Rank 0 alone."""
    name = order.begin()
    part = write_object(order.store, name, PART, tree)
    return commit(order, name, manifests.FULL, [part])


def fetched(crew: Crew, save: Save, room: Path) -> list[str]:
    """Bring the part to every rank's room; return what is wrong with it. A collective."""
    wrong: list[str] = []
    path = room / PART
    if crew.rank == 0:
        try:
            found = fetch(save.store, save.name, save.manifest.part(PART), room)
            if found != path:
                path.symlink_to(found)  # the store's own file
        except CheckpointError as error:
            wrong = [str(error)]
    wrong = broadcast_json(crew, wrong)
    if not wrong:
        broadcast_file(crew, path, save.manifest.size)
    return wrong


def load(room: Path, *, weights_only: bool) -> Any:
    """The tree, from what :func:`fetched` has left in the room.

    Raises:
        CheckpointError: it holds something that only unpickling brings back, and that was not allowed.
    """
    return load_object(room / PART, weights_only=weights_only)


def load_object(path: Path, *, weights_only: bool) -> Any:
    """As ``torch.load``, into memory of the CPU, with the file as its store until it is used."""
    import pickle

    import torch

    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            "this save holds objects that only unpickling brings back",
            where={"path": path},
            seen=str(error).splitlines()[0],
            hint="if you trust whoever could write to that place: checkpoints(weights_only=False)",
        ) from error
