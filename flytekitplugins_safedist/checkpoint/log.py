"""What checkpoints say in the rank's log: one line each."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """One line."""
    sys.stderr.write(f"[safedist checkpoint] {text}\n")
    sys.stderr.flush()
