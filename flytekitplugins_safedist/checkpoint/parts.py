"""Parts of a save: written once, with their digest taken on the way; read back only if they have it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import IO, Any

from ..errors import CheckpointError
from . import points
from .manifest import Part
from .stores import Store

_CHUNK = 1 << 22


class Measured:
    """A file that is written in order, with its size and SHA-256."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.bytes = 0

    def write(self, data: Any) -> int:
        """As a file's."""
        view = memoryview(data)
        self._digest.update(view)
        self._file.write(view)
        self.bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """As a file's."""
        self._file.flush()

    def part(self, name: str) -> Part:
        """What was written."""
        return Part(name, self.bytes, self._digest.hexdigest())


def write_object(store: Store, save: str, name: str, value: Any) -> Part:
    """Write a value as ``torch.save`` does, straight into the store."""
    import torch

    with store.part(f"{save}/{name}") as file:
        points.reached(points.PART_OPENED)
        measured = Measured(file)
        torch.save(value, measured)
    points.reached(points.PART_WRITTEN)
    return measured.part(name)


def write_file(store: Store, save: str, path: Path) -> Part:
    """Write a local file into the store."""
    with store.part(f"{save}/{path.name}") as file, open(path, "rb") as source:
        points.reached(points.PART_OPENED)
        measured = _copied(source, file)
    points.reached(points.PART_WRITTEN)
    return measured.part(path.name)


def measure(path: Path) -> Part:
    """The part that a file of a file system already is."""
    with open(path, "rb") as file, open(os.devnull, "wb") as sink:
        return _copied(file, sink).part(path.name)


def _copied(source: IO[bytes], target: IO[bytes]) -> Measured:
    measured = Measured(target)
    while data := source.read(_CHUNK):
        measured.write(data)
    return measured


def fetch(store: Store, save: str, part: Part, directory: Path) -> Path:
    """A part as a local file that has the digest that the manifest names: the store's own file, or a copy of it.

    Raises:
        CheckpointError: it is missing, cut or changed.
    """
    held = store.local(f"{save}/{part.name}")
    target = held if held is not None else directory / part.name
    try:
        with store.read(f"{save}/{part.name}") as source, open(os.devnull if held else target, "wb") as file:
            found = _copied(source, file).part(part.name)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError("a part of a save is missing", where=_where(store, save, part)) from error
    if found != part:
        raise CheckpointError(
            "a part of a save is not as it was written",
            where=_where(store, save, part),
            seen=f"{found.bytes} bytes, SHA-256 {found.sha256}",
            expected=f"{part.bytes} bytes, SHA-256 {part.sha256}",
        )
    return target


def _where(store: Store, save: str, part: Part) -> dict[str, object]:
    return {"store": store.url, "save": save, "part": part.name}
