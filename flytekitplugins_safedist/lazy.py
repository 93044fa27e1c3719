"""Public names of a package that are imported when they are first asked for: its import stays cheap (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def names_of(package: str, public: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its ``__name__``.
        public: its names, with the module below it that each is in.
    """

    def get(name: str) -> Any:
        if name not in public:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(f"{package}.{public[name]}"), name)
        except AttributeError as error:  # of which ``from package import name`` would say nothing
            raise ImportError(f"{name} of {package} cannot be imported: {error}") from error
        setattr(sys.modules[package], name, value)  # asked for once
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *public})

    return get, listed
