"""Ranks forked from a preloaded process, and ranks as fresh interpreters, are alike to the user's function."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.harness.procs import ROOT, uploaded_error


def test_preload_and_spawn_give_the_same_results(warm, tmp_path):
    (tmp_path / "here").mkdir()
    values = []
    for method in ("preloaded", "spawned"):
        ended = warm.run(f"job_random:same_{method}", tmp_path / method, inputs={"x": [0.5, 1.5]})
        values.append(ended.value)
        assert values[-1].pop("cwd") == str(ended.files)
        assert f"start_method {'preload' if method == 'preloaded' else 'spawn'}" in ended.err
    assert values[0] == values[1]
    assert values[0]["sum"] == "2.0"
    assert values[0]["replicas guarded"] == "True"
    assert values[0]["OPENBLAS_NUM_THREADS"] == "unset", "what importing needed is not the rank's"


@pytest.mark.parametrize(
    ("module", "why"),
    [("job_threads", "importing job_threads started 1 thread(s)"), ("job_cuda", "importing job_cuda initialised CUDA")],
)
def test_a_module_that_makes_forking_unsafe_falls_back_to_spawn_and_says_why(warm, tmp_path, module, why):
    ended = warm.run(f"{module}:still_works", tmp_path / "job")
    assert ended.value == "rank 0 runs somehow"
    [warning] = [line for line in ended.err.splitlines() if "warning" in line]
    assert why in warning
    assert "start_method='spawn'" in warning
    assert "start_method spawn" in ended.err


@pytest.mark.parametrize("how", ["ignores", "asyncio"])
def test_a_module_that_takes_signals_for_itself_does_not_hide_the_end_of_its_ranks(warm, tmp_path, how):
    ended = warm.run("job_signals:still_ends", tmp_path / "job", environment={"TEST_HOW": how})
    assert ended.value == "rank 0"
    assert "start_method preload" in ended.err


@pytest.mark.parametrize("task", ["preloaded", "spawned"])
def test_a_module_that_replaces_the_standard_streams_by_objects_with_only_a_write_keeps_its_ranks(warm, tmp_path, task):
    ended = warm.run(f"job_streams:{task}", tmp_path / "job")
    assert ended.value == "rank 0"
    # The agent has imported the module as well, and notes what it passes on.
    assert all(re.search(rf"^\[rank {rank}\] noted: .*seen by {rank}$", ended.out, re.M) for rank in (0, 1)), ended.out
    assert f"start_method {'preload' if task == 'preloaded' else 'spawn'}" in ended.err


@pytest.mark.parametrize("task", ["torch", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_a_module_that_keeps_its_rank_at_import_gets_it_in_every_rank(warm, tmp_path, task):
    ended = warm.run(f"job_identity:{task}", tmp_path / "job")
    assert ended.value == ["cuda:0", "cuda:1"]
    [warning] = [line for line in ended.err.splitlines() if "warning" in line]
    assert "LOCAL_RANK (in job_identity, line 12)" in warning


@pytest.mark.parametrize("task", ["preloaded", "spawned"])
def test_a_modules_exit_handler_runs_once_in_each_rank_and_never_in_the_rank_server(warm, tmp_path, task):
    ended = warm.run(f"job_handlers:{task}", tmp_path / "job")
    assert ended.value == "rank 0"
    assert f"start_method {'preload' if task == 'preloaded' else 'spawn'}" in ended.err
    said = [line for line in (ended.out + ended.err).splitlines() if "handler of" in line]
    assert sorted(said) == ["[rank 0] handler of rank 0", "[rank 1] handler of rank 1"]


@pytest.mark.parametrize(("task", "times"), [("preloaded", 2), ("spawned", 3)])
def test_a_module_is_imported_by_the_agent_and_then_once_for_both_ranks_or_by_each(warm, tmp_path, task, times):
    noted = tmp_path / "imports"
    ended = warm.run(f"job_handlers:{task}", tmp_path / "job", environment={"TEST_IMPORTS": str(noted)})
    assert ended.value == "rank 0"
    assert noted.read_text() == "imported\n" * times


@pytest.mark.parametrize("task", ["preloaded", "spawned"])
@pytest.mark.parametrize("seeded", [False, True])
def test_random_streams_differ_among_ranks_unless_the_module_seeds_them(warm, tmp_path, ranks_gate, task, seeded):
    environment = {**ranks_gate.environment, **({"TEST_SEED": "7"} if seeded else {})}
    warm.run(f"job_random:{task}", tmp_path / "job", environment=environment)
    zero, one = (json.loads(line) for line in ranks_gate.heard(2))
    assert zero["rank"] != one["rank"]
    assert zero["place"] != one["place"], "what one rank uploads would lie where the other's does"
    assert (zero["random"] == one["random"]) == seeded
    assert (zero["numpy"] == one["numpy"]) == seeded
    if seeded:
        assert zero["random"] == pytest.approx(0.32383276483316237)
        assert zero["numpy"] == pytest.approx(0.07630828937395717)


@pytest.mark.end("a rank does not begin the function in `Timeouts.start`", "USER:RanksNotReady")
def test_imports_of_fresh_interpreters_have_the_deadline_of_the_start_too(warm, tmp_path, as_promised):
    ended = warm.run("job_late:never_begins", tmp_path / "job", kind="execute")
    as_promised(ended)
    text = uploaded_error(ended).message
    assert "have not begun the task's function in time" in text
    assert "still importing, or loading the task, after 6 s" in text
    assert ended.scratch == []


SCRIPT = """
import json
import costly
from flytekit import task
from flytekitplugins_safedist import SafeTorch

@task(task_config=SafeTorch(nproc_per_node=3))
def train() -> int:
    return costly.TWO + 1

if __name__ == "__main__":
    print("found", train())
"""
COSTLY = """
import os
with open(os.environ["TEST_IMPORTS"], "a") as imports:
    imports.write("imported ")
TWO = 2
"""


def test_what_a_script_imports_is_imported_once_for_all_its_ranks(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "costly.py").write_text(COSTLY)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TEST_IMPORTS": str(tmp_path / "imports")}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "found 3" in done.stdout
    assert "start_method preload" in done.stderr
    assert (tmp_path / "imports").read_text().split() == ["imported"] * 2, "by the script, and for its ranks"


SPAWNING = """
import multiprocessing
from flytekit import task
from flytekitplugins_safedist import SafeTorch

def square(number: int) -> int:
    return number ** 2

@task(task_config=SafeTorch(nproc_per_node=1))
def train() -> int:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return sum(pool.map(square, range(4)))

if __name__ == "__main__":
    print("found", train())
"""


@pytest.mark.parametrize("command", [["package/tool.py"], ["-m", "package.tool"]], ids=["a file", "a module"])
def test_processes_that_a_rank_spawns_find_what_the_script_defines(tmp_path, command):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").touch()
    # What only the module finds: a spawned process that took it for a file would not.
    relative = "from . import __name__ as here\n" if command[0] == "-m" else ""
    (tmp_path / "package/tool.py").write_text(relative + SPAWNING)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "found 14" in done.stdout
