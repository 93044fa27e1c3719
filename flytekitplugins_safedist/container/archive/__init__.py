"""Safe unpacking of code archives, and its limits.

:func:`unpack` takes the bytes of a tar archive (packed with gzip or zstd or plain, told by its content) and fills one
private directory, or raises :class:`~flytekitplugins_safedist.errors.ArchiveError` naming the member it refuses.
"""

from __future__ import annotations

from .inflate import INFLATER, Inflate, crc32
from .limits import Limits
from .tar import DIRECTORY, FILE, HARDLINK, SYMLINK
from .unpack import IMPLIED, TreeEntry, Unpacked, unpack, unpack_tar

__all__ = [
    "DIRECTORY",
    "FILE",
    "HARDLINK",
    "IMPLIED",
    "INFLATER",
    "SYMLINK",
    "Inflate",
    "Limits",
    "TreeEntry",
    "Unpacked",
    "crc32",
    "unpack",
    "unpack_tar",
]
