"""What ``flytectl register files`` does to a package on its way, as its source has it (flytectl/cmd/register/
register_util.go and files.go, v1.16.8), because the program itself cannot be installed where the tests run.

``tests/contracts/oracle/flytectl`` holds what the real one registered; the tests compare this with it.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

from flyteidl.admin import task_pb2
from flyteidl.core.identifier_pb2 import ResourceType

REMOTE_PACKAGE = "{{ .remote_package_path }}"
DEST_DIR = "{{ .dest_dir }}"


@dataclass(frozen=True)
class Registered:
    """Tasks by name, the name of the archive's object, and the bytes that were uploaded."""

    tasks: dict[str, task_pb2.TaskSpec]
    archive_name: str
    archive: bytes


def register(package: Path, location: str, dest: str = "") -> Registered:
    """As ``flytectl register files --archive PACKAGE``.

    Args:
        location: the directory that flyteadmin's signed URL leads to; the object keeps the archive's name.
        dest: ``--destinationDirectory``.
    """
    with tarfile.open(package) as packed:
        files = {one.name: reader.read() for one in packed if (reader := packed.extractfile(one)) is not None}
    (source,) = [name for name in files if name.startswith("fast") and name.endswith(".tar.gz")]
    # uploadFastRegisterArtifact hands the *gzip reader* to the upload, and the archive's own name to flyteadmin.
    archive = gzip.GzipFile(fileobj=io.BytesIO(files[source])).read()
    tasks = {}
    for name, content in files.items():
        if name.endswith(f"_{ResourceType.TASK}.pb"):
            spec = task_pb2.TaskSpec.FromString(content)
            hydrate(spec, f"{location}/{source}", dest)
            tasks[spec.template.id.name] = spec
    return Registered(tasks, source, archive)


def hydrate(spec: task_pb2.TaskSpec, location: str, dest: str) -> None:
    """``hydrateTaskSpec``: whole arguments only, of the container or of the pod's containers; not of init containers,
    not in variables, not in ``custom``."""
    filled = {REMOTE_PACKAGE: location, DEST_DIR: dest or "."}
    if spec.template.HasField("container"):
        arguments = spec.template.container.args
        arguments[:] = [filled.get(one, one) for one in arguments]
    elif spec.template.HasField("k8s_pod"):
        for container in spec.template.k8s_pod.pod_spec["containers"]:
            if "args" in container:
                arguments = list(container["args"])
                container["args"] = [filled.get(one, one) for one in arguments]
