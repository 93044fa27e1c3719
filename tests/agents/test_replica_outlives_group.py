"""A replica that would be its group's last owner: its function returns, and the next group finds nothing of it."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def fifos(tmp_path):
    for name in ("go", "gone"):
        os.mkfifo(tmp_path / name)
    return {"fifos": str(tmp_path)}


def test_a_function_that_destroyed_its_group_returns_while_gloos_thread_waits_for_pythons_lock(warm, tmp_path, fifos):
    ended = warm.run("job_groups:returns", tmp_path / "job", inputs=fifos)
    assert ended.value == "DistributedDataParallel of rank 0"


def test_groups_made_and_destroyed_in_turn_with_a_replica_each_do_not_meet(warm, tmp_path, fifos):
    assert warm.run("job_groups:again", tmp_path / "job", inputs=fifos).value == [1.0, 3.0, 5.0]
