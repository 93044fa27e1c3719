"""Modules come from this process's own archive, and look as if they came from the destination directory.

Where the stock command unpacks, ``__file__``, tracebacks, data files beside a module, and modules that only the image
has (a compiled extension next to a package's sources) all point into the destination directory, so they must here. But
that directory can be shared: another task may put *its* archive there at any time, also while this one is running and
still has modules to import. So names are looked up, and source and bytecode are read, in this pod's own copy of the
modules; everything else, and everything the archive does not have, is left to Python and the destination directory.

Without this (a program that a task starts by itself) Python imports from the destination directory as ever.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any

from .. import envvars


def install(tree: str | os.PathLike[str], dest: str | os.PathLike[str]) -> None:
    """From now on, import what the archive in ``tree`` holds from there, under the name it has in ``dest``.

    Modules that were imported from ``dest`` before and are in the archive are forgotten: they are the image's.
    To be called once.
    """
    finder = CodeFinder(os.fspath(tree), os.fspath(dest))
    # Before the finder that walks sys.path, behind those for built-in and frozen modules.
    at = next((n for n, other in enumerate(sys.meta_path) if other is PathFinder), len(sys.meta_path))
    sys.meta_path.insert(at, finder)
    finder.forget_modules_of_the_image()
    importlib.invalidate_caches()


def install_from(environment: Mapping[str, str]) -> None:
    """:func:`install` what :func:`export` left in the variables; nothing where there is nothing, or where this process
    was forked from one that has it: what that has imported stays."""
    tree, dest = environment.get(envvars.CODE_TREE), environment.get(envvars.CODE_DEST)
    if tree and dest and not any(isinstance(finder, CodeFinder) for finder in sys.meta_path):
        install(tree, dest)


def export(tree: str | os.PathLike[str], dest: str | os.PathLike[str], environment: MutableMapping[str, str]) -> None:
    """Leave word for processes of ours that start as fresh interpreters."""
    environment[envvars.CODE_TREE] = os.fspath(tree)
    environment[envvars.CODE_DEST] = os.fspath(dest)


class CodeFinder(MetaPathFinder):
    """Finds modules of the archive."""

    def __init__(self, tree: str, dest: str) -> None:
        self.tree = tree
        self.dest = dest

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See :class:`importlib.abc.MetaPathFinder`."""
        places = [self.tree] if path is None else [place for entry in path if (place := self._within_tree(entry))]
        spec = PathFinder.find_spec(fullname, places) if places else None
        if spec is None or spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
            # Namespace packages have portions in both places; the dynamic linker reads extensions where they are; and
            # flytekit leaves bytecode out of an archive.
            return spec if spec is not None and spec.has_location else None
        shown = self.dest + spec.origin[len(self.tree) :]
        locations = spec.submodule_search_locations
        return spec_from_file_location(
            fullname,
            shown,
            loader=_Source(fullname, shown, self),
            submodule_search_locations=None if locations is None else [os.path.dirname(shown)],  # noqa: PTH120
        )

    def _within_tree(self, path: str) -> str | None:
        if path == self.dest:
            return self.tree
        if path.startswith(self.dest + os.sep):
            return self.tree + path[len(self.dest) :]
        return None

    def real(self, path: str) -> str:
        """Where a file of the destination directory, or its bytecode, is read and written."""
        if (inner := self._within_tree(path)) is not None:
            return inner
        prefix = sys.pycache_prefix
        if prefix and path.startswith(prefix) and (inner := self._within_tree(path[len(prefix) :])) is not None:
            return prefix + inner  # one cache for all: bytecode of different archives must not meet in it
        return path

    def forget_modules_of_the_image(self) -> None:
        """Something (a flytekit plugin, sitecustomize) may have imported the image's version before."""
        for name, module in list(sys.modules.items()):
            file = module.__file__ if hasattr(module, "__file__") else None
            inner = self._within_tree(file) if isinstance(file, str) else None
            if inner is not None and name != "__main__" and os.path.exists(inner):  # noqa: PTH110
                del sys.modules[name]


class _Source(SourceFileLoader):
    """Reads the pod's own copy."""

    def __init__(self, fullname: str, path: str, finder: CodeFinder) -> None:
        super().__init__(fullname, path)
        self._finder = finder

    def get_data(self, path: Any) -> bytes:
        """``pkgutil.get_data`` comes here too, for files that perhaps only the image has."""
        try:
            return super().get_data(self._finder.real(os.fspath(path)))
        except FileNotFoundError:
            if path.endswith(".pyc"):
                raise  # the destination's bytecode may be another archive's
            return super().get_data(path)

    def path_stats(self, path: Any) -> Mapping[str, Any]:
        return super().path_stats(self._finder.real(os.fspath(path)))

    def set_data(self, path: Any, data: Any, *, _mode: int = 0o666) -> None:
        super().set_data(self._finder.real(os.fspath(path)), data, _mode=_mode)
