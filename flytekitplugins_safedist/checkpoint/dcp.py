"""torch.distributed.checkpoint as we use it: tensors only, into and out of a directory, and nothing is unpickled.

Its own ``.metadata`` is a pickle: it is read with an allow-list of the few classes that it is made of.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .crew import Crew, TorchCrew

METADATA = ".metadata"

_ALLOWED: dict[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            *("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
            *("BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch": frozenset({"Size"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "collections": frozenset({"OrderedDict"}),
}


def save(tensors: Mapping[str, Any], directory: Path, crew: Crew) -> None:
    """Write this rank's part of the tensors, and in rank 0 the metadata. A collective; its files are durable then."""
    import torch.distributed.checkpoint as torch_dcp

    torch_dcp.save(
        dict(tensors),
        storage_writer=_writer(directory),
        process_group=crew.group if isinstance(crew, TorchCrew) else None,
        no_dist=not isinstance(crew, TorchCrew),
    )


def load(tensors: dict[str, Any], directory: Path, metadata: Path, fetch: Callable[[str], object], crew: Crew) -> None:
    """Read into the given tensors what they are of the saved ones. A collective.

    Args:
        tensors: of this job's own layout; overwritten.
        directory: where the files are, once ``fetch`` was called with their names.
        metadata: the metadata's file.
        fetch: brings a file of the save to the directory.
        crew: all ranks.

    Raises:
        CheckpointError: the save has other names than ``tensors``. Nothing is read then.
    """
    import torch.distributed.checkpoint as torch_dcp

    found = read_metadata(metadata)
    _same_names(set(found.state_dict_metadata), set(tensors))
    torch_dcp.load(
        tensors,
        storage_reader=_reader(directory, metadata, fetch),
        process_group=crew.group if isinstance(crew, TorchCrew) else None,
        no_dist=not isinstance(crew, TorchCrew),
    )


def read_metadata(path: Path) -> Any:
    """The metadata of a directory that :func:`save` has written.

    Raises:
        CheckpointError: it names something that such metadata is not made of.
    """
    with open(path, "rb") as file:
        return _Restricted(file).load()


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name in _ALLOWED.get(module, ()) or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        raise _foreign(f"{module}.{name}")


def _member(kind: object, name: object) -> Any:
    """In the place of getattr, by which Python 3.11.0 to 3.11.3 pickle a member of an enum, and nothing else."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind.__members__[str(name)]
    raise _foreign(f"getattr of {kind}: {name}")


def _foreign(seen: str) -> CheckpointError:
    return CheckpointError(
        "the metadata of a save names something that does not belong there: it is not loaded",
        seen=seen,
        hint="find out who wrote to that place",
    )


def _is_dtype(name: str) -> bool:
    import torch

    return isinstance(getattr(torch, name, None), torch.dtype)


def _writer(directory: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemWriter

    class Writer(FileSystemWriter):  # type: ignore[misc]  # torch is untyped to mypy here
        def storage_meta(self) -> None:
            """Nothing: torch would name the place of the save, by an object that only unpickling brings back."""

    return Writer(directory, sync_files=True, overwrite=True)


def _reader(directory: Path, metadata: Path, fetch: Callable[[str], object]) -> Any:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta

    class Reader(FileSystemReader):  # type: ignore[misc]  # torch is untyped to mypy here
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            found = read_metadata(metadata)
            found.storage_meta = StorageMeta()
            found.storage_meta.load_id = self.load_id
            return found

        def read_data(self, plan: Any, planner: Any) -> Any:
            for name in sorted({self.storage_data[item.storage_index].relative_path for item in plan.items}):
                fetch(name)
            return super().read_data(plan, planner)

    return Reader(directory)


def _same_names(saved: set[str], wanted: set[str]) -> None:
    if saved == wanted:
        return
    raise CheckpointError(
        "the tensors that are saved are not those of the model and the optimizer",
        seen=f"only saved: {_some(saved - wanted)}; only here: {_some(wanted - saved)}",
        hint="resume with the model and the optimizer that were saved",
    )


def _some(names: set[str]) -> str:
    listed = sorted(names)
    return (", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")) or "none"
