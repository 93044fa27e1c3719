"""torch's private names, looked up here and nowhere else. Imports torch only inside its functions."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .. import envvars
from . import lookup

DISTRIBUTED = "torch.distributed"


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


def reshard(model: Any) -> None:
    """Have each module of FSDP2's in a model hold its part alone: after a forward alone the root's stay whole."""
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:  # torch 2.5
        from torch.distributed._composable.fsdp import FSDPModule
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def sharded_tensors_without_a_part() -> Iterator[None]:
    """Inside, a sharded tensor of which this rank holds nothing says that it is not on the meta device. torch 2.5's
    ``get_model_state_dict`` asks that at its end, and it raised on such ranks alone: the others waited for them."""
    import torch
    from torch.distributed._shard.sharded_tensor import api

    operations = lookup(api, "_SHARDED_OPS", of="torch")
    key = torch.Tensor.is_meta.__get__  # as torch registers it
    before = operations[key]
    operations[key] = lambda _types, arguments, _kwargs, _group: any(
        shard.tensor.is_meta for shard in arguments[0].local_shards()
    )
    try:
        yield
    finally:
        operations[key] = before


def has_worker_server() -> bool:
    """Whether torch.distributed is imported, and has the server that :func:`serve_workers` starts (2.4 and later)."""
    is_there = hasattr(sys.modules.get("torch.distributed"), "init_process_group")
    return is_there and hasattr(sys.modules.get("torch._C._distributed_c10d"), "_WorkerServer")


def serve_workers(path: str) -> None:
    """Have a C++ thread of torch's answer on a socket: what collectives were begun, and stacks.

    Raises:
        RuntimeError: it cannot listen there.
    """
    server = sys.modules["torch._C._distributed_c10d"]._WorkerServer(path)
    # It stays for the process's whole life: its end would be told of in the rank's log.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))


def process_groups() -> list[tuple[str, list[int], list[str]]]:
    """Name, members and backends of each group that this process is in. For any thread: imports nothing.

    Raises:
        IncompatibleVersionError: torch keeps them in another way.
    """
    world = vars(sys.modules.get("torch.distributed.distributed_c10d", sys)).get("_world")
    if world is None:
        return []
    facts = ("pg_names", "pg_group_ranks", "pg_backend_config")
    names, ranks, configs = (lookup(world, name, of="torch") for name in facts)
    return [
        (str(name), sorted(ranks.get(group, ())), _backends_in(str(configs.get(group, ""))))
        for group, name in list(names.items())
    ]


def call_at_groups(meet: Callable[[str], object]) -> None:
    """Have something called when this process is about to make a process group, with its name; at once where torch
    makes them in another way, and nobody can tell. Imports nothing."""

    def meeting(make: Callable[..., Any]) -> Callable[..., Any]:
        def makes(*arguments: Any, **more: Any) -> Any:
            meet(_name_among(inspect.signature(make), arguments, more))
            return make(*arguments, **more)

        return makes

    _put_around("distributed_c10d", "_new_process_group_helper", meeting, missing=lambda: meet(""))


_STORE_MAKER = "_create_c10d_store"
"""In ``torch.distributed.rendezvous``: what makes a store for ``env://`` and ``tcp://``."""


def finds_store_maker() -> bool:
    """Whether :func:`around_stores` has anything to go around, in a process that has imported torch."""
    return hasattr(sys.modules.get("torch.distributed.rendezvous"), _STORE_MAKER)


def around_stores(around: Callable[[Callable[..., Any], dict[str, Any]], Any]) -> None:
    """Have something called in the place of what makes the store of a process group, with that and what it is given by
    name (hostname, port, rank, world_size, ...). Nothing where torch makes it in another way. Imports nothing."""

    def surrounded(create: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(create)
        return lambda *arguments, **more: around(create, dict(signature.bind(*arguments, **more).arguments))

    _put_around("rendezvous", _STORE_MAKER, surrounded)


def call_as_group_ends(call: Callable[[], object]) -> None:
    """Have something called when this process lets go of its group of all ranks; never where torch keeps it
    in another way. Imports nothing."""

    def watched(keep: Callable[[Any], None]) -> Callable[[Any], None]:
        def keeps(group: Any) -> None:
            keep(group)
            if group is None:
                call()

        return keeps

    _put_around("distributed_c10d", "_update_default_pg", watched)


def _put_around(
    module: str,
    name: str,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    missing: Callable[[], object] = lambda: None,
) -> None:
    """Have a function of torch's in the place of one of its own, as soon as that is there.

    Args:
        module: below ``torch.distributed``; has it.
        name: of the function.
        wrap: makes the other one of it.
        missing: called where torch has none of that name.
    """

    def watch(dist: ModuleType) -> None:
        if not dist.is_available():
            return  # a torch that was built without
        holder = sys.modules[f"{DISTRIBUTED}.{module}"]
        found = getattr(holder, name, None)
        if found is None:
            missing()
        else:
            setattr(holder, name, functools.wraps(found)(wrap(found)))

    at_distributed(watch)


def _name_among(signature: inspect.Signature, arguments: Sequence[Any], more: Mapping[str, Any]) -> str:
    with contextlib.suppress(TypeError):  # what is called with them says so
        return str(signature.bind(*arguments, **more).arguments.get("group_name", ""))
    return ""


def at_distributed(call: Callable[[ModuleType], object]) -> None:
    """Have something called with torch's package of this name: now, or as soon as this process imports it. What it
    raises then, the import raises."""
    if DISTRIBUTED in sys.modules:
        call(sys.modules[DISTRIBUTED])
    else:
        sys.meta_path.insert(0, _Expecting(call))


class _Expecting(MetaPathFinder):
    """Finds the one package as others do, once."""

    def __init__(self, call: Callable[[ModuleType], object]) -> None:
        self._call = call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != DISTRIBUTED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            before = vars(loader).get("exec_module")  # another one of these
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                if before is None:
                    del loader.exec_module  # as if the finder had not been there
                execute(module)
                self._call(module)

            loader.exec_module = exec_module
        return spec


def _backends_in(config: str) -> list[str]:
    """``cpu:gloo,cuda:nccl``"""
    named = (part.rpartition(":")[2] for part in config.split(","))
    return sorted({name for name in named if name not in ("", "fake", "undefined")})


def recorder(backend: str) -> str:
    """Which question torch's server answers with what a backend has recorded; "" where this torch records nothing of
    it. 2.8 was the first to record gloo; until 2.7 NCCL is recorded for whom asks for it, from 2.15 on most others are,
    NCCL's new implementation among them."""
    c10d = sys.modules["torch._C._distributed_c10d"]
    recorded = vars(sys.modules["torch.distributed.distributed_c10d"]).get("_FR_SELF_RECORDING_BACKENDS")
    is_hooked = recorded is not None and backend not in recorded
    handler = "dump_nccl_trace_json" if backend.startswith("nccl") and not is_hooked else "fr_trace_json"
    sizes = [os.environ.get(name) for name in (envvars.TORCH_FR_BUFFER_SIZE, envvars.TORCH_NCCL_TRACE_BUFFER_SIZE)]
    size = next(filter(None, sizes), "")
    is_on = size != "0" and (bool(size) or backend != "nccl" or _version() >= (2, 7))
    is_known = is_hooked or backend == "gloo" or backend.startswith("nccl")
    handlers = c10d._get_handler_names() if hasattr(c10d, "_get_handler_names") else ()
    if not is_on or not is_known or handler not in handlers:
        return ""
    return f"{handler}?backend={'nccl2' if backend == 'nccl' else backend}" if is_hooked else handler


def gives_up(backend: str) -> bool:
    """Whether a backend ends what has lasted for its group's timeout. Nobody ends NCCL's where that is switched off."""
    return not (backend.startswith("nccl") and os.environ.get(envvars.TORCH_NCCL_ASYNC_ERROR_HANDLING) == "0")


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in str(sys.modules["torch"].__version__).split("+")[0].split(".")[:2])
