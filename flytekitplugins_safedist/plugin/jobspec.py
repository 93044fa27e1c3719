"""From a configuration to what the Flyte backend turns into a job: task type, ``custom``, pinned variables, command.

Pure: values in, values out. What the backend does with it: ``flyteplugins/go/tasks/plugins/k8s/kfoperators`` of Flyte
v1.16.8.

- ``nnodes=1``: task type ``python-task``, an ordinary pod.
- ``nnodes=N``: task type ``pytorch``, Master and N-1 Workers, no elastic policy: every pod knows its node rank, and the
  job succeeds when the master does.
- ``nnodes="2:4"``: task type ``pytorch`` with an elastic policy, Workers only.
- ``operator="mpi"``: task type ``mpi``, a launcher and N workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .. import envvars
from ..config.gpus import TaskArguments, gpus_requested
from ..config.options import DEFAULT_REPLACEMENTS, Resolved, SafeDistributed, Timeouts
from ..config.registered import timeouts_text

PYTHON_TASK = "python-task"
ENTRYPOINT = "safedist-execute"
MPI_LAUNCHER = "safedist-mpi-launch"
_MPI_WORKER = ("--wait",)
"""What the same command is told in a worker. Without a command of its own, the operator has workers sleep, deaf to
SIGTERM (training-operator v1.9.0, mpijob_controller.go, newWorker)."""
_STOCK_PREFIX = "pyflyte-fast-execute"
_PLACEHOLDERS = ("{{ .remote_package_path }}", "{{ .dest_dir }}")
RESTART_POLICY = "ON_FAILURE"
"""What every role gets that names no restart policy (Flyte's own default is Never for all).

A pod that exits non-zero has died undecided: it comes back, in place or as a new pod of the same name, and takes its
old place, or finds that the attempt has its verdict. With Never, the operator fails the whole job for it, a retry of
the task's is spent, and what was uploaded is not read (training-operator v1.9.0, pytorchjob_controller.go,
UpdateJobStatus).
"""


@dataclass(frozen=True)
class Distribution:
    """Where fast registration put the code archive, and where it goes in the pod; may be flytectl's placeholders."""

    location: str
    destination: str


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What registration sends, the pod template apart.

    Attributes:
        task_type, task_type_version: which backend plugin handles the task.
        custom: the plugin's message as a dict, or None for an ordinary pod.
        environment: variables pinned into the container, compared in the pod with what is found there.
        workers_of_mpi: agents that the launcher of an MPIJob starts; None for every other job.
    """

    task_type: str
    task_type_version: int
    custom: Mapping[str, Any] | None
    environment: tuple[tuple[str, str], ...]
    workers_of_mpi: int | None = None


def plan_job(config: SafeDistributed, resolved: Resolved, arguments: TaskArguments) -> JobSpec:
    """Decide the job. *config* and *asks* must be free of problems (:func:`.problems_of_job`)."""
    environment = _pinned(config, resolved, arguments)
    if resolved.max_nodes == 1:
        return JobSpec(task_type=PYTHON_TASK, task_type_version=0, custom=None, environment=environment)
    if config.operator == "mpi":
        return JobSpec(
            task_type="mpi",
            task_type_version=1,
            custom=_mpi(config, resolved, arguments),
            environment=environment,
            workers_of_mpi=resolved.max_nodes,
        )
    custom = _pytorch(config, resolved, arguments)
    return JobSpec(task_type="pytorch", task_type_version=1, custom=custom, environment=environment)


def command(args: Iterable[str], job: JobSpec, distribution: Distribution | None) -> list[str]:
    """The container's command for the stock *args* (``pyflyte-execute ...``).

    flytekit asks twice on the pod path, the second time with its own ``pyflyte-fast-execute`` in front, which unpacks
    once per rank: it is replaced, never wrapped. The archive and the directory stay whole arguments of their own, so
    that ``flytectl register files`` finds its placeholders.
    """
    rest = list(args)
    if rest[:1] == [_STOCK_PREFIX]:
        end = rest.index("--")
        distribution = Distribution(_after(rest, "--additional-distribution"), _after(rest, "--dest-dir"))
        rest = rest[end + 1 :]
    staged = [ENTRYPOINT]
    if distribution is not None:
        staged += ["--additional-distribution", distribution.location, "--dest-dir", distribution.destination]
    staged += ["--", *rest]
    if job.workers_of_mpi is None:
        return staged
    return [MPI_LAUNCHER, "--nodes", str(job.workers_of_mpi), "--", *staged]


def distribution_of(settings: Any) -> Distribution | None:
    """The archive of a flytekit ``SerializationSettings``, or None without fast registration."""
    if not settings.should_fast_serialize():
        return None
    fast = settings.fast_serialization_settings
    location, destination = _PLACEHOLDERS
    return Distribution(fast.distribution_location or location, fast.destination_dir or destination)


def task_resources(arguments: TaskArguments) -> tuple[dict[str, object], dict[str, object]]:
    """Requests and limits of the task by flytekit's field names, ``resources=`` taken apart."""
    requests, limits = _fields(arguments.requests), _fields(arguments.limits)
    for name, value in _fields(arguments.resources).items():
        if isinstance(value, (list, tuple)):
            requests[name], limits[name] = value
        else:
            requests[name] = value
    return requests, limits


def _pinned(config: SafeDistributed, resolved: Resolved, arguments: TaskArguments) -> tuple[tuple[str, str], ...]:
    low, high = resolved.min_nodes, resolved.max_nodes
    pinned = {
        envvars.NODES: str(high) if low == high else f"{low}:{high}",
        envvars.NPROC_PER_NODE: str(resolved.nproc_per_node),
        envvars.BACKEND: resolved.backend,
    }
    if resolved.start_method != "preload":
        # Else the entrypoint would import everything and fork, for a rank server that such a task has no use for.
        pinned[envvars.START_METHOD] = resolved.start_method
    if high > 1:
        pinned[envvars.TIMEOUTS] = timeouts_text(resolved.timeouts)
        if resolved.max_replacements != DEFAULT_REPLACEMENTS:
            pinned[envvars.MAX_REPLACEMENTS] = str(resolved.max_replacements)
    gpus = gpus_requested(arguments, config, nodes=(low, high)).gpus
    if gpus:
        pinned[envvars.GPUS] = str(gpus)
    if resolved.timeouts.code != Timeouts().code and envvars.CODE_TIMEOUT not in (arguments.environment or {}):
        pinned[envvars.CODE_TIMEOUT] = f"{resolved.timeouts.code:g}"
    return tuple(pinned.items())


def _pytorch(config: SafeDistributed, resolved: Resolved, arguments: TaskArguments) -> dict[str, Any]:
    from flyteidl.plugins.kubeflow import pytorch_pb2 as pb
    from google.protobuf.json_format import MessageToDict

    elastic = resolved.min_nodes != resolved.max_nodes
    replicas = resolved.max_nodes if elastic else resolved.max_nodes - 1
    job = pb.DistributedPyTorchTrainingTask(
        worker_replicas=pb.DistributedPyTorchTrainingReplicaSpec(replicas=replicas, **_role(config.worker, arguments)),
        run_policy=_run_policy(config, resolved, ("worker",) if elastic else ("master", "worker")),
    )
    if elastic:
        job.elastic_config.CopyFrom(
            pb.ElasticConfig(
                rdzv_backend="c10d",
                min_replicas=resolved.min_nodes,
                max_replicas=resolved.max_nodes,
                nproc_per_node=resolved.nproc_per_node,
                max_restarts=resolved.max_restarts,
            )
        )
    else:
        master = pb.DistributedPyTorchTrainingReplicaSpec(replicas=1, **_role(config.master, arguments))
        job.master_replicas.CopyFrom(master)
    return dict(MessageToDict(job))


def _mpi(config: SafeDistributed, resolved: Resolved, arguments: TaskArguments) -> dict[str, Any]:
    from flyteidl.plugins.kubeflow import mpi_pb2 as pb
    from flytekit import Resources
    from google.protobuf.json_format import MessageToDict

    launcher = _role(config.launcher, arguments, inherit=False)
    if "resources" not in launcher:
        # Without this the launcher gets what the task asks for each worker, and does nothing with it.
        launcher["resources"] = _to_idl(_fields(Resources(cpu="1", mem=_launcher_memory(resolved.max_nodes))), {})
    # The container's own resources leave out the GPUs (see serialization), or the launcher would hold some: nothing can
    # take them from one role only. Without GPUs the workers name nothing of their own, and with_overrides changes them.
    has_gpus = bool(gpus_requested(arguments, config, nodes=(resolved.min_nodes, resolved.max_nodes)).gpus)
    job = pb.DistributedMPITrainingTask(
        worker_replicas=pb.DistributedMPITrainingReplicaSpec(
            replicas=resolved.max_nodes, command=_MPI_WORKER, **_role(config.worker, arguments, always=has_gpus)
        ),
        launcher_replicas=pb.DistributedMPITrainingReplicaSpec(replicas=1, **launcher),
        run_policy=_run_policy(config, resolved, ("launcher", "worker")),
        slots=resolved.nproc_per_node,
    )
    return dict(MessageToDict(job))


def _launcher_memory(workers: int) -> str:
    """A kubectl for each worker: a Go program, some tens of MiB each."""
    return "1Gi" if workers <= 8 else f"{512 + 64 * workers}Mi"


def _role(role: Any, arguments: TaskArguments, *, inherit: bool = True, always: bool = False) -> dict[str, Any]:
    """Image, restart policy and resources of a role, as arguments of the replica message."""
    from flyteidl.plugins.kubeflow import common_pb2

    policy = f"RESTART_POLICY_{_restart_policy(role)}"
    replica: dict[str, Any] = {"restart_policy": common_pb2.RestartPolicy.Value(policy)}
    if getattr(role, "image", None):
        replica["image"] = role.image
    requests, limits = _fields(getattr(role, "requests", None)), _fields(getattr(role, "limits", None))
    if requests or limits or always:
        if inherit:
            # The backend fills cpu and memory that a role does not name with the platform's defaults and lets those
            # win over the task's (v1.16, ToReplicaSpecWithOverrides): name everything the task asked for.
            of_task = task_resources(arguments)
            requests, limits = of_task[0] | requests, of_task[1] | limits
        if requests or limits:
            replica["resources"] = _to_idl(requests, limits)
    return replica


def _restart_policy(role: Any) -> str:
    """As flyteidl says it: NEVER, ON_FAILURE or ALWAYS."""
    policy = getattr(role, "restart_policy", None)
    if policy is None:
        return RESTART_POLICY
    return "ON_FAILURE" if policy.name == "FAILURE" else str(policy.name)


def _run_policy(config: SafeDistributed, resolved: Resolved, roles: Iterable[str]) -> Any:
    from flyteidl.plugins.kubeflow import common_pb2 as pb

    policy = config.run_policy
    # Flyte reads "no clean pod policy" as None, which leaves pods of a finished job running.
    clean = getattr(policy, "clean_pod_policy", None)
    backoff = getattr(policy, "backoff_limit", None)
    if backoff is None and any(_restart_policy(getattr(config, name)) != "NEVER" for name in roles):
        # The operator adds up the restarts of all containers, and fails the job when they reach the limit: never
        # before our own budget is spent, which counts a round once, however many of its nodes were lost.
        backoff = resolved.max_replacements * resolved.max_nodes + 1
    return pb.RunPolicy(
        clean_pod_policy=pb.CLEANPOD_POLICY_RUNNING if clean is None else clean.value,
        ttl_seconds_after_finished=getattr(policy, "ttl_seconds_after_finished", None),
        active_deadline_seconds=getattr(policy, "active_deadline_seconds", None),
        backoff_limit=backoff,
    )


def _fields(resources: Any) -> dict[str, object]:
    if resources is None:
        return {}
    named = {field.name: getattr(resources, field.name) for field in fields(resources)}
    return {name: value for name, value in named.items() if value is not None}


def _to_idl(requests: Mapping[str, object], limits: Mapping[str, object]) -> Any:
    from flytekit import Resources
    from flytekit.core.resources import convert_resources_to_resource_model

    wanted: Any = Resources
    model = convert_resources_to_resource_model(requests=wanted(**requests), limits=wanted(**limits))
    return model.to_flyte_idl()


def _after(args: list[str], flag: str) -> str:
    return args[args.index(flag) + 1]
