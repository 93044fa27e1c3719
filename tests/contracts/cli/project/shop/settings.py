"""What several modules of the project share."""

from flytekit import Resources
from flytekit.core.pod_template import PodTemplate
from kubernetes.client import V1Container, V1PodSpec, V1Toleration

GPUS = Resources(cpu="16", mem="128Gi", gpu="4")

POOL = PodTemplate(
    labels={"team": "vision"},
    pod_spec=V1PodSpec(
        containers=[V1Container(name="primary")],
        tolerations=[V1Toleration(key="gpu", operator="Exists", effect="NoSchedule")],
    ),
)
