"""A user's state as values by path, and back: what is saved of models, optimizers, whatever else, and of each rank.

Optimizers are saved by the names of the model's parameters, as torch.distributed.checkpoint.state_dict does it, so a
save does not depend on how a model is wrapped or over how many ranks it is sharded.
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from ..errors import CheckpointError
from .dcp import Path, flat

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_DICTS = (dict, OrderedDict, Counter)
"""As torch.load(weights_only=True) has them; a scheduler's milestones are a Counter."""

_COMPARED_BYTES = 1 << 20
"""Of a tensor beside models and optimizers: beyond it, it is not compared between ranks."""


class per_rank:
    """Marks a value of which each rank has its own: a loader's state, random numbers.

    Args:
        value: with ``state_dict`` and ``load_state_dict``, or a plain value, which a restore replaces.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


def require_names(state: object) -> None:
    """Raise CheckpointError unless a user's state is a dict by names."""
    if not isinstance(state, MutableMapping) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(
            "the state is not a dict by names",
            seen=f"{type(state).__module__}.{type(state).__qualname__}",
            expected='{"model": model, "optimizer": optimizer, ...}',
        )


# --- what is in it ----------------------------------------------------------------------------------------------------
def is_model(value: Any) -> bool:
    """Whether it is torch's Module."""
    import torch

    return isinstance(value, torch.nn.Module)


def is_optimizer(value: Any) -> bool:
    """Whether it is torch's Optimizer."""
    import torch

    return isinstance(value, torch.optim.Optimizer)


def is_fsdp1(value: Any) -> bool:
    """Whether it is a model with torch's FullyShardedDataParallel anywhere: its state_dict() is a collective."""
    wrapper = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    return is_model(value) and any(isinstance(inner, wrapper) for inner in value.modules())


def is_sharded(state: Mapping[str, Any]) -> bool:
    """Whether each rank holds a part of a model's parameters: DTensors (FSDP2, tensor parallel), or FSDP1's."""
    found = any(is_fsdp1(value) for value in state.values())
    for value in state.values():
        if is_model(value):
            found = found or any(is_part(parameter) for parameter in value.parameters())
        elif not is_optimizer(value) and not isinstance(value, per_rank):
            found = found or any(is_part(leaf) for _, leaf in leaves(tree_in(value)))
    return found


def is_part(value: Any) -> bool:
    """Whether it is this rank's part of a tensor.

    Where nobody has imported DTensor there are none, and importing it costs a rank a second."""
    kinds = [("torch.distributed.tensor", "DTensor"), ("torch.distributed._shard.sharded_tensor", "ShardedTensor")]
    return isinstance(value, tuple(getattr(sys.modules[name], kind) for name, kind in kinds if name in sys.modules))


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor, or a part of one."""
    import torch

    return isinstance(value, torch.Tensor) or is_part(value)


def bare(value: Any) -> Any:
    """A model without the wrappers that put a prefix on its names: DistributedDataParallel, torch.compile."""
    import torch

    while True:
        if isinstance(value, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            value = value.module
        elif isinstance(value, torch.nn.Module) and "_orig_mod" in value._modules:
            value = value._modules["_orig_mod"]
        else:
            return value


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
    import torch

    return isinstance(value, (torch.Tensor, dict)) or (type(value) is list and any(_is_inner(one) for one in value))


def tree_of(values: Mapping[Path, Any]) -> Any:
    """The inverse of :func:`leaves`."""
    if () in values:
        return values[()]
    heads: dict[Any, dict[Path, Any]] = {}
    for (head, *rest), value in values.items():
        heads.setdefault(head, {})[tuple(rest)] = value
    inner = {head: tree_of(below) for head, below in heads.items()}
    return [inner[index] for index in sorted(inner)] if type(next(iter(inner))) is int else inner


# --- save -------------------------------------------------------------------------------------------------------------
def check(state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if something in it could not be loaded again without unpickling; names it.

    No collective: what a sharded model holds is not asked for.
    """
    require_names(state)
    for name, value in state.items():
        if not is_model(value):
            _check(tree_in(value), name)
        if is_optimizer(value) and is_sharded(state):
            model_of(name, state)


def _check(value: Any, name: str) -> None:
    import torch

    kind = type(value)
    if kind in _DICTS:
        for key, inner in value.items():
            _check(key, f"{name}.{key} (a key)")
            _check(inner, f"{name}.{key}")
    elif kind in (list, tuple):
        for index, inner in enumerate(value):
            _check(inner, f"{name}.{index}")
    elif not is_tensor(value) and kind not in (
        *_PLAIN,
        *(torch.Size, torch.dtype, torch.device),
    ):
        raise CheckpointError(
            "this value cannot be loaded again without unpickling",
            where={"state": name},
            seen=f"{kind.__module__}.{kind.__qualname__}",
            expected="tensors, numbers, text, bytes, None, and dicts, lists and tuples of these",
            hint="save it as one of these (an array: torch.from_numpy or .tolist())",
        )


def tree_in(value: Any) -> Any:
    """What is saved of one value."""
    value = value.value if isinstance(value, per_rank) else value
    return value.state_dict() if has_state(value) else value


def has_state(value: Any) -> bool:
    """Whether it saves and loads itself."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def of_this_rank(state: Mapping[str, Any]) -> dict[str, Any]:
    """The trees of what each rank has its own of."""
    return {name: tree_in(value) for name, value in state.items() if isinstance(value, per_rank)}


def marks(state: Mapping[str, Any]) -> dict[str, int]:
    """A number for each name that all ranks must hold alike, beside models and optimizers."""
    plain = {n: v for n, v in state.items() if not (is_model(v) or is_optimizer(v) or isinstance(v, per_rank))}
    return {name: zlib.crc32(repr(_mark(tree_in(value))).encode()) for name, value in plain.items()}


def _mark(value: Any) -> Any:
    import torch

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


def collect(state: Mapping[str, Any]) -> dict[Path, Any]:
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
    if is_fsdp1(value):
        from torch.distributed.checkpoint import state_dict as dcp

        return dcp.get_model_state_dict(value)
    if is_optimizer(value):
        return _optimizer_tree(name, state)
    return bare(value).state_dict() if is_model(value) else tree_in(value)


def _optimizer_tree(name: str, state: Mapping[str, Any]) -> Any:
    optimizer, model = state[name], model_of(name, state)
    if model is None:
        return optimizer.state_dict()
    if is_fsdp1(model):
        from torch.distributed.checkpoint import state_dict as dcp

        return dcp.get_optimizer_state_dict(model, optimizer)
    names = parameter_names(optimizer, model)
    held = optimizer.state_dict()
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in held["param_groups"]]
    return {"state": {names[index]: value for index, value in held["state"].items()}, "param_groups": groups}


def parameter_names(optimizer: Any, model: Any) -> list[str]:
    """The model's names of what the optimizer counts."""
    names = {id(parameter): name for name, parameter in bare(model).named_parameters(remove_duplicate=True)}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


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
