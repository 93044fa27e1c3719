"""What the kernel says of a process (/proc), without its help: also while it is stopped, or holds the GIL."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_CONNECTED = ("01", "02")
_SENT_AGAIN = "01"
"""The timer of a connection that waits for an acknowledgement; another one asks whether the other end reads again."""
_TIMES_IN_VAIN = 2
PEERS = 32
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep (a disk, a file server or a device does not answer)",
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "Z": "ended, not reaped",
}

_Stats = Mapping[int, list[str]]


@dataclass(frozen=True)
class Process:
    """A process at one moment.

    Attributes:
        pid: its id.
        state: as in /proc/PID/stat: R, S, D, T, t, Z; "" where it is gone.
        wchan: what its main thread waits for in the kernel; "" where it runs, or the kernel does not say.
        cpu: seconds of CPU time so far of its session and of its descendants: what it has started counts as its own.
        children: ids of its children that have ended and are not reaped, or are stopped.
        peers: whom its TCP connections lead to, with what they have not acknowledged; at most :data:`PEERS`.
        cut: its own address and the other one of connections over which the kernel sends the same again and again, and
            hears nothing.
        addresses: its own, of all its connections but those within the machine.
    """

    pid: int
    state: str = ""
    wchan: str = ""
    cpu: float = 0.0
    children: tuple[int, ...] = ()
    peers: tuple[str, ...] = ()
    cut: tuple[tuple[str, str], ...] = ()
    addresses: tuple[str, ...] = ()

    def __str__(self) -> str:
        """For people: ``sleeping (pipe_read)``."""
        text = _STATES.get(self.state, self.state or "gone")
        return f"{text} ({self.wchan})" if self.wchan and self.state in "SD" else text


def look(pids: Collection[int]) -> dict[int, Process]:
    """What processes do now, but for their connections. Each leads a session of its own, as every rank does."""
    stats = dict(_stats())
    children: dict[int, list[int]] = {}
    sessions: dict[str, list[int]] = {}
    for found, fields in stats.items():
        children.setdefault(int(fields[1]), []).append(found)
        sessions.setdefault(fields[3], []).append(found)
    return {pid: _look(pid, stats, children, sessions) if pid in stats else Process(pid) for pid in pids}


def _look(pid: int, stats: _Stats, children: Mapping[int, list[int]], sessions: Mapping[str, list[int]]) -> Process:
    # Compilers' workers leave the session; those whose parent has ended are no descendants any more.
    started, left = set(sessions[stats[pid][3]]), [pid]
    while left:
        born = children.get(left.pop(), [])
        started.update(born)
        left += born
    cpu = sum(int(stats[each][11]) + int(stats[each][12]) for each in started) / _TICKS
    ended = tuple(each for each in children.get(pid, []) if stats[each][0] in "ZT")
    wchan = _text(_PROC / str(pid) / "wchan")
    return Process(pid, stats[pid][0], "" if wchan == "0" else wchan, cpu, ended)


def connected(some: Collection[Process]) -> dict[int, Process]:
    """The same with their connections, by process id; one that is being made counts, too. They share a network."""
    sockets = {f"socket:[{at[9]}]": at for name in ("tcp", "tcp6") for at in _connections(some, name)}
    return {process.pid: _connected(process, sockets) for process in some}


def _connected(process: Process, sockets: Mapping[str, list[str]]) -> Process:
    own = [sockets[link] for link in _links(process.pid) if link in sockets]
    peers = sorted(_peer(at[2], int(at[4].partition(":")[0], 16)) for at in own)
    lost = [at for at in own if at[5].startswith(_SENT_AGAIN) and int(at[6], 16) >= _TIMES_IN_VAIN]
    cut = {(str(_ip(at[1])), str(_ip(at[2]))) for at in lost}
    addresses = {str(_ip(at[1])) for at in own if not _ip(at[1]).is_loopback}
    return replace(process, peers=tuple(peers[:PEERS]), cut=tuple(sorted(cut)), addresses=tuple(sorted(addresses)))


def _connections(some: Collection[Process], name: str) -> Iterator[list[str]]:
    """Of the network of the first that is still there: a line of /proc/PID/net/tcp each (proc_net_tcp in the kernel's
    documentation)."""
    texts = (_text(_PROC / str(process.pid) / "net" / name) for process in some)
    for line in next(filter(None, texts), "").splitlines()[1:]:
        fields = line.split()
        if fields[3] in _CONNECTED:
            yield fields


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    words = bytes.fromhex(address.partition(":")[0])  # each of 4 bytes, in this machine's order
    packed = b"".join(words[at : at + 4][:: -1 if sys.byteorder == "little" else 1] for at in range(0, len(words), 4))
    ip = ipaddress.ip_address(packed)
    return getattr(ip, "ipv4_mapped", None) or ip


def _peer(address: str, unacknowledged: int) -> str:
    ip, port = _ip(address), int(address.partition(":")[2], 16)
    shown = f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"
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
