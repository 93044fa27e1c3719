"""Real ranks that wait: whom they are held up by is found by the waits of those who are held up by it, and by nobody's
else; and who is slow is not ended."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.procs import until

REDUCE = r"rank {} waits in all_reduce of Float\[3\] \(#{} of group {}\)"


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("pipeline", f"rank 3 is at .* in sleeps, and does nothing .*; {REDUCE}, {REDUCE} ".format(0, 1, 1, 2, 1, 2)),
        ("evaluators", f"rank 1 is at .* in sleeps, and does nothing .*; {REDUCE} ".format(2, 1, 1)),
        ("beside", r"rank 1 is at .* in sleeps, .*; ranks 0, 2-3 wait in all_reduce of Float\[3\] \(#1 of group 0\) "),
        (
            "messages",
            r"rank 1 is at .* in sleeps, .*; ranks 0, 2-3 wait in all_reduce of Float\[3\] \(#\d of group 0\) ",
        ),
    ],
)
def test_the_culprit_is_whom_the_others_wait_for(warm, tmp_path: Path, how: str, says: str) -> None:
    text = str(warm.run("job_waits:waits", tmp_path / "job", inputs={"how": how}).error)
    assert re.search(f"the job does not move: {says}", text), text


@pytest.mark.parametrize(
    ("task", "environment", "says"),
    [
        ("job_waits:remembers_much", {"TORCH_FR_BUFFER_SIZE": "6000"}, r"rank 0 waits in all_reduce of Float\[3\] \(#"),
        ("job_waits:has_a_short_timeout", {}, r"rank 0 waits in all_reduce of Float\[3\] \(#2 of group 0\)"),
        ("job_waits:never_comes_to_a_group", {}, r"rank 0 waits in new_group "),
        ("job_waits:makes_its_group_again", {}, r"rank 0 waits in all_reduce of Float\[3\] \(#2 of group 0\)"),
        ("job_waits_late:imports_torch_itself", {}, r"rank 0 waits in all_reduce of Float\[3\] \(#2 of group 0\)"),
    ],
)
def test_a_hang_is_found(warm, tmp_path: Path, task: str, environment: dict[str, str], says: str) -> None:
    """However much torch remembers; before a short timeout; in what nothing records; in a fresh interpreter."""
    text = str(warm.run(task, tmp_path / "job", environment=environment).error)
    assert re.search(rf"the job does not move: rank 1 is at .*, and does nothing .*; {says}", text), text


SLOW = "slow, or an endless loop"


@pytest.mark.parametrize(
    ("task", "inputs", "says", "value"),
    [
        ("job_hangs:evaluates", {}, SLOW, "evaluated"),
        ("job_hangs_horovod:evaluates", {}, SLOW, "evaluated"),
        ("job_hangs:compiles", {}, SLOW, "compiled"),
        ("job_hangs:saves", {"how": "copies"}, "rank 1 has waited for rank 0 for 2 s in Checkpoints.save", "saved"),
        ("job_hangs:saves", {"how": "writes"}, "the end waits for the save before, which is still being", "saved"),
        ("job_waits:has_long_steps", {}, r"rank 0 is at .*, and computes .*; step 2 has not ended for", "done"),
        (
            "job_waits:writes_predictions",
            {},
            r"rank 0 is at .*, and reads or writes \(.* MB a .*\) .*: slow",
            "written",
        ),
        ("job_waits_import:meets", {}, r"rank 1 is at .*, and is not in the .*; ranks 0, 2 wait in init", "met"),
    ],
    ids=["evaluates", "evaluates (Horovod)", "compiles", "saves", "still saves", "long steps", "writes", "imports"],
)
def test_who_is_slow_is_told_of_and_waited_for(
    warm, tmp_path: Path, ranks_gate, task: str, inputs: dict[str, str], says: str, value: str
) -> None:
    """Up to the ceiling: an evaluation on one rank, the others at a barrier; a compiler in a session of its own; a slow
    store, which is no hang."""
    environment = {**ranks_gate.environment, "TEST_CHECKPOINTS": str(tmp_path / "checkpoints")}
    running = warm.start(task, tmp_path / "job", inputs=inputs, environment=environment)
    until(lambda: re.search(says, running.shown), "it is told")
    ranks_gate.let_go(3)
    assert running.wait().value == value
