"""What stands between this image or machine and a distributed task: the checks of a machine, and of an image.

Torch, Horovod and a store's client are loaded in a process of their own: a build that crashes on import is a finding
too, and so is a store that does not answer.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import envvars, package
from ..agent import memory
from ..preflight import machine
from ..preflight.machine import Finding
from ..texts import human
from ..topology.devices import device_files

_SECONDS = 180.0
_TORCH_PROBE = """
import json
from flytekitplugins_safedist.preflight.machine import torch_facts
print(json.dumps(torch_facts()))
"""
_HOROVOD_PROBE = """
import json, horovod, horovod.torch as hvd
built = {"gloo": hvd.gloo_built(), "nccl": hvd.nccl_built(), "mpi": hvd.mpi_built()}
print(json.dumps({"version": horovod.__version__, **{name: bool(is_there) for name, is_there in built.items()}}))
"""
_STORE_PROBE = """
import json, sys
from flytekit.core.context_manager import FlyteContextManager
store = FlyteContextManager.current_context().file_access.get_filesystem_for_path(sys.argv[1])
try:
    is_there = bool(store.info(sys.argv[1]))
except FileNotFoundError:
    is_there = False
print(json.dumps({"there": is_there}))
"""


def examine(
    *, paths: Sequence[Path], stores: Sequence[str], backend: str | None, env: Mapping[str, str]
) -> Iterator[Finding]:
    """Every check, one after the other.

    Args:
        paths: directories to examine, besides the scratch directory.
        stores: URIs that must be readable.
        backend: "horovod" or "torch" when that one must work; None: whatever is installed.
        env: the environment.
    """
    import flytekit

    facts = {"python": platform.python_version(), "flytekit": flytekit.__version__, "machine": platform.machine()}
    yield Finding("python", "ok", f"{facts['python']} on {facts['machine']}, flytekit {facts['flytekit']}", "", facts)
    yield from machine.check_torch(output_of(_TORCH_PROBE), env, device_files())
    yield from _horovod(backend)
    yield from machine.check_shared_memory()
    yield out_of_memory(memory.cgroup())
    scratch = Path(env.get(envvars.SCRATCH_ROOT) or env.get(envvars.TMPDIR) or "/tmp")  # noqa: S108  (the default)
    for path in dict.fromkeys([scratch, *paths]):
        yield from machine.check_directory(path)
    yield from machine.check_network()
    for uri in stores:
        yield from _store(uri)


def out_of_memory(group: memory.Cgroup | None) -> Finding:
    """What the kernel ends here when memory is out."""
    if group is None:
        return Finding("out of memory", "ok", "no control group of this process accounts for memory")
    limit = "no limit" if group.limit is None else f"a limit of {human(group.limit)}"
    facts = {"limit": group.limit, "as_one": group.as_one}
    if not group.as_one:
        return Finding("out of memory", "ok", f"{limit}; the kernel ends one process, a rank first", "", facts)
    what = f"{limit}; the kernel ends all processes of the container at once (memory.oom.group): nobody says which rank"
    return Finding("out of memory", "warning", what, "singleProcessOOMKill: true for the kubelet (1.32)", facts)


def output_of(program: str, *arguments: str) -> dict[str, Any] | str:
    """What *program* prints, as JSON, in a process of its own; or, in one line, why there is nothing."""
    command = [sys.executable, *package.program(program, *arguments)]
    environment = {**os.environ, "CUDA_MODULE_LOADING": "LAZY"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return f"it takes more than {_SECONDS:.0f} s"
    if done.returncode < 0:
        return f"it ends with {signal.Signals(-done.returncode).name}: the build does not fit this machine"
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"')]  # libraries print, too
    with suppress(ValueError, IndexError):
        if not done.returncode:
            answer: dict[str, Any] = json.loads(answers[-1])
            return answer
    return (done.stderr.strip().splitlines() or ["no output"])[-1]


def _horovod(backend: str | None) -> Iterator[Finding]:
    facts = output_of(_HOROVOD_PROBE)
    unfit: machine.Status = "warning" if backend == "torch" else "broken"  # torch's tasks run without it
    if isinstance(facts, str):
        is_missing = "No module named 'horovod'" in facts
        status = unfit if backend == "horovod" or not is_missing else "ok" if backend == "torch" else "warning"
        remedy = "" if status == "ok" else "build the wheel against this torch (see horovod_build/README.md)"
        yield Finding("horovod", status, facts, remedy)
        return
    over = ", ".join(name.upper() for name in ("gloo", "nccl", "mpi") if facts[name]) or "nothing"
    remedy = "" if facts["gloo"] else "rebuild with HOROVOD_WITH_GLOO=1: ranks are started without MPI"
    yield Finding("horovod", "ok" if facts["gloo"] else unfit, f"{facts['version']} with {over}", remedy, facts)


def _store(uri: str) -> Iterator[Finding]:
    """One look-up of one key: a prefix may hold millions."""
    answer = output_of(_STORE_PROBE, uri)
    if isinstance(answer, str):
        remedy = "check credentials (FLYTE_AWS_*, a mounted service account), endpoint and network policy"
        yield Finding(f"store {uri}", "broken", f"cannot be read: {answer[:300]}", remedy)
    elif answer["there"]:
        yield Finding(f"store {uri}", "ok", "can be read")
    else:
        yield Finding(f"store {uri}", "broken", "it answers, but nothing is there", "check the name")
