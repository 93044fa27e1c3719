"""What Flyte does with a job besides what ``safedist render`` shows: overrides of a call, names and paths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flyteidl.core import tasks_pb2
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from google.protobuf.json_format import MessageToDict, ParseDict

from tests.harness.operator import pods_and_services
from tests.harness.product import job_manifest

NAME = "f0123456789abcdef"
"""Of the execution whose job is shown."""
SETTINGS = SerializationSettings(
    image_config=ImageConfig(default_image=Image(name="default", fqn="registry.example/train", tag="1")),
    project="p",
    domain="d",
    version="v",
)
"""Of a registration from the image itself."""


def overrides_of(node: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What ``with_overrides`` says of the task, in the node of a workflow that calls or maps it."""
    call = (node or {}).get("arrayNode", {}).get("node") or node or {}
    overrides: Mapping[str, Any] = call.get("taskNode", {}).get("overrides", {})
    return overrides


def called(template: Any, node: Mapping[str, Any] | None) -> dict[str, Any]:
    """The job of a call with overrides (``flytek8s/pod_helper.go``)."""
    overrides, task = overrides_of(node), MessageToDict(template)
    pod = overrides.get("podTemplate", {})
    if pod.get("podSpec"):
        task["config"]["primary_container_name"] = pod["primaryContainerName"]
        task["k8sPod"] = {**task["k8sPod"], **{key: pod[key] for key in ("podSpec", "metadata") if key in pod}}
    task["extendedResources"] = {**task.get("extendedResources", {}), **overrides.get("extendedResources", {})}
    if overrides.get("containerImage"):
        for container in task["k8sPod"]["podSpec"]["containers"]:
            if container["name"] == task["config"]["primary_container_name"]:
                container["image"] = overrides["containerImage"]
    found: dict[str, Any] = job_manifest(ParseDict(task, tasks_pb2.TaskTemplate()), overrides.get("resources"))
    return found


def pods(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of a job, node 0 first; an ordinary pod is its own only one."""
    return [each for each in (pods_and_services(job) if job["kind"] != "Pod" else [job]) if each["kind"] == "Pod"]


def executed(job: Mapping[str, Any], files: Mapping[str, str], *, name: str = NAME, attempt: int = 0) -> dict[str, Any]:
    """The job of an execution.

    Args:
        job: as it is shown.
        files: texts of its commands, ``{{.input}}`` and the like, and what they become.
        name, attempt: of the execution.
    """
    identity = {
        "FLYTE_INTERNAL_EXECUTION_ID": name,
        "FLYTE_INTERNAL_EXECUTION_PROJECT": "flytesnacks",
        "FLYTE_INTERNAL_EXECUTION_DOMAIN": "development",
        "FLYTE_ATTEMPT_NUMBER": str(attempt),
    }
    texts = {f"{NAME}-n0-0": f"{name}-n0-{attempt}", **files}

    def fill(value: Any) -> Any:
        if isinstance(value, Mapping):
            filled = {key: fill(each) for key, each in value.items()}
            if isinstance(value.get("containers"), list):
                for container in filled["containers"]:
                    variables = [{"name": key, "value": text} for key, text in identity.items()]
                    container["env"] = [*container.get("env", ()), *variables]
            return filled
        if isinstance(value, list):
            return [fill(each) for each in value]
        for old, new in texts.items() if isinstance(value, str) else ():
            value = value.replace(old, new)
        return value

    found: dict[str, Any] = json.loads(json.dumps(fill(job)))
    return found
