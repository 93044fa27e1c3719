"""Named points of a save, for tests that kill or fault a process there: calls to the store, seen from outside.

Nothing in the package knows of them: importing this wraps the store's calls, in this process and in those forked from
it, and ``on_point`` is called with the name of each point that is passed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tests.harness.product import Store, saves

SAVE_BEGUN = "save begun"
PART_OPENED = "part opened"
PART_WRITTEN = "part written"
PARTS_WRITTEN = "parts written"
COMMITTED = "committed"
PRUNED_ONE_MANIFEST = "pruned one manifest"
PRUNED = "pruned"

IN_ORDER = (SAVE_BEGUN, PART_OPENED, PART_WRITTEN, PARTS_WRITTEN, COMMITTED, PRUNED_ONE_MANIFEST, PRUNED)

on_point: Callable[[str], object] | None = None
"""Called in the thread that writes."""

under_way = False
"""Whether this process is between the first and the last of them."""

_make, _part, _put, _remove, _prune = Store.make, Store.part, Store.put, Store.remove, saves.prune
_begun: set[str] = set()


def reached(point: str) -> None:
    global under_way  # noqa: PLW0603  (of this process, as what it wraps is)
    under_way = point != PRUNED
    if on_point is not None:
        on_point(point)


def _is_manifest(name: str) -> bool:
    return name.endswith(saves.MANIFEST)


def make(self: Any, save: str) -> None:
    _make(self, save)
    if save not in _begun:
        _begun.add(save)
        reached(SAVE_BEGUN)


@contextlib.contextmanager
def part(self: Any, name: str) -> Iterator[Any]:
    with _part(self, name) as file:
        if name.endswith(".distcp"):
            reached(PART_OPENED)
        yield file
    if name.endswith(".distcp"):
        reached(PART_WRITTEN)


def put(self: Any, name: str, data: bytes) -> None:
    if _is_manifest(name):
        reached(PARTS_WRITTEN)
    _put(self, name, data)
    if _is_manifest(name):
        reached(COMMITTED)


def remove(self: Any, name: str) -> None:
    _remove(self, name)
    if _is_manifest(name):
        reached(PRUNED_ONE_MANIFEST)


def prune(*arguments: Any) -> None:
    _prune(*arguments)
    reached(PRUNED)


Store.make, Store.part, Store.put, Store.remove, saves.prune = make, part, put, remove, prune
