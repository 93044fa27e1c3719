"""The ranks' output in the node's log: prefixed, whole lines, live, filtered, and nothing lost at the end."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.harness.procs import until
from tests.jobs.job_private import PIECES


def test_lines_are_whole_prefixed_complete_and_in_order(warm, tmp_path):
    ended = warm.run("job_private:talk_all_at_once", tmp_path / "job")
    lines = ended.out.splitlines()
    pattern = re.compile(
        r"<(\d)/\1/0> (?:rank \1 says line (\d+) and that is all|grüße|from a child|half a line at the end)"
    )
    matches = [pattern.fullmatch(line) for line in lines]
    assert all(matches), [line for line, match in zip(lines, matches, strict=True) if not match][:5]
    for rank in "0123":
        assert [int(m[2]) for m in matches if m[1] == rank and m[2]] == list(range(PIECES))
    counted = Counter(line.split("> ", 1)[1] for line in lines)
    assert [counted[text] for text in ("grüße", "from a child", "half a line at the end")] == [4, 4, 4]


def test_only_the_ranks_asked_for_are_shown_and_each_has_its_file(warm, tmp_path):
    ended = warm.run("job_private:talk_but_show_one", tmp_path / "job")
    assert ended.out.splitlines() == ["[rank 1] I am rank 1"]
    [job] = ended.scratch
    for rank in range(3):
        log = Path(ended.files, "tmp", job, "logs", f"round-0-rank-{rank}.log")
        assert log.read_text() == f"I am rank {rank}\n"


def test_lines_are_shown_while_the_ranks_run(warm, tmp_path, ranks_gate):
    running = warm.start("job_private:live", tmp_path / "job", environment=ranks_gate.environment)
    ranks_gate.heard(2)
    shown = tmp_path / "job" / "out"
    until(lambda: shown.read_text().count("live from") == 2, "what ranks printed is shown before they end")
    ranks_gate.let_go(2)
    assert running.wait().code == 0


def test_a_traceback_after_the_function_is_not_lost(warm, tmp_path):
    ended = warm.run("job_private:raises_in_an_exit_handler", tmp_path / "job")
    assert ended.value == 3
    assert "[rank 1] OSError: cannot close the tap" in ended.out
    assert "[rank 0]" not in ended.out


PRINTS = """
import os, sys
from pathlib import Path
from flytekit import task
from flytekitplugins_safedist import SafeTorch

@task(task_config=SafeTorch(nproc_per_node=2))
def prints() -> str:
    print("from Python")
    os.system("echo from a child")
    return Path("/proc/self/fd/1").read_text()

if __name__ == "__main__":
    os.close(1)
    sys.stdout = None
    Path("value").write_text(prints())
"""


def test_where_the_standard_output_is_closed_what_ranks_print_is_in_their_logs_and_in_no_other_file(warm, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PRINTS)
    ended = warm.run(f"{script}:__main__", tmp_path / "job", kind="main", libraries=False)
    assert ended.code == 0, ended.err
    assert (tmp_path / "job" / "value").read_text() == "from Python\nfrom a child\n"


LOSES_A_PEER = """
import os, signal
from flytekit import task
from flytekitplugins_safedist import SafeTorch, Timeouts, current_rank, fs

@task(task_config=SafeTorch(nproc_per_node=2, timeouts=Timeouts(stop=0.5)))
def loses_a_peer() -> None:
    fs.barrier("both are there")
    if current_rank().rank == 1:
        signal.pause()
    raise RuntimeError("gloo/transport/tcp/pair.cc:561] Connection closed by peer")

if __name__ == "__main__":
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    loses_a_peer()
"""


def test_a_full_standard_output_hides_no_failure(warm, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LOSES_A_PEER)
    ended = warm.run(f"{script}:__main__", tmp_path / "job", kind="main")
    assert ended.code == 1
    assert "Connection closed by peer" in ended.err
    assert "of the ranks' output were not shown" in ended.err
    assert "has failed by itself" not in ended.err


def test_one_line_at_the_start_and_one_at_the_end(warm, tmp_path, ranks_gate):
    ended = warm.run("job_shapes:who_torch", tmp_path / "job", environment=ranks_gate.environment)
    start, alone, end = [line for line in ended.err.splitlines() if line.startswith("[safedist]")]
    assert "each of the 2 ranks worked alone" in alone  # they tell who they are, and do nothing together
    for fact in ("torch", "node 0 of 1", "2 rank(s) per node", "world_size 2", "preload", "max_restarts 0", "code "):
        assert fact in start, start
    for fact in ("attempt 0", "task job_shapes.who_torch"):
        assert fact in start, start
    assert re.search(
        r"end: succeeded after 1 round\(s\), [\d.]+ s "
        r"\(prepare [\d.]+ s, import [\d.]+ s, inputs [\d.]+ s, function [\d.]+ s, outputs [\d.]+ s",
        end,
    ), end
