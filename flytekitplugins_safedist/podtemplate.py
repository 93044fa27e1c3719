"""The pod of a task: the user's pod template with our volumes, merged into a new one each time.

Never the user's own object: two tasks may share it, and a task that is made twice must not find its first volumes.
"""

from __future__ import annotations

import copy
from typing import Any

from .config import Resolved
from .gpus import TaskAsks
from .jobcheck import SCRATCH_VOLUME, SHARED_MEMORY_VOLUME, mounted_paths
from .jobconfig import SHARED_MEMORY_MOUNT, JobShape, ScratchVolume


def merged_template(shape: JobShape, resolved: Resolved, asks: TaskAsks) -> Any:
    """A new flytekit ``PodTemplate``: the user's, the scratch volume, and shared memory where nothing else brings it;
    and the end of the log as the termination message, where the user's says nothing else.

    The primary container comes first: the operators and the backend write into the first container of a pod
    (``_F_WN`` in ``kfoperators/pytorch``, the MPIJob controller's mounts), and ``kubectl exec`` enters it.
    """
    from flytekit.core.pod_template import PodTemplate

    template = copy.deepcopy(asks.pod_template) if asks.pod_template is not None else PodTemplate()
    primary = _primary_first(template)
    if primary.termination_message_policy is None:
        # Flyte shows a failed pod's termination message. It sets this on the containers that it makes, and not on those
        # of a pod template (flytek8s, v1.16.8): there the text would be empty.
        primary.termination_message_policy = "FallbackToLogsOnError"
    if shape.scratch_volume is not None and resolved.scratch.path is None:
        volume = _scratch(shape.scratch_volume, resolved)
        _mount(template.pod_spec, primary, volume, shape.scratch_volume.mount_path)
    if shape.shared_memory and not asks.shared_memory and SHARED_MEMORY_MOUNT not in mounted_paths(asks):
        _mount(template.pod_spec, primary, _shared_memory(shape), SHARED_MEMORY_MOUNT)
    return template


def _primary_first(template: Any) -> Any:
    from kubernetes.client import V1Container

    spec = template.pod_spec
    containers = list(spec.containers or ())
    primary = next((one for one in containers if one.name == template.primary_container_name), None)
    if primary is None:
        primary = V1Container(name=template.primary_container_name)
    spec.containers = [primary, *(one for one in containers if one is not primary)]
    return primary


def _mount(spec: Any, container: Any, volume: Any, path: str) -> None:
    from kubernetes.client import V1VolumeMount

    spec.volumes = [*(spec.volumes or ()), volume]
    container.volume_mounts = [*(container.volume_mounts or ()), V1VolumeMount(name=volume.name, mount_path=path)]


def _scratch(volume: ScratchVolume, resolved: Resolved) -> Any:
    from kubernetes.client import V1EmptyDirVolumeSource, V1PersistentVolumeClaimVolumeSource, V1Volume

    if volume.claim is not None:
        return V1Volume(
            name=SCRATCH_VOLUME,
            persistent_volume_claim=V1PersistentVolumeClaimVolumeSource(claim_name=volume.claim),
        )
    size = volume.size_limit or (None if resolved.size_limit is None else str(resolved.size_limit))
    source = V1EmptyDirVolumeSource(medium="Memory" if volume.medium == "memory" else None, size_limit=size)
    return V1Volume(name=SCRATCH_VOLUME, empty_dir=source)


def _shared_memory(shape: JobShape) -> Any:
    from kubernetes.client import V1EmptyDirVolumeSource, V1Volume

    size = shape.shared_memory if isinstance(shape.shared_memory, str) else None
    return V1Volume(name=SHARED_MEMORY_VOLUME, empty_dir=V1EmptyDirVolumeSource(medium="Memory", size_limit=size))
