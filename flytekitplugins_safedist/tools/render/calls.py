"""A workflow's call of a task with ``with_overrides``, read from a file, as flyteidl has it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import RenderError
from .platform import read_yaml


def read_node(file: Path, template: Any) -> Mapping[str, Any]:
    """The node that calls the task of *template* (``TaskTemplate``), for :class:`.execution.Execution`.

    Args:
        file: YAML or JSON of a node's overrides (``core.TaskNodeOverrides``), or of the whole node (``core.Node``).

    Raises:
        RenderError: the file cannot be read, or is neither.
    """
    from flyteidl.core import workflow_pb2
    from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

    document = read_yaml(file)
    whole = "taskNode" in document or "arrayNode" in document
    message = workflow_pb2.Node() if whole else workflow_pb2.TaskNodeOverrides()
    try:
        read: dict[str, Any] = MessageToDict(ParseDict(document, message))
    except ParseError as error:
        raise RenderError(
            "these are not the overrides of a node",
            where={"file": file},
            seen=error,
            expected="resources, extendedResources, containerImage or podTemplate, or a node that has them",
        ) from error
    if whole:
        return read
    # Of the rest a call says what the task does, unless that is overridden too (flytekit's construct_node_metadata).
    of_task = MessageToDict(template.metadata)
    metadata = {name: of_task[name] for name in ("interruptible",) if name in of_task}
    return {"id": "n0", "metadata": metadata, "taskNode": {"overrides": read}}
