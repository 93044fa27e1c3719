"""Files that rank 0 returns and does not have: most often another rank wrote them, into its own scratch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any

from ..errors import PayloadError

_OF_A_RANK = re.compile(r"/safedist-[^/]+/round-(\d+)/rank-(\d+)(?:/|$)")
"""``scratch.py``'s layout, also through a short link."""


def problem(returned: object, said: str) -> PayloadError | None:
    """Why files of *returned* could not be uploaded, where flytekit has *said* so of one that is not there."""
    for path in _paths(returned):
        if path in said and not os.path.exists(path):  # noqa: PTH110  (no Path of what may hold a NUL or be too long)
            return _error(path)
    return None


def _paths(value: Any) -> Iterator[str]:
    if is_dataclass(value) and not isinstance(value, type):  # FlyteFile and FlyteDirectory are such, too
        value = [getattr(value, field.name, None) for field in fields(value)]
    elif isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _paths(each)
    elif isinstance(value, (str, PurePath)) and PurePath(value).is_absolute():
        yield str(value)


def _error(path: str) -> PayloadError:
    owner = _OF_A_RANK.search(path)
    whose = f": it is in the scratch of rank {owner[2]}, round {owner[1]}" if owner is not None else ""
    return PayloadError(
        f"rank 0 returns a path that is not there{whose}",
        where={"path": path},
        expected="a file or directory that rank 0 has written, or that all nodes see",
        hint="rank 0's return value is the task's, and each rank's scratch is its own, on its node's disk: have rank 0 "
        "write what it returns, or write to storage that all nodes share and return that path",
    )
