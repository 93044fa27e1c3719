"""Variables of a task's container: those that are not the user's to set, and what is none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from .. import envvars as names
from ..errors import Problem
from .typed import is_text

_IDENTITY = names.IDENTITY | {
    *(names.NNODES, names.JOBSET_NPROC_PER_NODE, names.JOB_COMPLETION_INDEX),
    *("NODE_RANK", "GROUP_LOCAL_RANK"),
}
"""Those by which torch, Horovod and the operators tell a node or rank who it is."""
_IDENTITY_PREFIXES = ("PET_", "OMPI_COMM_WORLD_", "JOBSET_", "HOROVOD_GLOO_RENDEZVOUS_")
"""Families of such variables."""
_OURS = {
    names.JOB: ("is decided by the task config", "set what you want in the task config"),
    names.GRACE: ("only says what the pod has", "set terminationGracePeriodSeconds in the pod template"),
    **dict.fromkeys(
        (names.MEETING, names.ROUND, names.EPHEMERAL_STORAGE, names.KUBERNETES_NODE),
        ("is set by safedist for its own ranks and agents", "remove it"),
    ),
}
_NAME = re.compile(r"[-.A-Za-z_][-.A-Za-z0-9_]*")  # Kubernetes takes more names than a shell does
_ENDPOINT = re.compile(r"(?:[^\s:/]+|\[[0-9A-Fa-f:.%]+\]):(?!0+$)([0-9]{1,5})")


def problems_of_variables(variables: Mapping[object, object], where: str, nodes: int) -> Iterator[Problem]:
    """What is wrong with each. Values may be secrets: they are never shown, only their type is.

    Args:
        variables: with their values; None: filled in by Kubernetes.
        where: the argument that sets them, for the message.
        nodes: of the job, at most; 0 where nobody can tell.
    """
    for name, value in variables.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            yield Problem(where, name, "is not a name of a variable", "use letters, digits and _")
        elif value is not None and not is_text(value):
            repair = "use a str without NUL and lone surrogates"
            yield Problem(f"{where}[{name!r}]", type(value).__name__, "is not text", repair)
        elif name in _OURS:
            yield Problem(where, name, *_OURS[name])
        elif name in _IDENTITY or name.startswith(_IDENTITY_PREFIXES):
            to_move = f"@task(environment={{{names.ENDPOINT!r}: 'HOST:PORT'}})"
            repair = f"remove it; to move the meeting point of the nodes: {to_move}"
            yield Problem(where, name, "says who a node or rank is, which differs in each", repair)
        elif name == names.ENDPOINT and nodes == 1:
            yield Problem(where, name, "says where nodes meet, and one node meets none", "remove it")
        elif name == names.ENDPOINT and value is not None:
            match = _ENDPOINT.fullmatch(str(value))
            if match is None or int(match[1]) > 65535:
                yield Problem(where, name, "is not where nodes can meet", "write HOST:PORT")
