"""Every difference between a recorded object and a rendered one that is no fault, once, with its reason."""

from __future__ import annotations

from oracle_comparison import Allowed

_LABELS = "domain|execution-id|interruptible|node-id|project|shard-key|task-name|workflow-name"
_TEMPLATE = r"(spec\.pytorchReplicaSpecs\.\w+\.template\.)?"
_CONTAINER = rf"{_TEMPLATE}spec\.(containers|initContainers)\[[^\]]*\]"

NOT_SHOWN = (
    Allowed(
        rf"{_TEMPLATE}metadata\.labels\.({_LABELS})",
        "Flyte labels everything with the execution; a preview has none",
        rendered="None",
    ),
    Allowed(
        rf"{_TEMPLATE}metadata\.annotations\.cluster-autoscaler\.kubernetes\.io/safe-to-evict",
        "Flyte's default annotation, on every object",
        rendered="None",
    ),
    Allowed(r"metadata\.ownerReferences", "who owns the object has an identity only in a cluster", rendered="None"),
    Allowed(
        rf"{_TEMPLATE}spec\.affinity(\..*)?",
        "Flyte writes an empty one, or the platform's accelerators",
        rendered="None",
    ),
    Allowed(
        rf"{_TEMPLATE}spec\.tolerations",
        "the platform's, for machines with an accelerator",
        recorded=r".*k8s\.amazonaws\.com/(accelerator|gpu-partition-size).*",
        rendered="None",
    ),
    Allowed(
        rf"{_CONTAINER}\.env\[(FLYTE_\w+|_F_\w+|BATCH_JOB_ARRAY_INDEX_VAR_NAME)\]",
        "an execution's variables, and those of Flyte's own",
        rendered="None",
    ),
    Allowed(
        rf"{_CONTAINER}\.args\[\d+\]", "an execution's paths, in the place of {{.input}}", rendered=r".*{{.*}}.*|\[\]"
    ),
    Allowed(
        rf"{_TEMPLATE}metadata\.(labels\.inject-flyte-secrets|annotations\.flyte\.secrets/s\d)",
        "what makes the webhook bring secrets",
        rendered="None",
    ),
    Allowed(
        r"metadata\.annotations\.primary_container_name", "Flyte's own, for a pod of one container", rendered="None"
    ),
    Allowed(r"metadata\.creationTimestamp", "of a living object", recorded="None", rendered="None"),
    Allowed(r"status", "of a living object", recorded=r"\{\}", rendered="None"),
    Allowed(r"status\.loadBalancer", "of a living object", recorded=r"\{\}", rendered="None"),
    Allowed(r"spec\.ports\[\d*\]\.targetPort", "Go writes the zero of a number or name", recorded="0", rendered="None"),
)
"""What the backend and the operator always add, and a preview leaves out."""

NOT_SENT_TODAY = (
    Allowed(
        rf"{_CONTAINER}\.resources\.limits\.(cpu|memory)",
        "registration names the limit of a sidecar, where the backend writes zero and the API server refuses the pod",
        recorded="0",
    ),
    Allowed(
        rf"{_CONTAINER}\.resources\.(requests|limits)\.nvidia\.com/gpu",
        "registration and a call send a count of GPUs as request and limit, so that the two never differ",
        override="resources",
    ),
)
"""What the backend makes of templates and calls that are not sent any more, and a preview does not follow."""

MEANT = (
    Allowed(
        rf"{_CONTAINER}\.terminationMessagePolicy",
        "the end of a failed container's log becomes its message, as in Flyte's own containers",
        recorded="None",
        rendered="FallbackToLogsOnError",
    ),
    Allowed(
        rf"{_CONTAINER}\.env\[SAFEDIST_KUBERNETES_NODE\]",
        "Kubernetes tells the container which machine it is on: errors name one that is at fault, and a range goes on "
        "without it",
        recorded="None",
    ),
    Allowed(
        rf"{_CONTAINER}\.env\[SAFEDIST_EPHEMERAL_STORAGE\]",
        "Kubernetes tells the container its limit of ephemeral storage, from which its ranks' own follows",
        recorded="None",
    ),
    Allowed(
        rf"{_TEMPLATE}spec\.terminationGracePeriodSeconds",
        "a pod has as long to stop as saving, ending ranks and an upload may take",
        recorded="None",
        rendered="60",
    ),
    Allowed(
        rf"{_CONTAINER}\.env\[SAFEDIST_GRACE_SECONDS\]",
        "and is told how long that is, which nothing else tells it",
        recorded="None",
    ),
    Allowed(
        rf"{_TEMPLATE}spec\.dnsPolicy",
        "pods of several nodes on their machines' network find each other's names",
        recorded="None",
        rendered="ClusterFirstWithHostNet",
    ),
    Allowed(
        rf"{_TEMPLATE}spec\.tolerations(\[\d+\].*)?",
        "pods of several nodes leave a lost machine after 30 s: the others wait for them",
    ),
    Allowed(
        r"spec\.pytorchReplicaSpecs\.Master\.restartPolicy|spec\.restartPolicy",
        "every role comes back: a pod that is lost costs no attempt",
        recorded="Never",
        rendered="OnFailure",
    ),
    Allowed(
        r"spec\.runPolicy\.backoffLimit",
        "the operator's limit is above the job's own budget for lost nodes",
        recorded="None|6",
        rendered=r"\d*1",
    ),
    Allowed(
        rf"{_CONTAINER}\.volumeMounts\[/dev/shm\]\.name",
        "shared memory is asked of the backend, where with_overrides can replace it, and no volume of our own",
        recorded="safedist-shm",
        rendered="flyte-shared-memory",
    ),
    Allowed(
        rf"{_TEMPLATE}spec\.volumes\[safedist-shm\]", "the volume that this was", recorded=".*Memory.*", rendered="None"
    ),
    Allowed(
        rf"{_TEMPLATE}spec\.volumes\[flyte-shared-memory\]",
        "the volume that it is",
        recorded="None",
        rendered=".*Memory.*",
    ),
    Allowed(
        rf"{_CONTAINER}\.ports\[\d+\]\.name",
        "ports have names: the operator's service has none without, and the API server refuses that",
        recorded="None",
        rendered=r"(tcp|udp|sctp)-\d+|pytorchjob-port",
    ),
    Allowed(r"spec\.ports\[\d+\]\.name", "the same, in the service", recorded="None", rendered=r"(tcp|udp|sctp)-\d+"),
    Allowed(
        rf"{_CONTAINER}\.resources\.(claims|(requests|limits)\.rdma/ib)",
        "what the template's primary container asks for and the task does not name stays beside the task's resources",
        recorded="None",
    ),
    Allowed(
        rf"{_CONTAINER}\.resources\.limits\.(cpu|memory)",
        "what a sidecar only requests is its limit, where the backend wrote zero and the API server refused it",
        recorded="0",
    ),
    Allowed(
        rf"{_TEMPLATE}spec\.volumes\[safedist-scratch\]",
        "the pod template of with_overrides gets the task's scratch volume",
        recorded="None",
        override="podTemplate",
    ),
    Allowed(
        rf"{_CONTAINER}\.volumeMounts\[[^\]]*\]",
        "and its mounts, shared memory's too",
        recorded="None",
        rendered=".*(safedist-scratch|flyte-shared-memory).*",
        override="podTemplate",
    ),
    Allowed(
        rf"{_TEMPLATE}spec\.containers in their order", "and the primary container comes first", override="podTemplate"
    ),
    Allowed(
        rf"{_CONTAINER}\.env\[_F_(WN|DES)\]",
        "and so what the backend writes into the first container",
        override="podTemplate",
    ),
)
"""What tasks are serialized to since the recordings were made."""

REFUSED_TODAY = (
    r"task_config='\w+' never reaches the cluster",
    r"(requests|limits|resources)=.* changes nothing: the job's .* names its own resources",
    r"(requests|limits|resources)=.* changes the GPUs of some nodes only",
    r"and the pod template both mount /dev/shm",
)
"""Registrations that were accepted, had no effect, and are refused with a reason."""
