"""What ranks find: variables in the promised order of precedence, and nothing of a round that is over."""

from __future__ import annotations

import json
import os

import pytest

from tests.harness.procs import alive
from tests.harness.product import SAFE_IMPORT_ENVIRONMENT


@pytest.fixture
def told(warm, tmp_path, ranks_gate, monkeypatch):
    """A function that runs a task in a pod with ``given`` variables, and returns those that its first rank found."""
    for name in ("OMP_NUM_THREADS", "TRITON_CACHE_DIR", *SAFE_IMPORT_ENVIRONMENT):
        monkeypatch.delenv(name, raising=False)

    def run(task: str, *, kind: str = "call", **given: str) -> dict[str, str]:
        environment, call = {**ranks_gate.environment, **given}, f"job_environment:{task}"
        ended = warm.run(call, tmp_path / "job", kind=kind, environment=environment)
        assert ended.code == 0, ended.err
        (line,) = ranks_gate.heard(1)
        return json.loads(line)

    return run


@pytest.mark.parametrize(
    ("kind", "given", "threads"),
    [("call", {}, "1"), ("execute", {"OMP_NUM_THREADS": "2"}, "2")],
    ids=["locally", "in a pod that says otherwise"],
)
def test_ranks_that_share_a_node_compute_on_one_thread_each_unless_the_pod_says_otherwise(told, kind, given, threads):
    odd = os.fsdecode(b"not utf-8: \xff\xfe")
    found = told("two_ranks", kind=kind, **given, ODD=odd, ODD_TOKEN=odd)
    assert (found["OMP_NUM_THREADS"], found["at import"]) == (threads, threads)
    assert found["ODD"] == odd, "what is not UTF-8 reaches the ranks as it is, and harms nobody"


def test_a_rank_on_its_own_has_the_whole_node_and_none_of_the_variables_that_make_importing_safe(told):
    found = told("one_rank")
    assert "OMP_NUM_THREADS" not in found
    assert found["at import"] is None
    assert not SAFE_IMPORT_ENVIRONMENT.keys() & found.keys()


def test_the_tasks_word_beats_the_pods_and_safedists(told):
    pod = {"OMP_NUM_THREADS": "2", "TRITON_CACHE_DIR": "/pods", "TEST_POD": "the pod's"}
    found = told("with_variables_of_its_own", **pod)
    assert (found["OMP_NUM_THREADS"], found["at import"]) == ("3", "3")
    assert found["TRITON_CACHE_DIR"] == "/mine"
    assert found["TEST_POD"] == "the task's"
    assert found["TEST_NO_KEY"] == "", "what is None, Flyte sets so"


def test_in_a_pod_the_container_has_the_tasks_word_or_that_of_the_execution_which_beats_it(told):
    found = told("with_variables_of_its_own", kind="execute", TEST_POD="the execution's", OMP_NUM_THREADS="2")
    assert (found["OMP_NUM_THREADS"], found["at import"]) == ("2", "2")
    assert found["TEST_POD"] == "the execution's"


def test_a_new_round_finds_no_process_and_no_scratch_of_the_round_before_it(warm, tmp_path, ranks_gate):
    task = "job_environment:leaves_a_process_behind"
    running = warm.start(task, tmp_path / "job", environment=ranks_gate.environment)
    (pid,) = ranks_gate.heard(1)
    (names,) = ranks_gate.heard(1)
    assert not alive(int(pid))
    assert json.loads(names) == ["1-0", "1-1", "cache", "inputs", "logs", "node", "orders", "owner", "round-1"]
    ranks_gate.let_go(1)
    ended = running.wait()
    assert (ended.code, ended.left) == (0, [])
