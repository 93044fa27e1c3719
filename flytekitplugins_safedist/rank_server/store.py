"""The store that torch's ranks of a round meet at, in a process of its own.

It is there before any rank looks for it: torch's client, once refused, looks again half a second to a second later. And
it is there when rank 0 has returned, while others still make groups, as under torchrun, whose agent has it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from ..compat import torch as torch_inside
from ..rank.backends.torch import LOOPBACK
from ..rank.fork import die_with_parent

_OPEN_SECONDS = 20.0
"""For a process to be forked, and to listen: some hundredths of a second, where the processor is free."""


def keep(shed: Callable[[], None]) -> tuple[int, int]:
    """Fork a process that opens a store, on a port that is free, and keeps it as long as this one lives.

    Args:
        shed: lets go, in the forked process, of what is this one's.

    Returns:
        Its process id and the port; 0 where there is none, because torch is not imported here or does not open it.
    """
    if not torch_inside.finds_store_maker():
        return 0, 0
    server = os.getpid()
    told, tells = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _be_the_store(server, tells, shed)
    os.close(tells)
    with open(told, "rb") as pipe:
        look = select.poll()
        look.register(pipe, select.POLLIN)
        port = int(pipe.read() or 0) if look.poll(_OPEN_SECONDS * 1000) else 0
    return pid, port


def _be_the_store(server: int, tells: int, shed: Callable[[], None]) -> NoReturn:
    try:
        os.setsid()
        die_with_parent(signal.SIGKILL)
        if os.getppid() != server:  # it died before the kernel was told
            os._exit(1)
        shed()
        with contextlib.suppress(OSError, ValueError):  # each rank of the job has some connections here
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        for number in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        made = sys.modules["torch.distributed"].TCPStore(
            host_name=LOOPBACK, port=0, is_master=True, wait_for_workers=False
        )
        os.write(tells, str(made.port).encode())
        os.close(tells)
        while True:
            signal.pause()
    finally:
        os._exit(1)
