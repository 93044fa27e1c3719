"""Who made this? A record that names one process for ever, and the proof that it is dead.

Proof means: the kernel that ran the process says so. Anything else (age, a missing heartbeat, a host name that looks
the same) is no proof, and a lock is never broken on it.
"""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ProcessRecord:
    """One process, for ever: a pid alone is used again, together with its start time and the boot it is not.

    Args:
        host: the machine's (or container's) name; for people, proves nothing.
        boot_id: the kernel's random name of this boot (random(4)); "" if unknown.
        pid_ns: the pid namespace that ``pid`` counts in (pid_namespaces(7)); "" if unknown.
        pid: process id.
        started: start time in clock ticks since boot (proc(5), stat field 22); -1 if unknown.
    """

    host: str
    boot_id: str
    pid_ns: str
    pid: int
    started: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ProcessRecord:
        """Raises: KeyError, TypeError, ValueError if ``values`` is no such record."""
        return cls(
            host=str(values["host"]),
            boot_id=str(values["boot_id"]),
            pid_ns=str(values["pid_ns"]),
            pid=int(values["pid"]),
            started=int(values["started"]),
        )

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


_this: list[ProcessRecord] = []
os.register_at_fork(after_in_child=_this.clear)


def this_process() -> ProcessRecord:
    """The record of the calling process. Read once: nothing of it changes while the process lives."""
    if not _this:
        _this.append(_read_this())
    return _this[0]


def _read_this() -> ProcessRecord:
    stat = _stat(os.getpid())
    return ProcessRecord(
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid_ns=pid_namespace(),
        pid=os.getpid(),
        started=stat[1] if stat else -1,
    )


def boot_id() -> str:
    """The random name of this boot of this kernel; empty where /proc does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def is_provably_dead(record: ProcessRecord) -> bool:
    """True only if this kernel knows that the process has ended.

    That takes the same boot of the same kernel, and the pid namespace that the pid counts in. (An inode number of a
    dead namespace may be given to a new one: then the recorded process has died with its namespace, and the start
    time tells the new pid from the old.) A process of another host or container cannot be judged: False.
    """
    if record.started < 0 or not record.boot_id or not record.pid_ns:
        return False
    if record.boot_id != boot_id() or record.pid_ns != pid_namespace():
        return False
    stat = _stat(record.pid)
    if stat is None:
        # No such pid, provided that this /proc shows it at all (it might be another namespace's, or hide pids).
        return _stat(os.getpid()) is not None and not _signalable(record.pid)
    state, started = stat
    if started != record.started:
        return True
    return state in "ZX" and _threads(record.pid) <= 1  # a zombie whose threads live on may still write


def pid_namespace() -> str:
    """The pid namespace of the caller, as /proc names it; empty where it does not."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name is in parentheses and may hold anything, parentheses included.
    rest = text[text.rindex(")") + 2 :].split()
    return rest[0], int(rest[19])


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208
    except OSError:
        return 0


def _signalable(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
