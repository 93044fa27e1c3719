"""What one should know of a task before it is registered, and a manifest does not show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...plugin.images import warning_of_image
from .platform import Cluster


def notes_of(task: Any, template: Any, cluster: Cluster) -> list[str]:
    """Sentences for people about one of our tasks and the ``TaskTemplate`` that it is registered as."""
    return [
        *unknown_template(template, cluster),
        *unusable_image(task, template),
        *_lost_resources(task),
        *_fixed_by_roles(task),
    ]


def unknown_template(template: Any, cluster: Cluster) -> list[str]:
    """A PodTemplate of the cluster that the task names, and that nobody has shown us."""
    name = template.metadata.pod_template_name
    if not name or name in cluster.pod_templates:
        return []
    return [
        f"the cluster's PodTemplate {name!r}, on which the backend lays these pods, is not known here: give its YAML "
        "with --pod-template FILE"
    ]


def unusable_image(task: Any, template: Any) -> list[str]:
    """An image in which no pod of the task can begin."""
    from google.protobuf.json_format import MessageToDict

    (container, *_) = MessageToDict(template.k8s_pod.pod_spec)["containers"]
    warning = warning_of_image(container.get("image"), task.serialized.job.custom)
    return [] if warning is None else [warning]


def _lost_resources(task: Any) -> Iterator[str]:
    """flytekit replaces the resources of a template's primary container by the task's (``_serialize_pod_spec``)."""
    serialized = task.serialized
    if not serialized.arguments.has_resources():
        return
    kept = set(serialized.arguments.resource_names())
    for name in sorted(serialized.arguments.template_resource_names() - kept):
        yield (
            f"{name} of the pod template's primary container is lost: the task's own resources replace all of that "
            "container's; put all of them into the template"
        )


def _fixed_by_roles(task: Any) -> Iterator[str]:
    shape = task.serialized.shape
    for name in ("master", "worker", "launcher"):
        role = getattr(shape, name)
        fields = [field for field in ("image", "requests", "limits") if getattr(role, field, None)]
        if fields:
            yield f"with_overrides does not change {' and '.join(fields)} of {name}: what a role names of its own stays"
