"""The state of sharded models and their optimizers, by names that do not depend on the number of ranks.

torch.distributed.checkpoint.state_dict gives an optimizer's state by the names of the model's parameters, so each
optimizer goes with the model that it steps.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

from ..errors import CheckpointError
from . import trees


def is_sharded(state: Mapping[str, Any]) -> bool:
    """Whether each rank holds a part of a model's parameters: DTensors (FSDP2, tensor parallel), or FSDP1's.

    FSDP1's look like any tensor, but its state_dict() is a collective: rank 0 alone would gather what other ranks
    compute with, save its own part of the optimizer, and wait for ever.
    """
    modules = [value for value in state.values() if _is_model(value)]
    return is_fsdp1(state) or any(_is_dtensor(parameter) for module in modules for parameter in module.parameters())


def is_fsdp1(state: Mapping[str, Any]) -> bool:
    """Whether a model in it has torch's FullyShardedDataParallel anywhere."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrapper = getattr(fsdp, "FullyShardedDataParallel", ())
    return any(isinstance(inner, wrapper) for value in state.values() if _is_model(value) for inner in value.modules())


def _is_dtensor(value: Any) -> bool:
    """Where nobody has imported them there are none, and importing them costs a rank a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def collect(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state as a tree; the tensors of models and optimizers are the live ones, or DTensors of them."""
    from torch.distributed.checkpoint import state_dict as dcp

    tree: dict[str, Any] = {}
    for name, value in state.items():
        if _is_model(value):
            tree[name] = dcp.get_model_state_dict(trees.bare(value))
        elif _is_optimizer(value):
            tree[name] = dcp.get_optimizer_state_dict(model_of(name, state), value)
        else:
            tree[name] = value.state_dict() if trees.has_state(value) else value
    return tree


def distribute(state: MutableMapping[str, Any], tree: Mapping[str, Any]) -> None:
    """The inverse of :func:`collect`."""
    from torch.distributed.checkpoint import state_dict as dcp

    for name, value in tree.items():
        if _is_model(state[name]):
            dcp.set_model_state_dict(trees.bare(state[name]), value)
        elif _is_optimizer(state[name]):
            dcp.set_optimizer_state_dict(model_of(name, state), state[name], value)
        elif trees.has_state(state[name]):
            state[name].load_state_dict(value)
        else:
            state[name] = value


def joint(state: Mapping[str, Any], split: trees.Split) -> dict[str, Any]:
    """The tensors that all ranks save together: of models, of optimizers, and those of which each rank holds a part."""

    def is_joint(flat: str, tensor: Any) -> bool:
        value = state[split.owner[flat]]
        return _is_model(value) or _is_optimizer(value) or _is_dtensor(tensor)

    return {flat: tensor for flat, tensor in split.tensors.items() if is_joint(flat, tensor)}


def parted(state: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of whole tensors, as :func:`trees.collect` makes it, with this rank's parts where the state has such.

    An optimizer's tensors are parted as the parameters that they belong to. A collective, where there is any DTensor.
    """
    found = dict(tree)
    for name, saved in tree.items():
        value: Any = state.get(name)
        if _is_model(value):
            live = trees.bare(value).state_dict()
            found[name] = {key: _like(entry, live.get(key)) for key, entry in saved.items()}
        elif _is_optimizer(value):
            stepped = dict(enumerate(parameter for group in value.param_groups for parameter in group["params"]))
            of_each = {
                index: {key: _like(entry, stepped.get(index)) for key, entry in held.items()}
                for index, held in saved["state"].items()
            }
            found[name] = {**saved, "state": of_each}
    return found


def _like(value: Any, live: Any) -> Any:
    import torch

    if _is_dtensor(live) and isinstance(value, torch.Tensor) and value.shape == live.shape:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value.to(live.device), live.device_mesh, live.placements)
    return value


def model_of(name: str, state: Mapping[str, Any]) -> Any:
    """The model in the state that holds all parameters of the optimizer of that name.

    Raises:
        CheckpointError: none does.
    """
    stepped = {id(parameter) for group in state[name].param_groups for parameter in group["params"]}
    for value in state.values():
        if _is_model(value):
            model = trees.bare(value)
            if stepped <= {id(parameter) for parameter in model.parameters()}:
                return model
    raise CheckpointError(
        "an optimizer cannot be saved without the model that it steps",
        where={"state": name},
        seen=f"models: {', '.join(key for key, value in state.items() if _is_model(value)) or 'none'}",
        hint="put the model with all of its parameters into the state, and one optimizer for each",
    )


def _is_model(value: Any) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)


def _is_optimizer(value: Any) -> bool:
    import torch

    return isinstance(value, torch.optim.Optimizer)
