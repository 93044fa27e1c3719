"""What a user wrote against the annotations of its fields: one walk over all of it, and everything that is not so.

A type that says too little has a :class:`Must` beside it (``Annotated``), with the words for what it is not. A field of
the wrong type keeps its default in what is handed back: every other check may rely on types, and all that is wrong is
found at once.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from contextlib import suppress
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .. import texts
from ..errors import Problem

T = TypeVar("T")
MOST_COUNTED = 2**31 - 1
"""An int32, which counts are in Kubernetes' objects."""
_KFPYTORCH = "flytekitplugins.kfpytorch"
_LIBRARIES = (f"{__name__.partition('.')[0]}.", f"{_KFPYTORCH}.", "flytekit.")


@dataclasses.dataclass(frozen=True)
class Must:
    """What every value of a field must be, instead of what its type says.

    Attributes:
        test: whether a value is that. What it raises is a no.
        reason, repair: of the problem where it is not.
        secret: the value is not shown, only its type, and what the test raised.
    """

    test: Callable[[Any], object]
    reason: str
    repair: str
    secret: bool = False

    def problem(self, field: str, value: object) -> Problem | None:
        """Why *value* cannot stand in *field*, or None."""
        reason = self.reason
        try:
            if self.test(value):
                return None
        except Exception as error:  # a value's own code may raise anything
            reason += f": {texts.named(error)}" if self.secret else ""
        return Problem(field, type(value).__name__ if self.secret else value, reason, self.repair)


def well_typed(config: T, problems: list[Problem], prefix: str = "") -> T:
    """A copy of a dataclass in which every field, and every field of those, is of its type; *config* stays as it is.

    Args:
        config: what the user wrote.
        problems: gets what is of another type.
        prefix: of the fields' names in them.
    """
    typed = copy.copy(config)
    for name, (kind, field) in _known(type(config)).items():  # type: ignore[arg-type]  # a class is hashable
        value = getattr(config, name)
        # kfpytorch annotates fields as never None whose default is None.
        problem = None if value is field.default else _problem(prefix + name, value, kind)
        if problem is not None:
            problems.append(problem)
            value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = well_typed(value, problems, f"{prefix}{name}.")
        object.__setattr__(typed, name, value)
    return typed


@functools.cache
def _known(cls: type) -> dict[str, tuple[Any, dataclasses.Field[Any]]]:
    """The fields of a class that is ours or flytekit's, with their annotations. A user's own class has other defaults
    for them, and may have other types; what it adds is its own."""
    for base in cls.__mro__:
        if dataclasses.is_dataclass(base) and base.__module__.startswith(_LIBRARIES):
            with suppress(Exception):  # of one that names what only a type checker sees
                hints = get_type_hints(base, include_extras=True)
                return {field.name: (hints[field.name], field) for field in dataclasses.fields(base)}
    return {}


def _problem(field: str, value: object, kind: Any) -> Problem | None:
    if get_origin(kind) in (Union, UnionType):
        problems = [_problem(field, value, part) for part in get_args(kind)]
        return None if None in problems else problems[0]
    return next(filter(None, (must.problem(field, value) for must in _musts(kind))), None)


def _musts(kind: Any) -> tuple[Must, ...]:
    cls, parts = get_origin(kind) or kind, get_args(kind)
    if cls is Annotated:
        return parts[1:]
    if cls is Literal:
        repair = "use one of: " + ", ".join(map(repr, parts))
        return (Must(lambda value: isinstance(value, str) and value in parts, "is unknown", repair),)
    if not isinstance(cls, type):  # Any
        return ()
    if cls.__module__.startswith(_KFPYTORCH):
        return (_of_kfpytorch(cls.__name__),)
    names = [f"{field.name}=..." for field in dataclasses.fields(cls)[:3]] if dataclasses.is_dataclass(cls) else []
    own = Must(
        lambda value: isinstance(value, cls), f"is not a {cls.__name__}", f"use {cls.__name__}({', '.join(names)})"
    )
    return RESOURCES if cls.__name__ == "Resources" else (_PLAIN.get(cls, own),)


def instance(name: str, module: str, repair: str) -> Must:
    """Of a class of that name, or of one derived from it, which need not be imported here: who has an object of it has
    done that. (Flyte's plugin for MPI has classes of the same names as that for PyTorch.)"""
    return Must(
        lambda value: any(cls.__name__ == name and cls.__module__.startswith(module) for cls in type(value).__mro__),
        f"is not a {name} of {module}",
        repair,
    )


def is_count(value: object, *, least: int) -> bool:
    """Whether it is a number, at least ``least``, that a job's message and Kubernetes can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST_COUNTED


def is_text(value: object) -> bool:
    """Whether it is text that a process and a protobuf can be given."""
    return isinstance(value, str) and "\0" not in value and value == value.encode(errors="ignore").decode()


def _of_kfpytorch(name: str) -> Must:
    return instance(name, _KFPYTORCH, f"import {name} from {_KFPYTORCH}")


KFPYTORCH = SimpleNamespace(**{name: Annotated[Any, _of_kfpytorch(name)] for name in ("RunPolicy", "Master", "Worker")})
"""Types of fields that hold classes of Flyte's PyTorch plugin."""
RESOURCES = (
    instance("Resources", "flytekit", 'use Resources(cpu="8", mem="32Gi")'),
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
    str: Must(is_text, "is not text", "use a str without NUL and lone surrogates"),
}
