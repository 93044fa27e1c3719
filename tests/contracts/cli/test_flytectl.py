"""``pyflyte package --fast`` and ``flytectl register files``: what arrives in the cluster that way can run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from clis import PACKAGE, pyflyte
from google.protobuf.json_format import MessageToDict

from tests.harness.flytectl import register
from tests.harness.product import stage
from tests.harness.registered import told_as_recorded

RECORDED = sorted((PACKAGE / "tests/contracts/oracle/flytectl").glob("*.yaml"))
IMAGE = "localhost/safedist:1"
TASKS = """
from flytekit import Resources, task
from flytekitplugins_safedist import SafeHorovod, SafeTorch

ROOM = {"requests": Resources(cpu="100m", mem="600Mi"), "limits": Resources(cpu="2", mem="1500Mi")}


@task(task_config=SafeTorch(nproc_per_node=2), **ROOM)
def torch_1x2_task(steps: int) -> str:
    return ""

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
    for name, text in {"__init__": "", "train": TASKS}.items():
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


def test_the_plain_tar_that_flytectl_uploads_as_tar_gz_becomes_the_code(package: Path, tmp_path: Path) -> None:
    registered = register(package, "s3://bucket")
    assert registered.archive_name.endswith(".tar.gz")
    assert registered.archive[:2] != b"\x1f\x8b"
    archive = tmp_path / registered.archive_name
    archive.write_bytes(registered.archive)

    stage(str(archive), tmp_path / "home")

    assert (tmp_path / "home/acme/train.py").read_text() == TASKS
