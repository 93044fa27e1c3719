"""How many GPUs this pod really has, and what that means for its ranks.

``with_overrides(requests=Resources(gpu=...))`` changes the GPUs of a pod, but not what was registered; and a platform's
limit makes a number smaller without a word.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from .. import envvars
from ..config.registered import Registered
from ..errors import TopologyError

_NO_LIST = ("", "all", "none", "void", "-1")
_DEVICE = re.compile(r"nvidia[0-9]+")
_ANY_DEVICE = re.compile(
    r"(nvidia|accel|hl|davinci|iluvatar|cambricon_dev|mtgpu\.)[0-9]+|nvhost.*|dxg|kfd|mkfd|mxcd|dri|accel"
)
"""Of a GPU, whoever makes it: NVIDIA's (Jetson's and WSL's, too), AMD's, Intel's, Habana's and others'."""


def device_files() -> list[str]:
    """Names of what is in ``/dev``."""
    return [device.name for device in Path("/dev").iterdir()]


def gpus_here(env: Mapping[str, str], devices: Collection[str] = ()) -> int | None:
    """GPUs of this pod: those that NVIDIA's device plugin lists and CUDA is narrowed to, else its device files.

    Args:
        env: the pod's variables.
        devices: names of the files in ``/dev``.

    Returns:
        None where nothing says it: "all" of a machine is no number, and other vendors give no list.
    """
    texts = (env.get(name, "") for name in (envvars.CUDA_VISIBLE_DEVICES, envvars.NVIDIA_VISIBLE_DEVICES))
    # A path: the list is handed over as files.
    lists = [text.split(",") for text in texts if text not in _NO_LIST and not text.startswith("/")]
    if lists:  # CUDA sees none of those that are named beyond what there is, and one that is shared may stand twice
        return min(len({entry.strip() for entry in each} - {""}) for each in lists)
    return sum(1 for device in devices if _DEVICE.fullmatch(device)) or None


def ranks_here(
    env: Mapping[str, str], registered: Registered, asked: Registered, devices: Collection[str]
) -> tuple[int, str | None]:
    """Ranks of this node, and why they are not those that were registered.

    Where the user left ``nproc_per_node`` open, there is a rank for each GPU that the pod has. Every node sees the
    same: an override changes all pods of a job, or is refused.

    Raises:
        TopologyError: the user named a number of ranks, and there are fewer GPUs.
    """
    ranks, gpus = asked.nproc_per_node, registered.gpus
    # A pod that asks for none sees a machine's files only where it is given all of them; NVIDIA's device plugin names
    # no list where it hands over files.
    listed = env.get(envvars.NVIDIA_VISIBLE_DEVICES, "")
    here = gpus_here(env, devices if gpus or listed == "void" or listed.startswith("/") else ())
    if here is None or here == ranks or is_partitioned(env):
        return ranks, None
    if asked.nproc_is_open:
        text = f"{gpus} GPU{'' if gpus == 1 else 's'}" if gpus else "no GPUs"
        named = f"{here} rank{'' if here == 1 else 's'}"
        return here, (
            f"{named} on each node, one for each GPU of this pod; the task was registered for {text}, and leaves "
            "nproc_per_node open (with_overrides, or a limit of the platform, changed the GPUs)"
        )
    if gpus and here < min(gpus, ranks):
        raise TopologyError(
            f"this pod has fewer GPUs than its {ranks} ranks were registered for",
            where={"registered GPUs": gpus, "this pod": here},
            seen=f"{here} GPUs",
            expected=gpus,
            hint="leave nproc_per_node out, so that ranks follow the GPUs that a pod has; or give the pod as many "
            "(with_overrides on the task changes GPUs, and a platform's limit makes them fewer)",
        )
    return ranks, None


def no_gpu_here(registered: Registered, devices: Collection[str]) -> str | None:
    """What there is to say of a pod that asks for GPUs, and has none: training would only be slow, on the CPU. Its
    machine's container runtime hands none over, say, whatever the device plugin has counted."""
    if not registered.gpus or not devices or any(map(_ANY_DEVICE.fullmatch, devices)):
        return None
    asked = f"{registered.gpus} GPU{'' if registered.gpus == 1 else 's'}"
    return (
        f"this task was registered with {asked}, and its pod has no device of one (/dev/nvidia0, say): torch will see "
        "none. Look at nvidia-smi in a pod of that machine, its container runtime, and the template's runtimeClassName"
    )


def sockets_despite_rdma(env: Mapping[str, str], devices: Collection[str]) -> str | None:
    """What there is to say where NCCL is told to leave the pod's fast network alone: training would only be slow.

    ``NCCL_IB_DISABLE`` is about NCCL's own transport: a plugin that is named (EFA's) is used all the same.
    """
    if "infiniband" not in devices:
        return None
    net, ib = env.get("NCCL_NET", ""), env.get("NCCL_IB_DISABLE", "0")
    if net.lower() == "socket":
        told = f"NCCL_NET={net}"
    elif ib not in ("", "0") and not net and not env.get("NCCL_NET_PLUGIN"):
        told = f"NCCL_IB_DISABLE={ib}"
    else:
        return None
    return f"this pod has RDMA devices (/dev/infiniband), and {told} has NCCL use TCP sockets: unset it if not meant so"


def is_partitioned(env: Mapping[str, str]) -> bool:
    """Slices of a GPU: a process sees one of them, and NCCL joins no two."""
    return env.get(envvars.NVIDIA_VISIBLE_DEVICES, "").startswith("MIG-")
