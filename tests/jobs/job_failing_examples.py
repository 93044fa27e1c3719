"""The examples that fail on purpose, as they are."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "failures"))

from bad_data import train as bad_data
from hang import train as hang
from lost_rank import train as lost_rank

__all__ = ["bad_data", "hang", "lost_rank"]
