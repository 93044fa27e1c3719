"""From a plan to what the Flyte backend turns into a job: task type, ``custom``, command.

Pure: values in, values out. What the backend does with it: ``flyteplugins/go/tasks/plugins/k8s/kfoperators`` of Flyte
v1.16.8.

- ``nnodes=1``: task type ``python-task``, an ordinary pod.
- ``nnodes=N``: task type ``pytorch``, Master and N-1 Workers, no elastic policy: every pod knows its node rank, and the
  job succeeds when the master does.
- ``nnodes="2:4"``: task type ``pytorch`` with an elastic policy, Workers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flyteidl.plugins.kubeflow import common_pb2, pytorch_pb2
from flytekit import Resources
from flytekit.core.resources import convert_resources_to_resource_model
from google.protobuf.json_format import MessageToDict

from ..compat.flytekit import FAST_EXECUTE
from ..config.effective import NAMES, Amounts, by_part, countable, of_resources
from ..config.plan import Plan
from ..config.roles import Role
from ..config.typed import MOST_COUNTED
from ..config.validate import QUEUE_LABEL

ENTRYPOINT = "safedist-execute"


def registered_as(plan: Plan) -> dict[str, Any]:
    """Keyword arguments for flytekit's ``PythonFunctionTask``: the backend plugin that handles the task, the version of
    its message, and the queue's label."""
    kind, version = ("python-task", 0) if plan.max_nodes == 1 else ("pytorch", 1)
    queue = plan.config.queue
    labels = {} if queue is None else {"labels": {**(plan.arguments.labels or {}), QUEUE_LABEL: queue}}
    return {"task_type": kind, "task_type_version": version, **labels}


def command(args: Sequence[str]) -> list[str]:
    """The container's command for flytekit's *args*: ``pyflyte-execute ...``, for fast registration with its own
    ``pyflyte-fast-execute ... --`` in front, which unpacks once per rank: that is replaced, never wrapped. Its
    arguments, the archive and the directory, stay as they are, so that ``flytectl register files`` finds its
    placeholders. (Of a mapped task's pod template in ``with_overrides`` flytekit puts it in front twice.)
    """
    if FAST_EXECUTE in args:
        return [ENTRYPOINT, *args[len(args) - args[::-1].index(FAST_EXECUTE) :]]
    return [ENTRYPOINT, "--", *args]


def custom(plan: Plan, image_of: Callable[[str], str]) -> dict[str, Any] | None:
    """The backend plugin's message as a dict, or None for an ordinary pod.

    Args:
        plan: of the task.
        image_of: the image's name, of a role's as it is written (``{{.image.default.fqn}}:...``).
    """
    if plan.max_nodes == 1:
        return None
    elastic = pytorch_pb2.ElasticConfig(
        rdzv_backend="c10d",
        min_replicas=plan.min_nodes,
        max_replicas=plan.max_nodes,
        nproc_per_node=plan.nproc_per_node,
        max_restarts=plan.max_restarts,
    )
    job = pytorch_pb2.DistributedPyTorchTrainingTask(
        run_policy=_run_policy(plan),
        elastic_config=None if plan.min_nodes == plan.max_nodes else elastic,
        **{f"{role.name}_replicas": _replica(role, plan, image_of) for role in plan.roles},
    )
    return dict(MessageToDict(job))


def _replica(role: Role, plan: Plan, image_of: Callable[[str], str]) -> Any:
    """A role; without resources where it names none of its own."""
    resources = None
    if countable(of_resources("", role.written)):
        resources = convert_resources_to_resource_model(**as_flytekits(plan.resources[role.name])).to_flyte_idl()
    image = getattr(role.written, "image", None)
    return pytorch_pb2.DistributedPyTorchTrainingReplicaSpec(
        replicas=role.replicas,
        image=image and image_of(image),
        restart_policy=common_pb2.RestartPolicy.Value(f"RESTART_POLICY_{role.restart_policy}"),
        resources=resources,
    )


def _run_policy(plan: Plan) -> Any:
    policy = plan.config.run_policy
    # Flyte reads "no clean pod policy" as None, which leaves pods of a finished job running.
    clean = getattr(policy, "clean_pod_policy", None)
    backoff = getattr(policy, "backoff_limit", None)
    if backoff is None and any(role.restart_policy != "NEVER" for role in plan.roles):
        # The operator adds up the restarts of all containers, and fails the job when they reach the limit: never
        # before our own budget is spent, which counts a round once, however many of its nodes were lost.
        backoff = min(plan.max_replacements * plan.max_nodes + 1, MOST_COUNTED)
    return common_pb2.RunPolicy(
        clean_pod_policy=common_pb2.CLEANPOD_POLICY_RUNNING if clean is None else clean.value,
        ttl_seconds_after_finished=getattr(policy, "ttl_seconds_after_finished", None),
        active_deadline_seconds=getattr(policy, "active_deadline_seconds", None),
        backoff_limit=backoff,
    )


def as_flytekits(amounts: Amounts) -> dict[str, Any]:
    """What can be said of amounts in a role's message, or in a call's node: flytekit's ``Resources``, as ``requests``
    and ``limits``."""
    names: Any = NAMES.items()
    return {
        part: Resources(**{own: listed[name].value for own, name in names if name in listed})
        for part, listed in by_part(amounts).items()
    }
