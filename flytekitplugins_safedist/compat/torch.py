"""torch's private names, looked up here and nowhere else. Imports torch only inside its functions."""

from __future__ import annotations

import ctypes
import sys
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


def is_profiled() -> bool:
    """Whether a profiler of torch's runs in this thread."""
    import torch

    return bool(lookup(torch.autograd, "_profiler_enabled", of="torch")())


def storage_info(part: str, offset: int, length: int) -> Any:
    """Where an item of a checkpoint lies, as DCP's metadata has it."""
    from torch.distributed.checkpoint import filesystem

    return lookup(filesystem, "_StorageInfo", of="torch")(part, offset, length)


def buffers_for(tensors: dict[str, Any], *, pinned: bool) -> dict[str, Any]:
    """Empty tensors on the CPU of the same shapes and layouts, as DCP's stagers make them."""
    from torch.distributed import _state_dict_utils

    made: dict[str, Any] = lookup(_state_dict_utils, "_create_cpu_state_dict", of="torch")(tensors, pin_memory=pinned)
    return made


def copy_state_dict(tensors: dict[str, Any], into: dict[str, Any]) -> dict[str, Any]:
    """Copy to what :func:`buffers_for` made; complete on return. torch 2.5's stager leaves out CPU tensors."""
    from torch.distributed import _state_dict_utils

    made: dict[str, Any] = lookup(_state_dict_utils, "_copy_state_dict", of="torch")(tensors, into)
    return made


def save_state_dict(*arguments: Any, **options: Any) -> None:
    """What DCP's ``save`` calls; also torch 2.5's takes ``no_dist``, which its ``save`` does not."""
    from torch.distributed.checkpoint import state_dict_saver

    lookup(state_dict_saver, "_save_state_dict", of="torch")(*arguments, **options)


def load_state_dict(*arguments: Any, **options: Any) -> None:
    """What DCP's ``load`` calls, for the same."""
    from torch.distributed.checkpoint import state_dict_loader

    lookup(state_dict_loader, "_load_state_dict", of="torch")(*arguments, **options)


def has_worker_server() -> bool:
    """Whether torch is imported and has the server that :func:`serve_workers` starts (2.4 and later)."""
    return hasattr(sys.modules.get("torch._C._distributed_c10d"), "_WorkerServer")


def serve_workers(path: str) -> None:
    """Have a C++ thread of torch's answer on a socket: what collectives were begun, and stacks.

    Raises:
        RuntimeError: it cannot listen there.
    """
    server = sys.modules["torch._C._distributed_c10d"]._WorkerServer(path)
    # It stays for the process's whole life: its end would be told of in the rank's log.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
