"""The job as the cluster will see it, before it is registered.

From the ``TaskTemplate`` that registration sends: :func:`job_manifest` does what the Flyte backend does with it,
:func:`pods` what the training operator does with that, :mod:`.check` compares it with published schemas and models, and
:mod:`.summary` says it in a few lines for people.
"""

from __future__ import annotations

from .backend import BACKENDS, Cluster, Execution, job_manifest
from .operators import pods

__all__ = ["BACKENDS", "Cluster", "Execution", "job_manifest", "pods"]
