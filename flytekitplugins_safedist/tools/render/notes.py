"""What one should know of a task before it is registered, and a manifest does not show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...plugin.images import warning_of_image
from .pod_templates import PodTemplates


def notes_of(task: Any, template: Any, pod_templates: PodTemplates | None) -> list[str]:
    """Sentences for people about one of our tasks and the ``TaskTemplate`` that it is registered as."""
    return [
        *_unknown_template(template, pod_templates),
        *_unusable_image(task, template),
        *_fixed_by_roles(task),
    ]


def _unknown_template(template: Any, pod_templates: PodTemplates | None) -> list[str]:
    """A PodTemplate of the cluster that the task names, and that nobody has shown us."""
    name = template.metadata.pod_template_name
    if not name or name in (pod_templates or {}):
        return []
    return [
        f"the cluster's PodTemplate {name!r}, on which the backend lays these pods, is not known here: give its YAML "
        "with --pod-template FILE"
    ]


def _unusable_image(task: Any, template: Any) -> list[str]:
    """An image in which no pod of the task can begin."""
    from google.protobuf.json_format import MessageToDict

    (container, *_) = MessageToDict(template.k8s_pod.pod_spec)["containers"]
    warning = warning_of_image(container.get("image"), task.plan.roles)
    return [] if warning is None else [warning]


def _fixed_by_roles(task: Any) -> Iterator[str]:
    for role in task.plan.roles:
        fields = [field for field in ("image", "requests", "limits") if getattr(role.written, field, None)]
        if fields:
            named = f"{' and '.join(fields)} of {role.name}"
            yield f"with_overrides does not change {named}: what a role names of its own stays"
