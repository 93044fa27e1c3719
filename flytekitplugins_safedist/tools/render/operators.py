"""What the training operator makes of a job: pods, services, and what an MPIJob's launcher needs.

Follows ``pkg/controller.v1`` of kubeflow/training-operator v1.9.0 with its default configuration.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ...errors import RenderError
from . import mpijob, pytorchjob


def pods(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The pods of *manifest* in the order in which the operator numbers them; an ordinary pod is its own only one.

    Raises:
        RenderError: no operator known here handles this kind.
    """
    return [item for item in created(manifest) if item["kind"] == "Pod"]


def created(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every object that the operator creates for *manifest*, pods first.

    Raises:
        RenderError: no operator known here handles this kind.
    """
    kind = manifest["kind"]
    if kind == "Pod":
        return [copy.deepcopy(dict(manifest))]
    if kind == "PyTorchJob":
        return pytorchjob.created(manifest)
    if kind == "MPIJob":
        return mpijob.created(manifest)
    raise RenderError("the pods of this job cannot be shown", where={"kind": kind})
