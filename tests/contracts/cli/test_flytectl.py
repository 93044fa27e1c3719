"""``pyflyte package --fast`` and ``flytectl register files``: what arrives in the cluster that way runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from clis import PACKAGE, pyflyte
from flyteidl.core.literals_pb2 import LiteralMap
from google.protobuf.json_format import MessageToDict

from tests.harness.flytectl import Registered, register
from tests.harness.moto_s3 import BUCKET, S3
from tests.harness.registered import told_as_recorded

RECORDED = sorted((PACKAGE / "tests/contracts/oracle/flytectl").glob("*.yaml"))
IMAGE = "localhost/safedist:1"
TASKS = """
from flytekit import Resources, task
from flytekitplugins_safedist import SafeHorovod, SafeTorch, current_rank

ROOM = {"requests": Resources(cpu="100m", mem="600Mi"), "limits": Resources(cpu="2", mem="1500Mi")}


@task(task_config=SafeTorch(nproc_per_node=2), **ROOM)
def torch_1x2_task(steps: int) -> str:
    import torch
    import torch.distributed as dist
    from acme import lib

    dist.init_process_group("gloo")
    total = torch.tensor([float(current_rank().rank + 1)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return f"{lib.WHO} {int(total)} {steps}"

@task(task_config=SafeTorch(nnodes=2, nproc_per_node=2), **ROOM)
def torch_2x2_task(steps: int) -> str:
    return ""

@task(task_config=SafeHorovod(nnodes=2, nproc_per_node=2), **ROOM)
def horovod_2x2_task(steps: int) -> str:
    return ""
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("acme")
    (root / "project/acme").mkdir(parents=True)
    for name, text in {"__init__": "", "train": TASKS, "lib": "WHO = 'the archive'"}.items():
        (root / f"project/acme/{name}.py").write_text(text)
    made = root / "package.tgz"
    arguments = ("package", "--fast", "--image", IMAGE, "--source", ".", "-o", str(made))
    pyflyte("--pkgs", "acme", *arguments, cwd=root / "project")
    return made


def recorded(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())["template"]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_what_flytectl_registered_is_what_is_packaged_with_its_placeholders_filled(path: Path, package: Path) -> None:
    then = recorded(path)
    container = then["k8sPod"]["podSpec"]["containers"][0]
    location, _, name = container["args"][container["args"].index("--additional-distribution") + 1].rpartition("/")

    registered = register(package, location)

    now = MessageToDict(registered.tasks[then["id"]["name"]].template)
    ours = now["k8sPod"]["podSpec"]["containers"][0]
    swapped = [one.replace(registered.archive_name, name) for one in ours["args"]]
    assert swapped == container["args"]
    assert {one["name"]: one["value"] for one in container["env"]}.items() <= {
        one["name"]: one.get("value") for one in told_as_recorded(ours)["env"]
    }.items()
    assert now["config"] == then["config"]
    assert now.get("custom", {}).keys() == then.get("custom", {}).keys()


@pytest.mark.parametrize("dest", ["", "/somewhere"])
def test_nothing_that_flytectl_would_have_to_fill_in_is_left_anywhere(package: Path, dest: str) -> None:
    registered = register(package, "s3://bucket/prefix", dest)
    assert len(registered.tasks) == 3
    for spec in registered.tasks.values():
        text = json.dumps(MessageToDict(spec))
        assert "{{ ." not in text
        assert "{{ registration" not in text


def test_ranks_run_with_the_plain_tar_that_flytectl_uploads_as_tar_gz(package: Path, s3: S3, tmp_path: Path) -> None:
    prefix = f"s3://{BUCKET}"
    registered = register(package, prefix)
    assert registered.archive_name.endswith(".tar.gz")
    assert registered.archive[:2] != b"\x1f\x8b"
    inputs = LiteralMap()
    inputs.literals["steps"].scalar.primitive.integer = 3
    s3.put(registered.archive_name, registered.archive)
    s3.put("inputs.pb", inputs.SerializeToString())

    done = run(registered, prefix, tmp_path, s3.environment)

    assert done.returncode == 0, done.stdout + done.stderr
    outputs = LiteralMap.FromString(s3.get("out/outputs.pb"))
    assert outputs.literals["o0"].scalar.primitive.string_value == "the archive 3 3"
    assert (tmp_path / "home/acme/train.py").is_file()


def run(
    registered: Registered, prefix: str, root: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """The pod's command and variables as a process, with what propeller fills in."""
    template = MessageToDict(registered.tasks["acme.train.torch_1x2_task"].template)
    container = template["k8sPod"]["podSpec"]["containers"][0]
    filled = {
        "{{.input}}": f"{prefix}/inputs.pb",
        "{{.outputPrefix}}": f"{prefix}/out",
        "{{.rawOutputDataPrefix}}": f"{prefix}/raw",
        "{{.checkpointOutputPrefix}}": f"{prefix}/check",
        "{{.prevCheckpointPrefix}}": "",
        "/root": str(root / "home"),
    }
    for name in ("home", "scratch"):
        (root / name).mkdir()
    program = "from flytekitplugins_safedist.pod.start import main; main()"  # the console script, by its module
    return subprocess.run(
        [sys.executable, "-c", program, *(filled.get(one, one) for one in container["args"][1:])],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(PACKAGE),
            **{one["name"]: one["value"] for one in container["env"] if "value" in one},  # else: the kubelet's
            **environment,
            "SAFEDIST_SCRATCH_ROOT": str(root / "scratch"),
        },
        cwd=root / "home",
        capture_output=True,
        text=True,
        check=False,
    )
