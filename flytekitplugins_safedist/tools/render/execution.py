"""One execution of a task: the names, paths and variables that the backend fills in."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_ALPHABET = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567=", "abcdefghijklmnopqrstuvwxyz123456=")
_MOST = 50
"""Characters of a generated name (``task.IDMaxLength`` of flytepropeller)."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One execution of the task, by one node of a workflow.

    Attributes:
        name: of the execution; the job's name is ``<name>-<node>-<attempt>``, or a hash of it where that is too long.
        metadata, raw_output: prefixes in the object store; None: templates such as ``{{.input}}`` stay as they are.
        labels, annotations, environment, service_account: of the execution (``pyflyte run --env``, launch plans, ...).
        node: the workflow's node with its overrides, as flyteidl has it; None: the task is called as it is.
        array_index: of the element, where the node maps the task over a list.
        files: further texts of commands and arguments, and what they become.
    """

    name: str = "f0123456789abcdef"
    project: str = "flytesnacks"
    domain: str = "development"
    attempt: int = 0
    metadata: str | None = None
    raw_output: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    service_account: str | None = None
    node: Mapping[str, Any] | None = None
    array_index: int = 0
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def in_namespace(self) -> str:
        """Where the job is created."""
        return f"{self.project}-{self.domain}"

    @property
    def is_mapped(self) -> bool:
        """The node maps the task over a list."""
        return self.node is not None and "arrayNode" in self.node

    @property
    def overrides(self) -> Mapping[str, Any]:
        """What ``with_overrides`` says of the task, in the node that calls it."""
        node = self.node or {}
        call = node["arrayNode"]["node"] if self.is_mapped else node
        overrides: Mapping[str, Any] = call.get("taskNode", {}).get("overrides", {})
        return overrides

    @property
    def job_name(self) -> str:
        """The name of the job or pod (``TaskExecutionID.GetGeneratedName``)."""
        element = f"-0-n{self.array_index}" if self.is_mapped else ""
        return _at_most(f"{self.name}-{self._node_id}{element}-{self.attempt}")

    @property
    def _node_id(self) -> str:
        return str((self.node or {}).get("id", "n0"))

    def variables(self) -> dict[str, str]:
        """Of the execution, and of a mapped task's element (``array.buildArrayNodeContext``)."""
        if not self.is_mapped:
            return dict(self.environment)
        index = {"BATCH_JOB_ARRAY_INDEX_VAR_NAME": "FLYTE_K8S_ARRAY_INDEX"}
        return {**self.environment, **index, "FLYTE_K8S_ARRAY_INDEX": str(self.array_index)}

    def fill(self, text: str) -> str:
        """*text* with the backend's templates filled in (``core/template/template.go``)."""
        for name, value in self._templates().items():
            # The value is split and joined in, not substituted: it may hold a backslash.
            text = value.join(re.split(r"{{\s*[.$]" + name + r"\s*}}", text, flags=re.IGNORECASE))
        for name, value in self.files.items():
            text = text.replace(name, value)
        return text

    def _templates(self) -> dict[str, str]:
        key = re.sub(r"[^a-zA-Z0-9_]+", "_", re.sub(r"^[^a-zA-Z_]+", "a", self.job_name))
        always = {"PerRetryUniqueKey": key, "Namespace": self.in_namespace}
        if self.metadata is None or self.raw_output is None:
            return always
        base = f"{self.metadata}/{self.in_namespace}-{self.name}/{self._node_id}/data"
        data = f"{base}/0/{self.array_index}" if self.is_mapped else base
        raw = f"{self.raw_output}/{self.job_name}"
        return {
            "Input": f"{data}/inputs.pb",
            "OutputPrefix": f"{data}/{self.attempt}",
            "InputPrefix": data,
            "RawOutputDataPrefix": raw,
            "PrevCheckpointPrefix": '""',
            "CheckpointOutputPrefix": f"{raw}/_flytecheckpoints",
            "TaskTemplatePath": f"{data}/task.pb",
            **always,
        }


def secret_annotations(secrets: Sequence[Any]) -> dict[str, str]:
    """What makes Flyte's webhook give a pod its secrets (``utils/secrets/marshaler.go``).

    Args:
        secrets: ``flyteidl.core.Secret`` messages.
    """
    from google.protobuf import text_format

    found = {}
    for index, secret in enumerate(secrets):
        found[f"flyte.secrets/s{index}"] = _base32(text_format.MessageToString(secret).encode())
    return found


def _at_most(name: str) -> str:
    """``encoding.FixedLengthUniqueID``: a name that is too long becomes ``f`` and its FNV-1a hash in base 32."""
    if len(name) <= _MOST:
        return name
    value = 0x811C9DC5
    for byte in name.encode():
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return "f" + _base32(value.to_bytes(4, "big"))


def _base32(data: bytes) -> str:
    return base64.b32encode(data).decode().translate(_ALPHABET).rstrip("=")
