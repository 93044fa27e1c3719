"""What people run beside a job: a tracker, of which a job has one run, over restarts and attempts."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.harness.procs import Ended, Warm

MLFLOW = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}


def attempt(warm: Warm, tmp_path: Path, number: int, failures: int) -> Ended:
    """One attempt of a task's node in one execution, as Flyte starts it."""
    environment = {
        "TEST_TRACKED": str(tmp_path),
        "TEST_FAILURES": str(failures),
        "FLYTE_ATTEMPT_NUMBER": str(number),
        "FLYTE_INTERNAL_EXECUTION_ID": "f7a1",
        **MLFLOW,
    }
    prefix = ["--output-prefix", str(tmp_path / "n0" / "data" / str(number))]
    files = tmp_path / f"pod-{number}"
    return warm.run("job_trackers:tracked", files, kind="execute", environment=environment, arguments=prefix)


def runs(tmp_path: Path) -> list[str]:
    """The ids of all runs that wandb has begun, by the files that ``wandb sync`` sends."""
    return [path.stem.removeprefix("run-") for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb")]


def test_a_jobs_restarts_and_attempts_are_one_run_of_each_tracker(warm, tmp_path):
    failed = attempt(warm, tmp_path, 0, failures=2)
    assert "bad data in round 1" in failed.err
    assert "start_method preload" in failed.err
    ended = attempt(warm, tmp_path, 1, failures=0)
    assert (tmp_path / "n0" / "data" / "1" / "outputs.pb").exists(), ended.err
    begun = runs(tmp_path)
    assert len(begun) > 1  # one for each round
    assert len(set(begun)) == 1
    assert re.fullmatch(r"f7a1-[0-9a-f]{8}", begun[0])
    [tag] = tmp_path.glob("mlruns/*/*/tags/job")
    assert tag.read_text() == begun[0]
    losses = (tag.parents[1] / "metrics" / "loss").read_text().splitlines()
    assert [line.split()[-1] for line in losses] == ["0", "1", "10"], "each round of each attempt"


def test_a_local_run_has_a_name_of_its_own_each_time(warm, tmp_path):
    told: list[dict[str, str]] = [{"TEST_TRACKED": str(tmp_path)}, {}]  # the tracker itself takes seconds
    names = [
        warm.run("job_trackers:tracked", tmp_path / str(count), environment=environment).value
        for count, environment in enumerate(told)
    ]
    assert all(re.fullmatch(r"local-[0-9a-f]{16}", name) for name in names)
    assert len(set(names)) == 2
    assert runs(tmp_path) == names[:1]


def test_the_run_of_a_rank_that_fails_is_told_so_before_the_rank_ends(warm, tmp_path):
    os.mkfifo(tmp_path / "told")
    ended = warm.run("job_trackers:ends_badly", tmp_path / "job", environment={"TEST_TRACKED": str(tmp_path / "told")})
    assert "the run has failed (bad data)" in ended.out
    assert "a word of the tracker" in ended.out
    assert ended.out.count("Traceback") == 1
