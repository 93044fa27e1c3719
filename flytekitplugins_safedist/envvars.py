"""Every environment variable that safedist reads or sets, once, with its source.

Constants only: reading the environment happens in ``topology`` (from a mapping that is handed in), in ``entrypoint``,
``cli`` and ``rank``.
"""

from __future__ import annotations

# --- ours, settable by users and platform engineers ---------------------------------------------------------------
SCRATCH_ROOT = "SAFEDIST_SCRATCH_ROOT"
"""Directory under which job scratch directories are made, when the task's ``Scratch(path=...)`` does not say."""

# --- ours, pinned into the pod at serialization; the entrypoint compares them with what it finds -------------------
NODES = "SAFEDIST_NODES"
NPROC_PER_NODE = "SAFEDIST_NPROC_PER_NODE"
BACKEND = "SAFEDIST_BACKEND"

# --- set in every rank ---------------------------------------------------------------------------------------------
RANK = "RANK"
LOCAL_RANK = "LOCAL_RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
GROUP_RANK = "GROUP_RANK"
GROUP_WORLD_SIZE = "GROUP_WORLD_SIZE"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
"""torch.distributed's env:// initialisation and torchrun's documented environment
(https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables)."""

OMP_NUM_THREADS = "OMP_NUM_THREADS"
TMPDIR = "TMPDIR"

# --- Flyte (flytekit.bin.entrypoint.setup_execution reads the same) ------------------------------------------------
FLYTE_EXECUTION_ID = "FLYTE_INTERNAL_EXECUTION_ID"
FLYTE_EXECUTION_ID_SHORT = "_F_NM"
FLYTE_ATTEMPT = "FLYTE_ATTEMPT_NUMBER"
"""Retry attempt, from 0 (flyteplugins/go/tasks/pluginmachinery/flytek8s/k8s_resource_adds.go)."""
