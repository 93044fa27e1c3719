"""How much an archive may unpack to before it is refused as a bomb."""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on one archive. The defaults leave room for any real project and stop a bomb before the disk is full.

    Attributes:
        max_bytes: bytes of the unpacked stream, headers and padding included.
        max_files: members of any kind.
        max_ratio: unpacked bytes per compressed byte, looked at only beyond ``ratio_from`` unpacked bytes: small
            archives of empty files compress far better than that and hurt nobody. deflate itself ends at 1032.
        ratio_from: unpacked bytes from which the ratio counts.
    """

    max_bytes: int = 64 * _GIB
    max_files: int = 1_000_000
    max_ratio: float = 200.0
    ratio_from: int = _GIB // 4


MAX_PATH = 4095
"""Bytes of a member's path: Linux's PATH_MAX less the terminating NUL (limits.h)."""

MAX_DEPTH = 255
"""Directories a member may be deep: each one is a lookup for every later access."""

MAX_EXTENDED_HEADER = 1 << 20
"""Bytes of one pax or GNU long-name header. Real ones hold a path; GNU tar's are a few hundred bytes."""

MAX_EXTENDED_TOTAL = 4 << 20
EXTENDED_PER_MEMBER = 16 << 10
"""Bytes of all such headers: each record costs as much to read as a file, and five bytes make one. A member needs two
paths at most."""
