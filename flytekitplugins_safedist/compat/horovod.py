"""Horovod's private names, looked up here and nowhere else. Imports Horovod only inside its functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import lookup


def around_waits(begins: Callable[[str], object], ends: Callable[[], object]) -> None:
    """Have something called before and after each time that this process waits for a collective; before it with what
    the collective is about: its tensor's name, and its process set unless that is all ranks.

    Every operation of ``horovod.torch`` waits in this one call, the optimizer's too, for a handle that another one has
    given it (horovod/torch/mpi_ops.py). What nobody waits for is remembered for ever, as Horovod does with the tensor.

    Raises:
        ImportError: there is no Horovod here, or not for torch.
        IncompatibleVersionError: it waits in another way.
    """
    from horovod.torch import mpi_ops

    native = lookup(mpi_ops, "mpi_lib", of="horovod")
    wait = lookup(native, "horovod_torch_wait_and_clear", of="horovod")
    about: dict[int, str] = {}

    def noting(enqueue: Callable[..., int]) -> Callable[..., int]:
        def enqueues(*arguments: Any) -> int:
            handle = enqueue(*arguments)
            about[handle] = _about(arguments)
            return handle

        return enqueues

    def waits(handle: int) -> Any:
        begins(about.pop(handle, ""))
        try:
            return wait(handle)
        finally:
            ends()

    native.horovod_torch_wait_and_clear = waits
    for name in dir(native):
        if "_async_" in name or name == "horovod_torch_barrier":
            setattr(native, name, noting(getattr(native, name)))


def before_init(check: Callable[[], object]) -> None:
    """Have something called before ``hvd.init()`` starts Horovod's thread: what that finds wrong ends the process.

    Raises:
        ImportError: there is no Horovod here, or not for torch.
        IncompatibleVersionError: it starts in another way.
    """
    from horovod.torch import mpi_ops

    native = lookup(lookup(mpi_ops, "_basics", of="horovod"), "MPI_LIB_CTYPES", of="horovod")
    init = lookup(native, "horovod_init", of="horovod")

    def checked(*arguments: Any) -> Any:
        check()
        return init(*arguments)

    native.horovod_init = checked


def _about(arguments: tuple[Any, ...]) -> str:
    """A name is the only bytes among them, and the process set's number the last whole number."""
    name = next((each.decode(errors="replace") for each in arguments if isinstance(each, bytes)), "")
    number = next((each for each in reversed(arguments) if isinstance(each, int)), 0)
    return f"{name} in process set {number}".strip() if number else name
