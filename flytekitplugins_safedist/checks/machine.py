"""What one machine has for a distributed task: checks, each a function that yields findings. ``safedist doctor`` makes
them by hand, and a job's preflight on each of its nodes.

Nothing is changed: files are made only below the directories that are examined, and removed again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .. import envvars
from ..config.registered import Registered
from ..fs.oserrors import mount_of

Status = Literal["ok", "warning", "broken"]
_PROBE_SECONDS = 180.0
_MIB = 1024**2
_RUNTIME_DEFAULT_SHM = 64 * _MIB  # what Docker and containerd mount when nobody asks for more
_LITTLE_SPACE = 1024 * _MIB
_SLOW_LOOKUP_SECONDS = 1.0

_TRY_LOCK = """
import fcntl, sys
try:
    fcntl.flock(open(sys.argv[1], "rb"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(3)
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


def check_torch(found: dict[str, Any] | str, env: Mapping[str, str]) -> Iterator[Finding]:
    """Torch and its GPUs.

    Args:
        found: what :func:`torch_facts` said, or why it could not.
        env: of the pod: what it is registered for.
    """
    if isinstance(found, str):
        yield Finding("torch", "broken", found, "pip install torch (2.5 or later), for the CUDA version of the node")
        return
    build = f"CUDA {found['cuda_build']}" if found["cuda_build"] else f"ROCm {found['hip_build']}"
    what = f"{found['version']}, {build if found['cuda_build'] or found['hip_build'] else 'CPU only'}"
    yield Finding("torch", "ok", f"{what}, {found['gpus']} GPUs visible", "", found)
    yield from _gpus(found, env)
    if not found["gloo"]:
        yield Finding(
            "torch gloo", "broken", "torch was built without Gloo", "install a build with it; ranks meet over it"
        )


def _gpus(found: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[Finding]:
    registered = Registered.from_env(env)
    driver = Path("/proc/driver/nvidia/version").exists() or bool(list(Path("/dev").glob("nvidia[0-9]*")))
    if driver and not found["gpus"]:
        why = "this torch is built for the CPU" if not found["cuda_build"] else "CUDA cannot be initialised"
        remedy = "install the CUDA build of torch; check the driver with nvidia-smi and NVIDIA_VISIBLE_DEVICES"
        # The driver is the machine's: a task that asks for no GPU may be meant to run there without one.
        is_task = registered is not None or envvars.ROUND in env
        status: Status = "warning" if is_task and not (registered and registered.gpus) else "broken"
        yield Finding("gpu", status, f"there is an NVIDIA driver, but torch sees no GPU: {why}", remedy)
    if found["gpus"] and not found["nccl"]:
        yield Finding(
            "nccl", "warning", "torch was built without NCCL: GPU collectives will be slow", "use a CUDA build"
        )
    if registered is not None and found["gpus"] < (registered.gpus or 0):
        what = f"{registered.gpus} GPUs are asked for this pod, and torch sees {found['gpus']}"
        yield Finding("gpu", "broken", what, "see nvidia-smi in the pod, and whether this torch is built for CUDA")
    elif registered is not None and found["cuda_build"] and 0 < found["gpus"] < registered.nproc_per_node:
        what = f"{registered.nproc_per_node} ranks are registered for this pod, and {found['gpus']} GPUs are visible"
        yield Finding("gpu", "broken", what, "request as many GPUs as ranks, or lower nproc_per_node")


def printed_by(program: str) -> dict[str, Any] | str:
    """What *program* prints, as JSON; or, in one line, why there is nothing."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
            env={**os.environ, "CUDA_MODULE_LOADING": "LAZY"},
        )
    except subprocess.TimeoutExpired:
        return f"loading it takes more than {_PROBE_SECONDS:.0f} s"
    if done.returncode < 0:
        return f"loading it ends with {signal.Signals(-done.returncode).name}: the build does not fit this machine"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no output"])[-1]
    try:
        result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return (
            f"loading it prints nothing that can be read: {(done.stdout + done.stderr).strip()[-200:] or 'no output'}"
        )
    return result


def check_shared_memory(path: Path = Path("/dev/shm")) -> Iterator[Finding]:  # noqa: S108  (the path is the interface)
    """How large ``/dev/shm`` is: data loaders and NCCL put tensors there, and die with SIGBUS when it is full."""
    remedy = "leave @task(shared_memory=...) out (then it is as large as the container's memory), or give it a size"
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        yield Finding("shared memory", "broken", f"{path}: {error.strerror}", remedy)
        return
    facts = {"total": usage.total, "free": usage.free}
    size = f"{usage.total // _MIB} MiB, {usage.free // _MIB} MiB free"
    if usage.total <= _RUNTIME_DEFAULT_SHM:
        yield Finding("shared memory", "warning", f"only {size}: data loaders with workers will crash", remedy, facts)
    else:
        yield Finding("shared memory", "ok", size, "", facts)


def check_directory(path: Path) -> Iterator[Finding]:
    """Is *path* fit for scratch, staging and the file-system helpers: space, renames, locks."""
    name = str(path)
    if not path.is_dir():
        yield Finding(name, "broken", "is not a directory", "create it, or mount a volume there")
        return
    mount = mount_of(path)
    kind, usage = mount.fstype, shutil.disk_usage(path)
    facts: dict[str, Any] = {"type": kind, "free": usage.free, "total": usage.total}
    try:
        with tempfile.TemporaryDirectory(prefix=".safedist-doctor-", dir=path) as directory:
            facts["replace"] = _replaces(Path(directory))
            facts["flock"] = _locks(Path(directory))
    except OSError as error:
        remedy = "make it writable for this user (fsGroup in the pod template), or use another directory"
        yield Finding(name, "broken", f"cannot be written by uid {os.getuid()}: {error.strerror}", remedy, facts)
        return
    if not facts["replace"]:
        what = f"{kind} does not rename over existing files"
        yield Finding(name, "broken", what, "use a volume that does; not an object mount", facts)
    if not facts["flock"]:
        what = f"{kind} does not keep locks between processes"
        yield Finding(name, "warning", what, "correct all the same, only slower: each process may do the work", facts)
    if usage.free < _LITTLE_SPACE:
        what = f"only {usage.free // _MIB} MiB free on {kind}"
        yield Finding(name, "warning", what, "raise ephemeral_storage or the volume's size", facts)
    if facts["replace"] and facts["flock"] and usage.free >= _LITTLE_SPACE:
        where = f"{kind}, {usage.free // _MIB} MiB free, renames and locks work"
        yield Finding(name, "ok", where + ("" if mount.is_local else " on this node"), "", facts)


def check_network() -> Iterator[Finding]:
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
        yield Finding("network", "warning", f"{name} does not resolve: {why}", remedy, facts)
        return
    facts["addresses"] = addresses
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        what = f"{name} resolves to {', '.join(addresses)} only, which other nodes cannot reach"
        remedy = "fine on one machine; in a pod, let /etc/hosts name the pod's address"
        yield Finding("network", "warning", what, remedy, facts)
    else:
        yield Finding(
            "network", "ok", f"{name} is {', '.join(addresses)}, default interface {interface or 'none'}", "", facts
        )
    yield from _reverse(addresses[0], facts)


def _reverse(address: str, facts: dict[str, Any]) -> Iterator[Finding]:
    started = time.monotonic()
    socket.getfqdn(address)
    seconds = facts["reverse_lookup_seconds"] = round(time.monotonic() - started, 3)
    if seconds > _SLOW_LOOKUP_SECONDS:
        # The store looks up every connection it accepts: at 200 nodes a slow resolver is minutes.
        what = f"the reverse look-up of {address} takes {seconds:.1f} s, and is done for each node that joins"
        yield Finding(
            "dns", "warning", what, "add a PTR record, or ndots/options timeout:1 in the pod's dnsConfig", facts
        )


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


def _default_interface() -> str | None:
    """The interface of the default route, from ``/proc/net/route`` (IPv4)."""
    try:
        rows = Path("/proc/net/route").read_text(encoding="utf-8").splitlines()[1:]
    except OSError:
        return None
    fields = (row.split() for row in rows)
    return next((row[0] for row in fields if len(row) > 1 and row[1] == "00000000"), None)
