"""From a plan to what the Flyte backend turns into a job: task type, ``custom``, command.

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
from typing import Any

from ..compat.flytekit import FAST_EXECUTE
from ..config.asked import part_of
from ..config.gpus import fewest, per_role
from ..config.plan import Plan
from ..config.roles import Role

ENTRYPOINT = "safedist-execute"
MPI_LAUNCHER = "safedist-mpi-launch"
_MPI_WORKER = ("--wait",)
"""What the same command is told in a worker. Without a command of its own, the operator has workers sleep, deaf to
SIGTERM (training-operator v1.9.0, mpijob_controller.go, newWorker)."""


def task_type(plan: Plan) -> tuple[str, int]:
    """Which backend plugin handles the task, and the version of its message."""
    if plan.max_nodes == 1:
        return "python-task", 0
    return plan.config.operator, 1


def command(args: Iterable[str], plan: Plan) -> list[str]:
    """The container's command for flytekit's *args*: ``pyflyte-execute ...``, for fast registration with its own
    ``pyflyte-fast-execute ... --`` in front, which unpacks once per rank: that is replaced, never wrapped. Its
    arguments, the archive and the directory, stay as they are, so that ``flytectl register files`` finds its
    placeholders.
    """
    first, *rest = args
    staged = [ENTRYPOINT, *rest] if first == FAST_EXECUTE else [ENTRYPOINT, "--", first, *rest]
    return [MPI_LAUNCHER, "--nodes", str(plan.max_nodes), "--", *staged] if plan.on_mpi else staged


def custom(plan: Plan) -> dict[str, Any] | None:
    """The backend plugin's message as a dict, or None for an ordinary pod."""
    if plan.max_nodes == 1:
        return None
    from google.protobuf.json_format import MessageToDict

    return dict(MessageToDict(_mpi(plan) if plan.on_mpi else _pytorch(plan)))


def _pytorch(plan: Plan) -> Any:
    from flyteidl.plugins.kubeflow import pytorch_pb2 as pb

    job = pb.DistributedPyTorchTrainingTask(run_policy=_run_policy(plan))
    for role in plan.roles:
        made = pb.DistributedPyTorchTrainingReplicaSpec(replicas=role.replicas, **_replica(role, plan))
        getattr(job, f"{role.name}_replicas").CopyFrom(made)
    if plan.is_elastic:
        job.elastic_config.CopyFrom(
            pb.ElasticConfig(
                rdzv_backend="c10d",
                min_replicas=plan.min_nodes,
                max_replicas=plan.max_nodes,
                nproc_per_node=plan.nproc_per_node,
                max_restarts=plan.max_restarts,
            )
        )
    return job


def _mpi(plan: Plan) -> Any:
    from flyteidl.plugins.kubeflow import mpi_pb2 as pb
    from flytekit import Resources

    launcher, worker = plan.roles
    of_launcher = _replica(launcher, plan)
    if "resources" not in of_launcher:
        # Without this the launcher gets what the task asks for each worker, and does nothing with it: a kubectl for
        # each worker is a Go program, some tens of MiB each.
        memory = "1Gi" if plan.max_nodes <= 8 else f"{512 + 64 * plan.max_nodes}Mi"
        of_launcher["resources"] = _to_idl(vars(Resources(cpu="1", mem=memory)), {})
    # The container's own resources leave out the GPUs (see serialization), or the launcher would hold some: nothing can
    # take them from one role only. Without GPUs the workers name nothing of their own, and with_overrides changes them.
    has_gpus = bool(fewest(per_role(plan.arguments, plan.roles))[0])
    replica = pb.DistributedMPITrainingReplicaSpec
    return pb.DistributedMPITrainingTask(
        worker_replicas=replica(
            replicas=worker.replicas, command=_MPI_WORKER, **_replica(worker, plan, always=has_gpus)
        ),
        launcher_replicas=replica(replicas=launcher.replicas, **of_launcher),
        run_policy=_run_policy(plan),
        slots=plan.nproc_per_node,
    )


def _replica(role: Role, plan: Plan, *, always: bool = False) -> dict[str, Any]:
    """Image, restart policy and resources of a role, as arguments of the replica message."""
    from flyteidl.plugins.kubeflow import common_pb2

    policy = f"RESTART_POLICY_{role.restart_policy}"
    replica: dict[str, Any] = {"restart_policy": common_pb2.RestartPolicy.Value(policy)}
    if getattr(role.written, "image", None):
        replica["image"] = role.written.image
    asked = role.amounts()
    if asked or always:
        # The backend fills cpu and memory that a role does not name with the platform's defaults and lets those win
        # over the task's (v1.16, ToReplicaSpecWithOverrides): name everything the task asked for.
        amounts = {**(plan.arguments.amounts() if role.trains else {}), **asked}
        if amounts:
            replica["resources"] = _to_idl(part_of(amounts, "requests"), part_of(amounts, "limits"))
    return replica


def _run_policy(plan: Plan) -> Any:
    from flyteidl.plugins.kubeflow import common_pb2 as pb

    policy = plan.config.run_policy
    # Flyte reads "no clean pod policy" as None, which leaves pods of a finished job running.
    clean = getattr(policy, "clean_pod_policy", None)
    backoff = getattr(policy, "backoff_limit", None)
    if backoff is None and any(role.restart_policy != "NEVER" for role in plan.roles):
        # The operator adds up the restarts of all containers, and fails the job when they reach the limit: never
        # before our own budget is spent, which counts a round once, however many of its nodes were lost.
        backoff = plan.max_replacements * plan.max_nodes + 1
    return pb.RunPolicy(
        clean_pod_policy=pb.CLEANPOD_POLICY_RUNNING if clean is None else clean.value,
        ttl_seconds_after_finished=getattr(policy, "ttl_seconds_after_finished", None),
        active_deadline_seconds=getattr(policy, "active_deadline_seconds", None),
        backoff_limit=backoff,
    )


def _to_idl(requests: Mapping[str, object], limits: Mapping[str, object]) -> Any:
    from flytekit import Resources
    from flytekit.core.resources import convert_resources_to_resource_model

    wanted: Any = Resources
    model = convert_resources_to_resource_model(requests=wanted(**requests), limits=wanted(**limits))
    return model.to_flyte_idl()
