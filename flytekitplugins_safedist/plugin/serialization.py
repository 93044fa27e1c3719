"""What flytekit asks of a task when it registers it.

Both of flytekit's ways are ours. Every task has a pod template, so the container path is never taken; on the pod path
``get_command`` builds the whole command, whatever flytekit put in front of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flytekit.configuration import SerializationSettings
from flytekit.core.python_function_task import PythonFunctionTask

from ..compat import flytekit as flytekit_inside
from ..config.asked import GENERIC_GPU, TaskArguments, is_gpu
from ..config.options import SafeDistributed
from ..config.plan import Plan, plan
from ..config.validate import QUEUE_LABEL, problems_of_environment, problems_of_function, warnings_of_job
from ..errors import ConfigError, Problem
from .images import warning_of_image
from .jobspec import command, custom, task_type
from .pod_template import merged_template, shared_memory


def plan_task(
    config: SafeDistributed,
    kwargs: Mapping[str, Any],
    *,
    where: Mapping[str, object],
    function: Callable[..., Any],
    dynamic: bool = False,
) -> Plan:
    """The plan of a task whose decorator was given *kwargs*.

    Args:
        config: what the user wrote.
        kwargs: keyword arguments of ``@task``.
        where: the task, for the error.
        function: of the task.
        dynamic: it is a ``@dynamic`` workflow, which has no ranks.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    made, problems = plan(config, TaskArguments.from_kwargs(kwargs))
    problems += problems_of_function(function)
    if dynamic:
        reason = "is on a @dynamic workflow, which has no ranks"
        problems.append(Problem("task_config", type(config).__name__, reason, "use @task"))
    if config.queue is not None and not flytekit_inside.knows_labels():
        reason = "is a label, which this flytekit has none of"
        problems.append(Problem("queue", config.queue, reason, "upgrade flytekit"))
    if made is None or problems:
        raise ConfigError(problems, where=where)
    return made


def registered_as(plan: Plan) -> dict[str, Any]:
    """Keyword arguments for flytekit's ``PythonFunctionTask``."""
    kind, version = task_type(plan)
    own: dict[str, Any] = {"task_type": kind, "task_type_version": version}
    if plan.config.queue is not None:
        own["labels"] = {**(plan.arguments.labels or {}), QUEUE_LABEL: plan.config.queue}
    return own


class SerializesToKubeflow(PythonFunctionTask[SafeDistributed]):  # type: ignore[misc]  # flytekit is untyped to mypy
    """flytekit's task, as it is registered; set ``self.plan`` in the constructor, before flytekit's own runs."""

    plan: Plan
    _users_template: Any = None
    _merged_template: Any = None
    _warned = False

    @property
    def pod_template(self) -> Any:
        """The task's own pod template: the user's with our volumes. Made when registration first asks: the kubernetes
        client takes half a second to import, which ranks and pods need not spend."""
        if self._merged_template is None:
            self._merged_template = merged_template(self._asked(), self.plan)
        return self._merged_template

    @pod_template.setter
    def pod_template(self, value: Any) -> None:
        # A copy, now: other plugins change a template that they are given, and tasks may share one.
        self._users_template = copy.deepcopy(value)
        self._merged_template = None

    def _asked(self) -> TaskArguments:
        """What the task was given, with the pod template as other plugins left it."""
        return replace(self.plan.arguments, pod_template=self._users_template)

    def get_command(self, settings: SerializationSettings) -> list[str]:
        """The command of every pod of the job; see :func:`.jobspec.command`."""
        return command(flytekit_inside.stock_command(self, settings))

    def get_custom(self, settings: SerializationSettings) -> dict[str, Any] | None:
        """The backend plugin's message."""
        message = custom(self.plan)
        return super().get_custom(settings) if message is None else message

    def get_extended_resources(self, settings: SerializationSettings) -> Any:
        """Accelerator and shared memory: the task's own, or as much as its config asks for."""
        from flytekit.core.resources import construct_extended_resources

        return construct_extended_resources(
            accelerator=self.accelerator, shared_memory=shared_memory(self._asked()) or None
        )

    def get_k8s_pod(self, settings: SerializationSettings) -> Any:
        """flytekit's pod. With fast registration flytekit asks twice, and takes the second."""
        pod = super().get_k8s_pod(settings)
        _keep_resources(pod.pod_spec["containers"][0], self.plan.arguments.primary_container())
        self._warn(warning_of_image(pod.pod_spec["containers"][0].get("image"), self.plan.roles))
        return pod

    def _warn(self, of_image: str | None) -> None:
        """When a task is registered, and not in its pods: say what its config gives up."""
        from flytekit.loggers import logger

        if self._warned:
            return
        self._warned = True
        warnings = warnings_of_job(self.plan.roles, self._asked(), self.plan.timeouts)
        for warning in filter(None, [*warnings, of_image]):
            logger.warning("%s: %s", self.name, warning)

    def _get_container(self, settings: SerializationSettings) -> Any:
        """flytekit's container, with the job in a variable.

        Raises:
            ConfigError: the registration itself (``--env``) sets a variable that is not the user's to set.
        """
        problems = list(problems_of_environment(settings.env or {}, "--env"))
        if problems:
            raise ConfigError(problems)
        container = flytekit_inside.stock_container(super(), settings)
        return _with_environment(container, {**(container.env or {}), **self.plan.variables()})


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


def _with_environment(container: Any, environment: Mapping[str, str]) -> Any:
    """flytekit's model of a container, with other variables: the models themselves are not to be changed."""
    names = ("image", "command", "args", "resources", "config", "data_loading_config")
    return type(container)(env=dict(environment), **{name: getattr(container, name) for name in names})
