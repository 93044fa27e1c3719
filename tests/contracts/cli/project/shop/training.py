"""Tasks: two sizes, two backends, one pod template between them; and an ordinary one."""

from flytekit import task

from flytekitplugins_safedist import SafeHorovod, SafeTorch

from .settings import GPUS, POOL


@task
def prepare(size: int) -> int:
    return size * 2


@task(task_config=SafeHorovod(nnodes=2, max_restarts=1), requests=GPUS, limits=GPUS, pod_template=POOL, retries=2)
def train(size: int) -> float:
    return size / 3


@task(task_config=SafeTorch(nproc_per_node=2), pod_template=POOL)
def evaluate(score: float) -> float:
    return score
