"""A job on a laptop: a person sits at its terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.procs import ROOT, Ended, Running, Warm, until
from tests.harness.terminal import COLUMNS, screen

PYFLYTE = str(Path(sys.executable).parent / "pyflyte")
JOB = str(Path(__file__).parents[1] / "jobs" / "job_local.py")
CTRL_C = "\x03"


def on_a_terminal(
    warm: Warm, files: Path, typed: list[tuple[list[str], str]], command: list[str], **more: Any
) -> Running:
    """Run a command on a terminal, where ``typed`` says what is typed when something has appeared."""
    whole = [sys.executable, "-m", "tests.harness.terminal", json.dumps(typed), *command]
    return warm.command(whole, files, {**TERMINAL, **more})


def started(
    warm: Warm, files: Path, typed: list[tuple[list[str], str]], program: str, *arguments: str, **more: Any
) -> Running:
    """The same of a program of Python's, where all is imported already."""
    options: dict[str, Any] = {"typed": typed, "arguments": arguments, "environment": {**TERMINAL, **more}}
    return warm.start(f"{program}:__main__", files, kind="main", **options)


TERMINAL = {"COLUMNS": str(COLUMNS), "TERM": "xterm"}
ENDED = "[safedist] interrupted (Ctrl-C): every rank has been ended"


def after(text: str, ended: Ended) -> str:
    """What the terminal showed after the last ``text``, but for its echo of Ctrl-C (which drops what is on its way)
    and for where the record of the run is."""
    shown = "\n".join(screen(ended.files / "out")).replace("^C", "").rpartition(text)[2].strip()
    return shown.partition("; the record of this run: ")[0]


@pytest.mark.parametrize("how", ["python", "pyflyte"])
def test_ctrl_c_is_one_line(warm, tmp_path, how):
    typed = [(["[rank 0] here", "[rank 1] here"], CTRL_C)]
    command = (JOB, "waits") if how == "python" else (PYFLYTE, "run", JOB, "waits")
    ended = started(warm, tmp_path / "job", typed, *command).wait()
    assert after("here", ended) == ENDED
    [page] = re.findall(r"the record of this run: (\S+)", ended.out)
    assert "failed: SYSTEM:Stopped" in Path(page).read_text()
    assert ended.code == 130
    assert ended.left == ended.scratch == []


def test_ctrl_c_at_a_python_prompt_comes_back_to_it(warm, tmp_path):
    typed = [
        ([">>> "], "from tests.jobs.job_local import waits; waits()\n"),
        (["[rank 0] here", "[rank 1] here"], CTRL_C),
        (["KeyboardInterrupt", ">>> "], "6 * 7\n"),
        (["42", ">>> "], "exit()\n"),
    ]
    ended = on_a_terminal(warm, tmp_path / "job", typed, [sys.executable, "-q"]).wait()
    assert ENDED in ended.out
    assert (ended.code, ended.left, ended.scratch) == (0, [], []), ended.out


SLOW_LIBRARY = """
import sys, time
if "-c" in sys.orig_argv:
    print("slow library", flush=True)
    time.sleep(600)
"""


def test_ctrl_c_while_the_rank_server_imports_is_one_line(warm, tmp_path):
    typed = [(["slow library"], CTRL_C)]
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "slow_library.py").write_text(SLOW_LIBRARY)
    path = os.pathsep.join([str(ROOT), str(installed)])
    options: dict[str, Any] = {"libraries": False, "path": [installed], "environment": {**TERMINAL, "PYTHONPATH": path}}
    command = ["run", JOB, "waits"]
    ended = warm.start(
        f"{PYFLYTE}:__main__", tmp_path / "job", kind="main", typed=typed, arguments=command, **options
    ).wait()
    assert after("slow library", ended) == ENDED
    assert ended.code == 130
    assert ended.left == ended.scratch == []


def test_ctrl_c_in_ranks_that_are_fresh_interpreters_and_import_is_one_line(warm, tmp_path):
    """What flytekit does at SIGINT, in each process that imports it, is to exit with a traceback."""
    typed = [(["[rank 0] importing", "[rank 1] importing"], CTRL_C)]
    how = "import in the ranks"
    ended = started(warm, tmp_path / "job", typed, PYFLYTE, "run", JOB, "waits_spawned", TEST_HOW=how).wait()
    assert after("importing", ended) == ENDED
    assert (ended.code, ended.left, ended.scratch) == (130, [], [])


OUTLIVES = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)  # as a program finds it
from flytekit import task
from flytekitplugins_safedist import SafeTorch
from tests.harness.procs import say, wait_for_word

@task(task_config=SafeTorch(nproc_per_node=1))
def outlives() -> None:
    say("runs")
    wait_for_word()

if __name__ == "__main__":
    outlives()
"""


@pytest.mark.parametrize("under", ["nohup", "a shell"])
def test_a_job_ends_with_its_terminal_but_under_nohup(warm, tmp_path, ranks_gate, under):
    script = tmp_path / "script.py"
    script.write_text(OUTLIVES)
    options: dict[str, Any] = {"kind": "main", "arguments": [under], "environment": ranks_gate.environment}
    running = warm.start(f"{script}:__main__", tmp_path / "job", **options)
    ranks_gate.heard(1)
    running.signal(signal.SIGHUP)
    if under == "nohup":
        ranks_gate.let_go(1)
    ended = running.wait()
    assert (ended.code, ended.left) == (0 if under == "nohup" else 1, []), ended.err
    assert ("told to stop by SIGHUP" in ended.err) == (under != "nohup")


def test_breakpoint_is_the_terminals_and_rank_0s_while_the_others_pass_it(warm, tmp_path):
    typed = [(["(Pdb) "], "p number * 2\n"), (["\r\n84\r\n", "(Pdb) "], "number = 7\n"), (["(Pdb) "], "c\n")]
    ended = started(warm, tmp_path / "job", typed, JOB, "breaks").wait()
    assert any(re.match(r"> \S+job_local.py\(\d+\)_break\(\)", line) for line in screen(ended.files / "out")), (
        "from the margin on"
    )
    assert "rank 0 has 7" in ended.out
    assert "rank 1 has 42" in ended.out
    assert "[rank 1] [safedist] warning: breakpoint() stops only rank 0; this rank continues" in ended.out
    assert (ended.code, ended.left, ended.scratch) == (0, [], []), ended.out


def test_ctrl_c_in_the_debugger_ends_the_job_with_one_line(warm, tmp_path):
    typed = [(["(Pdb) "], CTRL_C)]
    ended = started(warm, tmp_path / "job", typed, PYFLYTE, "run", JOB, "breaks_alone").wait()
    assert after("(Pdb)", ended) == ENDED
    assert (ended.code, ended.left, ended.scratch) == (130, [], [])


def test_ctrl_c_ends_the_job_too_when_the_debugger_has_gone_on(warm, tmp_path):
    typed = [(["(Pdb) "], "c\n"), (["rank 0 has 42"], CTRL_C)]
    ended = started(warm, tmp_path / "job", typed, PYFLYTE, "run", JOB, "breaks_and_goes_on").wait()
    assert after("rank 0 has 42", ended) == ENDED
    assert (ended.code, ended.left, ended.scratch) == (130, [], [])


@pytest.mark.parametrize("task", ["breaks", "breaks_alone"])
def test_breakpoint_without_a_terminal_is_an_error_that_says_so(warm, tmp_path, task):
    ended = warm.run(f"job_local:{task}", tmp_path / "job")
    assert "NoTerminalError: breakpoint() was called where there is no terminal" in str(ended.error)
    assert "Fix: run the task locally, on a terminal" in str(ended.error)
    assert "BdbQuit" not in str(ended.error)


def test_a_debugger_of_the_users_own_needs_no_terminal(warm, tmp_path):
    more = {"PYTHONBREAKPOINT": "job_local.own_debugger"}
    ended = warm.run("job_local:breaks_alone", tmp_path / "job", environment=more)
    assert "own debugger" in ended.out


LINE = "[safedist] 2 rank(s), round 0: step"


def test_a_line_below_all_others_says_how_far_the_job_is(warm, tmp_path, ranks_gate):
    job = started(warm, tmp_path / "job", [], PYFLYTE, "run", JOB, "steps", **ranks_gate.environment)
    ranks_gate.heard(2)

    def last() -> str:
        return (screen(job.files / "out") or [""])[-1]

    until(lambda: last().startswith(f"{LINE} 3 of 10"), "the slower rank's step is shown")
    ranks_gate.let_go(2)
    ranks_gate.heard(2)

    def shows_a_rate() -> bool:
        lines = screen(job.files / "out") or [""]
        rate = re.escape(LINE) + r" 6 of 10, [\d.]+ (steps/s|m?s a step), about .* left"
        go_on = sorted(line for line in lines if "goes on" in line)
        return (
            re.fullmatch(rate, lines[-1]) is not None
            and go_on == ["[rank 0] rank 0 goes on", "[rank 1] rank 1 goes on"]
            and sum(LINE in line for line in lines) == 1
        )

    until(shows_a_rate, "a rate, below the ranks' lines")
    ranks_gate.let_go(2)
    ended = job.wait()
    assert ended.code == 0, ended.out
    assert not any(LINE in line for line in screen(ended.files / "out")), "it is gone in the end"
    assert "[safedist] end: succeeded" in ended.out


def test_without_a_terminal_there_is_no_such_line(warm, tmp_path, ranks_gate):
    ranks_gate.let_go(4)
    ended = warm.run("job_local:steps", tmp_path / "job", environment={**ranks_gate.environment, "TERM": "xterm"})
    assert "[rank 0] rank 0 goes on\n" in ended.out
    assert "\x1b" not in ended.out + ended.err
    assert LINE not in ended.out + ended.err
