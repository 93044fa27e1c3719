"""Fields of the task configs that have moved into ``cluster=Kubeflow(...)``: for one release they are still taken and
read, with a ``DeprecationWarning`` that names the new spelling."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ConfigError, Problem
from .cluster import Kubeflow

T = TypeVar("T")

MOVED = tuple(field.name for field in fields(Kubeflow))
NO_CLUSTER_GIVEN = Kubeflow()
"""The default of ``cluster``: by its identity a config knows whether the user has given one."""


def takes_moved_fields(config: type[T]) -> type[T]:
    """Have a dataclass with a field ``cluster`` take the fields of :class:`.Kubeflow` as well, gathered into it.

    Both at once raise a ``ConfigError``: which of them is meant cannot be known.
    """
    stock: Callable[..., None] = config.__init__

    @functools.wraps(stock)
    def init(self: T, *args: Any, **arguments: Any) -> None:
        moved = {name: arguments.pop(name) for name in MOVED if name in arguments}
        if moved:
            arguments["cluster"] = _gathered(type(self).__name__, moved, arguments.get("cluster", NO_CLUSTER_GIVEN))
        stock(self, *args, **arguments)

    config.__init__ = init  # type: ignore[assignment]
    return config


def _gathered(config: str, moved: Mapping[str, object], cluster: object) -> Kubeflow:
    listed = ", ".join(f"{name}=..." for name in moved)
    if cluster is not NO_CLUSTER_GIVEN:
        reason = "is given beside cluster=, which holds it now"
        repair = f"write all of it there: cluster=Kubeflow({listed})"
        raise ConfigError([Problem(name, value, reason, repair) for name, value in moved.items()])
    flat, name = ", ".join(moved), f"{config}(..., cluster=Kubeflow({listed}))"
    # The frames above: this function, the wrapped __init__, the user's own line.
    warnings.warn(f"{flat} of {config} moved: write {name}", DeprecationWarning, stacklevel=3)
    return replace(NO_CLUSTER_GIVEN, **dict(moved))  # type: ignore[arg-type]


class ReadsMovedFields:
    """Base of the task configs: ``config.operator`` still answers, with what ``config.cluster`` says."""

    if not TYPE_CHECKING:  # a type checker is to see that they are gone

        def __getattr__(self, name: str) -> Any:
            if name not in MOVED:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            warnings.warn(f"{name} moved: read .cluster.{name}", DeprecationWarning, stacklevel=2)
            return getattr(self.cluster, name)
