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


def key_value_server(host: str) -> Any:
    """Horovod's key-value server for one round, at a port that the kernel picks (Horovod's own find_port tries them one
    by one). With it ranks may leave Horovod and begin it again, as often as they like.

    A scope holds the addresses of ranks until all have left it. Horovod's own server (0.28.1, RendezvousHandler)
    forgets who has left each of the scopes as soon as one of them is done: what stays of the others are addresses of
    ranks that listen there no more, for which the next ``hvd.init()`` waits.

    Raises:
        IncompatibleVersionError: it counts in another way.
    """
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    lookup(RendezvousHandler, "do_DELETE", of="horovod")

    class CountsEachScope(RendezvousHandler):  # type: ignore[misc]  # Horovod is untyped to mypy
        def do_DELETE(self) -> None:
            scope, _, rank = self.path.strip("/").partition("/")
            size = self.server.scope_size.get(scope)
            if size is None:
                super().do_DELETE()
                return
            with self.server.finished_list_lock, self.server.cache_lock:
                finished = self.server.finished_list[scope]
                finished.append(rank)
                if len(finished) == size:
                    finished.clear()
                    self.server.cache.pop(scope, None)
            self.send_status_code(200)

    server = RendezvousHTTPServer((host, 0), CountsEachScope, 0)
    for name in ("cache", "cache_lock", "finished_list", "finished_list_lock", "scope_size"):
        lookup(server, name, of="horovod")
    return server


def _about(arguments: tuple[Any, ...]) -> str:
    """A name is the only bytes among them, and the process set's number the last whole number."""
    name = next((each.decode(errors="replace") for each in arguments if isinstance(each, bytes)), "")
    number = next((each for each in reversed(arguments) if isinstance(each, int)), 0)
    return f"{name} in process set {number}".strip() if number else name
