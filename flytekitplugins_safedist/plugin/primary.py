"""The container of a pod template that runs the task. Imports the kubernetes client: half a second."""

from __future__ import annotations

from typing import Any

from kubernetes.client import ApiClient, V1Container

from ..config.effective import GPU, PARTS, beneath, one_count
from .jobspec import command


class Primary(V1Container):  # type: ignore[misc]  # kubernetes is untyped to mypy
    """A container that holds its own when flytekit puts the task's arguments, resources and variables into it
    (``_serialize_pod_spec``): for the task, for a call with another pod template, and for a mapped one.

    - Of resources flytekit drops what the template asks for (EFA, hugepages, slices of a GPU): what the task does not
      name stays.
    - Of variables it puts the task's in front, whatever there is: of one name the first stays. The API server refuses
      a PyTorchJob with two, and in a pod the last would win.
    - The command is ours, whatever it wraps around it.
    """

    _resources: Any

    @classmethod
    def of(cls, container: V1Container) -> Primary:
        """The same container."""
        return cls(**{name: getattr(container, name) for name in V1Container.openapi_types})

    @property
    def args(self) -> Any:
        """The task's command."""
        return self._args

    @args.setter
    def args(self, args: Any) -> None:
        self._args = command(args) if args else args

    @property
    def env(self) -> Any:
        """Variables, each name once."""
        return self._env

    @env.setter
    def env(self, env: Any) -> None:
        names: dict[str, Any] = {}
        for variable in env or ():
            names.setdefault(variable.name, variable)
        self._env = list(names.values()) or None

    @property
    def resources(self) -> Any:
        """The template's, below the task's."""
        return self._resources

    @resources.setter
    def resources(self, resources: Any) -> None:
        own, template = (ApiClient().sanitize_for_serialization(each) or {} for each in (resources, self._resources))
        kept = beneath(own, template)
        parts = {part: {**kept[part], **(own.get(part) or {})} for part in PARTS}
        for name in ("gpu", GPU):
            one_count(parts, name)
        self._resources = {name: value for name, value in {**template, **own, **parts}.items() if value} or None
