"""A node with GPUs, as far as NVIDIA's library tells of them: a stand-in for the driver (``driver.c``), below the real
``nvidia-ml-py``. No test here has seen a GPU."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("driver.c")
SONAME = "libnvidia-ml.so.1"
"""What ``nvidia-ml-py`` loads. Who has loaded a library of that name already is given that one."""


def build(directory: Path) -> Path:
    """Compile the driver."""
    library = directory / SONAME
    command = ["cc", "-shared", "-fPIC", "-Wall", "-Wno-unused-parameter", f"-Wl,-soname,{SONAME}"]
    subprocess.run([*command, "-o", str(library), str(SOURCE)], check=True)
    return library


class Gpus:
    """GPUs that do what they are told.

    Args:
        path: of the file that says it.
        count: of GPUs.
    """

    def __init__(self, path: Path, count: int) -> None:
        self.path = path
        say(path, -1, gpus=count)

    def say(self, index: int, **values: int) -> None:
        """From now on; ``xid`` is an event."""
        say(self.path, index, **values)


def say(path: Path | str, index: int, **values: int) -> None:
    """The same, from any process: each line is written at once."""
    lines = "".join(f"{index} {name.replace('_', '-')} {value}\n" for name, value in values.items())
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, lines.encode())
    finally:
        os.close(file)


def load() -> None:
    """In a process that is to find the driver: TEST_NVML_LIBRARY says where it is."""
    if "TEST_NVML_LIBRARY" in os.environ:
        ctypes.CDLL(os.environ["TEST_NVML_LIBRARY"])
