"""How much memory this container may use, and what it and its processes use.

The numbers come from the kernel: the control group of this process (version 1 and 2), and ``/proc``. Reading never
fails: what is not there is None.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..coordinator.books import Memory
from ..texts import human


@dataclass(frozen=True)
class Cgroup:
    """The memory of this process's control group.

    Attributes:
        limit: bytes that it may use; None without a limit, or above what the machine has.
        in_use: bytes that the kernel cannot take back: all but the cached files.
        kills: processes that the kernel's out-of-memory killer has ended here; None where it does not count them.
        place: directory of the control group whose limit it is: this process's own, or one above it; without a limit
            its own.
        peak: the most bytes that were in use there, cached files included; None where the kernel does not say (version
            2 before Linux 5.19).
        as_one: whether one out-of-memory kill ends every process here (version 2's ``memory.oom.group``).
    """

    limit: int | None
    in_use: int
    kills: int | None
    place: str = ""
    peak: int | None = None
    as_one: bool = False


@dataclass(frozen=True)
class _Version:
    """One version of control groups: where it is mounted, as every distribution and container runtime has it, and the
    names of its files."""

    mount: str
    limit: str
    usage: str
    kills: str
    peak: str
    cached: tuple[str, ...]


_V1 = _Version(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.oom_control",
    "memory.max_usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Version(
    "sys/fs/cgroup",
    "memory.max",
    "memory.current",
    "memory.events",
    "memory.peak",
    ("inactive_file", "active_file"),
)
_NEAR = 0.95
"""Of a limit: a group that the limit held back was this near to it. It is charged by pages in batches."""


def cgroup(root: Path = Path("/")) -> Cgroup | None:
    """The control group of this process; None where there is none that accounts for memory.

    Args:
        root: where ``proc`` and the mount points lie; another one in tests.
    """
    for line in _lines(root / "proc" / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        version = _V1 if "memory" in controllers.split(",") else _V2
        mount = root / version.mount
        # In a container the mount's root is often the group itself, and the path that of another machine's directory.
        own = mount / path.lstrip("/") if (mount / path.lstrip("/") / version.usage).is_file() else mount
        usage = _number(own / version.usage)
        if usage is None or (version is _V2 and number != "0"):
            continue
        cached = sum(_table(own / "memory.stat").get(name, 0) for name in version.cached)
        above = [own, *own.parents][: len(own.parts) - len(mount.parts) + 1]
        limits = [(limit, place) for place in above if (limit := _number(place / version.limit)) is not None]
        machine = _table(root / "proc" / "meminfo").get("MemTotal:", 0) * 1024
        # "No limit" is a very large number in version 1.
        real = [(limit, place) for limit, place in limits if not machine or limit < machine]
        limit, place = min(real, key=lambda each: each[0], default=(None, own))
        kills = _table(own / version.kills).get("oom_kill")
        as_one = any(_number(each / "memory.oom.group") == 1 for each in above)
        return Cgroup(limit, max(0, usage - cached), kills, str(place), _number(place / version.peak), as_one)
    return None


def in_use() -> Memory | None:
    """What this container uses, and its limit; None where it has none."""
    group = cgroup()
    return None if group is None or group.limit is None else Memory(group.in_use, group.limit)


def resident(pid: int) -> int:
    """Bytes that a process has in memory, pages shared with others included. 0 when it is gone."""
    return _table(Path(f"/proc/{pid}/status")).get("VmRSS:", 0) * 1024


def high_water(pid: int) -> int:
    """The most bytes that a process has had in memory, pages shared with others included. 0 when it is gone."""
    return _table(Path(f"/proc/{pid}/status")).get("VmHWM:", 0) * 1024


def told(now: Cgroup | None, before: Cgroup | None, peaks: Mapping[int, int], *, ran_out: bool = False) -> str:
    """What is known of memory when a rank was killed, in one paragraph.

    Args:
        now: read after that.
        before: read when the ranks started.
        peaks: high-water in bytes by rank; 0 where it is not known.
        ran_out: whether somebody else than the kernel says that it was out: the text ends with what to write then.
    """
    shown = ", ".join(f"rank {rank} {human(peak) if peak else 'unknown'}" for rank, peak in sorted(peaks.items()))
    text = f"Memory high-water of each rank of this node: {shown}."
    if now is None:
        return text
    limit = "no limit" if now.limit is None else f"a limit of {human(now.limit)}"
    group = f" (control group {now.place})" if now.place else ""
    most = "" if now.peak is None else f" its high-water mark, cached files included, is {human(now.peak)},"
    text += f" The container has {limit}{group},{most} {human(now.in_use)} were in use right after."
    kills = killed(now, before)
    if kills is not None:
        text += f" Since the ranks started, the kernel's out-of-memory killer has ended {kills} process(es) here."
    return text + _advice(now) if kills or ran_out else text


def _advice(now: Cgroup) -> str:
    """What to write after an out-of-memory kill: more where its own limit was reached; else it was not its limit that
    ended the process, but what the machine had left for it."""
    if now.limit is not None and (now.peak is None or now.peak >= _NEAR * now.limit):
        mem = f'mem="{-(-now.limit * 3 // 2 // 2**30)}Gi"'
        return f" To give it at least half as much again: requests=Resources({mem}, ...), limits=Resources({mem}, ...)."
    of_limit = "" if now.limit is None else f", {human(now.limit - (now.peak or 0))} below its limit"
    mem = "..." if now.peak is None else f'"{-(-now.peak * 3 // 2 // 2**30)}Gi"'
    return (
        f" It was not this limit that ended it: the machine, or the pod above the container, had no memory left"
        f"{of_limit}. Ask for all that it uses, so that it is placed where that is free: "
        f"requests=Resources(mem={mem}, ...), limits=Resources(mem={mem}, ...)."
    )


def killed(now: Cgroup | None, before: Cgroup | None) -> int | None:
    """Processes of this container that the out-of-memory killer ended in between; None where nobody counts."""
    if now is None or before is None or now.kills is None or before.kills is None:
        return None
    return now.kills - before.kills


def _lines(path: Path) -> Iterable[str]:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").splitlines()
    return ()


def _number(path: Path) -> int | None:
    """The one number in a file; None for "max", which means no limit."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _table(path: Path) -> dict[str, int]:
    """The first number of each line, by the line's first word."""
    found = {}
    for line in _lines(path):
        name, _, rest = line.partition(" ") if "\t" not in line else line.partition("\t")
        with contextlib.suppress(ValueError, IndexError):
            found[name] = int(rest.split()[0])
    return found
