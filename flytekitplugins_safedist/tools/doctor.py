"""What stands between this image or machine and a distributed task: the checks of a machine, and of an image.

Torch and Horovod are loaded in a process of their own, so that a build that crashes on import is a finding too.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from .. import envvars
from ..checks.machine import (
    Finding,
    Status,
    check_directory,
    check_network,
    check_shared_memory,
    check_torch,
    printed_by,
)

_TORCH_PROBE = """
import json
from flytekitplugins_safedist.checks.machine import torch_facts
print(json.dumps(torch_facts()))
"""
_HOROVOD_PROBE = """
import json, horovod, horovod.torch as hvd
print(json.dumps({
    "version": horovod.__version__, "gloo": bool(hvd.gloo_built()), "nccl": bool(hvd.nccl_built()),
    "mpi": bool(hvd.mpi_built()),
}))
"""


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
    checks = [_python(), check_torch(printed_by(_TORCH_PROBE), env), _horovod(backend), check_shared_memory()]
    checks += [check_directory(path) for path in dict.fromkeys([scratch, *paths])]
    checks += [check_network(), *(_store(uri) for uri in stores)]
    return list(chain.from_iterable(checks))


def exit_status(findings: Sequence[Finding]) -> int:
    """1 when something is broken, else 0: warnings are for people."""
    return int(any(finding.status == "broken" for finding in findings))


def _python() -> Iterator[Finding]:
    import flytekit

    facts = {"python": platform.python_version(), "flytekit": flytekit.__version__, "machine": platform.machine()}
    yield Finding("python", "ok", f"{facts['python']} on {facts['machine']}, flytekit {facts['flytekit']}", "", facts)


def _horovod(backend: str | None) -> Iterator[Finding]:
    found = printed_by(_HOROVOD_PROBE)
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


def _store(uri: str) -> Iterator[Finding]:
    from flytekit.core.context_manager import FlyteContextManager

    check = f"store {uri}"
    try:
        access = FlyteContextManager.current_context().file_access
        filesystem = access.get_filesystem_for_path(uri)
        filesystem.ls(filesystem._strip_protocol(uri), detail=False)
    except FileNotFoundError:
        yield Finding(check, "broken", "it answers, but there is no such bucket or prefix", "check the name")
    except Exception as error:  # every store library raises its own; here all of them mean the same
        remedy = "check credentials (FLYTE_AWS_*, a mounted service account), endpoint and network policy"
        yield Finding(check, "broken", f"cannot be read: {type(error).__name__}: {str(error)[:300]}", remedy)
    else:
        yield Finding(check, "ok", "can be listed")
