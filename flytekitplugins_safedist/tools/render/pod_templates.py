"""The cluster's PodTemplates, as files say them: the backend lays pods on the one that a task names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import RenderError

PodTemplates = Mapping[str, Mapping[str, Any]]
"""By name."""


def read_pod_templates(files: Sequence[Path]) -> PodTemplates:
    """The PodTemplates of these files.

    Raises:
        RenderError: a file cannot be read or holds no PodTemplate.
    """
    found = {}
    for file in files:
        document = _read_yaml(file)
        name = (document.get("metadata") or {}).get("name")
        if document.get("kind", "PodTemplate") != "PodTemplate" or not name or "template" not in document:
            raise RenderError(
                "this is not a PodTemplate", where={"file": file}, expected="kind: PodTemplate with a name"
            )
        found[name] = document
    return found


def _read_yaml(file: Path) -> dict[str, Any]:
    import yaml

    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise RenderError("the file cannot be read", where={"file": file}, seen=error) from error
    if not isinstance(document, dict):
        raise RenderError("the file does not hold a YAML mapping", where={"file": file})
    return document
