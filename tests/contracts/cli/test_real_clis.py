"""What ``pyflyte package``, ``register`` and ``run --remote`` really send, read back from the protobufs.

The CLIs are the real ones, as processes. The service that receives ``register`` and ``run --remote`` is a stand-in in
this process (see :mod:`flyteadmin`), because no Flyte backend can run where these tests do.
"""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

from clis import IMAGE, pyflyte
from flyteadmin import Received
from flyteidl.admin import launch_plan_pb2, task_pb2, workflow_pb2
from flyteidl.core.identifier_pb2 import ResourceType
from google.protobuf.json_format import MessageToDict

from tests.harness.product import job_manifest

PLACEHOLDER = "{{ .remote_package_path }}"
"""What ``flytectl register files`` fills in. flytekit 1.16's CLI puts a directory for --dest-dir, not a placeholder."""


def packaged(path: Path) -> dict[str, Any]:
    """The messages in a package, by entity name."""
    kinds = {
        ResourceType.TASK: task_pb2.TaskSpec,
        ResourceType.WORKFLOW: workflow_pb2.WorkflowSpec,
        ResourceType.LAUNCH_PLAN: launch_plan_pb2.LaunchPlan,
    }
    found: dict[str, Any] = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            if not member.name.endswith(".pb"):
                continue
            name, kind = member.name.removesuffix(".pb").rsplit("_", 1)
            message = kinds[int(kind)]()
            file = archive.extractfile(member)
            assert file is not None
            message.ParseFromString(file.read())
            found[f"{name.split('_', 1)[-1]}:{ResourceType.Name(int(kind))}"] = message
    return found


def args_of(spec: task_pb2.TaskSpec) -> list[str]:
    pod = MessageToDict(spec.template.k8s_pod)["podSpec"]
    return list(pod["containers"][0]["args"])


def test_package_fast_keeps_the_placeholder_for_flytectl_whole(project: Path, tmp_path: Path) -> None:
    output = tmp_path / "package.tgz"
    pyflyte("--pkgs", "shop", "package", "--fast", "--image", IMAGE, "--source", ".", "-o", str(output), cwd=project)

    found = packaged(output)

    stock = list(found["shop.training.prepare:TASK"].template.container.args)
    assert stock[0] == "pyflyte-fast-execute"
    assert stock[2] == PLACEHOLDER
    train = args_of(found["shop.training.train:TASK"])
    assert train[:6] == ["safedist-execute", *stock[1:6]]
    assert train[6] == "pyflyte-execute"
    assert train[-4:] == ["task-module", "shop.training", "task-name", "train"]
    assert "shop.workflows.daily.daily:WORKFLOW" in found
    assert "shop.workflows.nightly.nightly:WORKFLOW" in found


def test_package_without_fast_runs_what_is_in_the_image(project: Path, tmp_path: Path) -> None:
    output = tmp_path / "package.tgz"
    pyflyte("--pkgs", "shop", "package", "--image", IMAGE, "--source", ".", "-o", str(output), cwd=project)

    found = packaged(output)

    for name in ("train", "evaluate"):
        assert args_of(found[f"shop.training.{name}:TASK"])[:3] == ["safedist-execute", "--", "pyflyte-execute"]
    stock = found["shop.training.prepare:TASK"].template
    assert stock.container.args[0] == "pyflyte-execute"


def test_register_sends_jobs_that_the_backend_understands(project: Path, admin: tuple[str, Received]) -> None:
    endpoint, received = admin
    version = ("--version", "v7", "--project", "flytesnacks", "--domain", "development")
    pyflyte("register", *version, "--image", IMAGE, "shop", cwd=project, endpoint=endpoint)

    train = received.tasks["shop.training.train"]
    args = args_of(train.spec)
    location = args[args.index("--additional-distribution") + 1]
    assert location in received.uploads
    assert "shop/training.py" in names_in(received.uploads[location])
    assert set(received.workflows) == {"shop.workflows.daily.daily", "shop.workflows.nightly.nightly"}

    job = job_manifest(train.spec.template)
    assert job["kind"] == "PyTorchJob"
    for role in ("Master", "Worker"):
        replica = job["spec"]["pytorchReplicaSpecs"][role]
        pod = replica["template"]["spec"]
        assert replica["replicas"] == 1
        mine, *ours = pod["tolerations"]
        assert mine == {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
        assert {one["key"]: one["tolerationSeconds"] for one in ours} == {
            "node.kubernetes.io/not-ready": 30,
            "node.kubernetes.io/unreachable": 30,
        }
        assert pod["containers"][0]["resources"]["limits"] == {"cpu": "16", "memory": "128Gi", "nvidia.com/gpu": "4"}
        pinned = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
        told = json.loads(pinned["SAFEDIST_JOB"])
        assert (told["min_nodes"], told["max_nodes"], told["nproc_per_node"]) == (2, 2, 4)
    assert train.spec.template.metadata.retries.retries == 2
    assert job_manifest(received.tasks["shop.training.evaluate"].spec.template)["kind"] == "Pod"


def test_run_remote_uploads_the_code_and_starts_the_workflow(project: Path, admin: tuple[str, Received]) -> None:
    endpoint, received = admin
    where = ("--project", "flytesnacks", "--domain", "development", "--image", IMAGE)
    run = ("run", "--remote", "--copy", "all", *where, "shop/workflows/daily.py", "daily", "--size", "6")
    pyflyte(*run, cwd=project, endpoint=endpoint)

    args = args_of(received.tasks["shop.training.train"].spec)
    location = args[args.index("--additional-distribution") + 1]
    assert args[0] == "safedist-execute"
    assert "shop/training.py" in names_in(received.uploads[location])
    assert [one.spec.launch_plan.name for one in received.executions] == ["shop.workflows.daily.daily"]
    assert received.executions[0].inputs.literals["size"].scalar.primitive.integer == 6


def names_in(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return [name.removeprefix("./") for name in opened.getnames()]
