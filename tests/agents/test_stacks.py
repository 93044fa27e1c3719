"""Where the ranks of a running job stand: `safedist stacks` in its pod, and SIGQUIT to its agent."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.harness.procs import ROOT, until
from tests.harness.product import main


def stacks(directory: Path) -> str:
    """What the command says of the jobs below a directory."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main(["stacks", "--scratch", str(directory)])
    return said.getvalue()


def standing(text: str, rank: str) -> str:
    """The part of a picture that begins with a rank, or ranks."""
    [part] = re.findall(rf"^{rank} \(.*?(?=^ranks? |\Z)", text, re.MULTILINE | re.DOTALL)
    return str(part)


def test_a_rank_that_holds_the_interpreter_is_shown_beside_those_who_wait_for_it(
    warm, tmp_path: Path, ranks_gate
) -> None:
    running = warm.start("job_hangs:one_holds_the_interpreter", tmp_path / "job", environment=ranks_gate.environment)
    ranks_gate.heard(3)
    text = ""

    def both_wait() -> bool:
        nonlocal text
        text = stacks(tmp_path)
        return "ranks 0, 2 (2 of 3) stand in all_reduce, called at job_hangs.py" in text

    until(both_wait, "both wait for rank 1")
    running.signal(signal.SIGTERM)
    running.wait()
    culprit = standing(text, "rank 1")
    assert re.match(r"rank 1 \(1 of 3\) stands at job_hangs.py:\d+ in holds_the_interpreter\n", culprit)
    assert "sleeping" in culprit
    assert "in one_holds_the_interpreter" in culprit, "who called it"
    assert "worker.py" not in text


def test_the_agent_shows_it_in_its_log_at_sigquit_and_a_rank_that_is_stopped_is_said_to_be_that(
    warm, tmp_path: Path, ranks_gate
) -> None:
    running = warm.start("job_hangs:one_waits", tmp_path / "job", environment=ranks_gate.environment)
    ranks_gate.heard(2)
    until(
        lambda: re.search(r"stands in all_reduce.* in waits_alone", stacks(tmp_path), re.DOTALL),
        "rank 0 waits for rank 1, and that for the test",
    )
    running.signal(signal.SIGQUIT)
    until(lambda: "in waits_alone" in running.shown, "it is shown")
    _, pid = map(int, re.findall(r"^    process.* (\d+)$", stacks(tmp_path), re.MULTILINE))
    os.kill(pid, signal.SIGSTOP)
    stopped = "rank 1 (1 of 2) stands stopped (SIGSTOP); it has not answered"
    until(lambda: stopped in stacks(tmp_path), "it is seen")
    os.kill(pid, signal.SIGCONT)
    ranks_gate.let_go(1)
    assert running.wait().code == 0, "the job goes on"
    assert "rank 0 (1 of 2) stands in all_reduce, called at job_hangs.py" in running.shown


def test_where_no_rank_runs_the_command_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from flytekitplugins_safedist.tools.cli import main; raise SystemExit(main())"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "stacks", "--scratch", str(tmp_path)], capture_output=True, text=True, check=False, env=variables
    )
    assert done.returncode == 2
    assert "no rank runs here" in done.stderr
