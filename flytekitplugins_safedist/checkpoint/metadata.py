"""torch's ``.metadata`` of a save: a pickle, read with an allow-list of the few classes that it is made of."""

from __future__ import annotations

import io
import pickle
from enum import Enum
from typing import Any

from ..errors import CheckpointError

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


def read_metadata(data: bytes) -> Any:
    """The metadata of a save.

    Raises:
        CheckpointError: it names something that such metadata is not made of.
    """
    return _Restricted(io.BytesIO(data)).load()


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
