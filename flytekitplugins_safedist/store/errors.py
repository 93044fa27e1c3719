"""An error of a store's in one line, for the log and for messages."""

from __future__ import annotations

from ..texts import public


def one_line(error: BaseException) -> str:
    """``error`` with its type in at most 300 characters, without secrets."""
    text = public(" ".join(f"{type(error).__name__}: {error}".split()))
    return text if len(text) <= 300 else text[:297] + "..."
