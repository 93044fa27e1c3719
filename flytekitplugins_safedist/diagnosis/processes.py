"""What the kernel says of a process (/proc), without its help: also while it is stopped, or holds the GIL."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_CONNECTED = ("01", "02")
PEERS = 32
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep (a disk, a file server or a device does not answer)",
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "Z": "ended, not reaped",
}


@dataclass(frozen=True)
class Process:
    """A process at one moment.

    Attributes:
        pid: its id.
        state: as in /proc/PID/stat: R, S, D, T, t, Z; "" where it is gone.
        wchan: what its main thread waits for in the kernel; "" where it runs, or the kernel does not say.
        cpu: seconds of CPU time of all processes of its session so far: what it has started counts as its own.
        children: ids of its children that have ended and are not reaped, or are stopped.
        peers: whom its TCP connections lead to, with what they have not acknowledged; at most :data:`PEERS`.
    """

    pid: int
    state: str = ""
    wchan: str = ""
    cpu: float = 0.0
    children: tuple[int, ...] = ()
    peers: tuple[str, ...] = ()

    def __str__(self) -> str:
        """For people: ``sleeping (pipe_read)``."""
        text = _STATES.get(self.state, self.state or "gone")
        return f"{text} ({self.wchan})" if self.wchan and self.state in "SD" else text


def look(pid: int) -> Process:
    """What a process does now. It leads a session of its own, as every rank does."""
    stats = list(_stats())
    own = next((fields for found, fields in stats if found == pid), None)
    if own is None:
        return Process(pid)
    session = own[3]
    cpu = sum(int(fields[11]) + int(fields[12]) for _, fields in stats if fields[3] == session) / _TICKS
    children = tuple(found for found, fields in stats if fields[1] == str(pid) and fields[0] in "ZT")
    wchan = _text(_PROC / str(pid) / "wchan")
    return Process(pid, own[0], "" if wchan == "0" else wchan, cpu, children)


def peers(pid: int) -> tuple[str, ...]:
    """See :class:`Process`. A connection that is being made counts, too."""
    sockets = {f"socket:[{fields[9]}]": fields for name in ("tcp", "tcp6") for fields in _connections(pid, name)}
    own = [sockets[link] for link in _links(pid) if link in sockets]
    return tuple(sorted(_peer(fields[2], int(fields[4].partition(":")[0], 16)) for fields in own))[:PEERS]


def _connections(pid: int, name: str) -> Iterator[list[str]]:
    """Of its network: a line of /proc/PID/net/tcp each (proc_net_tcp in the kernel's documentation)."""
    for line in _text(_PROC / str(pid) / "net" / name).splitlines()[1:]:
        fields = line.split()
        if fields[3] in _CONNECTED:
            yield fields


def _peer(address: str, unacknowledged: int) -> str:
    host, _, port = address.partition(":")
    words = bytes.fromhex(host)  # each of 4 bytes, in this machine's order
    packed = b"".join(words[at : at + 4][:: -1 if sys.byteorder == "little" else 1] for at in range(0, len(words), 4))
    ip = ipaddress.ip_address(packed)
    ip = getattr(ip, "ipv4_mapped", None) or ip
    shown = f"[{ip}]:{int(port, 16)}" if ip.version == 6 else f"{ip}:{int(port, 16)}"
    return f"{shown} ({unacknowledged} bytes not acknowledged)" if unacknowledged else shown


def listens(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal (one that has none may be ended by it), and is not stopped."""
    found = re.search(r"^State:\s*(\w).*^SigCgt:\s*([0-9a-f]+)", _text(_PROC / str(pid) / "status"), re.M | re.S)
    return found is not None and found[1] not in "TtZ" and bool(int(found[2], 16) >> (number - 1) & 1)


def holding(pattern: str) -> dict[Path, int]:
    """Files of that name (a pattern of ``re``) that processes have open: the first process of each, which the others
    come from."""
    found: dict[Path, dict[int, int]] = {}
    for pid, fields in _stats():
        for link in _links(pid):
            if re.search(pattern, link):
                found.setdefault(Path(link), {})[pid] = int(fields[1])
    return {path: next(pid for pid, parent in pids.items() if parent not in pids) for path, pids in found.items()}


def _links(pid: int) -> list[str]:
    """What a process has open."""
    links = []
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        for entry in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                links.append(os.readlink(entry))  # noqa: PTH115
    return links


def _stats() -> Iterator[tuple[int, list[str]]]:
    """Each process's id, and its /proc/PID/stat from the state on (proc_pid_stat(5)): state, parent, group, session."""
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (line := _text(entry / "stat")):
            # The command's name, in brackets, may hold spaces and brackets itself.
            yield int(entry.name), line.rpartition(")")[2].split()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it ended meanwhile, or the kernel does not show it
        return ""
