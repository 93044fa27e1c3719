"""What flytekit asks of a task when it registers it.

Every task has a pod template, so flytekit's container path is never taken; on the pod path its primary container
(:mod:`.pod`) holds what is ours.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from flytekit.configuration import SerializationSettings
from flytekit.core.python_auto_container import get_registerable_container_image
from flytekit.core.python_function_task import PythonFunctionTask
from flytekit.deck import DeckField
from flytekit.loggers import logger

from ..compat import flytekit as flytekit_inside
from ..config.arguments import TaskArguments
from ..config.effective import of_resources
from ..config.hints import hints
from ..config.options import SafeDistributed
from ..config.plan import Plan, plan
from ..config.validate import problems_of_function, problems_of_variables
from ..errors import ConfigError, Problem
from .jobspec import custom


def plan_task(config: SafeDistributed, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Plan:
    """The plan of a task.

    Args:
        config, function: of the task.
        kwargs: keyword arguments of ``@task``.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    planned, problems = plan(config, TaskArguments.from_kwargs(kwargs), decks=_decks(kwargs))
    problems += problems_of_function(function)
    if kwargs.get("execution_mode") == PythonFunctionTask.ExecutionBehavior.DYNAMIC:
        reason = "is on a @dynamic workflow, which has no ranks"
        problems.append(Problem("task_config", type(config).__name__, reason, "use @task"))
    if config.queue is not None and not flytekit_inside.knows_labels():
        reason = "is a label, which this flytekit has none of"
        problems.append(Problem("queue", config.queue, reason, "upgrade flytekit"))
    if planned is None or problems:
        raise ConfigError(problems, where={"task": f"{function.__module__}.{function.__name__}"})
    return planned


def _decks(kwargs: Mapping[str, Any]) -> tuple[str, ...] | None:
    """As flytekit reads its three arguments for it."""
    enable, disable = kwargs.get("enable_deck"), kwargs.get("disable_deck")
    if not enable and (enable is not None or disable is not False):
        return None
    return tuple(str(getattr(each, "value", each)) for each in kwargs.get("deck_fields", DeckField) or ())


class SerializesToKubeflow(PythonFunctionTask[SafeDistributed]):  # type: ignore[misc]  # flytekit is untyped to mypy
    """flytekit's task, as it is registered; set ``self.plan`` in the constructor, before flytekit's own runs."""

    plan: Plan
    _users_template: Any = None
    _merged_template: Any = None
    has_hinted = False

    @property
    def pod_template(self) -> Any:
        """The task's own pod template: the user's with our volumes. Made when registration first asks."""
        from .pod import merged_template

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
        defaults = getattr(settings, "default_resources", None)  # a registration of flytekit 1.16.0 asks for nothing
        if defaults is None or of_resources("", self.plan.arguments):
            return self.plan
        arguments = replace(self.arguments, requests=defaults.requests, limits=defaults.limits, resources=None)
        planned, problems = plan(self.plan.config, arguments, decks=self.plan.decks)
        if planned is None:
            raise ConfigError(problems, where={"task": self.name, "resources": "of the registration"})
        return planned

    def get_custom(self, settings: SerializationSettings) -> dict[str, Any] | None:
        """The backend plugin's message."""
        image_of = partial(get_registerable_container_image, cfg=settings.image_config)
        return custom(self._registered_plan(settings), image_of)

    def get_extended_resources(self, settings: SerializationSettings) -> Any:
        """Accelerator and shared memory: the task's own, or as much as its config asks for."""
        from flytekit.core.resources import construct_extended_resources

        return construct_extended_resources(
            accelerator=self.accelerator, shared_memory=self.arguments.dev_shm() or None
        )

    def get_k8s_pod(self, settings: SerializationSettings) -> Any:
        """flytekit's pod; and what its job gives up is said. With fast registration flytekit asks twice."""
        pod = super().get_k8s_pod(settings)
        if not self.has_hinted:
            self.has_hinted = True
            image = pod.pod_spec["containers"][0].get("image")
            for hint in hints(self.plan, self.arguments, image, self.container_image):
                logger.warning("%s: %s", self.name, hint)
        return pod

    def _get_container(self, settings: SerializationSettings) -> Any:
        """flytekit's container, with the job in a variable.

        Raises:
            ConfigError: the registration itself (``--env``) sets a variable that this task cannot have.
        """
        problems = list(problems_of_variables(settings.env or {}, "--env", self.plan.max_nodes))
        if problems:
            raise ConfigError(problems)
        container = super()._get_container(settings)
        return _with_environment(container, {**(container.env or {}), **self._registered_plan(settings).pinned()})


def _with_environment(container: Any, environment: Mapping[str, str]) -> Any:
    """flytekit's model of a container, with other variables: the models themselves are not to be changed."""
    names = ("image", "command", "args", "resources", "config", "data_loading_config")
    return type(container)(env=dict(environment), **{name: getattr(container, name) for name in names})
