"""The rank server of a local run stays for the next one of the same process: what it has imported is there already.

It is used again as long as all is equal that it, and each rank, takes over from this process as it is started, as
nothing was installed since, and as no variable has changed that something has read as it was imported. It ends with
this process; sooner, when nobody has needed it for some minutes.
"""

from __future__ import annotations

import atexit
import os
import resource
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..rank_server.client import RankServer
from ..rank_server.launch import Launched, launch, path_for_libraries

IDLE_SECONDS = 300.0
"""What it has imported takes some hundred MiB."""

_SAYS = (".dist-info", ".egg-info", ".egg-link", ".pth")

_LIMITS = sorted(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))


class _Standby:
    """The one server that stands by in this process, and what it was started in."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.server: RankServer | None = None
        self.around: Any = None

    def exchange(self, server: RankServer | None, around: Any = None) -> tuple[RankServer | None, Any]:
        with self.lock:
            before = self.server, self.around
            self.server, self.around = server, around
        return before

    def close(self) -> None:
        server, _ = self.exchange(None)
        if server is not None:
            server.close()


_STANDBY = _Standby()
atexit.register(_STANDBY.close)
# A child has a copy of the connection, and may not use it: its parent does.
os.register_at_fork(after_in_child=_STANDBY.__init__)  # type: ignore[misc]


@contextmanager
def lent(environment: Mapping[str, str]) -> Iterator[RankServer]:
    """A rank server for one job: the one that stands by where it fits, else a new one; it stands by afterwards, unless
    an exception comes through.

    Args:
        environment: the job's variables.

    Raises:
        LaunchError: it cannot be started.
    """
    around = _surroundings()
    with ExitStack() as held:
        server, its = _STANDBY.exchange(None)
        if server is not None and not (its == around and server.fits(environment)):
            server.close()
            server = None
        server = held.enter_context(server or RankServer(_launched(environment)))
        yield server
        with suppress(LaunchError):  # it is gone
            server.stand_by(IDLE_SECONDS)
            held.pop_all()
            other, _ = _STANDBY.exchange(server, around)  # of a job that ran beside this one
            if other is not None:
                other.close()


def _surroundings() -> Any:
    path = path_for_libraries(sys.path)
    status = Path("/proc/self/status").read_bytes().splitlines()  # its name may be no text
    return (
        [(each, _installed(each)) for each in path],
        [resource.getrlimit(limit) for limit in _LIMITS],
        [line for line in status if line.startswith(b"Umask:")],
        os.sched_getaffinity(0),
        os.getpriority(os.PRIO_PROCESS, 0),
    )


def _installed(directory: str) -> list[tuple[str, int]]:
    """What an installer has put there, and when it wrote what it says of that. Not the directory's own time: Python
    changes that as it writes bytecode."""
    if not os.path.isdir(directory):  # noqa: PTH112  (a zip file may be on the path)
        return []
    with os.scandir(directory) as entries:
        names = [entry for entry in entries if entry.name != "__pycache__"]
        return sorted(
            (each.name, each.stat(follow_symlinks=False).st_mtime_ns if each.name.endswith(_SAYS) else 0)
            for each in names
        )


def _launched(environment: Mapping[str, str]) -> Launched:
    """Start one from a thread that lives as long as it does: to the kernel a process's parent is the thread that has
    started it, and callers' threads end."""
    answer: Future[Launched] = Future()

    def start() -> None:
        try:
            launched = launch(environment)
        except BaseException as error:
            answer.set_exception(error)
            return
        answer.set_result(launched)
        with suppress(ChildProcessError):  # reaped by then
            os.waitid(os.P_PID, launched.pid, os.WEXITED | os.WNOWAIT)

    threading.Thread(target=start, name="safedist rank server", daemon=True).start()
    return answer.result()
