"""A function whose replica is the last owner of its process group returns, whatever Gloo's threads wait for."""

from __future__ import annotations

import os


def test_a_function_that_destroyed_its_group_returns_while_gloos_thread_waits_for_pythons_lock(warm, tmp_path):
    for name in ("go", "gone"):
        os.mkfifo(tmp_path / name)
    ended = warm.run("job_groups:returns", tmp_path / "job", inputs={"fifos": str(tmp_path)})
    assert ended.value == "DistributedDataParallel of rank 0"
