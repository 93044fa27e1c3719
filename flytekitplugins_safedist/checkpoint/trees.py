"""A user's state as trees of plain values and tensors, and back.

``{"model": model, "optimizer": optimizer, "epoch": 3}`` becomes nested dicts, lists and tuples. :func:`split` takes the
tensors out of such a tree under flat names, and :func:`join` puts them back.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError

_PLACE = "__safedist_tensor__"
_DICTS = (dict, OrderedDict, Counter)
"""As torch.load(weights_only=True) has them; a scheduler's milestones are a Counter."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def collect(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state as a tree: what each object's ``state_dict()`` says, and plain values as they are."""
    return {name: bare(value).state_dict() if has_state(value) else value for name, value in state.items()}


def distribute(state: MutableMapping[str, Any], tree: Mapping[str, Any]) -> None:
    """The inverse of :func:`collect`: objects load, plain values are replaced in ``state``.

    Raises:
        CheckpointError: the save and the state do not have the same names. Nothing is loaded then.
    """
    match(state, tree)
    for name, value in tree.items():
        if has_state(state[name]):
            bare(state[name]).load_state_dict(value)
        else:
            state[name] = value


def require_names(state: object) -> None:
    """Raise CheckpointError unless a user's state is a dict by names."""
    if not isinstance(state, MutableMapping) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(
            "the state is not a dict by names",
            seen=f"{type(state).__module__}.{type(state).__qualname__}",
            expected='{"model": model, "optimizer": optimizer, ...}',
        )


def match(state: Mapping[str, Any], tree: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless a save has the very names that the state has."""
    if set(state) == set(tree):
        return
    raise CheckpointError(
        "the save does not hold what is to be resumed",
        seen=f"saved: {', '.join(sorted(tree)) or 'nothing'}",
        expected=", ".join(sorted(state)),
        hint="give resume() the same names that step() was given; add new ones after it",
    )


def has_state(value: Any) -> bool:
    """Whether it saves and loads itself."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def bare(value: Any) -> Any:
    """A model without the wrappers that put a prefix on its names: DistributedDataParallel, torch.compile.

    A save of one rank can then be resumed by many, compiled or not.
    """
    import torch

    while True:
        if isinstance(value, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            value = value.module
        elif isinstance(value, torch.nn.Module) and "_orig_mod" in value._modules:
            value = value._modules["_orig_mod"]
        else:
            return value


@dataclass(frozen=True)
class Split:
    """A tree and its tensors.

    Attributes:
        tree: with each tensor replaced by its flat name.
        tensors: by flat name.
        owner: flat name -> the name in the state under which the tensor is.
    """

    tree: dict[str, Any]
    tensors: dict[str, Any]
    owner: dict[str, str]


def split(tree: Mapping[str, Any], *, weights_only: bool = True) -> Split:
    """Take the tensors out of a tree.

    Args:
        tree: by the state's names, nested dicts, lists and tuples.
        weights_only: refuse what ``torch.load(weights_only=True)`` would refuse: now, and not when it is needed.

    Raises:
        CheckpointError: it holds something else. The text names it.
    """
    tensors: dict[str, Any] = {}
    owner: dict[str, str] = {}
    without: dict[str, Any] = {}
    for name, value in tree.items():
        without[name] = _split(value, name, tensors, weights_only)
        owner.update((flat, name) for flat in tensors.keys() - owner.keys())
    return Split(without, tensors, owner)


def _split(value: Any, name: str, tensors: dict[str, Any], weights_only: bool) -> Any:  # noqa: FBT001
    import torch

    if isinstance(value, torch.Tensor):
        while name in tensors:  # {"a.b": x, "a": {"b": y}} has one flat name for two
            name += "'"
        tensors[name] = value.detach()
        return {_PLACE: name}
    kind = type(value)
    if kind in _DICTS:
        inner = []
        for key, item in value.items():
            below = f"{name}.{key}" if name else str(key)
            inner.append(
                (_split(key, f"{below} (a key)", {}, weights_only), _split(item, below, tensors, weights_only))
            )
        return kind(dict(inner))
    if kind in (list, tuple):
        return kind(_split(item, f"{name}.{index}", tensors, weights_only) for index, item in enumerate(value))
    if kind in _PLAIN or kind in (torch.Size, torch.dtype, torch.device) or not weights_only:
        return value
    raise CheckpointError(
        "this value cannot be loaded again without unpickling",
        where={"state": name},
        seen=f"{kind.__module__}.{kind.__qualname__}",
        expected="tensors, numbers, text, bytes, None, and dicts, lists and tuples of these",
        hint="save it as one of these (an array: torch.from_numpy or .tolist()), or trust your own saves: "
        "checkpoints(weights_only=False)",
    )


def join(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """The inverse of :func:`split`."""
    return walk(tree, lambda name: tensors[name])


def walk(tree: Any, tensor: Callable[[str], Any]) -> Any:
    """A copy of a tree that :func:`split` has made, with ``tensor(name)`` for each flat name."""
    kind = type(tree)
    if kind is dict and set(tree) == {_PLACE}:
        return tensor(tree[_PLACE])
    if kind in _DICTS:
        return kind({key: walk(inner, tensor) for key, inner in tree.items()})
    if kind is list or kind is tuple:
        return kind(walk(inner, tensor) for inner in tree)
    return tree
