"""A user's state as values by path: what is saved of models, optimizers, whatever else, and of each rank.

Optimizers are saved by the names of the model's parameters, as torch.distributed.checkpoint.state_dict does it, so a
save does not depend on how a model is wrapped or over how many ranks it is sharded. Imports torch, as :mod:`.dcp`.
"""

from __future__ import annotations

import heapq
import logging
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..errors import CheckpointError
from .dcp import Buffers, Path, Share, dumps, flat, is_part, is_tensor, loads
from .group import JobRanks, per_rank

logger = logging.getLogger(__name__)

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_DICTS = (dict, OrderedDict, Counter)
"""As torch.load(weights_only=True) has them; a scheduler's milestones are a Counter."""

_COMPARED_BYTES = 1 << 20
"""Of a tensor beside models and optimizers: beyond it, it is not compared between ranks."""


# --- what is in it ----------------------------------------------------------------------------------------------------
def is_model(value: Any) -> bool:
    """Whether it is torch's Module."""
    return isinstance(value, torch.nn.Module)


def is_optimizer(value: Any) -> bool:
    """Whether it is torch's Optimizer."""
    return isinstance(value, torch.optim.Optimizer)


def is_fsdp1(value: Any) -> bool:
    """Whether it is a model with torch's FullyShardedDataParallel anywhere: its state_dict() is a collective."""
    return is_model(value) and any(isinstance(inner, FullyShardedDataParallel) for inner in value.modules())


def has_state(value: Any) -> bool:
    """Whether it saves and loads itself."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def bare(value: Any) -> Any:
    """A model without the wrappers that put a prefix on its names: DistributedDataParallel, torch.compile."""
    while True:
        if isinstance(value, (DistributedDataParallel, DataParallel)):
            value = value.module
        elif is_model(value) and "_orig_mod" in value._modules:
            value = value._modules["_orig_mod"]
        else:
            return value


def tree_in(value: Any) -> Any:
    """What is saved of one value."""
    value = value.value if isinstance(value, per_rank) else value
    return value.state_dict() if has_state(value) else value


def model_of(name: str, state: Mapping[str, Any]) -> Any:
    """The model in the state that holds all parameters of the optimizer of that name; None where there is none.

    Raises:
        CheckpointError: there is none, and models here are sharded: their parts could not be told apart.
    """
    stepped = {id(parameter) for group in state[name].param_groups for parameter in group["params"]}
    for value in state.values():
        if is_model(value) and stepped <= {id(parameter) for parameter in bare(value).parameters()}:
            return value
    if not any(is_part(parameter) for group in state[name].param_groups for parameter in group["params"]):
        return None
    raise CheckpointError(
        "an optimizer of a sharded model cannot be saved without that model",
        where={"state": name},
        seen=f"models: {', '.join(key for key, value in state.items() if is_model(value)) or 'none'}",
        hint="put the model with all of its parameters into the state, and one optimizer for each",
    )


def parameter_names(optimizer: Any, model: Any) -> list[str]:
    """The model's names of what the optimizer counts."""
    names = {id(parameter): name for name, parameter in bare(model).named_parameters(remove_duplicate=True)}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The values of a tree, by path: dicts by names are gone through, and lists of them or of tensors.

    The rest is one value each; so is a dict with other keys than text, whose paths torch would take for a list's.
    """
    if type(tree) in (dict, OrderedDict) and tree and all(type(key) is str for key in tree):
        for key, inner in tree.items():
            yield from leaves(inner, (*path, key))
    elif type(tree) is list and any(_is_inner(one) for one in tree):
        for index, inner in enumerate(tree):
            yield from leaves(inner, (*path, index))
    else:
        yield path, tree


def _is_inner(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, dict)) or (type(value) is list and any(_is_inner(one) for one in value))


def tree_of(values: Mapping[Path, Any]) -> Any:
    """The inverse of :func:`leaves`."""
    if () in values:
        return values[()]
    heads: dict[Any, dict[Path, Any]] = {}
    for (head, *rest), value in values.items():
        heads.setdefault(head, {})[tuple(rest)] = value
    inner = {head: tree_of(below) for head, below in heads.items()}
    return [inner[index] for index in sorted(inner)] if any(type(head) is int for head in inner) else inner


# --- save -------------------------------------------------------------------------------------------------------------
def check(state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if something in it could not be loaded again without unpickling; names it.

    No collective: what a sharded model holds is not asked for.
    """
    if not isinstance(state, MutableMapping) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(
            "the state is not a dict by names",
            seen=f"{type(state).__module__}.{type(state).__qualname__}",
            expected='{"model": model, "optimizer": optimizer, ...}',
        )
    for name, value in state.items():
        if is_optimizer(value):
            model_of(name, state)
        if not is_model(value):
            _check(tree_in(value), name)


def _check(value: Any, name: str) -> None:
    kind = type(value)
    if kind in _DICTS:
        for key, inner in value.items():
            _check(key, f"{name}.{key} (a key)")
            _check(inner, f"{name}.{key}")
    elif kind in (list, tuple):
        for index, inner in enumerate(value):
            _check(inner, f"{name}.{index}")
    elif not is_tensor(value) and kind not in _PLAIN:
        raise CheckpointError(
            "this value cannot be loaded again without unpickling",
            where={"state": name},
            seen=f"{kind.__module__}.{kind.__qualname__}",
            expected="tensors, numbers, text, bytes, None, and dicts, lists and tuples of these",
            hint="save it as one of these (an array: torch.from_numpy or .tolist())",
        )


def told(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a rank tells the others of its state before a save.

    Returns:
        "own": the trees of what each rank has its own of, as bytes; "marks": a number for each name that all ranks must
        hold alike, beside models and optimizers.
    """
    own = {name: tree_in(value) for name, value in state.items() if isinstance(value, per_rank)}
    alike = {n: v for n, v in state.items() if n not in own and not is_model(v) and not is_optimizer(v)}
    return {
        "own": dumps(own),
        "marks": {name: zlib.crc32(repr(_mark(tree_in(value))).encode()) for name, value in alike.items()},
    }


def _mark(value: Any) -> Any:
    if is_part(value):
        return "a part"
    if isinstance(value, torch.Tensor):
        small = value.numel() * value.itemsize <= _COMPARED_BYTES
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy() if small and value.numel() else b""
        return tuple(value.shape), value.dtype, zlib.crc32(data)
    if isinstance(value, bytes):
        return len(value), zlib.crc32(value)
    if isinstance(value, dict):
        return [(key, _mark(inner)) for key, inner in value.items()]
    return [_mark(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def refuse_different(marks_of: list[dict[str, int]]) -> None:
    """Raise CheckpointError where ranks hold different values under a name that is saved once."""
    for name in sorted({name for of_rank in marks_of for name in of_rank}):
        first = marks_of[0].get(name)
        others = [rank for rank, of_rank in enumerate(marks_of) if of_rank.get(name) != first]
        if others:
            raise CheckpointError(
                "ranks hold different values under one name: all but rank 0's would be lost",
                where={"state": name},
                seen=f"other than rank 0's on ranks {', '.join(map(str, others[:10]))}",
                hint=f'mark it: {{"{name}": per_rank(...)}}; or save what is the same on every rank',
            )


def share_of(state: Mapping[str, Any], own: list[bytes], group: JobRanks, buffers: Buffers) -> Share:
    """What this rank writes, copied: training may go on. A collective for FSDP1.

    Args:
        state: the user's.
        own: by rank, what each told of its own; rank 0 writes it.
        group: all ranks.
        buffers: for the copy, of the save in flight until it has ended.
    """
    try:
        values = _collect(state)
        mine, layout = _shared_out(state, values, group)
        copies = buffers.copy(mine)
        for rank, data in enumerate(own if group.rank == 0 else []):
            copies.update({(f"{name}@{rank}",): tree for name, tree in loads(data).items()})
        return Share(copies, [*values, *(path for path in copies if path not in values)], layout)
    except Exception as error:
        return Share({}, [], failed=error)


def _shared_out(state: Mapping[str, Any], values: Mapping[Path, Any], group: JobRanks) -> tuple[dict[Path, Any], int]:
    """This rank's parts, and its share of the tensors that all ranks hold alike; and a number for how that was done.

    The tensors are shared out by their sizes, alike in every rank, so nobody is asked. The rest is rank 0's: plain
    values, and buffers of models, which ranks may hold differently (running means): DDP goes on with those of rank 0.
    """
    sharers = group.world_size if group.writers is not None else 1
    models = {name: bare(value) for name, value in state.items() if is_model(value)}
    parameters = {(name, key) for name, model in models.items() for key, _ in model.named_parameters()}
    alike = {
        path: value.nbytes
        for path, value in values.items()
        if isinstance(value, torch.Tensor)
        and not is_part(value)
        and (path[0] not in models or (path[0], flat(path[1:])) in parameters)
    }
    least, writer = [(0, rank) for rank in range(sharers)], dict.fromkeys(values, 0)
    for path in sorted(alike, key=lambda path: -alike[path]):
        size, writer[path] = least[0]
        heapq.heapreplace(least, (size + alike[path], writer[path]))
    mine = {path: value for path, value in values.items() if is_part(value) or writer[path] == group.rank}
    return mine, zlib.crc32(repr(alike).encode())


def _collect(state: Mapping[str, Any]) -> dict[Path, Any]:
    """The values that all ranks save together, by path: live tensors, or parts of them. A collective for FSDP1."""
    found: dict[Path, Any] = {}
    for name, value in state.items():
        if not isinstance(value, per_rank):
            found.update(leaves(shared_tree(name, state), (name,)))
    twice = [name for name, count in Counter(map(flat, found)).items() if count > 1]
    if twice:
        raise CheckpointError(
            "two values of the state have one name when its dicts are joined by dots",
            where={"state": twice[0]},
            hint="rename one of them",
        )
    return found


def shared_tree(name: str, state: Mapping[str, Any]) -> Any:
    """What is saved under one name that all ranks share. A collective for FSDP1."""
    value = state[name]
    model = model_of(name, state) if is_optimizer(value) else None
    if is_fsdp1(value):
        return torchs.get_model_state_dict(value)
    if is_fsdp1(model):
        return torchs.get_optimizer_state_dict(model, value)
    if model is None:
        return tree_in(bare(value))
    names, held = parameter_names(value, model), value.state_dict()
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in held["param_groups"]]
    return {"state": {names[index]: inner for index, inner in held["state"].items()}, "param_groups": groups}
