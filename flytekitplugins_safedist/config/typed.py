"""What a user wrote against the annotations of its fields: one walk over all of it, and everything that is not so.

A type that says too little has a :class:`Must` beside it (``Annotated``), with the words for what it is not. A field of
the wrong type keeps its default in what is handed back: every other check may rely on types, and all that is wrong is
found at once.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Callable
from contextlib import suppress
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import Problem

T = TypeVar("T")
MOST_COUNTED = 2**31 - 1
"""An int32, which counts are in Kubernetes' objects."""


@dataclasses.dataclass(frozen=True)
class Must:
    """What every value of a field must be, instead of what its type says.

    Attributes:
        test: whether a value is that. What it raises of AttributeError, LookupError, TypeError and ValueError is a no.
        reason, repair: of the problem where it is not.
        secret: the value is not shown, only its type.
    """

    test: Callable[[Any], object]
    reason: str
    repair: str
    secret: bool = False

    def problem(self, field: str, value: object) -> Problem | None:
        """Why *value* cannot stand in *field*, or None."""
        with suppress(AttributeError, LookupError, TypeError, ValueError):
            if self.test(value):
                return None
        return Problem(field, type(value).__name__ if self.secret else value, self.reason, self.repair)


def well_typed(written: T, problems: list[Problem], prefix: str = "") -> T:
    """A copy of a dataclass in which every field, and every field of those, is of its type; *written* stays as it is.

    Args:
        written: what the user wrote.
        problems: gets what is of another type.
        prefix: of the fields' names in them.
    """
    found = copy.copy(written)
    kinds: dict[str, Any] = _hints(type(written))  # type: ignore[arg-type]  # a class is hashable
    for field in dataclasses.fields(written):  # type: ignore[arg-type]
        value, name = getattr(written, field.name), prefix + field.name
        # A default is right: kfpytorch's own None is not what it is annotated with.
        is_default = value is field.default or field.name not in kinds
        problem = None if is_default else _problem(name, value, kinds[field.name])
        if problem is not None:
            problems.append(problem)
            value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = well_typed(value, problems, f"{name}.")
        object.__setattr__(found, field.name, value)
    return found


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """The annotations of a class; of its nearest base where its own name what only a type checker sees."""
    for base in cls.__mro__:
        with suppress(NameError, TypeError):
            return get_type_hints(base, include_extras=True)
    return {}


def _problem(field: str, value: object, kind: Any) -> Problem | None:
    if get_origin(kind) in (Union, UnionType):
        found = [_problem(field, value, part) for part in get_args(kind)]
        return None if None in found else found[0]
    return next(filter(None, (must.problem(field, value) for must in _musts(kind))), None)


def _musts(kind: Any) -> tuple[Must, ...]:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return parts[1:]
    if origin is Literal:
        repair = "use one of: " + ", ".join(repr(choice) for choice in parts)
        return (Must(lambda value: isinstance(value, str) and value in parts, "is unknown", repair),)
    cls = origin or kind
    if not isinstance(cls, type):  # Any
        return ()
    return RESOURCES if cls.__name__ == "Resources" else (_PLAIN.get(cls) or _instance_of(cls),)


def instance(name: str, repair: str) -> Must:
    """Of a class of that name, or of one derived from it: flytekit's own need not be imported here."""
    return Must(lambda value: has_class(value, name), f"is not a {name}", repair)


def of_kfpytorch(name: str) -> Any:
    """The type of a field that holds the class of that name of Flyte's PyTorch plugin, or of one derived from it. The
    plugin is not imported: who has an object of it has done that. Its plugin for MPI has classes of the same names."""
    return Annotated[Any, _instance_of_kfpytorch(name)]


_KFPYTORCH = "flytekitplugins.kfpytorch"


def _instance_of_kfpytorch(name: str) -> Must:
    def test(value: object) -> bool:
        return any(cls.__name__ == name and cls.__module__.startswith(_KFPYTORCH) for cls in type(value).__mro__)

    return Must(test, f"is not the {name} of {_KFPYTORCH}", f"import {name} from {_KFPYTORCH}")


def _instance_of(cls: type) -> Must:
    if cls.__module__.startswith(_KFPYTORCH):
        return _instance_of_kfpytorch(cls.__name__)
    names = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    parts = ", ".join(f"{name}=..." for name in names[:3])
    return Must(lambda value: isinstance(value, cls), f"is not a {cls.__name__}", f"use {cls.__name__}({parts})")


def has_class(value: object, name: str) -> bool:
    """Whether a class of that name is among those of *value*."""
    return any(cls.__name__ == name for cls in type(value).__mro__)


def is_count(value: object, *, least: int) -> bool:
    """Whether it is a number, at least ``least``, that a job's message and Kubernetes can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST_COUNTED


def can_be_given(text: object) -> bool:
    """Whether it is text that a process can be given."""
    try:
        return isinstance(text, str) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


RESOURCES = (
    instance("Resources", 'use Resources(cpu="8", mem="32Gi")'),
    Must(
        lambda value: not any(isinstance(amount, (list, tuple)) for amount in vars(value).values()),
        "holds a pair of request and limit, which only resources= takes",
        "give one amount for each, or use resources=",
    ),
)
"""flytekit's, of a task or a role."""
_PLAIN = {
    NoneType: Must(lambda value: value is None, "is not None", "leave it out"),
    bool: Must(lambda value: isinstance(value, bool), "is neither True nor False", "use one of them"),
    int: Must(lambda value: is_count(value, least=-MOST_COUNTED), "is not a whole number", "use an int of 32 bits"),
    str: Must(can_be_given, "is not text", "use a str without NUL and lone surrogates"),
}
