"""What flytekit asks of a task when it registers it.

Every task has a pod template, so flytekit's container path is never taken; on the pod path its primary container
(:mod:`.primary`) holds what is ours.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flytekit.configuration import SerializationSettings
from flytekit.core.python_function_task import PythonFunctionTask

from ..compat import flytekit as flytekit_inside
from ..config.arguments import TaskArguments
from ..config.effective import of_resources
from ..config.options import SafeDistributed
from ..config.plan import Plan, plan
from ..config.validate import QUEUE_LABEL, problems_of_environment, problems_of_function, warnings_of_job
from ..errors import ConfigError, Problem
from .images import warning_of_image
from .jobspec import custom, task_type
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
            self._merged_template = merged_template(self.arguments, self.plan)
        return self._merged_template

    @pod_template.setter
    def pod_template(self, value: Any) -> None:
        # A copy, now: other plugins change a template that they are given, and tasks may share one.
        self._users_template = copy.deepcopy(value)
        self._merged_template = None

    @property
    def arguments(self) -> TaskArguments:
        """What the task was given, with the pod template as other plugins left it."""
        return replace(self.plan.arguments, pod_template=self._users_template)

    def _registered_plan(self, settings: SerializationSettings) -> Plan:
        """The task's plan; with what the registration itself asks for (``pyflyte register --resource-requests``), where
        the task asks for nothing.

        Raises:
            ConfigError: the task cannot run with that.
        """
        defaults = settings.default_resources
        if defaults is None or any(of_resources("", self.plan.arguments).values()):
            return self.plan
        arguments = replace(self.arguments, requests=defaults.requests, limits=defaults.limits, resources=None)
        planned, problems = plan(self.plan.config, arguments)
        if planned is None:
            raise ConfigError(problems, where={"task": self.name, "resources": "of the registration"})
        return planned

    def get_custom(self, settings: SerializationSettings) -> dict[str, Any] | None:
        """The backend plugin's message."""
        message = custom(self._registered_plan(settings))
        return super().get_custom(settings) if message is None else message

    def get_extended_resources(self, settings: SerializationSettings) -> Any:
        """Accelerator and shared memory: the task's own, or as much as its config asks for."""
        from flytekit.core.resources import construct_extended_resources

        return construct_extended_resources(
            accelerator=self.accelerator, shared_memory=shared_memory(self.arguments) or None
        )

    def get_k8s_pod(self, settings: SerializationSettings) -> Any:
        """flytekit's pod. With fast registration flytekit asks twice, and takes the second."""
        pod = super().get_k8s_pod(settings)
        self._warn(warning_of_image(pod.pod_spec["containers"][0].get("image"), self.plan.roles))
        return pod

    def _warn(self, of_image: str | None) -> None:
        """When a task is registered, and not in its pods: say what its config gives up."""
        from flytekit.loggers import logger

        if self._warned:
            return
        self._warned = True
        warnings = warnings_of_job(self.plan.roles, self.arguments, self.plan.timeouts)
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
        return _with_environment(container, {**(container.env or {}), **self._registered_plan(settings).variables()})


def _with_environment(container: Any, environment: Mapping[str, str]) -> Any:
    """flytekit's model of a container, with other variables: the models themselves are not to be changed."""
    names = ("image", "command", "args", "resources", "config", "data_loading_config")
    return type(container)(env=dict(environment), **{name: getattr(container, name) for name in names})
