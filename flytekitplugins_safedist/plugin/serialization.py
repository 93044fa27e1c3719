"""What flytekit asks of a task when it registers it. A mixin for the task classes.

Both of flytekit's ways are ours. Every task has a pod template, so the container path is never taken; on the pod path
``get_command`` builds the whole command, whatever flytekit put in front of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..compat import flytekit as flytekit_inside
from ..config.classes import of_their_classes, problems_of_function
from ..config.gpus import GENERIC_GPU, TaskArguments, gpus_requested, is_gpu
from ..config.options import Resolved, SafeDistributed, parse_nodes, resolve
from ..config.validate import QUEUE_LABEL, problems_of_environment, problems_of_job, warnings_of_job
from ..errors import ConfigError, Problem
from .images import warning_of_image
from .jobspec import JobSpec, command, distribution_of, plan_job
from .pod_template import merged_template, shared_memory

if TYPE_CHECKING:
    from flytekit.configuration import SerializationSettings

    class _Base:
        accelerator: Any
        name: str

        def _get_container(self, settings: SerializationSettings) -> Any: ...
        def get_k8s_pod(self, settings: SerializationSettings) -> Any: ...
        def get_custom(self, settings: SerializationSettings) -> dict[str, Any] | None: ...

else:
    _Base = object


@dataclass(frozen=True)
class Serialized:
    """What registration needs to know of a task: what the user wrote, what was decided, and the job it makes."""

    config: SafeDistributed
    resolved: Resolved
    arguments: TaskArguments
    job: JobSpec

    def task_arguments(self) -> dict[str, Any]:
        """Keyword arguments for flytekit's ``PythonFunctionTask``."""
        own: dict[str, Any] = {"task_type": self.job.task_type, "task_type_version": self.job.task_type_version}
        if self.config.queue is not None:
            own["labels"] = {**(self.arguments.labels or {}), QUEUE_LABEL: self.config.queue}
        return own


def plan_task(
    config: SafeDistributed,
    kwargs: Mapping[str, Any],
    *,
    where: Mapping[str, object],
    function: Callable[..., Any],
    dynamic: bool = False,
) -> tuple[Resolved, Serialized]:
    """Check *config* against the arguments of ``@task``, and decide everything that registration needs.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    arguments = TaskArguments.from_kwargs(kwargs)
    low, high = parse_nodes(config.nnodes) or (0, 0)
    problems = [
        *problems_of_function(function),
        *problems_of_job(config, arguments, min_nodes=low, max_nodes=high, nproc_per_node=config.nproc_per_node),
    ]
    if config.queue is not None and not flytekit_inside.knows_labels():
        problems.append(
            Problem("queue", config.queue, "is a label, which this flytekit has none of", "upgrade flytekit")
        )
    readable, asks, _ = of_their_classes(config, arguments)
    requested = gpus_requested(asks, readable, nodes=(low, high))
    resolved = resolve(
        config, requested, where=where, dynamic=dynamic, environment=arguments.environment, further=problems
    )
    return resolved, Serialized(config, resolved, arguments, plan_job(config, resolved, arguments))


class SerializesToKubeflow(_Base):
    """Put before flytekit's ``PythonFunctionTask`` in the bases; set ``self.serialized`` in the constructor, before
    flytekit's runs."""

    serialized: Serialized
    _users_template: Any = None
    _merged_template: Any = None
    _pod_asked: Any = None
    _pod: Any = None
    _warned = False

    @property
    def pod_template(self) -> Any:
        """The task's own pod template: the user's with our volumes. Made when registration first asks: the kubernetes
        client takes half a second to import, which ranks and pods need not spend."""
        if self._merged_template is None:
            known = self.serialized
            arguments = replace(known.arguments, pod_template=self._users_template)
            self._merged_template = merged_template(known.resolved, arguments)
        return self._merged_template

    @pod_template.setter
    def pod_template(self, value: Any) -> None:
        # A copy, now: other plugins change a template that they are given, and tasks may share one.
        self._users_template = copy.deepcopy(value)
        self._merged_template = self._pod_asked = None

    def get_command(self, settings: SerializationSettings) -> list[str]:
        """The command of every pod of the job; see :func:`.jobspec.command`."""
        return command(flytekit_inside.stock_command(self, settings), self.serialized.job, distribution_of(settings))

    def get_custom(self, settings: SerializationSettings) -> dict[str, Any] | None:
        """The backend plugin's message."""
        custom = self._job_in(settings).custom
        return super().get_custom(settings) if custom is None else copy.deepcopy(dict(custom))

    def get_extended_resources(self, settings: SerializationSettings) -> Any:
        """Accelerator and shared memory: the task's own, or as much as its config asks for."""
        from flytekit.core.resources import construct_extended_resources

        known = self.serialized
        arguments = replace(known.arguments, pod_template=self._users_template)
        return construct_extended_resources(
            accelerator=self.accelerator, shared_memory=shared_memory(arguments) or None
        )

    def _job_in(self, settings: SerializationSettings) -> JobSpec:
        """The job with what this registration gives to tasks that ask for nothing (``--resource-requests``): in an
        MPIJob GPUs stand in the worker role."""
        known, default = self.serialized, settings.default_resources
        if known.job.workers_of_mpi is None or default is None or known.arguments.has_resources():
            return known.job
        arguments = replace(known.arguments, requests=default.requests, limits=default.limits)
        return plan_job(known.config, known.resolved, arguments)

    def get_k8s_pod(self, settings: SerializationSettings) -> Any:
        """flytekit's pod. With fast registration flytekit asks twice, with the same answer here: it is made once."""
        container = self._get_container(settings).to_flyte_idl().SerializeToString(deterministic=True)
        asked = (container, settings.image_config, id(self.pod_template))
        if self._pod_asked != asked:
            self._pod_asked, self._pod = asked, super().get_k8s_pod(settings)
            _keep_resources(self._pod.pod_spec["containers"][0], self.serialized.arguments.primary_container())
        self._warn(warning_of_image(self._pod.pod_spec["containers"][0].get("image"), self.serialized.job.custom))
        return self._pod

    def _warn(self, of_image: str | None) -> None:
        """When a task is registered, and not in its pods: say what its config gives up."""
        from flytekit.loggers import logger

        if self._warned:
            return
        self._warned, known = True, self.serialized
        arguments = replace(known.arguments, pod_template=self._users_template)
        for warning in filter(None, [*warnings_of_job(known.config, arguments, known.resolved.timeouts), of_image]):
            logger.warning("%s: %s", self.name, warning)

    def _get_container(self, settings: SerializationSettings) -> Any:
        """flytekit's container, with the pinned variables.

        Raises:
            ConfigError: the registration itself (``--env``) sets a variable that is not the user's to set.
        """
        problems = list(problems_of_environment(settings.env or {}, "--env"))
        if problems:
            raise ConfigError(problems)
        container = flytekit_inside.stock_container(super(), settings)
        environment: Mapping[str, str] = {**(container.env or {}), **dict(self.serialized.job.environment)}
        if self.serialized.job.workers_of_mpi is None:
            return _changed(container, env=environment)
        # The command serves both roles; the arguments are the launcher's, and the worker role has its own.
        parts = {"command": container.args[:1], "args": container.args[1:]}
        return _changed(container, env=environment, resources=_without_gpus(container.resources), **parts)


def _keep_resources(container: dict[str, Any], of_template: Any) -> None:
    """What the pod template's primary container asks for and the task does not name: EFA, hugepages, slices of a GPU.
    flytekit puts the task's own resources in the place of all of them (``_serialize_pod_spec``)."""
    from kubernetes.client import ApiClient

    theirs = ApiClient().sanitize_for_serialization(getattr(of_template, "resources", None)) or {}
    own = container.get("resources") or {}
    named = {name for part in ("requests", "limits") for name in own.get(part) or {}}
    for part in ("requests", "limits"):
        kept = {
            name: amount
            for name, amount in (theirs.get(part) or {}).items()
            if name not in named and not (GENERIC_GPU in named and is_gpu(name))
        }
        theirs[part] = {**kept, **(own.get(part) or {})}
    resources = {**own, **{part: amounts for part, amounts in theirs.items() if amounts}}
    if resources:
        container["resources"] = resources


def _changed(container: Any, **fields: Any) -> Any:
    """flytekit's model of a container, with other values: the models themselves are not to be changed."""
    names = ("image", "command", "args", "resources", "env", "config", "data_loading_config")
    return type(container)(**{**{name: getattr(container, name) for name in names}, **fields})


def _without_gpus(resources: Any) -> Any:
    """The worker role of an MPIJob names its GPUs itself; on the container they would go to the launcher too."""
    from flytekit.models.task import Resources

    gpu = Resources.ResourceName.GPU
    return Resources(
        requests=[entry for entry in resources.requests if entry.name != gpu],
        limits=[entry for entry in resources.limits if entry.name != gpu],
    )
