"""Two Kubernetes objects, field by field; and which differences are no fault."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.harness.product import value_of

_KEYS = {
    "env": "name",
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
"""Lists whose elements have a name of their own, by which they are compared."""
_ORDERED = ("containers", "initContainers")
"""Of these, the order means something: who is first, who runs first."""


@dataclass(frozen=True)
class Difference:
    """A field that is not the same.

    Attributes:
        path: e.g. ``spec.containers[pytorch].env[RANK].value``.
        recorded, rendered: the values; None where there is none.
    """

    path: str
    recorded: Any
    rendered: Any

    def __str__(self) -> str:
        return f"{self.path}: recorded {self.recorded!r}, rendered {self.rendered!r}"


@dataclass(frozen=True)
class Allowed:
    """A kind of difference that is no fault.

    Attributes:
        path: what the whole path of the difference must match.
        reason: why it is no fault.
        recorded, rendered: what the value must match as text; None: anything.
        override: the override of the node with which it is no fault; None: with any, and without.
    """

    path: str
    reason: str
    recorded: str | None = None
    rendered: str | None = None
    override: str | None = None

    def covers(self, difference: Difference, overrides: Collection[str]) -> bool:
        """Whether *difference*, found with these overrides, is one of these."""
        values = ((self.recorded, difference.recorded), (self.rendered, difference.rendered))
        return (
            (self.override is None or self.override in overrides)
            and re.fullmatch(self.path, difference.path) is not None
            and all(wanted is None or re.fullmatch(wanted, str(value)) is not None for wanted, value in values)
        )


def differences(recorded: Any, rendered: Any, path: str = "") -> Iterator[Difference]:
    """Every field in which the two differ."""
    if isinstance(recorded, Mapping) and isinstance(rendered, Mapping):
        for name in sorted({*recorded, *rendered}):
            below = f"{path}.{name}" if path else name
            if name in _KEYS and isinstance(recorded.get(name, []), list) and isinstance(rendered.get(name, []), list):
                yield from _keyed(recorded.get(name, []), rendered.get(name, []), name, below)
            elif name not in recorded or name not in rendered:
                yield from _missing(recorded.get(name), rendered.get(name), below)
            else:
                yield from differences(recorded[name], rendered[name], below)
    elif isinstance(recorded, list) and isinstance(rendered, list) and len(recorded) == len(rendered):
        for index, (one, other) in enumerate(zip(recorded, rendered, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif recorded != rendered and not _are_one_amount(path, recorded, rendered):
        yield Difference(path, recorded, rendered)


def _are_one_amount(path: str, recorded: Any, rendered: Any) -> bool:
    """Go writes ``1024Mi`` as ``1Gi``; what is shown is as the user wrote it."""
    is_amount = re.search(r"\.(requests|limits)\.[^\[\]]+$|\.sizeLimit$", path) is not None
    return is_amount and value_of(recorded) is not None and value_of(recorded) == value_of(rendered)


def _missing(recorded: Any, rendered: Any, path: str) -> Iterator[Difference]:
    """Of a structure that only one has, each field is a difference of its own."""
    if isinstance(recorded, Mapping) and recorded:
        yield from differences(recorded, {}, path)
    elif isinstance(rendered, Mapping) and rendered:
        yield from differences({}, rendered, path)
    else:
        yield Difference(path, recorded, rendered)


def _keyed(recorded: list[Any], rendered: list[Any], name: str, path: str) -> Iterator[Difference]:
    key = _KEYS[name]
    if any(key not in one for one in (*recorded, *rendered)):  # a service's ports have other fields
        key = "port"
    ours, theirs = _grouped(rendered, key), _grouped(recorded, key)
    for each in sorted({*ours, *theirs}, key=str):
        one, other = theirs.get(each, []), ours.get(each, [])
        if len(one) == len(other):
            # Of one name there may be several (of two variables the last counts): in their order.
            for left, right in zip(one, other, strict=True):
                yield from differences(left, right, f"{path}[{each}]")
        else:
            yield Difference(f"{path}[{each}]", _one_or_all(one), _one_or_all(other))
    if name in _ORDERED and set(ours) == set(theirs) and list(ours) != list(theirs):
        yield Difference(f"{path} in their order", list(theirs), list(ours))


def _grouped(values: list[Any], key: str) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for one in values:
        found.setdefault(one.get(key), []).append(one)
    return found


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values or None
