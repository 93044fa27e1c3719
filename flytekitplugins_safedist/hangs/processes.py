"""What the kernel says of a process (/proc, and its table of sockets), without the process's help: also while it is
stopped, or holds the GIL."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_SOCK_DIAG, _DIAG_INFO, _DONE = 4, 2, 3
_CONNECTED = 1 << 1 | 1 << 2
"""Of states, a bit each: ESTABLISHED, SYN_SENT."""
_COUNT = re.compile(r"^(\w+): (\d+)$", re.MULTILINE)
_CHARS, _BYTES = ("rchar", "wchar"), ("read_bytes", "write_bytes")
_PAGE_BYTES = 1 << 15
"""That are read at least, with those beside it, where a page of a file that is mapped is waited for."""
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
        cpu: seconds of CPU time so far of its session and of its descendants: what it has started counts as its own,
            also when that has ended.
        children: ids of its children that have ended and are not reaped, or are stopped.
        data: bytes that it and its descendants have read and written so far: files, pipes, and what else is read so.
        stored: of these what came from and went to disks and file servers.
        received: bytes that have come and gone over the connections of all these, by socket.
        peers: whom its TCP connections lead to, with what they have not acknowledged; at most :data:`PEERS`.
    """

    pid: int
    state: str = ""
    wchan: str = ""
    cpu: float = 0.0
    children: tuple[int, ...] = ()
    data: int = 0
    stored: int = 0
    received: Mapping[str, int] = field(default_factory=dict)
    peers: tuple[str, ...] = ()

    def __str__(self) -> str:
        """For people: ``sleeping (pipe_read)``."""
        text = _STATES.get(self.state, self.state or "gone")
        return f"{text} ({self.wchan})" if self.wchan and self.state in "SD" else text


def look(pids: Collection[int]) -> dict[int, Process]:
    """What processes do now. Each leads a session of its own, as every rank does; they share a network."""
    stats, sockets = dict(_stats()), _sockets()
    children: dict[int, list[int]] = {}
    sessions: dict[str, list[int]] = {}
    for found, fields in stats.items():
        children.setdefault(int(fields[1]), []).append(found)
        sessions.setdefault(fields[3], []).append(found)
    looks = {pid: Process(pid) for pid in pids}
    for pid in looks.keys() & stats.keys():
        # Compilers' workers leave the session; those whose parent has ended are no descendants any more.
        started, left = set(sessions[stats[pid][3]]), [pid]
        while left:
            born = children.get(left.pop(), [])
            started.update(born)
            left += born
        looks[pid] = _look(pid, {each: stats[each] for each in started}, children.get(pid, []), sockets)
    return looks


def _look(
    pid: int, stats: Mapping[int, list[str]], born: Collection[int], sockets: Mapping[str, tuple[int, str]]
) -> Process:
    """A process, with *stats* of it and all that it has started."""
    own, wchan = stats[pid], _text(_PROC / str(pid) / "wchan")
    counts = [dict(_COUNT.findall(_text(_PROC / str(each) / "io"))) for each in stats]
    data, stored = (sum(int(each.get(name, 0)) for each in counts for name in names) for names in (_CHARS, _BYTES))
    links = {each: [link for link in _links(each) if link in sockets] for each in stats}
    return Process(
        pid=pid,
        state=own[0],
        wchan="" if wchan == "0" else wchan,
        # With the time of children that have ended (and were waited for), as the kernel counts I/O by itself: else a
        # compiler that ends would take from the sum, and one that is run for each file would be seen to do nothing.
        cpu=sum(int(ticks) for fields in stats.values() for ticks in fields[11:15]) / _TICKS,
        children=tuple(each for each in born if stats[each][0] in "ZT"),
        data=data,
        stored=stored + _PAGE_BYTES * sum(int(faults) for fields in stats.values() for faults in fields[9:11]),
        received={link: sockets[link][0] for some in links.values() for link in some},
        peers=tuple(sorted(sockets[link][1] for link in links[pid])[:PEERS]),
    )


def _sockets() -> dict[str, tuple[int, str]]:
    """By what a descriptor leads to: bytes that have come and gone, and the other end of each TCP connection here, also
    of one that is being made (sock_diag(7)). {} where the kernel, or what stands for it, does not tell."""
    found: dict[str, tuple[int, str]] = {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        for family in (socket.AF_INET, socket.AF_INET6):
            request = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (_DIAG_INFO - 1), _CONNECTED)
            kernel.send(struct.pack("=IHHII", 16 + len(request), 20, 0x301, 0, 0) + request)
            kind = _DONE + 1
            while kind > _DONE:
                for kind, message in _parts(kernel.recv(1 << 17), "=IH"):
                    if kind > _DONE:
                        found.update([_socket(message[16:])])
    return found


def _parts(data: bytes, head: str) -> Iterator[tuple[int, bytes]]:
    """Of what the kernel says, each with its kind: its length and that are the head of it."""
    while len(data) >= struct.calcsize(head):
        length, kind = struct.unpack_from(head, data)
        yield kind, data[:length]
        data = data[max(4, (length + 3) & ~3) :]


def _socket(message: bytes) -> tuple[str, tuple[int, str]]:
    """``struct inet_diag_msg``, and after it attributes, of which one is ``struct tcp_info``."""
    size = 4 if message[0] == socket.AF_INET else 16
    ip = ipaddress.ip_address(message[24 : 24 + size])
    other = str(getattr(ip, "ipv4_mapped", None) or ip)
    (port,), (unacknowledged, _, inode) = struct.unpack_from(">H", message, 6), struct.unpack_from("=III", message, 60)
    infos = [part for kind, part in _parts(message[72:], "=HH") if kind == _DIAG_INFO and len(part) >= 4 + 136]
    data = sum(sum(struct.unpack_from("=QQ", info, 4 + 120)) for info in infos)  # tcpi_bytes_acked, tcpi_bytes_received
    peer = f"[{other}]:{port}" if ":" in other else f"{other}:{port}"
    peer += f" ({unacknowledged} bytes not acknowledged)" if unacknowledged else ""
    return f"socket:[{inode}]", (data, peer)


def listens(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal (one that has none may be ended by it), and is not stopped."""
    found = re.search(r"^State:\s*(\w).*^SigCgt:\s*([0-9a-f]+)", _text(_PROC / str(pid) / "status"), re.M | re.S)
    return found is not None and found[1] not in "TtZ" and bool(int(found[2], 16) >> (number - 1) & 1)


def woken(pid: int) -> int:
    """How often the main thread of a process has waited, and been woken; 0 where nobody knows."""
    found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", _text(_PROC / str(pid) / "status"), re.MULTILINE)
    return int(found[1]) if found is not None else 0


def wakes(pid: int, number: int) -> int:
    """How often the thread of a process that takes a signal has been woken; the least, where there are several."""
    counts = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in (_PROC / str(pid) / "task").iterdir():
            text = _text(thread / "status")
            found = re.search(r"^SigBlk:\s*([0-9a-f]+).*^voluntary_ctxt_switches:\s*(\d+)", text, re.M | re.S)
            if found is not None and not int(found[1], 16) >> (number - 1) & 1:
                counts.append(int(found[2]))
    return min(counts, default=0)


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
