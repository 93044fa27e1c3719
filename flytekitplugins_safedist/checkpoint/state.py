"""A user's state as values by path: what is saved of models, optimizers and whatever else, and how they take it again.

torch's own functions (torch.distributed.checkpoint.state_dict) give the names of an optimizer's parameters, and all of
FSDP1: so a save does not depend on how a model is wrapped, in which order its parameters are stepped, or over how many
ranks it is sharded. Imports torch, as :mod:`.pieces`.
"""

from __future__ import annotations

import contextlib
import warnings
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.nn.parallel import DistributedDataParallel

from ..compat import torch as torch_inside
from ..errors import CheckpointError
from .group import JobRanks, of_rank_0, per_rank
from .pieces import (
    Path,
    Piece,
    dtype_of,
    flat,
    holders_of,
    is_part,
    is_tensor,
    marks,
    parts,
    pieces_of,
    without_autograd,
)
from .values import to_bytes

Items = Mapping[Path, Mapping[str, Any]]
"""What a save holds, by path: see :class:`~.saves.Manifest`."""

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
"""Under which torch.compile and checkpoint_wrapper hold the module that they wrap."""


# --- trees ------------------------------------------------------------------------------------------------------------
def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The values of a tree, by path. What holds no tensor is one value, however large."""
    kind = type(tree)
    if kind in (dict, OrderedDict, list, tuple) and _holds_tensor(tree):
        for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
            step = ("tuple", key) if kind is tuple else key if kind is list or type(key) is str else ("key", key)
            yield from leaves(inner, (*path, step))
    else:
        yield path, tree


def _holds_tensor(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(map(_holds_tensor, tree.values())) and all(type(key) in (str, int) for key in tree)
    return any(map(_holds_tensor, tree)) if type(tree) in (list, tuple) else isinstance(tree, torch.Tensor)


def path_of(keys: Iterable[Any]) -> Path:
    """A path that came through JSON."""
    return tuple(tuple(key) if isinstance(key, list) else key for key in keys)


def tree_of(values: Mapping[Path, Any]) -> Any:
    """The inverse of :func:`leaves`."""
    if () in values:
        return values[()]
    heads: dict[Any, dict[Path, Any]] = {}
    for (head, *rest), value in values.items():
        heads.setdefault(head, {})[tuple(rest)] = value
    inner = {head: tree_of(below) for head, below in heads.items()}
    first = next(iter(inner))
    if type(first) is int or (type(first) is tuple and first[0] == "tuple"):
        return (list if type(first) is int else tuple)(inner[index] for index in sorted(inner))
    return {key[1] if isinstance(key, tuple) else key: value for key, value in inner.items()}


# --- models and optimizers --------------------------------------------------------------------------------------------
def _is_model(value: Any) -> bool:
    return isinstance(value, torch.nn.Module)


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer)


def _is_fsdp1(model: torch.nn.Module | None) -> bool:
    return model is not None and any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def is_trained(value: Any) -> bool:
    """Whether it is a model or an optimizer."""
    return _is_model(_inner(value)) or _is_optimizer(_inner(value))


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _inner(value: Any) -> Any:
    return value.value if isinstance(value, per_rank) else value


def is_own(value: Any) -> bool:
    """Whether each rank has its own of it."""
    return isinstance(value, per_rank) and not isinstance(value, of_rank_0)


def _prefixes(module: torch.nn.Module, prefix: str = "", name: str = "") -> Iterator[tuple[str, str]]:
    """Prefixes of the names in a ``state_dict()``, with what they are without wrappers.

    As torch's functions have them; but these lose a module that is in a model twice (torch 2.15,
    ``_iterate_valid_model_state``), and fail for a key that is no attribute.
    """
    yield prefix, name
    for key, child in module._modules.items():
        is_wrapped = key in _WRAPPED or (isinstance(module, DistributedDataParallel) and key == "module")
        if child is not None:
            yield from _prefixes(child, f"{prefix}{key}.", name if is_wrapped else f"{name}{key}.")


def _names(model: torch.nn.Module) -> dict[str, str]:
    """For each key of its ``state_dict()`` the name without wrappers."""
    prefixes, names = dict(_prefixes(model)), {}
    for key in model.state_dict():
        ends = [key[: at + 1] for at, letter in enumerate(key) if letter == "."]
        longest = next((end for end in reversed(ends) if end in prefixes), "")
        names[key] = prefixes[longest] + key.removeprefix(longest)
    return names


def _model_tree(model: torch.nn.Module) -> dict[str, Any]:
    """A model's tensors by name. A collective for FSDP1."""
    torch_inside.reshard(model)  # FSDP2 keeps the root's parameters whole after a forward alone
    if _is_fsdp1(model):
        with torch_inside.sharded_tensors_without_a_part():
            return dict(torchs.get_model_state_dict(model))
    names = _names(model)
    return {names[key]: value for key, value in model.state_dict().items()}


def _model_of(name: str, state: Mapping[str, Any]) -> torch.nn.Module | None:
    """What holds all parameters of the optimizer of that name: a model in the state, or all of them; None where there
    are others, or each rank has its own.

    Raises:
        CheckpointError: there are, and sharded ones: their parts could not be told apart.
    """
    if isinstance(state[name], per_rank):
        return None
    models = {key: value for key, value in state.items() if _is_model(value)}
    for model in models.values():
        torch_inside.reshard(model)
    stepped = {id(parameter) for group in state[name].param_groups for parameter in group["params"]}
    together = torch.nn.ModuleDict({f"{key.replace('.', '/')}/": model for key, model in models.items()})
    for model in (*models.values(), together):
        if stepped <= {id(parameter) for parameter in model.parameters()}:
            return model
    if any(is_part(parameter) for group in state[name].param_groups for parameter in group["params"]):
        raise CheckpointError(
            "an optimizer of a sharded model cannot be saved without that model",
            where={"state": name},
            seen=f"models: {', '.join(models) or 'none'}",
            hint="put the model with all of its parameters into the state",
        )
    return None


@contextlib.contextmanager
def _about_to_step(optimizer: Any) -> Iterator[None]:
    """Inside, a parameter has a gradient. torch's functions make an optimizer a state where it has none, by a step with
    lr 0, which moves the parameters of some optimizers and counts in others; but not of one that is about to step."""
    least = min((each for group in optimizer.param_groups for each in group["params"]), key=lambda each: each.numel())
    before = least.grad
    least.grad = torch.zeros_like(least) if before is None else before
    try:
        yield
    finally:
        least.grad = before


def _optimizer_tree(model: torch.nn.Module | None, optimizer: Any) -> Any:
    """An optimizer's state by the model's names; by numbers, as it has it, without a model. A collective for FSDP1."""
    if model is None:
        return optimizer.state_dict()
    with _about_to_step(optimizer):
        return torchs.get_optimizer_state_dict(model, optimizer)


def _tree(name: str, state: Mapping[str, Any]) -> Any:
    value = _inner(state[name])
    if _is_model(value):
        return _model_tree(value)
    if _is_optimizer(value):
        return _optimizer_tree(_model_of(name, state), value)
    return value.state_dict() if _has_state(value) else value


# --- save -------------------------------------------------------------------------------------------------------------
def _check(state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if something in it cannot be saved at all; names it."""
    if not isinstance(state, MutableMapping) or not all(isinstance(name, str) for name in state):
        seen = f"{type(state).__module__}.{type(state).__qualname__}"
        expected = '{"model": model, "optimizer": optimizer}'
        raise CheckpointError("the state is not a dict by names", seen=seen, expected=expected)
    for name, value in state.items():
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(_inner(value)).__mro__):
            raise CheckpointError(
                "each rank holds the state of other parameters: it is a ZeroRedundancyOptimizer",
                where={"state": name},
                hint=f'shard by fully_shard(), or save {{"{name}": per_rank(optimizer.optim)}} for as many ranks again',
            )


@without_autograd
def collect(state: Mapping[str, Any], ranks: JobRanks, *, of_models: bool) -> list[Piece]:
    """What this rank holds of models and their optimizers, or of all else. The former is a collective for FSDP1.

    Raises:
        CheckpointError: the state is none, or something could not be loaded again; names it.
    """
    if not of_models:
        _check(state)
    trees = _trees([name for name in state if _is_of_models(name, state) == of_models], state)
    return [piece for name, tree in trees.items() for piece in _pieces(name, tree, state, ranks)]


def _is_of_models(name: str, state: Mapping[str, Any]) -> bool:
    """Whether it is saved with what all ranks have of a model."""
    return _is_model(state[name]) or (_is_optimizer(state[name]) and _model_of(name, state) is not None)


def _in_order(names: Iterable[str], state: Mapping[str, Any]) -> list[str]:
    """The names, those first whose trees are collectives: a rank that fails in another one has come to all of these.
    Then models: what lies in a model's memory, too, is read into other memory."""

    def is_collective(name: str) -> bool:
        value = state[name]
        return _is_fsdp1(_model_of(name, state) if _is_optimizer(value) else value if _is_model(value) else None)

    return sorted(names, key=lambda name: (not is_collective(name), not _is_model(state[name])))


def _trees(names: Iterable[str], state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _tree(name, state) for name in _in_order(names, state)}


def _pieces(name: str, tree: Any, state: Mapping[str, Any], ranks: JobRanks) -> Iterator[Piece]:
    value, me = state[name], (ranks.rank,)
    if isinstance(value, of_rank_0) and ranks.rank:
        return
    own, buffers = isinstance(value, per_rank), _buffers_of_rank_0(value) if _is_model(value) else set()
    for path, leaf in leaves(tree, (f"{name}@{ranks.rank}" if is_own(value) else name,)):
        if not is_tensor(leaf) or (own and is_part(leaf)):
            yield Piece(path, to_bytes(leaf, flat(path)), me if own else tuple(range(ranks.size)))
        elif is_part(leaf) and any(one == "state" and type(other) is tuple for one, other in pairwise(path)):
            raise CheckpointError(
                "the state of a sharded optimizer has numbers in the place of names: a restore could not shard it",
                where={"state": name},
                hint='put the optimizers themselves into the state, {"muon": both.muon, ...}, and the model',
            )
        elif is_part(leaf) or leaf.data_ptr() not in buffers:
            yield from pieces_of(path, leaf, ranks, me if own else holders_of(leaf, ranks))
        elif ranks.rank == 0:
            yield from pieces_of(path, leaf, ranks, me)


def _buffers_of_rank_0(model: torch.nn.Module) -> set[int]:
    """Where buffers lie of which rank 0's are right: running means, and all that DistributedDataParallel hands on."""
    hands_on = any(isinstance(each, DistributedDataParallel) and each.broadcast_buffers for each in model.modules())
    normed = [each for each in model.modules() if "running_mean" in each._buffers]
    return {each.data_ptr() for module in ([model] if hands_on else normed) for each in module.buffers()}


# --- restore ----------------------------------------------------------------------------------------------------------
@without_autograd
def targets(state: Mapping[str, Any], heads: Mapping[str, str], items: Items) -> dict[Path, Any]:
    """What a save is to be read into, by path: this rank's own tensors, or parts of them, and new ones where there is
    none; None for what is no tensor. A collective for FSDP1.

    Args:
        state: the user's.
        heads: of its names those that are restored, with their names in the save.
        items: what the save holds of them.

    Raises:
        CheckpointError: the save has other tensors than a model here, or of other sizes.
    """
    into, memory, wanted_of = dict[Path, Any](), _Memory(), dict[str, dict[Path, Any]]()
    for path, item in items.items():
        wanted_of.setdefault(path[0], {})[path] = item
    for name in _in_order(heads, state):
        value, wanted = state[name], wanted_of.get(heads[name], {})
        like: dict[Path, Any] = {}
        if _is_optimizer(value) and (model := _model_of(name, state)) is not None:
            like = {(name, "state", *path): each for path, each in leaves(_model_tree(model))}
            states = [(path, item) for path, item in wanted.items() if len(path) > 3 and item["size"] is not None]
            is_odd = any(_is_sharded(item) and not _fits(like.get(path[:3]), item) for path, item in states)
            if is_odd or (states and _is_fsdp1(model)):  # a state as it will be, by a step, which is overwritten next
                torchs.get_optimizer_state_dict(model, value)
        live = {} if isinstance(value, per_rank) else dict(leaves(_tree(name, state), (name,)))
        if _is_model(value):
            _refuse_another(name, value, live, wanted)
        for path, item in wanted.items():
            here = live.get(path)
            into[path] = _target(here, like.get(path[:3]), item, memory, casts=_is_model(value))
    return into


class _Memory:
    """What is read into already. Where two values lie in one memory here and are two in the save (averaged weights that
    begin as the weights themselves), reading both into it would make one of them the other."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int, Any]] = []

    def take(self, live: Any, item: Mapping[str, Any]) -> bool:
        """Whether ``item`` may be read into ``live``: nothing is, or the same bytes."""
        content = [(offsets, crc) for offsets, *_, crc in item["chunks"]]
        for _, part in parts(live):
            if not part.numel():
                continue
            words = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True)) + 1
            span = part.data_ptr(), part.data_ptr() + words * part.element_size(), content
            at = bisect_left(self._spans, span[1], key=lambda each: each[0])  # the first that begins after it
            before = self._spans[at - 1] if at else (0, 0, None)
            if before[1] <= span[0]:
                self._spans.insert(at, span)
            elif before != span:
                return False
        return True


def _target(live: Any, like: Any, item: Mapping[str, Any], memory: _Memory, *, casts: bool) -> Any:
    if item["size"] is None:
        return None
    dtype = dtype_of(item["dtype"])
    if _fits(live, item) and (casts or live.dtype == dtype) and (is_part(live) or 0 not in live.stride()):
        return live if memory.take(live, item) else torch.empty_like(live.detach())
    if isinstance(like, torch.Tensor) and _fits(like, item):
        return torch.empty_like(like.detach(), dtype=dtype)
    return torch.empty(item["size"], dtype=dtype, device="cpu")


def _fits(live: Any, item: Mapping[str, Any]) -> bool:
    return is_tensor(live) and [*live.size()] == item["size"]


def _is_sharded(item: Mapping[str, Any]) -> bool:
    return any(sizes != item["size"] for _, sizes, *_ in item["chunks"])


def _refuse_another(name: str, model: torch.nn.Module, live: Mapping[Path, Any], items: Items) -> None:
    """Raise CheckpointError where a model has other tensors, or no memory for them, before any is overwritten. The
    sizes of its buffers and of its extra states are its own affair."""
    if any(each.is_meta for each in model.parameters()):
        raise CheckpointError(
            "nothing can be read into a model that is on the meta device",
            where={"state": name},
            hint='give it memory before: model.to_empty(device="cuda"), after fully_shard(); and set the buffers that '
            "are in no state_dict (persistent=False)",
        )
    buffers = {each.data_ptr() for each in model.buffers()}
    loose = {path for path in (*live, *items) if "_extra_state" in flat(path)}
    loose |= {path for path in {*live} - loose if not is_tensor(live[path])}
    loose |= {path for path in {*live} - loose if not is_part(live[path]) and live[path].data_ptr() in buffers}
    here = {(flat(path[1:2]), *(() if path in loose else each.size())) for path, each in live.items()}
    there = {(flat(path[1:2]), *(() if path in loose else item["size"] or ())) for path, item in items.items()}
    if here != there:
        only = [", ".join(f"{key} {size}" for key, *size in sorted(some)[:5]) for some in (there - here, here - there)]
        raise CheckpointError(
            "the tensors that are saved are not those of the model",
            where={"state": name},
            seen=f"only saved: {only[0] or 'none'}; only here: {only[1] or 'none'}",
            hint="restore into the model that was saved",
        )


def hand_out(state: MutableMapping[str, Any], trees: Mapping[str, Any]) -> list[Callable[[], None]]:
    """What is to be done to load what was read, part by part: objects load, plain values are filled in or replaced;
    then models and their optimizers load; then it is seen that these hold it. The latter are collectives for FSDP1.

    Each part raises CheckpointError where it cannot be done.
    """
    names, before = _in_order(trees, state), dict[str, dict[str, Any]]()

    def load(*, of_models: bool) -> None:
        if not of_models:  # before any object may change what lies in a model's own memory by now
            before.update({name: _contents(name, trees[name], {}) for name in names if is_trained(state[name])})
        for name in names:
            if _is_of_models(name, state) == of_models:
                _load(name, state, trees[name])

    def read_back() -> None:
        for name, tree in _trees(before, state).items():
            _compare(name, tree, before[name])

    parts: list[Callable[[], None]] = [lambda: load(of_models=False), lambda: load(of_models=True), read_back]
    return [without_autograd(part) for part in parts]


def _load(name: str, state: MutableMapping[str, Any], tree: Any) -> None:
    value = state[name]
    inner = _inner(value)
    if _is_model(inner) and _is_fsdp1(inner):
        torchs.set_model_state_dict(inner, tree)
    elif _is_model(inner):
        here = {key: tree.pop(name) for key, name in _names(inner).items() if name in tree}
        inner.load_state_dict({**here, **tree})
    elif _is_optimizer(inner):
        _load_optimizer(name, state, tree)
    elif _has_state(inner):
        inner.load_state_dict(tree)
    elif isinstance(value, per_rank):
        value.value = _filled(inner, tree)
    else:
        state[name] = _filled(inner, tree)


def _compare(name: str, tree: Any, before: Mapping[str, Any]) -> None:
    """Raise CheckpointError where a model or an optimizer holds something else than was read."""
    after = _contents(name, tree, before)
    for path in (path for path, content in before.items() if after.get(path) != content):
        raise CheckpointError(
            "what was loaded is not what was saved: it is not safe to go on",
            where={"state": path},
            seen=after.get(path),
            expected=before[path],
            hint="see how its load_state_dict() changes it, or its step(), which torch may call with lr 0; or whether "
            "two tensors that were saved apart are one here",
        )


def _contents(name: str, tree: Any, like: Mapping[str, Any]) -> dict[str, Any]:
    """What a model or an optimizer holds, by name: of tensors type and marks. Groups go by the parameters in them.

    Args:
        name: of it.
        tree: its own.
        like: contents; a tensor that has another type here, or lies elsewhere, is taken as it is in these.
    """
    if isinstance(tree, dict) and "param_groups" in tree:
        groups = {
            str(sorted(group["params"])): {**group, "params": (), "param_names": ()} for group in tree["param_groups"]
        }
        tree = {"state": tree["state"], "groups": dict(sorted(groups.items()))}
    values: dict[str, Any] = {
        flat(path): leaf for path, leaf in leaves(tree, (name,)) if "_extra_state" not in flat(path)
    }
    tensors = {key: leaf for key, leaf in values.items() if is_tensor(leaf)}
    kinds = {key: held[0] for key, held in like.items() if type(held) is tuple and held[0]}
    each_part = {
        key: [part.to(*kinds.get(key, (part.dtype,))) for _, part in parts(leaf)] for key, leaf in tensors.items()
    }
    numbers = iter(marks([part for some in each_part.values() for part in some]))
    for key, some in each_part.items():
        values[key] = next(((part.device, part.dtype) for part in some), None), [next(numbers) for _ in some]
    return {key: held if key in tensors else repr(held) for key, held in values.items()}


def _load_optimizer(name: str, state: Mapping[str, Any], tree: Any) -> None:
    """Into an optimizer whose groups have the parameters that were saved, in whatever order it has them."""
    optimizer, model = _inner(state[name]), _model_of(name, state)
    groups, saved = [], tree["param_groups"]
    for group in _optimizer_tree(model, optimizer)["param_groups"]:
        same = [each for each in saved if {*each["params"]} == {*group["params"]}]
        if not same or len(tree["param_groups"]) != len(optimizer.param_groups):
            raise CheckpointError(
                "the parameters that are saved of an optimizer are not those that it steps",
                where={"state": name},
                seen=f"a group of {group['params']}"[:300],
                expected=f"{[each['params'] for each in tree['param_groups']]}"[:300],
                hint="resume with the groups that were saved, and with the model in the state if it was there",
            )
        saved = [each for each in saved if each is not same[0]]  # of two without parameters each its own
        groups.append({**same[0], **{key: group[key] for key in ("params", "param_names") if key in group}})
    # As torch's function has it, which drops what it has of a frozen parameter, and fails for one that has none.
    if _is_fsdp1(model):
        optimizer.load_state_dict(_flattened(model, optimizer, {"state": tree["state"], "param_groups": groups}))
        return
    number = {key: index for index, key in enumerate(key for group in groups for key in group["params"])}
    held = {number[key]: each for key, each in tree["state"].items()}
    numbered = [{**group, "params": [number[key] for key in group["params"]]} for group in groups]
    optimizer.load_state_dict({"state": held, "param_groups": numbered})
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:  # it casts to the parameters' types
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for index, given in held.items():
            optimizer.state[parameters[index]] = _of_its_types(given, optimizer.state[parameters[index]])


def _flattened(model: Any, optimizer: Any, by_name: dict[str, Any]) -> Any:
    """An optimizer's state by the model's names, as FSDP1 has it: by its flat parameters. A collective."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP.state_dict_type", FutureWarning)
        with FullyShardedDataParallel.state_dict_type(
            model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        ):
            empty = {**optimizer.state_dict(), "state": {}}
            groups = FullyShardedDataParallel.optim_state_dict(model, optimizer, empty)["param_groups"]
            its = {name.replace("_orig_mod.", ""): name for group in groups for name in group["params"]}
            held = {its[name]: held for name, held in by_name["state"].items()}
            groups = [{**each, "params": [its[name] for name in each["params"]]} for each in by_name["param_groups"]]
            named = {"state": held, "param_groups": groups}
            return FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, named)


def _of_its_types(given: Any, loaded: Any) -> Any:
    """What was loaded, with what was given in the place of each tensor that has another type since."""
    if type(given) in (dict, OrderedDict):
        return {key: _of_its_types(inner, loaded[key]) for key, inner in given.items()}
    if type(given) in (list, tuple):
        return type(given)(_of_its_types(*each) for each in zip(given, loaded, strict=True))
    return given.to(loaded.device) if isinstance(given, torch.Tensor) and given.dtype != loaded.dtype else loaded


def _filled(live: Any, loaded: Any) -> Any:
    """What was loaded, in the user's own lists and dicts where there are some."""
    if type(live) in (dict, OrderedDict) and type(loaded) in (dict, OrderedDict):
        inner = {key: _filled(live.get(key), each) for key, each in loaded.items()}
        live.clear()
        live.update(inner)
        return live
    if type(live) is type(loaded) is list:
        live[:] = [_filled(before, each) for before, each in zip_longest(live[: len(loaded)], loaded)]
        return live
    return loaded
