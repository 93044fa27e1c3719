"""What a task's module finds as a rank imports it: in a pod what it finds on a laptop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from flyteidl.core import literals_pb2
from flytekit.configuration import Image, ImageConfig, SerializationSettings

from tests.harness.pod import pyflyte_execute
from tests.harness.procs import DEADLINE, ROOT
from tests.harness.product import envvars
from tests.jobs import job_preloaded

pytestmark = pytest.mark.processes

JOBS = ROOT / "tests" / "jobs"
SETTINGS = SerializationSettings(image_config=ImageConfig(default_image=Image("default", "registry/image", "v1")))


LINGERS = """
import atexit, threading
from flytekitplugins_safedist.pod.start import main
threading.Thread(target=threading.Event().wait).start()
atexit.register(threading.Event().wait)
main()
"""
"""The console script in an image whose own code leaves what never ends: after its verdict the pod ends all the same."""


def environment(further: Mapping[str, str]) -> dict[str, str]:
    of_tests = ("SAFEDIST", "OMP_NUM", "OPENBLAS_NUM", "PYTORCH_NVML")  # set also by what other tests have imported
    kept = {name: value for name, value in os.environ.items() if not name.startswith(of_tests)}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), str(JOBS), *filter(None, sys.path)]), **further}


def in_a_pod(task: str, directory: Path, **further: str) -> tuple[dict[str, Any], str]:
    """What the task returned, and the log of ``safedist-execute`` under the variables that registration gives it."""
    directory.mkdir()
    (directory / "inputs.pb").write_bytes(b"")
    places = (directory / name for name in ("inputs.pb", "out", "raw"))
    command = pyflyte_execute(f"job_preloaded:{task}", *places)
    (container,) = getattr(job_preloaded, task).get_k8s_pod(SETTINGS).pod_spec["containers"]
    registered = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    registered.pop(envvars.SCRATCH_ROOT, None)  # a volume of the pod's
    done = subprocess.run(
        [sys.executable, "-c", LINGERS, "--", *command],
        cwd=directory,
        env=environment({**registered, **further}),
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    outputs = literals_pb2.LiteralMap.FromString((directory / "out" / "outputs.pb").read_bytes())
    return json.loads(outputs.literals["o0"].scalar.primitive.string_value), done.stderr


def test_a_module_finds_its_tasks_variables_and_libraries_that_were_imported_under_them(warm, tmp_path):
    found, log = in_a_pod("found", tmp_path / "pod", _F_IMG_ID=job_preloaded.MINE.id)
    assert found.pop("in images") == [True, False], "as flytekit's own command has it"
    assert "start_method preload" in log
    assert found["forked"], log
    nothing_else = {"OPENBLAS_NUM_THREADS": None, "PYTORCH_NVML_BASED_CUDA_CHECK": None}
    assert found["at import"] == {"MY": "x", "HIS": "y", "OMP_NUM_THREADS": "2", **nothing_else}
    assert found["threads"] == 2, "torch, which the pod loads before it knows the task"
    assert found["training"], "what an optimizer imports is there before there is one"
    assert found["tuned"], "by a variable of the task's that is read then"
    # flytekit gives a task's own ``environment=`` to its container alone: its ranks have it on a laptop, too.
    laptop = json.loads(warm.run("job_preloaded:found", tmp_path / "laptop", libraries=False).value)
    assert laptop.pop("in images") == [True, True]
    assert found == laptop
