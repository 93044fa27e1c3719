"""What backends share."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from ...errors import MissingDependencyError
from ...handoff import HERE

LOOPBACK = "127.0.0.1"


def require_found(module: str, *, package: str, hint: str) -> None:
    """Look whether a top-level ``module`` is installed, without importing it.

    Raises:
        MissingDependencyError: it is not.
    """
    if module not in sys.modules and importlib.util.find_spec(module) is None:
        raise MissingDependencyError(
            f"{package} is not installed", where={"module": module}, seen="no such module", hint=hint
        )


def require(module: str, *, package: str, hint: str) -> None:
    """Import ``module``.

    Raises:
        MissingDependencyError: it is not installed, or its native parts do not load.
    """
    try:
        importlib.import_module(module)
    except Exception as error:
        installed = not isinstance(error, ModuleNotFoundError) or error.name != module.split(".", 1)[0]
        what = f"{package} is installed, but cannot be imported" if installed else f"{package} is not installed"
        told = HERE.failed_imports.setdefault(module.partition(".")[0], f"{type(error).__name__}: {error}")
        raise MissingDependencyError(what, where={"module": module}, seen=told, hint=hint) from error
