"""Ranks that hang in one way or another: the job ends, and its one error names who holds up whom, and how."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import pytest

from tests.harness.job import Job
from tests.harness.procs import ROOT, TERM, gate, until, uploaded_error


@dataclass(frozen=True)
class Case:
    """What one rank does while the others go to their next collective: rank 1, where nothing else is said.

    Attributes:
        how: as ``tests/jobs/job_hangs.py`` knows it.
        what: as the docs say it.
        says: what the error says, a pattern.
        torch, horovod: how it ends with these: a kind of hang, or an error's code; "" where that is not tried.
    """

    how: str
    what: str
    says: str
    torch: str
    horovod: str


CHILD = r".*; its child process \d+ has ended or is stopped"
KILLED = r"DataLoader worker \(pid.* \d+\) (is killed by signal|exited unexpectedly)"
CROSSED = r"waits in all_reduce of Float\[3\] \(#1 of group 2\), and|has called allreduce of mine in .* 1 \(.*\), where"
SAYS = {
    "asleep": r"rank 1 is at job_hangs.py:\d+ in sleeps, and does nothing",
    "loop": r"rank 1 is at job_hangs.py:\d+ in loops, and computes",
    "gil": r"rank 1 is at job_hangs.py:\d+ in holds_the_interpreter, in native code that holds Python's",
    "stopped": r"rank 1 is stopped \(SIGSTOP\)",
    "input": "rank 1 waits for input at",
    "worker stopped": f"rank 1 waits for input at{CHILD}",
    "worker killed": f"rank 1 .* raised RuntimeError: {KILLED}",
    "process killed": f"rank 1 waits for input at{CHILD}",
    "returned": r"rank 1 finished early",
    "returned, stays": "rank 1 has returned from the task's function",
    "skipped": r"rank 1 has called (barrier \(#2 of group 0\)|allreduce of third \(.*\)), where ranks 0, 2 have",
    "barrier in one branch": r"rank 1 has called barrier \(.*, where ranks 0, 2 have",
    "barrier as it raises": r"rank 1 has called barrier .*, where ranks 0, 2 have .*; rank 1 handles ValueError: a bad",
    "other collective": r"rank 1 has called broadcast",
    "other shape": r"rank 1 has called all_reduce of Float\[5\]|: Mismatched ALLREDUCE tensor shapes: .* shape \[3\]",
    "groups crossed": f"rank 1 ({CROSSED}) ranks 0, 2",
    "new group": r"rank 1 is in .*, called at job_hangs\w*.py:\d+ in \S+, and does nothing",
    "rank 0 killed": r"rank 0 .* was killed by SIGKILL",
    "rank 0 asleep": r"rank 0 is at job_hangs.py:\d+ in sleeps, and does nothing",
}
"""Of each case what the error says, in the order of the table of docs/hangs.md, which says how it ends."""


def cases() -> Iterator[Case]:
    lines = (ROOT / "docs" / "hangs.md").read_text().splitlines()
    rows = lines[lines.index("| What rank 1 does | torch (gloo) | Horovod |") + 2 :]
    for (how, says), row in zip(SAYS.items(), takewhile(lambda line: line.startswith("|"), rows), strict=True):
        what, torch, horovod = (cell.strip() for cell in row.split("|")[1:4])
        yield Case(how, what, says, torch.strip("`"), horovod.strip("`"))


SCREEN = 45
"""Lines of an error that still fits one."""
CELLS = [(library, case) for case in cases() for library in ("torch", "horovod") if getattr(case, library)]
"""All of the table, of which ``benchmarks/hangs.py`` tries each kind of hang."""
AS_WITH_TORCH = ("loop", "gil", "stopped", "input", "barrier in one branch", "other collective")
"""What shows in the process of rank 1 alone, whatever library the others wait in; and what is seen by two names, as
where a collective is skipped. ``SAFEDIST_HANGS=all`` tries it with Horovod, too."""
IS_ALL = os.environ.get("SAFEDIST_HANGS") == "all"
TRIED = [(library, case) for library, case in CELLS if IS_ALL or library == "torch" or case.how not in AS_WITH_TORCH]


@pytest.mark.parametrize(("library", "case"), TRIED, ids=[f"{library} {case.how}" for library, case in TRIED])
def test_the_error_names_the_rank_that_holds_up_the_others(
    warm, tmp_path: Path, ranks_gate, library: str, case: Case
) -> None:
    module = {"torch": "job_hangs", "horovod": "job_hangs_horovod"}[library]
    soon = {"TEST_CEILING": "2"} if case.how == "loop" else {}  # it takes a core for as long
    how = {"inputs": {"how": case.how}, "environment": {**ranks_gate.environment, **soon}}
    error = warm.run(f"{module}:fails", tmp_path / "job", **how).error
    assert re.search(case.says, str(error)), error
    end = getattr(case, library)
    assert error.error_code == (end if ":" in end else "USER:HangError")
    if ":" not in end:
        assert "the job does not move: " in str(error)
        assert f"[kind={end}]" in str(error)
        assert len(str(error).splitlines()) <= SCREEN


def test_a_hang_that_is_only_to_be_reported_is_told_in_the_log_and_the_job_goes_on(
    warm, tmp_path: Path, ranks_gate
) -> None:
    running = warm.start("job_hangs:reports", tmp_path / "job", environment=ranks_gate.environment)
    until(lambda: "the job does not move" in running.shown, "it is told")
    ranks_gate.let_go(1)
    ended = running.wait()
    assert ended.value == "done"
    told = next(line for line in running.shown.splitlines() if "the job does not move" in line)
    assert "rank 0 waits in all_reduce of Float[3] (#2 of group 0)" in told
    assert "in waits_alone" in running.shown, "who calls it"


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("stands_alone", r"rank 0 is at job_hangs.py:\d+ in sleeps, and does nothing \(.*\); step 3 has not ended"),
        ("stands_behind", r"rank 1 is at job_hangs.py:\d+ in sleeps, .*; step 3 has not ended .*, and 2 rank\(s\) go"),
        ("stands_before_a_barrier", r"rank 1 is at job_hangs.py:\d+ in sleeps, .*; step 3 has not ended for"),
    ],
)
def test_a_job_that_tells_its_steps_hangs_where_they_do_not_end(warm, tmp_path: Path, task: str, says: str) -> None:
    """No library knows of anybody who waits."""
    ended = warm.run(f"job_hangs:{task}", tmp_path / "job", environment={"MY_SECRET": "stands_alone"})
    text = str(ended.error)
    assert re.search(f"the job does not move: {says}", text)
    assert "[kind=missing, step=3]" in text
    [address] = re.findall(r"All stacks and connections of all ranks: (\S+)", text)
    evidence = Path(address).read_text()
    assert ("in [$MY_SECRET]\n" in evidence) == (task == "stands_alone"), "it is called as the secret is"
    assert "stands_alone" not in evidence, "no values of variables"


def test_ranks_that_have_returned_hold_up_the_others_also_where_their_node_is_gone(
    warm, tmp_path: Path, ranks_gate
) -> None:
    task, more = "job_hangs:waits_for_a_node_that_has_returned", ranks_gate.environment
    job = Job(warm, tmp_path / "job", task, more=more, nproc_per_node=1)
    leaves, stays = job.start(1), job.start(0)
    until(job.a_node_is_done, "rank 1 has returned")
    leaves.signal(TERM)
    leaves.wait()
    ranks_gate.let_go(1)
    message = uploaded_error(stays.wait()).message
    assert message.startswith("rank 0 (local_rank 0) on node 0")
    assert "the job does not move: rank 1 has returned from the task's function; step 3 has not ended" in message


def test_a_rank_that_fails_by_itself_while_its_hang_is_found_out_is_told_with_its_own_error(
    warm, tmp_path: Path, ranks_gate
) -> None:
    with gate(tmp_path / "evidence") as evidence:
        environment = {**ranks_gate.environment, "TEST_LEAVE_WORD": str(evidence.word)}
        running = warm.start("job_hangs:fails_as_it_is_found_out", tmp_path / "job", environment=environment)
        assert ranks_gate.heard(1) == ["leaves"]
        ranks_gate.let_go(1)
        until(lambda: "ValueError: the file server" in running.shown, "the rank has failed")
        evidence.let_go(1)
        ended = running.wait()
    assert "rank 1 (local_rank 1) on node 0" in str(ended.error).splitlines()[0]
    assert "raised ValueError: the file server has answered at last" in str(ended.error).splitlines()[0]


def test_a_hang_at_the_same_step_again_is_not_tried_again(warm, tmp_path: Path) -> None:
    ended = warm.run("job_hangs:stands_at_the_same_step_again", tmp_path / "job")
    assert "rank 1 failed (HangError); all ranks start again: restart 1 of 5" in ended.out + ended.err
    text = str(ended.error)
    assert "[kind=missing, step=3]" in text
    assert "rank 1 with HangError at step 3 has failed before" in text
    assert "This was round 1" in text


@pytest.mark.end("hang", "USER:HangError")
def test_what_flyte_is_told_is_the_hang(warm, tmp_path: Path, as_promised) -> None:
    ended, other = Job(warm, tmp_path / "job", "job_hangs:one_of_another_node_sleeps").run()
    as_promised(ended)
    message = uploaded_error(ended).message
    assert "rank 3 (local_rank 1) on node 1" in message
    assert "the job does not move: rank 3 is at job_hangs.py" in message
    assert "ranks 0-2 wait in all_reduce of Float[3] (#2 of group 0)" in message
    assert "in sleeps" in other.out + other.err, "both nodes' logs have the picture"
    [address] = re.findall(r"All stacks and connections of all ranks: (\S+)", message)
    evidence = Path(address).read_text()
    assert "the job does not move: rank 3 is at job_hangs.py" in evidence
    assert "another thread of rank 0:" in evidence
    assert all(re.search(rf"rank {rank} is connected to 127\.0\.0\.1:\d+", evidence) for rank in range(4))
