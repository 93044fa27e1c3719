"""Named points of a staging, in order; tests stop processes there."""

from __future__ import annotations

from collections.abc import Callable

POINTS = ("waiting", "locked", "fetch", "unpacked", "place", "placed")
"""Waiting for another process; alone; bytes have come; all is unpacked and nothing placed; after each rename; done."""


at: Callable[[str], object] = bool
"""Told each of them."""
