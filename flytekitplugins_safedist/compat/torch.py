"""torch's private names, looked up here and nowhere else. Imports torch only inside its functions."""

from __future__ import annotations

from typing import Any

from . import lookup

STORE_MAKER = "_create_c10d_store"
"""In ``torch.distributed.rendezvous``: what makes a store for ``env://`` and ``tcp://``."""


def default_store() -> Any:
    """The store of the process group that this process is in."""
    from torch.distributed import distributed_c10d

    return lookup(distributed_c10d, "_get_default_store", of="torch")()


def backends(group: Any) -> list[Any]:
    """What a process group works with, one for each kind of device: where its threads are.

    Raises:
        IncompatibleVersionError: torch keeps them in another way.
    """
    backend_for = lookup(group, "_get_backend", of="torch")
    return [backend_for(device) for device in lookup(group, "_device_types", of="torch")]


def storage_info(part: str, offset: int, length: int) -> Any:
    """Where an item of a checkpoint lies, as DCP's metadata has it."""
    from torch.distributed.checkpoint import filesystem

    return lookup(filesystem, "_StorageInfo", of="torch")(part, offset, length)
