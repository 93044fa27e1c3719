"""What registration decided, against the code that runs."""

from __future__ import annotations

from collections.abc import Mapping

from .. import envvars
from ..errors import TopologyError
from .model import Asked


def pins(asked: Asked) -> dict[str, str]:
    """What registration pins into a pod whose code *asked* for this."""
    nodes = str(asked.max_nodes) if asked.min_nodes == asked.max_nodes else f"{asked.min_nodes}:{asked.max_nodes}"
    pinned = {envvars.NODES: nodes, envvars.NPROC_PER_NODE: str(asked.nproc_per_node)}
    backend = getattr(asked, "backend", None)
    return pinned if backend is None else {**pinned, envvars.BACKEND: backend}


def check_pinned(env: Mapping[str, str], asked: Asked) -> None:
    """Compare what was pinned into the pod with what the code *asked* for now.

    Raises:
        TopologyError: they differ.
    """
    for name, value in pins(asked).items():
        pinned = env.get(name)
        if pinned is not None and pinned != value:
            field = name.removeprefix("SAFEDIST_").lower()
            raise TopologyError(
                "the code in this pod is configured differently from what was registered",
                where={name: pinned},
                seen=f"{field}={value} in the code, {pinned} at registration",
                hint="register the task again; and let the config depend on nothing that differs in the pod, "
                "such as the GPUs of the machine it is imported on",
            )
