"""What no stand-in shows: real NCCL hangs, what a GPU reports, what its errors say, checks and an example on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.procs import Running, gate, until

IDLE = r"rank 1 is at job_hangs.py:\d+ in sleeps, and does nothing"
REDUCE = r"rank 0 waits in all_reduce of Float\[3\] \(#2 of group 0\)"


@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("synchronizes", "missing", f"{IDLE} .*; {REDUCE}"),
        ("reads a value", "missing", f"{IDLE} .*; {REDUCE}"),
        ("barrier", "missing", rf"{IDLE} .*; rank 0 waits in all_reduce_barrier of Float\[1\] \(#2"),
        ("objects", "missing", rf"{IDLE} .*; rank 0 waits in all_gather of Long\[1\] \(#2"),
        ("receives", "missing", f"{IDLE} .*; rank 0 waits in recv"),
        ("batch", "missing", f"{IDLE} .*; rank 0 waits in send 0->1, recv 0<-1 "),
        ("trains", "missing", rf"{IDLE} .*; rank 0 waits in all_reduce of Float\[12\] "),
        ("the first one", "missing", f"{IDLE} .*; rank 0 waits in all_reduce "),
        (
            "calls another",
            "mismatch",
            r"rank 1 has called broadcast of Float\[9\] \(#2 of .*, where rank 0 has called all_r",
        ),
        ("stops", "frozen", rf"rank 1 is stopped \(SIGSTOP\).*; {REDUCE}"),
        ("loops", "slow", rf"rank 1 is at job_nccl.py:\d+ in loops, and computes .*; {REDUCE}"),
    ],
)
def test_a_rank_that_waits_for_nccl_is_known_to_and_for_whom(warm, tmp_path: Path, how: str, kind: str, says: str):
    text = str(warm.run("job_nccl:hangs", tmp_path / "job", inputs={"how": how}).error)
    assert re.search(f"the job does not move: {says}", text), text
    assert f"[kind={kind}]" in text


def test_a_short_timeout_of_nccls_is_come_before(warm, tmp_path: Path) -> None:
    text = str(warm.run("job_nccl:times_out", tmp_path / "job").error)
    assert re.search(f"the job does not move: {IDLE} .*; {REDUCE}", text), text


def shown(running: Running) -> str:
    """What the agent has written so far."""
    return (running.files / "out").read_text() + (running.files / "err").read_text()


def test_an_evaluation_on_the_gpu_is_told_of_and_waited_for(warm, tmp_path: Path) -> None:
    with gate(tmp_path / "gate") as ranks:
        running = warm.start("job_nccl:evaluates", tmp_path / "job", environment=ranks.environment)
        until(lambda: re.search(r"rank 1 is at .*, and computes", shown(running)), "it is told")
        ranks.let_go(1)
        assert running.wait().value == "evaluated"


@pytest.mark.parametrize(
    ("how", "says", "xid"),
    [
        ("index", "device-side assert triggered", "Xid 43"),
        ("address", "an illegal memory access was encountered", "Xid 31"),
        ("memory", "CUDA out of memory", ""),
        ("device", "invalid device ordinal", ""),
    ],
)
@pytest.mark.xdist_group("Xids")  # one after the other: all tests share the GPU, and each agent hears of all its Xids
def test_a_failure_on_the_gpu_has_its_text_and_what_the_gpu_has_reported(
    warm, tmp_path: Path, how: str, says: str, xid: str
) -> None:
    ended = warm.run("job_nccl:fails", tmp_path / "job", inputs={"how": how})
    text = str(ended.error)
    assert re.search(rf"rank 1 .* raised .*{says}", text), text
    assert xid in text
    assert f"reported {xid}" in ended.out + ended.err or not xid


def test_two_ranks_on_one_gpu_are_told_so(warm, tmp_path: Path) -> None:
    text = str(warm.run("job_nccl:shares_a_gpu", tmp_path / "job").error)
    assert re.search(r"raised .*Duplicate GPU detected", text, re.DOTALL), text


def test_a_node_with_a_gpu_is_checked_before_its_rank_begins(warm, tmp_path: Path) -> None:
    assert warm.run("job_nccl:is_checked", tmp_path / "job").value == "3"


def test_an_example_trains_on_the_gpu(warm, tmp_path: Path) -> None:
    inputs = {"example": "digits_ddp", "ranks": 1, "epochs": 3}
    ended = warm.run("job_examples:train", tmp_path / "job", inputs=inputs)
    assert ended.value["accuracy"] > 0.8
    assert "train on the CPU" not in ended.out
