"""What ``pip install flytekitplugins-safedist`` alone brings is enough to register: no torch, no extra.

One environment is made for all of it, from the wheel as it would be published. pip resolves nothing (the constraints
name every version), compiles nothing, and keeps what it downloads in its own cache: tens of seconds, most of them
unpacking.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from flyteidl.admin import task_pb2
from flyteidl.core import dynamic_job_pb2, literals_pb2
from google.protobuf.json_format import MessageToDict

from tests.harness.procs import ROOT

Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

DYNAMIC = """
from flytekit import dynamic, task
from flytekitplugins_safedist import SafeTorch


@task(task_config=SafeTorch(nproc_per_node=2))
def train(n: int) -> int:
    return n


@dynamic
def several(count: int) -> list[int]:
    return [train(n=n) for n in range(count)]
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Run:
    """Runs a console script of an environment that holds the wheel and what it requires, and nothing else."""
    place = tmp_path_factory.mktemp("alone")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment["PATH"] = f"{place / 'env' / 'bin'}{os.pathsep}{environment['PATH']}"
    environment["TMPDIR"] = str(place)

    def run(*command: str, cwd: Path = place, further: Mapping[str, str] | None = None) -> Done:
        whole = {**environment, **(further or {})}
        done = subprocess.run(command, cwd=cwd, env=whole, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    venv.create(place / "env")
    constraints = str(ROOT / "requirements" / "constraints.txt")
    python = str(place / "env" / "bin" / "python")
    run(*pip, "--python", python, "install", "--no-compile", "--constraint", constraints, str(wheel))
    names = "from importlib.metadata import distributions as all; print(*(each.metadata['Name'] for each in all()))"
    installed = set(run(python, "-c", names).stdout.split())
    assert "flytekitplugins-safedist" in installed
    assert installed.isdisjoint({"torch", "horovod", "scikit-learn", "flytekitplugins-kfpytorch"})
    return run


@pytest.mark.wheel
@pytest.mark.processes
@pytest.mark.timeout(900)  # a slow index, the first time
def test_the_wheel_alone_packages_every_example_and_starts_tasks_from_a_dynamic_one(alone: Run, tmp_path: Path) -> None:
    for example in EXAMPLES:
        (tmp_path / example.name).write_bytes(example.read_bytes())
    (tmp_path / "started_later.py").write_text(DYNAMIC)
    package = tmp_path / "package.tgz"
    modules = [word for module in sorted(tmp_path.glob("*.py")) for word in ("--pkgs", module.stem)]

    options = ["--fast", "--source", ".", "--image", "registry.example/image:1", "--output", str(package)]
    alone("pyflyte", *modules, "package", *options, cwd=tmp_path)

    with tarfile.open(package) as archive:
        packaged = {name.split("_", 1)[-1]: name for name in archive.getnames()}
        assert {"digits_ddp.train_1.pb", "digits_horovod.train_1.pb"} <= set(packaged)
        file = archive.extractfile(packaged["started_later.several_1.pb"])
        assert file is not None
        several = task_pb2.TaskSpec.FromString(file.read())

    inputs = literals_pb2.LiteralMap()
    inputs.literals["count"].scalar.primitive.integer = 2
    (tmp_path / "inputs.pb").write_bytes(inputs.SerializeToString())
    places = ["--inputs", "inputs.pb", "--output-prefix", "outputs", "--raw-output-data-prefix", "raw"]
    code = ["--dynamic-addl-distro", "s3://bucket/code.tar.gz", "--dynamic-dest-dir", "/code"]
    resolver = ["--resolver", "flytekit.core.python_auto_container.default_task_resolver"]
    task = ["task-module", "started_later", "task-name", "several"]
    command = ["safedist-execute", "--", "pyflyte-execute", *places, *code, *resolver, "--", *task]
    pinned = {each.key: each.value for each in several.template.container.env}
    done = alone(*command, cwd=tmp_path, further=pinned)

    futures = tmp_path / "outputs" / "futures.pb"
    assert futures.exists(), done.stderr
    [template] = dynamic_job_pb2.DynamicJobSpec.FromString(futures.read_bytes()).tasks
    pod = MessageToDict(template.k8s_pod)["podSpec"]
    assert pod["containers"][0]["args"][:5] == [
        *("safedist-execute", "--additional-distribution", "s3://bucket/code.tar.gz", "--dest-dir", "/code")
    ]
