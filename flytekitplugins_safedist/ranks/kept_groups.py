"""A rank keeps the process groups that its function destroys: torch would end some of them in a way that can hang.

``destroy_process_group()`` only takes a group out of torch's own list; its threads end with its last owner. Where that
is a ``DistributedDataParallel`` replica, gone with the function's frame, they are joined by one that holds Python's
lock (``Reducer::~Reducer``, ``ProcessGroupGloo::~ProcessGroupGloo``), and one of them may be waiting for that lock to
free the tensor of the last collective. Both then wait for ever (docs/versions.md has the stacks,
tests/race/test_replica_outlives_group.py the order). With an owner that stays until the process ends there is nothing
to join.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..compat import torch as torch_inside

MODULE = "torch.distributed.distributed_c10d"


def install() -> None:
    """From now on, in this process and those forked from it, keep each process group that is destroyed.

    Imports nothing: what a module may set before it imports torch, it still may. To be called once, before modules of
    the user's, which may take ``destroy_process_group`` by name.

    Raises:
        IncompatibleVersionError: torch has its groups elsewhere. Where torch comes later, importing it raises.
    """
    if MODULE in sys.modules:
        _keep(sys.modules[MODULE])
    else:
        sys.meta_path.insert(0, Expecting())


class Expecting(MetaPathFinder):
    """Finds the one module as others do, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # As if the finder had not been there: modules ask their own loader for their source.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _keep(module)


def _keep(module: ModuleType) -> None:
    """Put a ``destroy_process_group`` that keeps in the place of torch's."""
    destroy = module.destroy_process_group
    kept: set[Any] = set(torch_inside.process_groups(module))  # none yet: but now is the time to see whether it knows
    # Never freed, not even by an interpreter that ends: what would be joined then could not get Python's lock either.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        kept.update(torch_inside.process_groups(module))
        destroy(*args, **kwargs)

    for holder in (module, sys.modules[module.__name__.rpartition(".")[0]]):
        if hasattr(holder, destroy.__name__):  # the package takes it from the module, when that has been loaded
            setattr(holder, destroy.__name__, destroy_process_group)
