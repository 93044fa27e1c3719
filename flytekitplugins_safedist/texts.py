"""Text from outside (an exception, a rank's log, a file's name) as everything that it reaches can hold it."""

from __future__ import annotations

from collections.abc import Iterator

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
"""What would move a terminal's cursor, clear it or hide what is written."""


def encodable(text: str) -> str:
    """``text`` as protobuf, files and terminals can hold it: lone surrogates (from names that are not UTF-8) and
    control characters are spelled out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").translate(_CONTROLS)


def chain(error: BaseException, *, implied: bool = False) -> Iterator[BaseException]:
    """``error`` and what it was raised from, each once: a chain may come back to itself.

    Args:
        implied: whether what was being handled when it was raised counts too.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        context = None if current.__suppress_context__ or not implied else current.__context__
        current = current.__cause__ or context
