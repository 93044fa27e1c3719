"""A save into a user's state: what it is read into, and how it is handed out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

from ..errors import CheckpointError
from . import saves
from .dcp import Path, SavedFiles, flat
from .group import JobRanks
from .state import (
    bare,
    has_state,
    is_fsdp1,
    is_model,
    is_optimizer,
    is_part,
    is_tensor,
    leaves,
    model_of,
    parameter_names,
    per_rank,
    shared_tree,
    tree_in,
    tree_of,
)
from .store import Store

logger = logging.getLogger(__name__)


def read(store: Store, name: str, state: Mapping[str, Any], group: JobRanks) -> dict[str, Any]:
    """What one save holds of the names in the state, as trees of this rank; its models' own tensors are overwritten.

    Raises:
        DamagedError: the save is not whole.
        CheckpointError: it is whole, and not of this state.
    """
    manifest = saves.read_manifest(store, name)
    missing = sorted(set(state) - set(manifest.names))
    if missing:
        raise CheckpointError(
            "the save does not hold what is to be resumed",
            seen=f"saved: {', '.join(sorted(manifest.names)) or 'nothing'}",
            expected=", ".join(sorted(state)),
            hint="give restore() names that save() was given; add new ones after it",
        )
    saved = SavedFiles(store, name, manifest)
    own = {f"{key}@{group.rank}": key for key in state if key in manifest.per_rank}
    if own and manifest.world_size != group.world_size:
        logger.warning(
            f"{', '.join(own.values())}: not restored, for {manifest.world_size} ranks have saved their own, and "
            f"there are {group.world_size} now"
        )
        own = {}
    shared = set(state) - set(manifest.per_rank)
    wanted = {key: path for key, path in saved.paths.items() if path[0] in shared or path[0] in own}
    known = saved.metadata.state_dict_metadata
    made = templates(state, {path: known[key] for key, path in wanted.items()})
    saved.load(made)
    found = tree_of({path: made[key] for key, path in wanted.items()}) if wanted else {}
    return {own.get(head, head): tree[0] if head in own else tree for head, tree in found.items()}


def templates(state: Mapping[str, Any], saved: Mapping[Path, Any]) -> dict[str, Any]:
    """What a save is to be read into: this rank's live tensors or parts of them, new tensors where there is none.

    Args:
        state: the user's.
        saved: by path, what torch's metadata says of each value to be read.

    Raises:
        CheckpointError: the save has other tensors, or of other sizes, than a model here.
    """
    import torch

    live: dict[Path, Any] = {}
    like: dict[Path, Any] = {}
    for name, value in state.items():
        model = model_of(name, state) if is_optimizer(value) else None
        if is_model(value) or is_fsdp1(model):
            live.update(leaves(shared_tree(name, state), (name,)))
        elif model is not None:
            like.update({(name, "state", key): one for key, one in bare(model).named_parameters()})
        elif not is_optimizer(value) and not isinstance(value, per_rank):
            live.update(leaves(tree_in(value), (name,)))
    _same_names(state, live, saved)
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


def _same_names(state: Mapping[str, Any], live: Mapping[Path, Any], saved: Mapping[Path, Any]) -> None:
    for name, value in state.items():
        if not is_model(value):
            continue
        here = {path: tuple(one.shape) for path, one in live.items() if path[0] == name and hasattr(one, "shape")}
        there = {path: tuple(one.size) for path, one in saved.items() if path[0] == name and hasattr(one, "size")}
        if here != there:
            differ = sorted(flat(path) for path in here.keys() & there.keys() if here[path] != there[path])
            raise CheckpointError(
                "the tensors that are saved are not those of the model",
                where={"state": name},
                seen=f"only saved: {_some(there.keys() - here.keys())}; "
                f"only here: {_some(here.keys() - there.keys())}; of another size: {', '.join(differ[:5]) or 'none'}",
                hint="restore into the model that was saved",
            )


def _some(paths: set[Path]) -> str:
    listed = sorted(map(flat, paths))
    return (", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")) or "none"


def distribute(state: MutableMapping[str, Any], trees: Mapping[str, Any]) -> None:
    """Load what was read: objects load, plain values are replaced. A collective for FSDP1.

    Args:
        state: the user's.
        trees: by its names.
    """
    for name, tree in trees.items():
        value = state[name]
        if is_optimizer(value):
            _load_optimizer(name, state, tree)
        elif is_fsdp1(value):
            from torch.distributed.checkpoint import state_dict as dcp

            dcp.set_model_state_dict(value, tree)
        elif isinstance(value, per_rank) and has_state(value.value):
            value.value.load_state_dict(tree)
        elif isinstance(value, per_rank):
            value.value = tree
        elif has_state(value):
            bare(value).load_state_dict(tree)
        else:
            state[name] = tree


def _load_optimizer(name: str, state: Mapping[str, Any], tree: Any) -> None:
    optimizer, model = state[name], model_of(name, state)
    if model is None:
        optimizer.load_state_dict(tree)
    elif is_fsdp1(model):
        from torch.distributed.checkpoint import state_dict as dcp

        dcp.set_optimizer_state_dict(model, optimizer, tree)
    else:
        names = parameter_names(optimizer, model)
        places = {key: index for index, key in enumerate(names)}
        groups = [{**group, "params": [places[key] for key in group["params"]]} for group in tree["param_groups"]]
        held = {places[key]: value for key, value in tree.get("state", {}).items()}
        optimizer.load_state_dict({"state": held, "param_groups": groups})
