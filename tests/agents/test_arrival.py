"""A node that cannot begin comes to the others with its error, which ends the job at once and is uploaded once.

Real nodes in processes of their own, over loopback, with the variables that a PyTorchJob gives its pods. Nothing here
waits out ``Timeouts.rendezvous`` (90 s): an error that is lost makes these tests fail by what is uploaded.
"""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest
from flyteidl.core import errors_pb2, execution_pb2, literals_pb2

from tests.harness import needs
from tests.harness.job import Job, ended, succeeded
from tests.harness.objectstore import ObjectStore
from tests.harness.procs import KILL, ROOT, Ended, Running, Warm, until, uploaded_error, uploaded_output
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


def node_0_uploads(*pods: Running) -> Ended:
    """Both leave with 0, and node 0 alone has uploaded an error."""
    first, second = ended(*pods)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (first.uploaded, second.uploaded) == (["error.pb"], [])
    return first


SAID = {
    "yes": f"raised {MISSING}",
    "sys.exit": "importing the task's module would have ended this process by SystemExit: 0",
    "os._exit": "ended with exit code 0 and no result (os._exit, or a native crash)",
}


@pytest.mark.parametrize(("how", "nodes"), [*zip(SAID, ["node 0", "node 1", "both"], strict=True)])
def test_what_a_rank_cannot_import_ends_the_job_and_node_0_uploads_it(warm, tmp_path, how, nodes):
    job = Unloadable(warm, tmp_path, "fixed")
    broken: list[dict[str, str] | None] = [
        {"TEST_BROKEN": how} if nodes in (f"node {node}", "both") else None for node in range(2)
    ]
    first = node_0_uploads(job.start(0, broken[0]), job.start(1, broken[1]))
    error = uploaded_error(first)
    who, _, said = error.message.partition(f" ({socket.gethostname()}) ")
    assert who in [f"rank {node} (local_rank 0) on node {node}" for node in range(2) if broken[node]]
    assert SAID[how] in said
    if how == "yes":
        assert (error.code, error.kind) == ("USER:ModuleNotFoundError", 0)  # NON_RECOVERABLE: it would repeat
        files = [line.split('"')[1] for line in said.splitlines() if line.startswith('  File "')]
        assert set(files) == {str(ROOT / "tests" / "jobs" / "job_unloadable.py")}, "the user's frames only"


def test_a_task_that_node_1_does_not_have_ends_the_job(warm, tmp_path):
    job = Unloadable(warm, tmp_path, "fixed")
    first = node_0_uploads(job.start(0), job.start(1, task="no_such_task"))
    assert "AttributeError" in uploaded_error(first).message
    assert "no_such_task" in uploaded_error(first).message


def test_a_scratch_directory_that_node_1_cannot_use_ends_the_job(warm, tmp_path):
    job = Unloadable(warm, tmp_path, "fixed")
    first = node_0_uploads(job.start(0), job.start(1, {"SAFEDIST_SCRATCH_ROOT": str(tmp_path / "nowhere")}))
    assert "node 1" in uploaded_error(first).message
    assert "nowhere" in uploaded_error(first).message


@pytest.fixture
def full_disk(tmp_path):
    needs.root("mount a small tmpfs")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "safedist-test", str(disk)], check=True)
    (disk / "full").write_bytes(bytes(16 << 10))
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_inputs_that_find_no_room_on_node_1_end_the_job_and_node_0_uploads_it(warm, tmp_path, full_disk):
    inputs = literals_pb2.LiteralMap()
    inputs.literals["text"].scalar.primitive.string_value = "some inputs"
    (tmp_path / "inputs.pb").write_bytes(inputs.SerializeToString())
    job = Unloadable(warm, tmp_path, "fixed", {"SAFEDIST_SCRATCH_ROOT": str(full_disk)})
    arguments = ("--inputs", str(tmp_path / "inputs.pb"))
    room = {"SAFEDIST_SCRATCH_ROOT": ""}
    first = node_0_uploads(job.start(0, room, arguments=arguments), job.start(1, arguments=arguments))
    error = uploaded_error(first)
    assert error.code == "USER:ScratchError"
    assert "the task's inputs cannot be written to the scratch directory" in error.message
    assert str(full_disk) in error.message
    assert "node 1" in error.message


NO_INPUTS = ("--inputs", "/nowhere/inputs.pb")


def no_inputs(by: Ended) -> str:
    """What was uploaded of inputs that cannot be fetched."""
    error = uploaded_error(by)
    assert (error.code, error.kind, error.origin) == ("SYSTEM:Storage", RECOVERABLE, SYSTEM)
    assert "the task's inputs cannot be fetched from /nowhere/inputs.pb" in error.message
    return error.message


@pytest.mark.end("one node cannot import your code, cannot fetch it or the inputs, or has no scratch")
@pytest.mark.end("storage", "SYSTEM:Storage")
@pytest.mark.parametrize("node", [0, 1])
def test_inputs_that_one_node_cannot_fetch_end_the_job_and_node_0_uploads_it(warm, tmp_path, node, as_promised):
    job = Unloadable(warm, tmp_path, "fixed")
    pods = [job.start(each, arguments=NO_INPUTS if each == node else ()) for each in (0, 1)]
    first = node_0_uploads(*pods)
    as_promised(first)
    assert (f"node 1 ({socket.gethostname()}) cannot begin" in no_inputs(first)) is (node == 1)


@pytest.fixture
def refusing():
    with ObjectStore(b"") as store:
        store.fault = lambda *_: 403
        yield store.url


@pytest.mark.end("storage", "SYSTEM:Storage")
@pytest.mark.parametrize("nodes", [(0,), (0, 1)], ids=["node 0", "both"])
def test_code_that_a_node_may_not_fetch_ends_the_job_once(warm, tmp_path, refusing, nodes, as_promised):
    job = Unloadable(warm, tmp_path, "fixed")
    first = node_0_uploads(*(job.start(node, {"TEST_CODE": refusing} if node in nodes else None) for node in (0, 1)))
    as_promised(first)
    error = uploaded_error(first)
    assert (error.code, error.kind, error.origin) == ("SYSTEM:Storage", RECOVERABLE, SYSTEM)
    assert "The store refused access to the task's code archive" in error.message


def test_code_that_node_1_does_not_find_ends_the_job_for_good(warm, tmp_path):
    job = Unloadable(warm, tmp_path, "fixed")
    first = node_0_uploads(job.start(0), job.start(1, {"TEST_CODE": str(tmp_path / "gone.tar.gz")}))
    assert (uploaded_error(first).code, uploaded_error(first).kind) == ("USER:CodeNotFoundError", 0)


def test_in_a_range_the_node_that_leads_the_job_uploads_what_another_cannot_fetch(warm, tmp_path):
    job = Unloadable(warm, tmp_path, "ranged")
    host = job.start(0)
    until(job.listening, "the first node leads the job")
    first = node_0_uploads(host, job.start(1, arguments=NO_INPUTS))
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
    done = succeeded(first, again)
    assert uploaded_output(done[0]) == "ran"


@pytest.mark.parametrize("task", ["fixed", "ranged"])
def test_a_replacement_of_node_0_that_cannot_begin_ends_no_job_that_has_begun(warm, tmp_path, ranks_gate, task):
    outputs = tmp_path / "outputs"
    job = Unloadable(warm, tmp_path, task, ranks_gate.environment)
    lost = job.start(0, outputs=outputs)
    until(job.listening, "the first node leads the job")
    other = job.start(1, outputs=outputs)
    ranks_gate.heard(2)
    lost.signal(KILL)
    lost.wait()
    [broken] = ended(job.start(0, BROKEN, outputs=outputs))
    assert broken.code not in {0, -KILL}
    assert MISSING in broken.err
    assert not (outputs / "error.pb").exists()
    again = job.start(0, outputs=outputs)
    ranks_gate.heard(2)
    ranks_gate.let_go(4)
    succeeded(again, other)
    assert (outputs / "outputs.pb").exists()


def test_a_second_node_0_that_cannot_begin_ends_no_job_that_the_first_one_leads(warm, tmp_path, ranks_gate):
    """Both have the machine's own network, so the second one cannot listen, and nobody hears what it has met."""
    outputs = tmp_path / "outputs"
    job = Unloadable(warm, tmp_path, "fixed", ranks_gate.environment)
    pods = [job.start(node, outputs=outputs) for node in (0, 1)]
    ranks_gate.heard(2)
    [second] = ended(job.start(0, arguments=NO_INPUTS, outputs=outputs))
    assert second.code not in {0, -KILL}, second.err
    assert second.err.splitlines()[-1].startswith("[safedist] this pod is to be replaced: node 0 cannot do its part: ")
    assert not (outputs / "error.pb").exists()
    ranks_gate.let_go(2)
    succeeded(*pods)
    assert (outputs / "outputs.pb").exists()


def test_in_a_range_that_runs_a_further_node_that_cannot_import_leaves_and_the_others_go_on(warm, tmp_path, ranks_gate):
    job = Unloadable(warm, tmp_path, "ranged", ranks_gate.environment)
    host = job.start(0)
    until(job.listening, "the first node leads the job")
    other = job.start(1)
    ranks_gate.heard(2)
    [further] = ended(job.start(2, BROKEN))
    assert further.code not in {0, -KILL}, further.err
    assert further.uploaded == []
    assert MISSING in further.err
    ranks_gate.let_go(6)
    done = succeeded(host, other)
    assert sorted(node.uploaded for node in done) == [[], ["outputs.pb"]]
