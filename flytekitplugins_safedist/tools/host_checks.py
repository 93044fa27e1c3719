"""Checks of this host: shared memory, file systems, network. Each yields (check, status, what, remedy, facts)."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

Result = tuple[str, Literal["ok", "warning", "broken"], str, str, dict[str, Any]]

_MIB = 1024**2
_RUNTIME_DEFAULT_SHM = 64 * _MIB  # what Docker and containerd mount when nobody asks for more
_LITTLE_SPACE = 1024 * _MIB
_SLOW_LOOKUP_SECONDS = 1.0
_NETWORK_TYPES = ("nfs", "nfs4", "lustre", "beegfs", "cifs", "ceph", "fuse", "gpfs", "9p", "virtiofs")
_TRY_LOCK = """
import fcntl, sys
try:
    fcntl.flock(open(sys.argv[1], "rb"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(3)
"""


def check_shared_memory(path: Path = Path("/dev/shm")) -> Iterator[Result]:  # noqa: S108  (the path is the interface)
    """How large ``/dev/shm`` is: data loaders and NCCL put tensors there, and die with SIGBUS when it is full."""
    remedy = "leave @task(shared_memory=...) out (then it is as large as the container's memory), or give it a size"
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        yield "shared memory", "broken", f"{path}: {error.strerror}", remedy, {}
        return
    facts = {"total": usage.total, "free": usage.free}
    size = f"{usage.total // _MIB} MiB, {usage.free // _MIB} MiB free"
    if usage.total <= _RUNTIME_DEFAULT_SHM:
        yield "shared memory", "warning", f"only {size}: data loaders with workers will crash", remedy, facts
    else:
        yield "shared memory", "ok", size, "", facts


def check_directory(path: Path) -> Iterator[Result]:
    """Is *path* fit for scratch, staging and the file-system helpers: space, renames, locks."""
    name = str(path)
    if not path.is_dir():
        yield name, "broken", "is not a directory", "create it, or mount a volume there", {}
        return
    kind = _filesystem(path)
    usage = shutil.disk_usage(path)
    facts: dict[str, Any] = {"type": kind, "free": usage.free, "total": usage.total}
    try:
        with tempfile.TemporaryDirectory(prefix=".safedist-doctor-", dir=path) as directory:
            facts["replace"] = _replaces(Path(directory))
            facts["flock"] = _locks(Path(directory))
    except OSError as error:
        remedy = "make it writable for this user (fsGroup in the pod template), or use another directory"
        yield name, "broken", f"cannot be written by uid {os.getuid()}: {error.strerror}", remedy, facts
        return
    if not facts["replace"]:
        yield (
            name,
            "broken",
            f"{kind} does not rename over existing files",
            "use a volume that does; not an object mount",
            facts,
        )
    if not facts["flock"]:
        what = f"{kind} does not keep locks between processes"
        yield name, "warning", what, "correct all the same, only slower: each process may do the work", facts
    if usage.free < _LITTLE_SPACE:
        what = f"only {usage.free // _MIB} MiB free on {kind}"
        yield name, "warning", what, "raise ephemeral_storage or the volume's size", facts
    if facts["replace"] and facts["flock"] and usage.free >= _LITTLE_SPACE:
        where = f"{kind}, {usage.free // _MIB} MiB free, renames and locks work"
        yield name, "ok", where + (" on this node" if kind in _NETWORK_TYPES else ""), "", facts


def check_network() -> Iterator[Result]:
    """The name and address that other nodes will use, and how long a reverse look-up takes."""
    name = socket.gethostname()
    interface = _default_interface()
    facts: dict[str, Any] = {"hostname": name, "interface": interface}
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        addresses = sorted({str(entry[4][0]) for entry in found})
    except (OSError, UnicodeError) as error:  # a name of more than 63 letters is none that DNS could have
        remedy = "give the pod a hostname that resolves (/etc/hosts); the operator's services do in a job"
        why = error.strerror if isinstance(error, OSError) else str(error)
        yield "network", "warning", f"{name} does not resolve: {why}", remedy, facts
        return
    facts["addresses"] = addresses
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        what = f"{name} resolves to {', '.join(addresses)} only, which other nodes cannot reach"
        remedy = "fine on one machine; in a pod, let /etc/hosts name the pod's address"
        yield "network", "warning", what, remedy, facts
    else:
        yield "network", "ok", f"{name} is {', '.join(addresses)}, default interface {interface or 'none'}", "", facts
    yield from _reverse(addresses[0], facts)


def _reverse(address: str, facts: dict[str, Any]) -> Iterator[Result]:
    started = time.monotonic()
    socket.getfqdn(address)
    seconds = facts["reverse_lookup_seconds"] = round(time.monotonic() - started, 3)
    if seconds > _SLOW_LOOKUP_SECONDS:
        # The store looks up every connection it accepts: at 200 nodes a slow resolver is minutes.
        what = f"the reverse look-up of {address} takes {seconds:.1f} s, and is done for each node that joins"
        yield "dns", "warning", what, "add a PTR record, or ndots/options timeout:1 in the pod's dnsConfig", facts


def _replaces(directory: Path) -> bool:
    old, new = directory / "old", directory / "new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    try:
        new.replace(old)
    except OSError:
        return False
    return old.read_bytes() == b"new" and not new.exists()


def _locks(directory: Path) -> bool:
    """Another process must find our lock taken: on some file systems both get it."""
    path = directory / "lock"
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        tried = subprocess.run([sys.executable, "-c", _TRY_LOCK, str(path)], check=False, capture_output=True)
    return tried.returncode == 3


def _filesystem(path: Path) -> str:
    """Type of the file system at *path*, from ``/proc/self/mountinfo`` (proc(5))."""
    best, kind = "", "unknown"
    try:
        # As os.fsdecode: names of mounts need not be text.
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return kind
    real = str(path.resolve())
    for line in lines:
        left, _, right = line.partition(" - ")
        # proc(5) writes space, tab, newline and backslash in octal, and nothing else.
        mount = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), left.split(" ")[4])
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind


def _default_interface() -> str | None:
    """The interface of the default route, from ``/proc/net/route`` (IPv4)."""
    try:
        rows = Path("/proc/net/route").read_text(encoding="utf-8").splitlines()[1:]
    except OSError:
        return None
    fields = (row.split() for row in rows)
    return next((row[0] for row in fields if len(row) > 1 and row[1] == "00000000"), None)
