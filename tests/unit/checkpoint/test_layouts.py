"""What looking at a state costs a rank whose model is not sharded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STEP = """
import sys, torch
from flytekitplugins_safedist.checkpoint import checkpoints
ckpt = checkpoints(sys.argv[1], every=None)
state = {"model": torch.nn.Linear(1, 1), "epoch": 0}
ckpt.step(ckpt.resume(state), state)
print(*sorted({"torch.distributed.tensor", "torch.distributed.checkpoint"} & sys.modules.keys()))
"""


@pytest.mark.processes
def test_a_step_that_saves_nothing_imports_nothing_of_sharded_tensors(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", STEP, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
