"""Every difference between a recorded object and a rendered one that is no fault, once, with its reason."""

from __future__ import annotations

from oracle_comparison import Allowed

_LABELS = "domain|execution-id|interruptible|node-id|project|shard-key|task-name|workflow-name"
_TEMPLATE = r"(spec\.(pytorch|mpi)ReplicaSpecs\.\w+\.template\.)?"
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
    Allowed(rf"{_TEMPLATE}spec\.affinity", "Flyte writes an empty one", recorded=r"\{\}", rendered="None"),
    Allowed(
        rf"{_CONTAINER}\.env\[FLYTE_INTERNAL_EXECUTION_WORKFLOW\]",
        "the workflow's name is known only when there is one",
        rendered="None",
    ),
    Allowed(r"metadata\.creationTimestamp", "of a living object", recorded="None", rendered="None"),
    Allowed(r"status", "of a living object", recorded=r"\{\}", rendered="None"),
    Allowed(r"status\.loadBalancer", "of a living object", recorded=r"\{\}", rendered="None"),
    Allowed(r"spec\.ports\[\d*\]\.targetPort", "Go writes the zero of a number or name", recorded="0", rendered="None"),
)
"""What the backend and the operator always add, and a preview leaves out."""

MEANT = (
    Allowed(
        rf"{_CONTAINER}\.terminationMessagePolicy",
        "the end of a failed container's log becomes its message, as in Flyte's own containers",
        recorded="None",
        rendered="FallbackToLogsOnError",
    ),
    *(
        Allowed(
            rf"{_TEMPLATE}spec\.containers\[mpi\]\.{field}",
            "an MPIJob's containers have a command of their own, so that workers do not sleep through SIGTERM; "
            "what follows it is compared by the golden specs and with flytectl's recordings",
            recorded=recorded,
            rendered=rendered,
        )
        for field, recorded, rendered in (
            ("command", "None", r"\['safedist-mpi-launch'\]"),
            (r"command\[0\]", "sleep", "safedist-mpi-launch"),
            ("args", r"\['safedist-mpi-launch', '--nodes', .*\]", r"\['--nodes', .*\]|\['--wait'\]"),
            (r"args\[0\]", "365d", "--wait"),
        )
    ),
)
"""What tasks are serialized to since the recordings were made."""
