"""The job as the cluster will see it, before it is registered.

From the ``TaskTemplate`` that registration sends: :func:`job_manifest` does what the Flyte backend does with it,
:func:`created` what the training operator does with that, both with their defaults, and :mod:`.summary` says it in a
few lines for people.
"""

from __future__ import annotations

from .backend import job_manifest
from .execution import Execution
from .operators import created, pods
from .pod_templates import PodTemplates, read_pod_templates

__all__ = ["Execution", "PodTemplates", "created", "job_manifest", "pods", "read_pod_templates"]
