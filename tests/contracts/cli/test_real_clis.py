"""What ``pyflyte register`` and ``run --remote`` really send, read back from the protobufs; what is shown of it runs.

The CLIs are the real ones, as processes. The service that receives what they send is a stand-in in this process (see
:mod:`flyteadmin`), because no Flyte backend can run where these tests do.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from clis import IMAGE, PACKAGE, PROJECT, pyflyte
from flyteadmin import Received, serving
from flyteidl.admin import task_pb2
from flyteidl.core.literals_pb2 import LiteralMap
from google.protobuf.json_format import MessageToDict

from tests.harness.flyte import executed
from tests.harness.product import job_manifest


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy without this repository above it, as users have it."""
    place = tmp_path_factory.mktemp("users") / "project"
    return Path(shutil.copytree(PROJECT, place, ignore=shutil.ignore_patterns("__pycache__")))


@pytest.fixture(scope="module")
def registered(project: Path) -> Received:
    """What is sent where the project is registered."""
    version = ("--version", "v7", "--project", "flytesnacks", "--domain", "development")
    with serving() as (endpoint, received):
        pyflyte("register", *version, "--image", IMAGE, "shop", cwd=project, endpoint=endpoint)
    return received


def args_of(spec: task_pb2.TaskSpec) -> list[str]:
    pod = MessageToDict(spec.template.k8s_pod)["podSpec"]
    return list(pod["containers"][0]["args"])


def test_register_sends_jobs_that_the_backend_understands(registered: Received) -> None:
    train = registered.tasks["shop.training.train"]
    args = args_of(train.spec)
    location = args[args.index("--additional-distribution") + 1]
    assert location in registered.uploads
    assert "shop/training.py" in names_in(registered.uploads[location])
    assert set(registered.workflows) == {"shop.workflows.daily.daily", "shop.workflows.nightly.nightly"}

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
    assert job_manifest(registered.tasks["shop.training.evaluate"].spec.template)["kind"] == "Pod"


def test_run_remote_uploads_the_code_and_starts_the_workflow(project: Path) -> None:
    where = ("--project", "flytesnacks", "--domain", "development", "--image", IMAGE)
    run = ("run", "--remote", "--copy", "all", *where, "shop/workflows/daily.py", "daily", "--size", "6")
    with serving() as (endpoint, received):
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


def test_the_command_of_the_shown_pod_uploads_the_output(registered: Received, tmp_path: Path) -> None:
    """As a process of this machine: image, mounts and network of the pod are no part of it."""
    template = registered.tasks["shop.training.evaluate"].spec.template
    inputs, store, scratch, home = (tmp_path / one for one in ("inputs.pb", "store", "scratch", "home"))
    for directory in (store, scratch, home):
        directory.mkdir()
    said = LiteralMap()
    said.literals["score"].scalar.primitive.float_value = 0.75
    inputs.write_bytes(said.SerializeToString())
    (archive,) = {location for location in registered.uploads if location in str(template.k8s_pod)}
    (store / "code.tar.gz").write_bytes(registered.uploads[archive])
    files = {
        "{{.input}}": str(inputs),
        "{{.outputPrefix}}": str(store),
        "{{.rawOutputDataPrefix}}": str(store / "raw"),
        "{{.checkpointOutputPrefix}}": "",
        "{{.prevCheckpointPrefix}}": "",
        archive: str(store / "code.tar.gz"),
        "/root": str(home),
    }

    pod = executed(job_manifest(template), files)
    container = pod["spec"]["containers"][0]
    program = "from flytekitplugins_safedist.pod.start import main; main()"  # the console script, by its module
    # what the kubelet would fill in (the pod's limits) is not known here, as without a limit
    variables = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    done = subprocess.run(
        [sys.executable, "-c", program, *container["args"][1:]],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(PACKAGE),
            **variables,
            "SAFEDIST_SCRATCH_ROOT": str(scratch),
        },
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )

    assert container["args"][0] == "safedist-execute"
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = LiteralMap.FromString((store / "outputs.pb").read_bytes())
    assert outputs.literals["o0"].scalar.primitive.float_value == 0.75
    assert (home / "shop" / "training.py").is_file()
    assert list(scratch.iterdir()) == []
