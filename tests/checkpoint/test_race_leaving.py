"""A save in flight outlives what a script does next: it ends, its process group goes, or a rank raises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flytekitplugins_safedist.checkpoint import Checkpoints
from tests.checkpoint import leaving_ranks
from tests.checkpoint.saving import reach_stores
from tests.fs.ranks import Process
from tests.harness.product import saves

TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2"]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("how", ["ends", "raises"])
def test_under_torchrun(tmp_path, how):
    place = tmp_path / "place"
    command = [*TORCHRUN, leaving_ranks.__file__, str(place), how]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode == 0) == (how == "ends"), done.stderr
    (manifest,) = place.rglob("manifest.json")
    assert saves.step_of(manifest.parent.name) == 9


def test_with_a_store_that_is_found_by_its_name(tmp_path, s3):
    """What resolves names is a thread that Python ends before its own."""
    environment = {**os.environ, **s3.environment, "PYTHONPATH": str(ROOT)}
    environment["FLYTE_AWS_ENDPOINT"] = s3.endpoint.replace("127.0.0.1", "localhost")
    command = [sys.executable, leaving_ranks.__file__, "s3://code/leaving", "ends"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert Process(steps, "s3://code/leaving", env=s3.environment).outcome().get() == [9]


def steps(place):
    reach_stores()
    return Checkpoints(place).steps()
