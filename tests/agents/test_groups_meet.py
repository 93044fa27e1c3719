"""Where ranks of torch meet: at a store that is there whoever has returned, and that each group finds empty."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from flytekitplugins_safedist.errors import LaunchError
from tests.harness.procs import until


def test_ranks_make_a_group_when_rank_0_has_returned(warm, tmp_path, ranks_gate):
    running = warm.start("job_groups_meet:one_returns_early", tmp_path / "job", environment=ranks_gate.environment)
    [process] = ranks_gate.heard(1)
    until(lambda: not Path("/proc", process).exists(), "rank 0 has ended")
    ranks_gate.let_go(2)
    assert ranks_gate.heard(2) == ["2.0", "2.0"]
    ended = running.wait()
    assert (ended.code, ended.value) == (0, 3.0)


def test_groups_are_made_again_and_again(warm, tmp_path):
    ended = warm.run("job_groups_meet:make_groups_again", tmp_path / "job")
    assert (ended.code, ended.value) == (0, [3.0] * 4)


def test_a_place_that_no_group_has_is_refused_at_once(warm, tmp_path):
    ended = warm.run("job_groups_meet:ask_for_no_place", tmp_path / "job")
    assert "waits for ranks that will never be there: this job has 2 ranks" in str(ended.error)


def test_a_store_is_found_at_masters_port_as_long_as_rank_0_is_in_a_group(warm, tmp_path, ranks_gate):
    running = warm.start("job_groups_meet:meet_beside_a_group", tmp_path / "job", environment=ranks_gate.environment)
    assert ranks_gate.heard(2) == ["left", "left"]
    ranks_gate.let_go(2)
    ended = running.wait()
    assert (ended.code, ended.value) == (0, [2.0, 2])
    assert ranks_gate.heard(2) == ["2.0", "2.0"]


def test_a_store_that_is_killed_is_named_at_once_and_not_waited_for(warm, tmp_path, ranks_gate):
    running = warm.start("job_groups_meet:lose_the_store", tmp_path / "job", environment=ranks_gate.environment)
    [port] = {int(line) for line in ranks_gate.heard(2)}
    [keeper] = {
        each.pid for each in psutil.net_connections("tcp") if each.laddr.port == port and each.status == "LISTEN"
    }
    os.kill(keeper, signal.SIGKILL)
    ended = running.wait()
    assert isinstance(ended.error, LaunchError)
    assert "the process that keeps the store at which torch's ranks meet is gone" in str(ended.error)
    assert "SIGKILL" in str(ended.error)
