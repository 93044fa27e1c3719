"""What a machine has at some paths, for one process and what it starts."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

DEVICES = ("null", "zero", "full", "random", "urandom")


def mount(*arguments: str | Path) -> None:
    """Mount something in a name space of this process's own: it goes with the process.

    Raises:
        OSError, subprocess.CalledProcessError: this process may not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000) != 0:  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "unshare")
    for command in (("--make-rprivate", "/"), arguments):
        subprocess.run(["mount", *command], check=True, capture_output=True)


def no_shared_memory(devices: Path) -> list[tuple[str, ...]]:
    """What to mount where there shall be no ``/dev/shm``. ``devices`` is a new directory."""
    devices.mkdir()
    for name in DEVICES:
        (devices / name).touch()
    (devices / "fd").symlink_to("/proc/self/fd")
    return [*(("--bind", f"/dev/{name}", str(devices / name)) for name in DEVICES), ("--rbind", str(devices), "/dev")]
