"""What stands between this image or machine and a distributed task: a list of checks, each returns findings.

Nothing is changed: files are made only below the directories that are examined, and removed again. Torch and Horovod
are loaded in a process of their own, so that a build that crashes on import is a finding too.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from .. import envvars
from ..config.registered import Registered
from .host_checks import check_directory, check_network, check_shared_memory

Status = Literal["ok", "warning", "broken"]
_PROBE_SECONDS = 180.0

_TORCH_PROBE = """
import json, torch
count = torch.cuda.device_count()
print(json.dumps({
    "version": torch.__version__, "cuda_build": torch.version.cuda, "hip_build": torch.version.hip,
    "gpus": count, "names": [torch.cuda.get_device_name(i) for i in range(count)],
    "nccl": torch.distributed.is_nccl_available(), "gloo": torch.distributed.is_gloo_available(),
}))
"""
_HOROVOD_PROBE = """
import json, horovod, horovod.torch as hvd
print(json.dumps({
    "version": horovod.__version__, "gloo": bool(hvd.gloo_built()), "nccl": bool(hvd.nccl_built()),
    "mpi": bool(hvd.mpi_built()),
}))
"""


@dataclass(frozen=True)
class Finding:
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
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        mark = {"ok": "ok     ", "warning": "warning", "broken": "BROKEN "}[self.status]
        return f"{mark}  {self.check}: {self.what}" + (f"\n         -> {self.remedy}" if self.remedy else "")


def examine(
    *, paths: Sequence[Path], stores: Sequence[str], backend: str | None, env: Mapping[str, str]
) -> list[Finding]:
    """Run every check.

    Args:
        paths: directories to examine, besides the scratch directory.
        stores: URIs that must be readable.
        backend: "horovod" or "torch" when that one must work; None: whatever is installed.
        env: the environment.
    """
    scratch = Path(env.get(envvars.SCRATCH_ROOT) or env.get(envvars.TMPDIR) or "/tmp")  # noqa: S108  (the default)
    findings = [_python(), *_torch(backend, env), *_horovod(backend)]
    findings += [Finding(*result) for result in check_shared_memory()]
    for path in dict.fromkeys([scratch, *paths]):
        findings += [Finding(*result) for result in check_directory(path)]
    findings += [Finding(*result) for result in check_network()]
    findings += [_store(uri) for uri in stores]
    return findings


def exit_status(findings: Sequence[Finding]) -> int:
    """1 when something is broken, else 0: warnings are for people."""
    return int(any(finding.status == "broken" for finding in findings))


def _python() -> Finding:
    import flytekit

    facts = {"python": platform.python_version(), "flytekit": flytekit.__version__, "machine": platform.machine()}
    return Finding("python", "ok", f"{facts['python']} on {facts['machine']}, flytekit {facts['flytekit']}", "", facts)


def _torch(backend: str | None, env: Mapping[str, str]) -> Iterator[Finding]:
    found = _probe(_TORCH_PROBE)
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
    driver = Path("/proc/driver/nvidia/version").exists() or bool(list(Path("/dev").glob("nvidia[0-9]*")))
    if driver and not found["gpus"]:
        why = "this torch is built for the CPU" if not found["cuda_build"] else "CUDA cannot be initialised"
        remedy = "install the CUDA build of torch; check the driver with nvidia-smi and NVIDIA_VISIBLE_DEVICES"
        yield Finding("gpu", "broken", f"there is an NVIDIA driver, but torch sees no GPU: {why}", remedy)
    if found["gpus"] and not found["nccl"]:
        yield Finding(
            "nccl", "warning", "torch was built without NCCL: GPU collectives will be slow", "use a CUDA build"
        )
    registered = Registered.from_env(env)
    if registered is not None and found["cuda_build"] and 0 < found["gpus"] < registered.nproc_per_node:
        what = f"{registered.nproc_per_node} ranks are registered for this pod, and {found['gpus']} GPUs are visible"
        yield Finding("gpu", "broken", what, "request as many GPUs as ranks, or lower nproc_per_node")


def _horovod(backend: str | None) -> Iterator[Finding]:
    found = _probe(_HOROVOD_PROBE)
    if isinstance(found, str):
        missing = "No module named 'horovod'" in found
        status: Status = "warning" if missing and backend != "horovod" else "broken"
        remedy = "build the wheel against this torch (see horovod_build/README.md)" if backend != "torch" else ""
        yield Finding("horovod", "ok" if missing and backend == "torch" else status, found, remedy)
        return
    over = ", ".join(name.upper() for name in ("gloo", "nccl", "mpi") if found[name])
    if found["gloo"]:
        yield Finding("horovod", "ok", f"{found['version']} with {over}", "", found)
    else:
        remedy = "rebuild with HOROVOD_WITH_GLOO=1: ranks are started without MPI"
        yield Finding("horovod", "broken", f"{found['version']} with {over or 'nothing'}, without Gloo", remedy, found)


def _probe(program: str) -> dict[str, Any] | str:
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


def _store(uri: str) -> Finding:
    from flytekit.core.context_manager import FlyteContextManager

    check = f"store {uri}"
    try:
        access = FlyteContextManager.current_context().file_access
        filesystem = access.get_filesystem_for_path(uri)
        filesystem.ls(filesystem._strip_protocol(uri), detail=False)
    except FileNotFoundError:
        return Finding(check, "broken", "it answers, but there is no such bucket or prefix", "check the name")
    except Exception as error:  # every store library raises its own; here all of them mean the same
        remedy = "check credentials (FLYTE_AWS_*, a mounted service account), endpoint and network policy"
        return Finding(check, "broken", f"cannot be read: {type(error).__name__}: {str(error)[:300]}", remedy)
    return Finding(check, "ok", "can be listed")
