"""What registration decided, against the code that runs and the devices that are here."""

from __future__ import annotations

from collections.abc import Mapping

from .. import envvars
from ..errors import TopologyError
from .model import Asked


def check_pinned(env: Mapping[str, str], asked: Asked) -> None:
    """Compare what was pinned into the pod with what the code *asked* for now, and with the GPUs in sight.

    Raises:
        TopologyError: they differ.
    """
    nodes = str(asked.max_nodes) if asked.min_nodes == asked.max_nodes else f"{asked.min_nodes}:{asked.max_nodes}"
    now = {envvars.NODES: nodes, envvars.NPROC_PER_NODE: str(asked.nproc_per_node)}
    backend = getattr(asked, "backend", None)
    if backend is not None:
        now[envvars.BACKEND] = backend
    for name, value in now.items():
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
    _check_gpus(env, asked)


def _check_gpus(env: Mapping[str, str], asked: Asked) -> None:
    """``with_overrides(requests=Resources(gpu=...))`` changes the GPUs of a pod, but not the ranks of the job."""
    pinned = env.get(envvars.GPUS, "")
    if not pinned.isdecimal():
        return
    for name in (envvars.NVIDIA_VISIBLE_DEVICES, envvars.CUDA_VISIBLE_DEVICES):
        listed = env.get(name, "")
        if listed in ("", "all", "none", "void", "-1"):
            continue  # no list: whatever the node or the runtime has
        here = len([one for one in listed.split(",") if one.strip()])
        if here < min(int(pinned), asked.nproc_per_node):
            raise TopologyError(
                f"this pod has fewer GPUs than its {asked.nproc_per_node} ranks were registered for",
                where={envvars.GPUS: pinned, name: listed},
                seen=f"{here} GPUs",
                expected=f"{pinned}",
                hint="give the pod as many (with_overrides on the task changes GPUs, never ranks), or register "
                "the task with fewer",
            )
