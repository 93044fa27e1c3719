"""A node that cannot begin comes to the others with its error, which ends the job at once and is uploaded once.

Real nodes in processes of their own, over loopback, with the variables that a PyTorchJob gives its pods. Nothing here
waits out ``Timeouts.rendezvous`` (90 s): an error that is lost makes these tests fail by what is uploaded.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from flyteidl.core import errors_pb2, execution_pb2

from tests.harness.job import Job, ended
from tests.harness.procs import KILL, ROOT, Ended, Warm, until, uploaded_error, uploaded_output
from tests.harness.registered import registered

BROKEN = {"TEST_BROKEN": "yes"}
RECOVERABLE, SYSTEM = errors_pb2.ContainerError.RECOVERABLE, execution_pb2.ExecutionError.SYSTEM
MISSING = "ModuleNotFoundError: No module named 'no_such_module_here'"


class Unloadable(Job):
    """Pods of one PyTorchJob, one rank each, which give up early."""

    module = "job_unloadable"
    nproc_per_node = 1

    def __init__(self, warm: Warm, directory: Path, task: str, more: dict[str, str] | None = None) -> None:
        super().__init__(warm, directory, task, "", more)
        self.registered = {"timeouts": {"rendezvous": 90, "heartbeat": 6, "upload": 60}}
        self.nodes = {"fixed": "2", "ranged": "2:3"}[task]


def cannot_import(ended: Ended, *nodes: int) -> bool:
    """Whether what is uploaded is the one text: the cause, and the user's frames only."""
    error = uploaded_error(ended)
    first, blank, *others = error.message.splitlines()
    assert (error.code, error.kind) == ("USER:ModuleNotFoundError", 0)  # NON_RECOVERABLE: it would repeat
    assert first in [f"node {node} ({socket.gethostname()}) cannot begin: it raised {MISSING}" for node in nodes]
    assert (blank, others[0]) == ("", "Traceback (most recent call last):")
    assert others[-3:] == [MISSING, "", "Not restarted in place: no rank was started."]
    files = [line.split('"')[1] for line in others if line.startswith('  File "')]
    return set(files) == {str(ROOT / "tests" / "jobs" / "job_unloadable.py")}


def test_what_node_1_alone_cannot_import_ends_the_job_and_node_0_uploads_it(warm, tmp_path):
    job = Unloadable(warm, tmp_path, "fixed")
    first, second = ended(job.start(0), job.start(1, BROKEN))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (first.uploaded, second.uploaded) == (["error.pb"], [])
    assert cannot_import(first, 1)


def test_an_import_that_does_not_end_on_node_1_alone_is_the_platforms(warm, tmp_path):
    job = Unloadable(warm, tmp_path, "fixed")
    job.registered["timeouts"] |= {"start": 5}
    first, second = ended(job.start(0), job.start(1, {"TEST_BROKEN": "never ends"}))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (first.uploaded, second.uploaded) == (["error.pb"], [])
    error = uploaded_error(first)
    assert (error.code, error.kind, error.origin) == ("SYSTEM:RanksNotStarted", RECOVERABLE, SYSTEM)
    assert re.match(r"node 1 \(.*\) cannot begin: it raised LaunchTimeoutError: importing the task's", error.message)


def test_what_node_0_cannot_import_ends_the_job_for_a_node_that_waits(warm, tmp_path):
    job = Unloadable(warm, tmp_path, "fixed")
    waiting = job.start(1)
    first, second = ended(job.start(0, BROKEN), waiting)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (first.uploaded, second.uploaded) == (["error.pb"], [])
    assert cannot_import(first, 0)


def test_what_a_job_of_one_node_cannot_import_is_told_as_of_several(warm, tmp_path):
    environment = {**registered(), **BROKEN}
    only = warm.run("job_unloadable:fixed", tmp_path / "job", kind="execute", environment=environment)
    assert (only.code, only.uploaded) == (0, ["error.pb"]), only.err
    assert cannot_import(only, 0)


def test_what_no_node_can_import_is_uploaded_once(warm, tmp_path):
    job = Unloadable(warm, tmp_path, "fixed", BROKEN)
    first, second = ended(job.start(0), job.start(1))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (first.uploaded, second.uploaded) == (["error.pb"], [])
    assert cannot_import(first, 0, 1)  # whichever came first


@pytest.mark.parametrize("nodes", ["node 0", "node 1", "both"])
@pytest.mark.parametrize(("how", "said"), [("sys.exit", "SystemExit: 0"), ("os._exit", "os._exit(0)")])
def test_a_module_that_ends_its_process_at_import_ends_the_job(warm, tmp_path, how, said, nodes):
    job = Unloadable(warm, tmp_path, "fixed")
    broken: list[dict[str, str] | None] = [
        {"TEST_BROKEN": how} if nodes in (f"node {node}", "both") else None for node in range(2)
    ]
    first, second = ended(job.start(0, broken[0]), job.start(1, broken[1]))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (first.uploaded, second.uploaded) == (["error.pb"], [])
    assert f"importing the task's module would have ended this process by {said}" in uploaded_error(first).message


def test_a_task_that_node_1_does_not_have_ends_the_job(warm, tmp_path):
    job = Unloadable(warm, tmp_path, "fixed")
    first, second = ended(job.start(0), job.start(1, task="no_such_task"))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (first.uploaded, second.uploaded) == (["error.pb"], [])
    assert "AttributeError" in uploaded_error(first).message
    assert "no_such_task" in uploaded_error(first).message


def test_a_scratch_directory_that_node_1_cannot_use_ends_the_job(warm, tmp_path):
    job = Unloadable(warm, tmp_path, "fixed")
    first, second = ended(job.start(0), job.start(1, {"SAFEDIST_SCRATCH_ROOT": str(tmp_path / "nowhere")}))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (first.uploaded, second.uploaded) == (["error.pb"], [])
    assert "node 1" in uploaded_error(first).message
    assert "nowhere" in uploaded_error(first).message


NO_INPUTS = ("--inputs", "/nowhere/inputs.pb")


def no_inputs(by: Ended) -> str:
    """What was uploaded of inputs that cannot be fetched."""
    error = uploaded_error(by)
    assert (error.code, error.kind, error.origin) == ("SYSTEM:Storage", RECOVERABLE, SYSTEM)
    assert "the task's inputs cannot be fetched from /nowhere/inputs.pb" in error.message
    return error.message


@pytest.mark.end("one node cannot import your code, cannot fetch the inputs, or has no scratch")
@pytest.mark.end("storage stays down for a rank, or a node cannot fetch the inputs", "SYSTEM:Storage")
@pytest.mark.parametrize("node", [0, 1])
def test_inputs_that_one_node_cannot_fetch_end_the_job_and_node_0_uploads_it(warm, tmp_path, node, as_promised):
    job = Unloadable(warm, tmp_path, "fixed")
    pods = [job.start(each, arguments=NO_INPUTS if each == node else ()) for each in (0, 1)]
    first, second = ended(*pods)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (first.uploaded, second.uploaded) == (["error.pb"], [])
    as_promised(first)
    assert (f"node 1 ({socket.gethostname()}) cannot begin" in no_inputs(first)) is (node == 1)


def test_in_a_range_the_node_that_leads_the_job_uploads_what_another_cannot_fetch(warm, tmp_path):
    job = Unloadable(warm, tmp_path, "ranged")
    host = job.start(0)
    until(job.listening, "the first node leads the job")
    first, second = ended(host, job.start(1, arguments=NO_INPUTS))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (first.uploaded, second.uploaded) == (["error.pb"], [])
    no_inputs(first)


def test_inputs_that_a_worker_cannot_fetch_without_node_0_leave_it_undecided(warm, tmp_path):
    job = Unloadable(warm, tmp_path, "fixed", registered(nodes="2", timeouts={"rendezvous": 1}))
    [alone] = ended(job.start(1, arguments=NO_INPUTS))
    assert (alone.code, alone.uploaded) == (1, [])
    assert "the task's inputs cannot be fetched" in alone.err


def test_a_replacement_that_cannot_begin_leaves_the_job_to_the_next_one(warm, tmp_path, ranks_gate):
    job = Unloadable(warm, tmp_path, "fixed", ranks_gate.environment)
    first, lost = job.start(0), job.start(1)
    ranks_gate.heard(2)
    lost.signal(KILL)
    lost.wait()
    [broken] = ended(job.start(1, BROKEN))
    assert broken.code not in {0, -KILL}
    assert broken.uploaded == []
    assert MISSING in broken.err
    again = job.start(1)
    ranks_gate.heard(2)
    ranks_gate.let_go(4)
    done = ended(first, again)
    assert [node.code for node in done] == [0, 0], done[0].err
    assert uploaded_output(done[0]) == "ran"


def test_in_a_range_a_node_that_cannot_import_ends_the_job_and_the_one_that_leads_it_uploads_that(warm, tmp_path):
    job = Unloadable(warm, tmp_path, "ranged")
    host = job.start(0)
    until(job.listening, "the first node leads the job")
    first, second = ended(host, job.start(1, BROKEN))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (first.uploaded, second.uploaded) == (["error.pb"], [])
    assert MISSING in uploaded_error(first).message


def test_in_a_range_that_runs_a_further_node_that_cannot_import_ends_nothing(warm, tmp_path, ranks_gate):
    job = Unloadable(warm, tmp_path, "ranged", ranks_gate.environment)
    host = job.start(0)
    until(job.listening, "the first node leads the job")
    other = job.start(1)
    ranks_gate.heard(2)
    [further] = ended(job.start(2, BROKEN))
    assert (further.code, further.uploaded) == (1, []), further.err
    assert MISSING in further.err
    ranks_gate.let_go(2)
    done = ended(host, other)
    assert [node.code for node in done] == [0, 0], done[0].err + done[1].err
    assert sorted(node.uploaded for node in done) == [[], ["outputs.pb"]]


def test_without_node_0_a_node_that_cannot_import_fails_with_its_error_in_its_log(warm, tmp_path):
    job = Unloadable(warm, tmp_path, "fixed", registered(nodes="2", timeouts={"rendezvous": 1}))
    [alone] = ended(job.start(1, BROKEN))
    assert alone.code == 1
    assert alone.uploaded == []
    assert MISSING in alone.err
    assert "node 0 is missing" in alone.err


MISREGISTERED = registered(nodes="3")
DIFFERENT = "the code in this pod is configured differently from what was registered"


def test_in_a_range_that_runs_a_further_pod_that_is_registered_otherwise_ends_nothing(warm, tmp_path, ranks_gate):
    job = Unloadable(warm, tmp_path, "ranged", ranks_gate.environment)
    host = job.start(0)
    until(job.listening, "the first node leads the job")
    other = job.start(1)
    ranks_gate.heard(2)
    [further] = ended(job.start(2, MISREGISTERED))
    assert (further.code, further.uploaded) == (1, []), further.err
    assert DIFFERENT in further.err
    ranks_gate.let_go(2)
    done = ended(host, other)
    assert [node.code for node in done] == [0, 0], done[0].err + done[1].err
    assert sorted(node.uploaded for node in done) == [[], ["outputs.pb"]]


@pytest.mark.parametrize("task", ["fixed", "ranged"])
def test_a_pod_that_is_registered_otherwise_ends_a_job_that_has_not_begun_with_one_error(warm, tmp_path, task):
    job = Unloadable(warm, tmp_path, task)
    first = job.start(0)
    until(job.listening, "the first node leads the job")
    done = ended(first, job.start(1, MISREGISTERED))
    assert [node.code for node in done] == [0, 0], done[0].err + done[1].err
    assert sorted(node.uploaded for node in done) == [[], ["error.pb"]]
    assert DIFFERENT in uploaded_error(next(node for node in done if node.uploaded)).message
