"""A save in flight outlives what a script does next: it ends, its process group goes, or a rank raises.

Also where the store's client has threads of its own, which Python ends before the script's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.checkpoint import leaving_ranks
from tests.fs.ranks import torchrun
from tests.harness.product import saves


@pytest.mark.parametrize(("launcher", "how"), [("alone", "ends"), ("torchrun", "ends"), ("torchrun", "raises")])
def test_it_is_committed(warm, tmp_path, launcher, how):
    place, script = tmp_path / "place", Path(leaving_ranks.__file__)
    if launcher == "torchrun":
        options = ("--standalone", "--nproc-per-node=2")
        done = torchrun(warm, tmp_path / "run", script, *options, place, how).wait()
    else:
        done = warm.command([sys.executable, str(script), str(place), how], tmp_path / "run").wait()
    assert (done.code == 0) == (how == "ends"), done.err
    (manifest,) = place.rglob("manifest.json")
    assert saves.step_of(manifest.parent.name) == 9
