"""The user's script as ``__main__`` of its ranks, for a task that was started by ``python script.py``.

Such a task reaches its ranks by value, and their own ``__main__`` is a module of safedist. What the task's function
hands to ``multiprocessing`` (a dataset to the workers of a ``DataLoader``, say) is pickled by name, however: pickle
looks for it in ``__main__``, and a spawned child imports the script again by the file or name that ``__main__`` has.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_replaced: list[ModuleType | None] = []
"""What was ``__main__`` before: its functions may still run, and need their module."""


@dataclass(frozen=True)
class MainModule:
    """Where the agent's ``__main__`` came from.

    Attributes:
        file: the script; None in a notebook or an interactive interpreter.
        name: the module that ``python -m`` named; None for a script.
    """

    file: str | None
    name: str | None


def of(function: Callable[..., Any], modules: Mapping[str, Any]) -> MainModule | None:
    """The agent's ``__main__``, when *function* is at home there; else None.

    Args:
        function: the task's.
        modules: ``sys.modules``.
    """
    main = modules.get("__main__")
    if main is None or function.__module__ != "__main__":
        return None
    file, spec = vars(main).get("__file__"), vars(main).get("__spec__")
    return MainModule(None if file is None else str(Path(file).absolute()), None if spec is None else spec.name)


def stand_in(main: MainModule, function: Callable[..., Any]) -> None:
    """Give this process a ``__main__`` with all that *function*, which came here by value, has from its own.

    The very objects, because pickle compares. Functions and classes that travelled together share their globals.
    """
    module = ModuleType("__main__")
    inner = inspect.unwrap(function)
    names = inner.__globals__ if inspect.isfunction(inner) else {}
    module.__dict__.update({name: value for name, value in names.items() if not name.startswith("__")})
    if main.file is not None:
        module.__file__ = main.file
    # The only part of it that multiprocessing reads (multiprocessing/spawn.py, get_preparation_data).
    module.__spec__ = None if main.name is None else ModuleSpec(main.name, None)
    _replaced.append(sys.modules.get("__main__"))
    sys.modules["__main__"] = module
