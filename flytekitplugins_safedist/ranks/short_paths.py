"""Paths that are short enough for the sockets that are made below them.

A DataLoader's workers hand tensors over through a socket in TMPDIR. Where its path is longer than the kernel takes, the
worker prints ``OSError: AF_UNIX path too long``, and the rank waits for it for ever.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from ..errors import ScratchError

SOCKET_PATH_BYTES = 107
"""The longest path of a socket: unix(7)'s ``sun_path`` has 108 bytes, one of them for the end."""
SOCKET_NAME_BYTES = 40
"""Of these, kept for what is made below TMPDIR: multiprocessing's ``/pymp-xxxxxxxx/listener-xxxxxxxx`` takes 32 bytes,
torch's ``/torch-shm-dir-XXXXXX/manager.sock`` 34."""


def of(directory: Path, *, below: Path) -> Path:
    """The directory itself, or a new link to it where sockets in ``directory / below`` would have too long a path.

    The link is as private as the directory: nobody else may enter that. It is made in the first place that is short
    enough and can be written.

    Raises:
        ScratchError: there is no such place.
    """
    if _fits(directory, below):
        return directory
    tried: dict[str, str] = {}
    for place in dict.fromkeys([str(directory.parent), tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"]):  # noqa: S108
        link = Path(place) / f"safedist-{secrets.token_hex(4)}"
        if not _fits(link, below):
            tried[place] = "too long"
            continue
        try:
            link.symlink_to(directory)  # EEXIST where somebody has this name already
        except OSError as error:
            tried[place] = error.strerror or str(error)
        else:
            return link
    raise _too_long(directory, below, tried)


def _fits(directory: Path, below: Path) -> bool:
    return len(os.fsencode(directory / below)) + SOCKET_NAME_BYTES <= SOCKET_PATH_BYTES


def _too_long(directory: Path, below: Path, tried: dict[str, str]) -> ScratchError:
    root = directory.parent
    taken = len(os.fsencode(root))
    allowed = taken + SOCKET_PATH_BYTES - SOCKET_NAME_BYTES - len(os.fsencode(directory / below))
    return ScratchError(
        "the scratch directory's path is too long for sockets: DataLoader workers would hang",
        where={"path": root, "tried for a link": "; ".join(f"{place}: {why}" for place, why in tried.items())},
        seen=f"{taken} bytes",
        expected=f"at most {allowed} bytes (a socket's path has at most {SOCKET_PATH_BYTES})",
        hint="set Scratch(path=...) or SAFEDIST_SCRATCH_ROOT to a shorter path, or make /tmp writable",
    )
