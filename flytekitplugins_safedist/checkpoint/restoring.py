"""A save into a user's state: what it is read into, and how it is handed out. Imports torch, as :mod:`.dcp`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict as torchs

from ..errors import CheckpointError
from .dcp import Path, SavedFiles, flat, is_part, is_tensor
from .group import JobRanks, per_rank
from .state import (
    bare,
    has_state,
    is_fsdp1,
    is_model,
    is_optimizer,
    leaves,
    model_of,
    parameter_names,
    shared_tree,
    tree_of,
)

logger = logging.getLogger(__name__)


def read(saved: SavedFiles, state: Mapping[str, Any], group: JobRanks) -> dict[str, Any]:
    """What one save holds of the names in the state, as trees of this rank; its models' own tensors are overwritten.

    Raises:
        DamagedError: the save is not whole.
        CheckpointError: it is whole, and not of this state.
    """
    manifest = saved.manifest
    if missing := set(state) - set(manifest.names):
        raise CheckpointError(
            "the save does not hold what is to be resumed",
            where={"missing": ", ".join(sorted(missing))},
            seen=f"saved: {', '.join(sorted(manifest.names)) or 'nothing'}",
            expected=", ".join(sorted(state)),
            hint="give restore() names that save() was given; add new ones after it",
        )
    own = {f"{key}@{group.rank}": key for key in state if key in manifest.per_rank}
    if own and manifest.world_size != group.world_size:
        logger.warning(
            f"{', '.join(own.values())}: not restored, for {manifest.world_size} ranks have saved their own, and "
            f"there are {group.world_size} now"
        )
        own = {}
    heads = own.keys() | (state.keys() - set(manifest.per_rank))
    known = saved.metadata.state_dict_metadata
    wanted = {path: known[key] for key, path in saved.metadata.planner_data.items() if path[0] in heads}
    made = _templates(state, wanted)
    saved.load(made)
    found = tree_of({path: made[flat(path)] for path in wanted}) if wanted else {}
    return {own.get(head, head): tree for head, tree in found.items()}


def _templates(state: Mapping[str, Any], saved: Mapping[Path, Any]) -> dict[str, Any]:
    """What a save is to be read into: this rank's live tensors or parts of them, new tensors where there is none.

    Args:
        state: the user's.
        saved: by path, what torch's metadata says of each value to be read.

    Raises:
        CheckpointError: the save has other tensors, or of other sizes, than a model here.
    """
    live: dict[Path, Any] = {}
    like: dict[Path, Any] = {}
    for name, value in state.items():
        model = model_of(name, state) if is_optimizer(value) else None
        if model is not None and not is_fsdp1(model):
            like.update({(name, "state", key): one for key, one in bare(model).named_parameters()})
        elif not isinstance(value, per_rank) and (model is not None or not is_optimizer(value)):
            live.update(leaves(shared_tree(name, state), (name,)))
        if is_model(value):
            _refuse_another(name, live, saved)
    made: dict[str, Any] = {}
    for path, what in saved.items():
        size, mine, parameter = getattr(what, "size", None), live.get(path), like.get(path[:3])
        if size is None:
            made[flat(path)] = b""
        elif is_tensor(mine):
            made[flat(path)] = mine.detach() if isinstance(mine, torch.Tensor) else mine
        elif parameter is not None and is_part(parameter) and size == parameter.shape:
            made[flat(path)] = torch.empty_like(parameter, dtype=what.properties.dtype).detach()
        else:
            made[flat(path)] = torch.empty(size, dtype=what.properties.dtype)
    return made


def _refuse_another(name: str, live: Mapping[Path, Any], saved: Mapping[Path, Any]) -> None:
    here = {(flat(path), *one.shape) for path, one in live.items() if path[0] == name and hasattr(one, "shape")}
    there = {(flat(path), *one.size) for path, one in saved.items() if path[0] == name and hasattr(one, "size")}
    if here != there:
        raise CheckpointError(
            "the tensors that are saved are not those of the model",
            where={"state": name},
            seen=f"only saved: {_listed(there - here)}; only here: {_listed(here - there)}",
            hint="restore into the model that was saved",
        )


def _listed(tensors: set[tuple[Any, ...]]) -> str:
    shown = [f"{key} {size}" for key, *size in sorted(tensors)[:5]]
    return ", ".join(shown) + (f" and {len(tensors) - 5} more" if len(tensors) > 5 else "") or "none"


def distribute(state: MutableMapping[str, Any], trees: Mapping[str, Any]) -> None:
    """Load what was read: objects load, plain values are replaced. A collective for FSDP1.

    Args:
        state: the user's.
        trees: by its names.
    """
    for name, tree in trees.items():
        value = state[name]
        model = model_of(name, state) if is_optimizer(value) else None
        target = bare(value.value if isinstance(value, per_rank) else value)
        if is_fsdp1(value):
            torchs.set_model_state_dict(value, tree)
        elif is_fsdp1(model):
            torchs.set_optimizer_state_dict(model, value, tree)
        elif model is not None:
            value.load_state_dict(_counted(tree, parameter_names(value, model)))
        elif has_state(target):
            target.load_state_dict(tree)
        elif isinstance(value, per_rank):
            value.value = tree
        else:
            state[name] = tree


def _counted(tree: Any, names: list[str]) -> dict[str, Any]:
    """An optimizer's tree by numbers, as it takes it, from that by names."""
    number = {key: index for index, key in enumerate(names)}
    groups = [{**group, "params": [number[key] for key in group["params"]]} for group in tree["param_groups"]]
    return {"state": {number[key]: one for key, one in tree.get("state", {}).items()}, "param_groups": groups}
