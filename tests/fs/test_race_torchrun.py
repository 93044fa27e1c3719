"""The helpers under the real ``torchrun``: its run id names no single run, and its store outlives the ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fs import torchrun_ranks
from tests.fs.ranks import size, torchrun
from tests.harness.procs import Running, Warm

RUNS, LIVES = size(2, 10), size(2, 50)
"""Launches in a row, and lives of the ranks in one launch."""
RANKS = 2
# The same for each run, as a port written into a script is; below the ports that the kernel hands out.
PORT = 20_000 + os.getpid() % 10_000


def _torchrun(warm: Warm, files: Path, *options: str, arguments: tuple[object, ...], **variables: str) -> Running:
    launcher = ("--rdzv-id=nightly3", f"--max-restarts={LIVES - 1}", *options, *map(str, arguments))
    return torchrun(warm, files, Path(torchrun_ranks.__file__), *launcher, SAFEDIST_FS_TIMEOUT="120", **variables)


def _ended(*agents: Running) -> None:
    for agent in agents:
        done = agent.wait()
        assert (done.code, done.left) == (0, []), done.out + done.err


def _answers(place: Path, value: str) -> list[list[str]]:
    """What each rank had, life by life: the same in all, and in each life of processes of that life alone."""
    by_rank = [(place / f"{value}-{rank}").read_text().splitlines() for rank in range(RANKS)]
    for rank, lives in enumerate(by_rank[1:], 1):
        assert lives == by_rank[0], rank
    lives = [line.split() for line in by_rank[0]]
    for agreed, *said in lives:
        assert agreed in said
        assert [one.rsplit("-", 1)[0] for one in said] == [f"{value}-{rank}" for rank in range(RANKS)]
    seen = [one for _, *said in lives for one in said]
    assert len(set(seen)) == len(seen), "a process of an earlier life has answered"
    assert not (place / "passed").exists(), "a barrier was passed without a rank"
    return lives


@pytest.mark.timeout(3600)  # launches of torch, one after the other
def test_runs_of_one_name_take_no_answers_from_each_other(warm, tmp_path):
    for run in range(RUNS):
        value = f"run{run}"
        options = (f"--nproc-per-node={RANKS}", f"--master-port={PORT}")
        _ended(_torchrun(warm, tmp_path / f"of-{value}", *options, arguments=(tmp_path, value, 1, "before")))
        assert len(_answers(tmp_path, value)) == 1


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("when", ["before", "after"])
def test_lives_of_the_ranks_of_two_agents_take_no_answers_from_each_other(warm, tmp_path, when):
    """Of two agents, only the one whose worker has failed counts the restart."""
    # torch's own init finds the addresses of the life before in a store that the agent shares, and fails.
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if when == "after" else {}
    options = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{PORT}")
    arguments = (tmp_path, "run", LIVES, when)
    places = [tmp_path / f"agent-{number}" for number in range(2)]
    _ended(*[_torchrun(warm, place, *options, arguments=arguments, **variables) for place in places])
    assert len(_answers(tmp_path, "run")) == LIVES
