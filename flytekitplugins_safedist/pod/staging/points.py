"""Named points of a staging, in order; tests stop processes there."""

from __future__ import annotations

from collections.abc import Callable

POINTS = ("begun", "fetch", "unpacked", "place", "placed")
"""The private directory is there; the archive is; all is unpacked and nothing placed; after each rename; done."""


at: Callable[[str], object] = bool
"""Told each of them."""
