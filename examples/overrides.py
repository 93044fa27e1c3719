"""One task, called with other resources, more shared memory, and a sidecar: ``with_overrides`` on its calls.

safedist render examples/overrides.py train
pyflyte run --remote examples/overrides.py experiments
"""

from flytekit import Resources, task, workflow
from flytekit.core.pod_template import PodTemplate
from kubernetes.client import V1Container, V1PodSpec

from flytekitplugins_safedist import SafeTorch, current_rank

SIDECAR = PodTemplate(
    primary_container_name="trainer",
    pod_spec=V1PodSpec(
        containers=[V1Container(name="trainer")],
        # A native sidecar (Kubernetes 1.29 and later): it ends with the trainer. In `containers`, one that never ends
        # by itself would keep a finished job running for ever.
        init_containers=[V1Container(name="metrics", image="registry.example/metrics:2", restart_policy="Always")],
    ),
)


# nproc_per_node is left open: each node has a rank for each GPU that its pod gets.
@task(task_config=SafeTorch(nnodes=2), requests=Resources(cpu="8", mem="64Gi", gpu="8"))
def train(epochs: int) -> str:
    rank = current_rank()
    return f"{epochs} epochs on {rank.world_size} ranks"


@workflow
def experiments() -> tuple[str, str, str]:
    half = train(epochs=1).with_overrides(requests=Resources(cpu="4", mem="32Gi", gpu="4"))  # 2 x 4 ranks
    roomy = train(epochs=1).with_overrides(shared_memory="32Gi")  # /dev/shm of that size
    watched = train(epochs=1).with_overrides(pod_template=SIDECAR)  # with this task's scratch volume
    return half, roomy, watched
