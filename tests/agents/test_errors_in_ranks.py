"""Each error of the package, raised in a rank of a real job: what is uploaded is what docs/errors.md says of it."""

from __future__ import annotations

import re

import pytest

from tests.harness.ends import PAYS
from tests.harness.procs import ROOT, Warm, uploaded_error

ROWS = {
    name: (code, pays)
    for name, code, pays in re.findall(
        r"^\| `(\w+)` \|.*\| `(\w+:\w+)` \| ([^|]+) \|$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE
    )
}
NOBODY, FLYTE = "none: the task fails", "Flyte"
MISTAKES = {
    "resume_from that is not there": ("USER:CheckpointError", NOBODY, "nothing was saved where to resume from"),
    "a directory on a file": ("USER:PathBlockedError", NOBODY, "a file is in the way"),
    "a checkpoint's store that is down": ("SYSTEM:Storage", FLYTE, "it broke"),
    "a download's source that is not there": ("USER:DownloadError", NOBODY, "it broke"),
}


def uploaded(warm: Warm, directory, how: str, task: str = "one_raises") -> tuple[str, str, str]:
    ended = warm.run(f"job_errors:{task}", directory / "job", kind="execute", environment={"TEST_HOW": how})
    assert (ended.code, ended.left, ended.uploaded) == (0, [], ["error.pb"]), ended.err
    error = uploaded_error(ended)
    return error.code, PAYS[error.kind, error.origin], error.message


def test_the_table_has_a_code_for_every_error():
    assert {pays for _, pays in ROWS.values()} == set(PAYS.values())
    assert len(ROWS) == len(re.findall(r"^\| `", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)) > 30


@pytest.mark.parametrize("name", ["FsIdentityError", "FsIoError", "MeetingLostError"])
def test_an_error_that_ends_a_rank_is_uploaded_as_the_table_says(warm, tmp_path, name):
    """One for each who pays. The table is made of the errors themselves (scripts/failures.py)."""
    assert uploaded(warm, tmp_path, name)[:2] == ROWS[name]


@pytest.mark.parametrize("how", MISTAKES)
def test_who_pays_is_decided_by_whose_doing_it_is(warm, tmp_path, how):
    code, pays, text = MISTAKES[how]
    seen_code, seen_pays, message = uploaded(warm, tmp_path, how, "the_one_raises")
    assert (seen_code, seen_pays) == (code, pays), message
    assert text in message


def test_what_the_users_own_work_raises_is_the_users_whatever_it_is_and_the_rank_that_did_it_is_the_cause(
    warm, tmp_path
):
    code, pays, message = uploaded(warm, tmp_path, "", "work_fails")
    assert (code, pays) == ("USER:WorkFailedError", NOBODY)
    assert "ConnectionRefusedError: the feature store is down" in message
    assert "The above exception was the direct cause" in message


def test_of_what_torchs_checkpoints_raise_in_all_ranks_the_one_that_failed_is_the_cause(warm, tmp_path):
    code, pays, message = uploaded(warm, tmp_path, "", "torch_saves")
    assert (code, pays) == ("SYSTEM:NodeDisk", FLYTE)
    first, *_ = message.splitlines()
    assert first.startswith("rank 1 ")
    assert first.endswith("CheckpointException: OSError: [Errno 5] Input/output error")


@pytest.mark.parametrize(
    ("how", "times"), [("killed by the kernel's out-of-memory killer", "xx"), ("no such file", "x")]
)
def test_the_recipe_for_more_memory_tries_again_after_an_oom_kill_alone(warm, tmp_path, how, times):
    environment = {"TEST_TIMES": str(tmp_path / "times"), "TEST_HOW": how}
    ended = warm.run("job_larger:called", tmp_path / "job", environment=environment)
    assert (tmp_path / "times").read_text() == times
    if times == "xx":
        assert ended.value == "trained 3"
    else:
        assert "no such file" in str(ended.error)
