"""The same task under both start methods."""

from __future__ import annotations

import multiprocessing
import os
import sys

from flytekit import task

from flytekitplugins_safedist import SafeTorch, current_rank


def _summed() -> int:
    """What the ones of all ranks come to, or of what each has started."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    dist.destroy_process_group()
    return int(value)


def _summed_in_a_child() -> int:
    child = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(_summed()))
    child.start()
    child.join()
    return child.exitcode or 0


def _same(x: list[float]) -> dict[str, str]:
    me = current_rank()
    interesting = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "MASTER_ADDR", "PYTHONUNBUFFERED")
    finders = [each for finder in sys.meta_path for each in vars(finder).values()]  # where torch is not here yet
    guarded = any(getattr(each, "__module__", "").endswith("rank.replicas") for each in finders)
    if "torch.distributed" in sys.modules:
        guarded = hasattr(sys.modules["torch.distributed"].Reducer, "__wrapped__")
    return {
        "replicas guarded": str(guarded),
        "sum": str(sum(x)),
        "sum of children's groups": str(_summed_in_a_child()),
        "sum of the ranks' group": str(_summed()),
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
