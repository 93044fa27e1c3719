"""Horovod's private names, looked up here and nowhere else. Imports Horovod only inside its functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import lookup


def around_waits(begins: Callable[[], object], ends: Callable[[], object]) -> None:
    """Have something called before and after each time that this process waits for a collective.

    Every operation of ``horovod.torch`` waits in this one call, the optimizer's too (horovod/torch/mpi_ops.py).

    Raises:
        ImportError: there is no Horovod here, or not for torch.
        IncompatibleVersionError: it waits in another way.
    """
    from horovod.torch import mpi_ops

    native = lookup(mpi_ops, "mpi_lib", of="horovod")
    wait = lookup(native, "horovod_torch_wait_and_clear", of="horovod")

    def waits(handle: int) -> Any:
        begins()
        try:
            return wait(handle)
        finally:
            ends()

    native.horovod_torch_wait_and_clear = waits
