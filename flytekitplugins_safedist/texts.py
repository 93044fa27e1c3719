"""Text from outside (an exception, a rank's log, a file's name) as everything that it reaches can hold it."""

from __future__ import annotations

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
"""What would move a terminal's cursor, clear it or hide what is written."""


def encodable(text: str) -> str:
    """``text`` as protobuf, files and terminals can hold it: lone surrogates (from names that are not UTF-8) and
    control characters are spelled out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").translate(_CONTROLS)
