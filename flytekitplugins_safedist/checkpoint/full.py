"""Full-state saves: one part that rank 0 writes, and that all ranks load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from . import manifest as manifests
from . import points
from .parts import fetch, write_object
from .saves import Author, Save, commit
from .stores import Store

PART = "state.pt"


def write(store: Store, step: int, tree: Any, author: Author, *, weights_only: bool) -> Save:
    """Write and commit a tree of plain values and tensors. Rank 0 alone."""
    name = manifests.new_name(step)
    store.make(name)
    points.reached(points.SAVE_BEGUN)
    part = write_object(store, name, PART, tree)
    return commit(store, name, manifests.FULL, [part], author, weights_only=weights_only)


def fetched(save: Save, directory: Path) -> Path:
    """The part as a local file, compared with the manifest. Rank 0 alone."""
    return fetch(save.store, save.name, save.manifest.part(PART), directory)


def load(path: Path, *, weights_only: bool) -> Any:
    """The tree.

    Raises:
        CheckpointError: it holds something that only unpickling brings back, and that was not allowed.
    """
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
