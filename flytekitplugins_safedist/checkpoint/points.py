"""The named points of a save at which a process may die, and of a resume; tests kill it there."""

from __future__ import annotations

from collections.abc import Callable

SAVE_BEGUN = "save begun"
PART_OPENED = "part opened"
PART_WRITTEN = "part written"
PARTS_WRITTEN = "parts written"
COMMITTED = "committed"
PRUNED_ONE_MANIFEST = "pruned one manifest"
PRUNED = "pruned"
IN_ORDER = (SAVE_BEGUN, PART_OPENED, PART_WRITTEN, PARTS_WRITTEN, COMMITTED, PRUNED_ONE_MANIFEST, PRUNED)

on_point: Callable[[str], None] | None = None
"""What tests set, in the process that they kill."""


def reached(point: str) -> None:
    """Say that ``point`` is reached: nothing happens, outside tests."""
    if on_point is not None:
        on_point(point)
