"""The saves of a place: committed by their manifest, found newest first, pruned after a commit only."""

from __future__ import annotations

import hashlib
import logging
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ..errors import CheckpointError
from . import manifest as manifests
from . import points
from .manifest import Manifest, Part
from .stores import DirectoryStore, Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Save:
    """A save with a whole manifest; its parts have yet to be compared with it."""

    store: Store
    name: str
    manifest: Manifest

    def __str__(self) -> str:
        return f"step {self.manifest.step} in {self.store.url}/{self.name}"


@dataclass(frozen=True)
class Author:
    """Who saves: ranks of the job, attempt and round."""

    world_size: int
    attempt: int
    round: int


@dataclass(frozen=True)
class Order:
    """What to write, but for the state itself.

    Attributes:
        store: where.
        step: the last step that is in it.
        author: of the save.
        weights_only: whether it can be loaded without unpickling.
        room: a directory of this rank for what is on its way.
        prepare: called in rank 0 before anything is written.
    """

    store: Store
    step: int
    author: Author
    weights_only: bool
    room: Path
    prepare: Callable[[], object]

    def begin(self) -> str:
        """Make room for the save in its store; return its name. Rank 0 alone."""
        self.prepare()
        name = manifests.new_name(self.step)
        self.store.make(name)
        points.reached(points.SAVE_BEGUN)
        return name


def commit(order: Order, name: str, kind: str, parts: Sequence[Part]) -> Save:
    """Make a save of parts that are in the store: from here on it is one.

    Raises:
        CheckpointError: a part is not there as it was written, or another writer has committed this save.
    """
    author, store = order.author, order.store
    made = Manifest(
        step=order.step,
        kind=kind,
        world_size=author.world_size,
        parts=tuple(sorted(parts, key=lambda part: part.name)),
        attempt=author.attempt,
        round=author.round,
        written_at=time.time(),
        weights_only=order.weights_only,
        versions=_versions(),
    )
    store.seal(name)
    points.reached(points.PARTS_WRITTEN)
    store.put_new(f"{name}/{manifests.NAME}", made.to_bytes())
    points.reached(points.COMMITTED)
    return Save(store, name, made)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "flytekitplugins-safedist"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # run from a source tree
            found[package] = "unknown"
    return found


def committed(store: Store) -> Iterator[Save]:
    """The saves of a place that have a whole manifest, newest first; a damaged manifest is said, and passed over."""
    for name in manifests.newest_first(store.names()):
        data = store.get(f"{name}/{manifests.NAME}")
        if data is None:
            continue  # begun and never finished, or being written now
        try:
            found = Manifest.from_bytes(data)
        except CheckpointError as error:
            logger.warning(f"{store.url}/{name} is passed over: {error}")
            yield Save(store, name, _DAMAGED)
            continue
        yield Save(store, name, found)


_DAMAGED = Manifest(-1, "damaged", 0, (), 0, 0, 0.0, weights_only=True)


def is_damaged(save: Save) -> bool:
    """Whether its manifest is there and cannot be read."""
    return save.manifest is _DAMAGED


def newest_of(stores: Sequence[Store]) -> list[Save]:
    """The saves of several places: the highest step first, of one step that of the first place; damaged ones by their
    name."""
    found = [save for store in stores for save in committed(store)]
    return sorted(found, key=lambda save: manifests.step_of(save.name) or 0, reverse=True)


def near(directory: Path, store: Store) -> Store:
    """Where first copies of a store's saves are kept in a directory of this node: apart from those of other stores."""
    return DirectoryStore(directory / f"safedist-{hashlib.sha256(store.url.encode()).hexdigest()[:16]}")


def prune(store: Store, just_made: Save, keep: int) -> None:
    """Remove all but the newest ``keep`` saves of a place, and what crashes have left; never what was just made.

    A save's manifest goes first: whoever dies after that leaves parts that are no save, and no manifest without parts.
    """
    whole = 0
    born = manifests.begun_ms(just_made.name)
    for name in manifests.newest_first(store.names()):
        has_manifest = store.get(f"{name}/{manifests.NAME}") is not None
        whole += has_manifest
        if name == just_made.name or (has_manifest and whole <= keep):
            continue
        if not has_manifest and manifests.begun_ms(name) >= born:
            continue  # perhaps being written: by the next save
        if has_manifest:
            store.remove(f"{name}/{manifests.NAME}")
            points.reached(points.PRUNED_ONE_MANIFEST)
        store.remove(name)
    points.reached(points.PRUNED)
