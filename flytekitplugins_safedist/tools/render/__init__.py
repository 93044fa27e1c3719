"""The job as the cluster will see it, before it is registered.

From the ``TaskTemplate`` that registration sends: :func:`job_manifest` does what the Flyte backend does with it,
:func:`created` what the training operator does with that, :mod:`.check` compares it with published schemas and models,
:mod:`.rules` with what an API server refuses, and :mod:`.summary` says it in a few lines for people.
"""

from __future__ import annotations

from .backend import Built, build, job_manifest
from .calls import read_node
from .execution import Execution
from .operators import created, pods
from .platform import BACKENDS, Cluster, read_platform, with_pod_templates
from .resources import Requirements

__all__ = [
    "BACKENDS",
    "Built",
    "Cluster",
    "Execution",
    "Requirements",
    "build",
    "created",
    "job_manifest",
    "pods",
    "read_node",
    "read_platform",
    "with_pod_templates",
]
