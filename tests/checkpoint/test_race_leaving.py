"""A save in flight outlives what a script does next: it ends, its process group goes, or a rank raises.

Also where the store's client has threads of its own, which Python ends before the script's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint import leaving_ranks
from tests.harness.product import saves

TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2"]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("launcher", "how"),
    [([sys.executable], "ends"), (TORCHRUN, "ends"), (TORCHRUN, "raises")],
    ids=["alone, ends", "torchrun, ends", "torchrun, raises"],
)
def test_it_is_committed(tmp_path, launcher, how):
    place = tmp_path / "place"
    command = [*launcher, leaving_ranks.__file__, str(place), how]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode == 0) == (how == "ends"), done.stderr
    (manifest,) = place.rglob("manifest.json")
    assert saves.step_of(manifest.parent.name) == 9
