"""What a machine has at some paths, for one process and what it starts."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
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


def no_shared_memory(devices: Path) -> Callable[[], None]:
    """For a process before it becomes another: there is no ``/dev/shm``. ``devices`` is a new directory."""
    devices.mkdir()
    for name in DEVICES:
        (devices / name).touch()
    (devices / "fd").symlink_to("/proc/self/fd")

    def enter() -> None:
        for name in DEVICES:
            mount("--bind", f"/dev/{name}", devices / name)
        mount("--rbind", devices, "/dev")

    return enter
