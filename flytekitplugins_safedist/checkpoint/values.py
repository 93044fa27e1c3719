"""What a state holds besides tensors, as JSON: so nothing is unpickled to read it. Imports torch, as :mod:`.pieces`."""

from __future__ import annotations

import base64
import json
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import CheckpointError
from .pieces import dtype_of, is_part


def to_bytes(value: Any, name: str) -> bytes:
    """A value, as bytes that :func:`from_bytes` takes; the same bytes for values that are alike.

    Raises:
        CheckpointError: it is, or holds, something that could not be loaded again; names it.
    """
    return json.dumps(_plain(value, name), separators=(",", ":")).encode()


def from_bytes(data: bytes) -> Any:
    """The inverse of :func:`to_bytes`; tensors are on the CPU."""
    return _value(json.loads(data))


def _plain(value: Any, name: str) -> Any:
    """A value as JSON: what JSON has no word for is a dict of one key, its type."""
    if isinstance(value, torch.Tensor) and not is_part(value):
        value = value.detach()  # a Parameter's
    elif isinstance(value, getattr(sys.modules.get("numpy"), "generic", ())):
        # item() of numpy's times is a mere number, or none
        value = value.item() if value.dtype.kind in "biufcUS" else value  # type: ignore[union-attr]
    kind = type(value)
    if kind in (type(None), bool, int, float, str):
        return value
    if kind is list:
        return _items(value, name)
    if kind not in _HELD:
        raise _refusal(value, name)
    return {kind.__name__: _HELD[kind][0](value, name)}


def _items(value: Iterable[Any], name: str) -> list[Any]:
    return [_plain(each, f"{name}.{index}") for index, each in enumerate(value)]


def _unordered(value: Iterable[Any], name: str) -> list[Any]:
    return sorted((_plain(each, name) for each in value), key=json.dumps)  # two ranks may have them in two orders


def _pairs(value: dict[Any, Any], name: str) -> list[Any]:
    return [[_plain(key, name), _plain(each, f"{name}.{key}")] for key, each in value.items()]


def _octets(value: Any, _name: str) -> str:
    return base64.b64encode(value).decode()


def _text(value: Any, _name: str) -> str:
    return str(value)


def _tensor(value: torch.Tensor, name: str) -> list[Any]:
    """Of a sparse one its indices, values and size."""
    if value.layout == torch.sparse_coo:
        held = value.coalesce()
        return [_plain(each, name) for each in (held.indices(), held.values(), held.shape)]
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise _refusal(value, name)
    whole = value.cpu().resolve_conj().resolve_neg().contiguous()
    return [str(value.dtype), [*value.shape], _octets(whole.flatten().view(torch.uint8).numpy(), name)]


def _refusal(value: Any, name: str) -> CheckpointError:
    what = " of which this rank holds a part" if is_part(value) else ""
    what = what or (f", {value.layout} on {value.device}" if isinstance(value, torch.Tensor) else "")
    return CheckpointError(
        "this value cannot be saved",
        where={"state": name},
        seen=f"{type(value).__module__}.{type(value).__qualname__}{what}",
        expected="tensors, numbers, text, bytes, None, and dicts, lists, tuples and sets of these",
        hint="save it as one of these (of an array: torch.from_numpy(array), or array.tolist())",
    )


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [*map(_value, plain)]
    if not isinstance(plain, dict):
        return plain
    ((name, held),) = plain.items()
    return _MAKE[name](_value(held))


def _tensor_of(held: list[Any]) -> torch.Tensor:
    if isinstance(held[0], torch.Tensor):
        return torch.sparse_coo_tensor(*held, device="cpu", check_invariants=True).coalesce()
    dtype, shape, data = dtype_of(held[0]), held[1], bytearray(base64.b64decode(held[2]))
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")).view(shape)


_HELD: dict[Any, tuple[Callable[[Any, str], Any], Callable[[Any], Any]]] = {
    tuple: (_items, tuple),
    torch.Size: (_items, torch.Size),
    set: (_unordered, set),
    frozenset: (_unordered, frozenset),
    dict: (_pairs, dict),
    OrderedDict: (_pairs, OrderedDict),
    Counter: (_pairs, lambda held: Counter(dict(held))),
    bytes: (_octets, base64.b64decode),
    bytearray: (_octets, lambda held: bytearray(base64.b64decode(held))),
    torch.dtype: (_text, dtype_of),
    torch.device: (_text, torch.device),
    complex: (lambda value, _: [value.real, value.imag], lambda held: complex(*held)),
    torch.Tensor: (_tensor, _tensor_of),
}
"""By type, what JSON has of one, and what makes one of that again."""
_MAKE = {kind.__name__: make for kind, (_, make) in _HELD.items()}
