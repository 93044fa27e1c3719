"""Variables that are not the user's to set: they say who a node or rank is, or what registration decided."""

from __future__ import annotations

import re

from .. import envvars as names
from ..errors import Problem

INTERNAL = frozenset({names.MEETING, names.ROUND, names.EPHEMERAL_STORAGE, names.KUBERNETES_NODE})
"""What an agent tells its ranks, or Kubernetes tells agents."""

IDENTITY = names.IDENTITY | {
    *(names.NNODES, names.JOBSET_NPROC_PER_NODE, names.JOB_COMPLETION_INDEX),
    *("NODE_RANK", "GROUP_LOCAL_RANK"),
}
"""Those by which torch, Horovod and the operators tell a node or rank who it is."""

IDENTITY_PREFIXES = ("PET_", "OMPI_COMM_WORLD_", "JOBSET_", "HOROVOD_GLOO_RENDEZVOUS_")
"""Families of such variables."""


def problem_of(name: str, where: str, value: object = None) -> Problem | None:
    """Why a user may not set the variable ``name``, or None. Its value may be a secret, and is not shown.

    Args:
        name: of the variable.
        where: the argument that sets it, for the message.
        value: what it is set to, where that is known.
    """
    if name == names.JOB:
        return Problem(where, name, "is decided by the task config", "set what you want in the task config")
    if name == names.GRACE:
        repair = "set terminationGracePeriodSeconds in the pod template"
        return Problem(where, name, "only says what the pod has", repair)
    if name in INTERNAL:
        return Problem(where, name, "is set by safedist for its own ranks and agents", "remove it")
    if name in IDENTITY or name.startswith(IDENTITY_PREFIXES):
        to_move = f"@task(environment={{{names.ENDPOINT!r}: 'HOST:PORT'}})"
        repair = f"remove it; to move the meeting point of the nodes: {to_move}"
        return Problem(where, name, "says who a node or rank is, which differs in each", repair)
    if name == names.ENDPOINT and isinstance(value, str) and not _is_endpoint(value):
        return Problem(where, name, "is not where nodes can meet", "write HOST:PORT")
    return None


def _is_endpoint(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(re.fullmatch(r"[^\s:/]+|\[[0-9A-Fa-f:.%]+\]", host) and re.fullmatch("[0-9]{1,5}", port)) and (
        0 < int(port) < 65536
    )
