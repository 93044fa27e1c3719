"""What one machine has for a distributed task: checks, each a function that yields findings. ``safedist doctor`` makes
them by hand, and a job's preflight on each of its nodes.

Nothing is changed: files are made only below the directories that are examined, and removed again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .. import envvars
from ..config.registered import Registered
from ..fs.oserrors import mount_of
from ..topology.devices import gpus_here, is_partitioned

Status = Literal["ok", "warning", "broken"]
_MIB = 1024**2
_RUNTIME_DEFAULT_SHM = 64 * _MIB  # what Docker and containerd mount when nobody asks for more
_LITTLE_SPACE = 1024 * _MIB
_SLOW_LOOKUP_SECONDS = 1.0

_TRY_LOCK = """
import fcntl, sys
fcntl.flock(open(sys.argv[1], "rb"), fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        check: what was examined ("torch", "/scratch", ...).
        status: "ok", "warning" (it may be meant so) or "broken" (a task will fail).
        what: what was found, one sentence.
        remedy: what to do about it; empty when all is well.
        facts: what was measured, for programs.
    """

    check: str
    status: Status
    what: str
    remedy: str = ""
    facts: Mapping[str, Any] = {}

    def __str__(self) -> str:
        mark = {"ok": "ok     ", "warning": "warning", "broken": "BROKEN "}[self.status]
        return f"{mark}  {self.check}: {self.what}" + (f"\n         -> {self.remedy}" if self.remedy else "")


def torch_facts() -> dict[str, Any]:
    """What is to know of torch; imports it."""
    import torch

    count = torch.cuda.device_count()
    return {
        **{"version": torch.__version__, "cuda_build": torch.version.cuda, "hip_build": torch.version.hip},
        **{"gpus": count, "names": [torch.cuda.get_device_name(index) for index in range(count)]},
        **{"nccl": torch.distributed.is_nccl_available(), "gloo": torch.distributed.is_gloo_available()},
    }


def check_torch(facts: dict[str, Any] | str, env: Mapping[str, str], devices: Collection[str]) -> Iterator[Finding]:
    """Torch and its GPUs.

    Args:
        facts: what :func:`torch_facts` said, or why it could not.
        env: of the pod: what it is registered for, and which GPUs it has.
        devices: names of the files in ``/dev``.
    """
    if isinstance(facts, str):
        yield Finding("torch", "broken", facts, "pip install torch (2.5 or later), for the CUDA version of the node")
        return
    build = f"CUDA {facts['cuda_build']}" if facts["cuda_build"] else f"ROCm {facts['hip_build']}"
    what = f"{facts['version']}, {build if facts['cuda_build'] or facts['hip_build'] else 'CPU only'}"
    yield Finding("torch", "ok", f"{what}, {facts['gpus']} GPUs visible", "", facts)
    yield from _gpus(facts, env, devices)
    if not facts["gloo"]:
        remedy = "install a build with it; ranks meet over it"
        yield Finding("torch gloo", "broken", "torch was built without Gloo", remedy)


def _gpus(facts: Mapping[str, Any], env: Mapping[str, str], devices: Collection[str]) -> Iterator[Finding]:
    registered, gpus = Registered.from_env(env), facts["gpus"]
    asks = registered.gpus if registered is not None else None
    # What the pod has in the end: with_overrides, a platform's limit and CUDA_VISIBLE_DEVICES change it.
    here = gpus_here(env, devices) if asks else None
    expected = (1 if is_partitioned(env) else here or asks) or 0
    if gpus < expected:
        what = f"this pod has {expected} GPUs, and torch sees {gpus}"
        yield Finding("gpu", "broken", what, "see nvidia-smi in the pod, and whether this torch is built for CUDA")
    elif not gpus and any(device.startswith("nvidia") and device[6:].isdecimal() for device in devices):
        why = "CUDA cannot be initialised" if facts["cuda_build"] else "this torch is built for the CPU"
        remedy = "install the CUDA build of torch; check the driver with nvidia-smi and NVIDIA_VISIBLE_DEVICES"
        # The driver is the machine's: a task that asks for no GPU may be meant to run there without one.
        status: Status = "warning" if registered is not None or envvars.ROUND in env else "broken"
        yield Finding("gpu", status, f"there is an NVIDIA driver, but torch sees no GPU: {why}", remedy)
    if gpus and not facts["nccl"]:
        what = "torch was built without NCCL: GPU collectives will be slow"
        yield Finding("nccl", "warning", what, "use a CUDA build")


def check_shared_memory(path: Path = Path("/dev/shm")) -> Iterator[Finding]:  # noqa: S108  (the path is the interface)
    """How large ``/dev/shm`` is: data loaders and NCCL put tensors there, and die with SIGBUS when it is full."""
    remedy = "leave @task(shared_memory=...) out (then it is as large as the container's memory), or give it a size"
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        yield Finding("shared memory", "broken", f"{path}: {error.strerror}", remedy)
        return
    size = f"{usage.total // _MIB} MiB, {usage.free // _MIB} MiB free"
    facts = {"total": usage.total, "free": usage.free}
    if usage.total > _RUNTIME_DEFAULT_SHM:
        yield Finding("shared memory", "ok", size, "", facts)
    else:
        yield Finding("shared memory", "warning", f"only {size}: data loaders with workers will crash", remedy, facts)


def check_directory(path: Path) -> Iterator[Finding]:
    """Is *path* fit for scratch, staging and the file-system helpers: space, renames, locks."""
    name, facts = str(path), dict[str, Any]()
    try:
        usage, mount = shutil.disk_usage(path), mount_of(path)
        facts = {"type": mount.fstype, "free": usage.free, "total": usage.total}
        with tempfile.TemporaryDirectory(prefix=".safedist-doctor-", dir=path) as directory:
            facts |= {"replace": _replaces(Path(directory)), "flock": _locks(Path(directory))}
    except OSError as error:
        remedy = "make it, or make it writable for this user (fsGroup in the pod template), or use another directory"
        yield Finding(name, "broken", f"cannot be written by uid {os.getuid()}: {error.strerror}", remedy, facts)
        return
    kind, free = mount.fstype, f"{usage.free // _MIB} MiB free"
    if not facts["replace"]:
        what = f"{kind} does not rename over existing files"
        yield Finding(name, "broken", what, "use a volume that does; not an object mount", facts)
    if not facts["flock"]:
        what = f"{kind} does not keep locks between processes"
        yield Finding(name, "warning", what, "correct all the same, only slower: each process may do the work", facts)
    if usage.free < _LITTLE_SPACE:
        yield Finding(name, "warning", f"only {free} on {kind}", "raise ephemeral_storage or the volume's size", facts)
    elif facts["replace"] and facts["flock"]:
        where = "" if mount.is_local else " on this node"
        yield Finding(name, "ok", f"{kind}, {free}, renames and locks work{where}", "", facts)


def check_network() -> Iterator[Finding]:
    """The name and address that other nodes will use, and how long a reverse look-up takes."""
    name = socket.gethostname()
    facts: dict[str, Any] = {"hostname": name}
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # a name of more than 63 letters is none that DNS could have
        remedy = "give the pod a hostname that resolves (/etc/hosts); the operator's services do in a job"
        yield Finding("network", "warning", f"{name} does not resolve: {error}", remedy, facts)
        return
    addresses = facts["addresses"] = sorted({str(entry[4][0]) for entry in found})
    where = f"{name} is {', '.join(addresses)}"
    if not all(address.startswith("127.") or address == "::1" for address in addresses):
        yield Finding("network", "ok", where, "", facts)
    else:
        remedy = "fine on one machine; in a pod, let /etc/hosts name the pod's address"
        yield Finding("network", "warning", f"{where} only, which other nodes cannot reach", remedy, facts)
    began = time.monotonic()
    socket.getfqdn(addresses[0])
    seconds = facts["reverse_lookup_seconds"] = round(time.monotonic() - began, 3)
    if seconds > _SLOW_LOOKUP_SECONDS:
        # The store looks up every connection it accepts: at 200 nodes a slow resolver is minutes.
        what = f"the reverse look-up of {addresses[0]} takes {seconds:.1f} s, and is done for each node that joins"
        remedy = "add a PTR record, or ndots/options timeout:1 in the pod's dnsConfig"
        yield Finding("dns", "warning", what, remedy, facts)


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
        done = subprocess.run([sys.executable, "-c", _TRY_LOCK, str(path)], check=False, capture_output=True)
    return b"BlockingIOError" in done.stderr
