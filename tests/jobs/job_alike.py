"""The same task under both start methods; with objects of the module's own in the place of the standard streams, as
loggers put them there. Without torch, which takes a fresh interpreter seconds: what ranks have of that is job_own's."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from flytekit import task

from flytekitplugins_safedist import SafeTorch, current_rank


class Noting:
    """As little as ``print`` needs: a ``write``, and no ``flush``, ``encoding`` or ``reconfigure``."""

    def __init__(self, below: TextIO) -> None:
        self.below = below

    def write(self, text: str) -> int:
        return self.below.write(text.replace("seen", "noted: seen"))


sys.stdout = Noting(sys.stdout)  # type: ignore[assignment]
sys.stderr = Noting(sys.stderr)  # type: ignore[assignment]


def _same(x: list[float]) -> dict[str, str]:
    me = current_rank()
    print(f"seen by {me.rank}")
    interesting = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "MASTER_ADDR", "PYTHONUNBUFFERED")
    finders = [each for finder in sys.meta_path for each in vars(finder).values()]  # where torch is not here yet
    guarded = any(getattr(each, "__module__", "").endswith("rank.replicas") for each in finders)
    if "torch.distributed" in sys.modules:
        guarded = hasattr(sys.modules["torch.distributed"].Reducer, "__wrapped__")
    return {
        "replicas guarded": str(guarded),
        "sum": str(sum(x)),
        "rank": str(me.rank),
        "module": __name__,
        "argv": str(len(sys.argv)),
        "cwd": os.getcwd(),
        "OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS", "unset"),
        "NVML": os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK", "unset"),
        "stdin": sys.stdin.read(),
        **{name: os.environ.get(name, "unset") for name in interesting},
    }


@task(task_config=SafeTorch(nproc_per_node=2))
def same_preloaded(x: list[float]) -> dict[str, str]:
    return _same(x)


@task(task_config=SafeTorch(nproc_per_node=2, start_method="spawn"))
def same_spawned(x: list[float]) -> dict[str, str]:
    return _same(x)
