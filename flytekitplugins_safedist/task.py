"""The flytekit task classes; importing this module registers them."""

from __future__ import annotations

from .config import SafeHorovod, SafeTorch

__all__ = ["SafeHorovod", "SafeTorch"]
