"""Small results as text that other ranks can read: JSON, with paths, bytes and tuples marked. Never a pickle."""

from __future__ import annotations

import base64
import json
from pathlib import Path, PurePath
from typing import Any

from ..errors import FsError

LIMIT = 1 << 20
_MARK = "__safedist__"


def encode(value: Any) -> str:
    """``value`` as text.

    Raises:
        FsError: it holds something that JSON cannot say, or is larger than a MiB.
    """
    try:
        text = json.dumps(_mark(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise FsError(
            "this result cannot be handed to the other ranks",
            seen=f"{type(value).__name__}: {error}",
            expected="None, numbers, text, bytes, paths, and lists, tuples or dicts (with text keys) of these",
            hint="write it to a file and return the path",
        ) from error
    if len(text) > LIMIT:
        raise FsError(
            "this result is too large to be handed to the other ranks",
            seen=f"{len(text)} characters",
            expected=f"at most {LIMIT}",
            hint="write it to a file and return the path",
        )
    return text


def decode(text: str) -> Any:
    """The value that ``encode`` was given."""
    return _unmark(json.loads(text))


def _mark(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, PurePath):
        return {_MARK: "path", "of": str(value)}
    if isinstance(value, bytes):
        return {_MARK: "bytes", "of": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {_MARK: "tuple", "of": [_mark(item) for item in value]}
    if isinstance(value, list):
        return [_mark(item) for item in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) and key != _MARK for key in value):
            raise TypeError("a dict with keys that are not text")
        return {key: _mark(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} is not one of the types that can be handed over")


def _unmark(value: Any) -> Any:
    if isinstance(value, list):
        return [_unmark(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_MARK)
    if kind == "path":
        return Path(value["of"])
    if kind == "bytes":
        return base64.b64decode(value["of"])
    if kind == "tuple":
        return tuple(_unmark(item) for item in value["of"])
    return {key: _unmark(item) for key, item in value.items()}
