"""Variables that are not the user's to set: they say who a node or rank is, or what registration decided."""

from __future__ import annotations

from . import envvars as names

PINNED = frozenset(
    {
        *(names.NODES, names.NPROC_PER_NODE, names.BACKEND, names.GPUS),
        *(names.MPI_NODE_RANK, names.MPI_NODES, names.MPI_ENDPOINT, names.AGENT_STORE, names.ROUND),
    }
)
"""Ours."""

IDENTITY = names.IDENTITY | {
    *(names.NNODES, names.JOBSET_NPROC_PER_NODE, names.JOB_COMPLETION_INDEX),
    *(names.VC_TASK_INDEX, names.VK_TASK_INDEX, "NODE_RANK", "GROUP_LOCAL_RANK"),
}
"""Those by which torch, Horovod and the operators tell a node or rank who it is."""

IDENTITY_PREFIXES = ("PET_", "OMPI_COMM_WORLD_", "JOBSET_", "HOROVOD_GLOO_RENDEZVOUS_")
"""Families of such variables."""
