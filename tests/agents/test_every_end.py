"""Every end of the README's tables of failures, by real agents and processes: what is uploaded, and the exit status.

A row that is not here fails a test. What has a test of its own, or needs more than processes (a kernel's limit, a
network), is asserted in the test that is named in its place.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from flyteidl.core import errors_pb2, execution_pb2

from tests.agents.test_node_0_lost import OnePrefix
from tests.harness.job import Job
from tests.harness.procs import KILL, ROOT, TERM, Ended, Gate, Warm, uploaded_error

NOBODY, RETRIES, FLYTE = "none: the task fails", "the task's `retries`", "Flyte"
PAYS = {
    (errors_pb2.ContainerError.NON_RECOVERABLE, execution_pb2.ExecutionError.USER): NOBODY,
    (errors_pb2.ContainerError.RECOVERABLE, execution_pb2.ExecutionError.USER): RETRIES,
    (errors_pb2.ContainerError.RECOVERABLE, execution_pb2.ExecutionError.SYSTEM): FLYTE,
}
Make = Callable[[Warm, Path, Gate], Ended]


def rows(title: str) -> dict[str, list[str]]:
    """A table of the README by its first column: the others, as text."""
    lines = (ROOT / "README.md").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("| What happens |") and title in line)
    found = {}
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        first, *others = (cell.strip() for cell in line.strip("|").split("|"))
        found[first] = others
    return found


CODES, NODES = rows("Who pays"), rows("What it takes")


def one_pod(call: str, how: str = "", *arguments: str) -> Make:
    def make(warm: Warm, directory: Path, _: Gate) -> Ended:
        return warm.run(call, directory / "job", kind="execute", environment={"TEST_HOW": how}, arguments=arguments)

    return make


def fails(how: str) -> Make:
    return one_pod("job_failing:one_fails", how)


def loses_what_starts_ranks(warm: Warm, directory: Path, gate: Gate) -> Ended:
    pod = warm.start("job_failing:waits", directory / "job", kind="execute", environment=gate.environment)
    os.kill(json.loads(gate.heard(2)[0])["server"], signal.SIGKILL)
    return pod.wait()


def is_told_to_stop(warm: Warm, directory: Path, gate: Gate) -> Ended:
    pod = warm.start("job_failing:waits", directory / "job", kind="execute", environment=gate.environment)
    gate.heard(2)
    pod.signal(TERM)
    return pod.wait()


def waits_without_success(warm: Warm, directory: Path, _: Gate) -> Ended:
    return Job(warm, directory, "torch_impatient", "nothing").start(0).wait()


def loses_node_0_for_good(warm: Warm, directory: Path, gate: Gate) -> Ended:
    job = OnePrefix(warm, directory, "torch_not_replaced", "gate", gate.environment)
    lost, other = job.start(0), job.start(1)
    gate.heard(4)
    lost.signal(KILL)
    lost.wait()
    ended = other.wait()
    job.outputs.rename(ended.files / "outputs")
    return ended


ENDS: dict[str, dict[str, tuple[Make, str]]] = {
    "a rank raises": {"USER:ValueError": (fails("raise"), "raised ValueError: no learning rate")},
    "a rank raises `FlyteRecoverableException`": {
        "USER:FlyteRecoverableException": (fails("recoverable"), "try me again"),
    },
    "a rank is killed from outside": {
        "SYSTEM:SIGKILL": (fails("SIGKILL"), "was killed by SIGKILL"),
        "SYSTEM:SIGTERM": (fails("SIGTERM"), "was killed by SIGTERM"),
    },
    "a rank crashes in native code, or leaves by `os._exit`": {
        "USER:SIGSEGV": (fails("SIGSEGV"), "was killed by SIGSEGV: invalid memory access in native code"),
        "USER:Exit3": (fails("os._exit"), "ended with exit code 3 and no result"),
    },
    "the disk is full, or `Scratch(size_limit=…)` is exceeded "
    "(by default: most of the pod's limit of ephemeral storage)": {
        "USER:OSError": (fails("ENOSPC"), "rank 1 ran out of disk space"),
    },
    "every rank that failed had only lost another one": {
        "USER:PeersLost": (one_pod("job_failing:one_returns_early"), "Rank(s) 1 had already returned"),
    },
    "a collective times out though every rank is there: most likely ranks called different ones": {
        "USER:CollectiveTimeout": (one_pod("job_failing:one_skips_a_collective"), "Where rank 1 was then"),
    },
    "a rank does not begin the function in `Timeouts.start`": {
        "USER:RanksNotReady": (one_pod("job_late:never_begins"), "have not begun the task's function in time"),
    },
    "a node's disk or file server fails (EIO, ESTALE)": {
        "SYSTEM:NodeDisk": (fails("EIO"), "raised OSError: [Errno 5] Input/output error"),
    },
    "outputs are larger than Flyte takes (2 MiB)": {
        "USER:OutputTooLargeError": (one_pod("job_large:large"), "return large values as FlyteFile"),
    },
    "storage stays down for a rank, or a node cannot fetch the inputs": {
        "SYSTEM:Storage": (fails("system"), "the bucket is away"),
        "SYSTEM:Storage for a node": (
            one_pod("job_failing:one_fails", "raise", "--inputs", "/nowhere/inputs.pb"),
            "the task's inputs cannot be fetched from /nowhere/inputs.pb",
        ),
    },
    "ranks cannot be started, or what starts them dies": {
        "SYSTEM:RanksNotStarted": (loses_what_starts_ranks, "SIGKILL"),
    },
    "a pod with `nodes=1` is told to stop (SIGTERM)": {"SYSTEM:Stopped": (is_told_to_stop, "told to stop by SIGTERM")},
    "not every node comes within `Timeouts.rendezvous`": {
        "SYSTEM:RendezvousTimeout": (waits_without_success, "node 1 of 2 did not arrive within 1 s"),
    },
    "nodes are lost more often than `max_replacements`, or one for good": {
        "SYSTEM:NodeLost": (loses_node_0_for_good, "node 0 was lost, and none took its place within 3 s"),
    },
}
"""By row and code: how it comes about, and a part of what the user reads."""

ELSEWHERE = {
    "a rank is killed for want of memory": (
        "unit/job/test_failure_table.py test_what_the_table_says_is_what_is_uploaded"
    ),
    "storage is down for a moment, while code or outputs move": (
        "containers/test_pod_failures.py test_a_store_that_is_down_for_a_moment_during_the_upload_loses_nothing"
    ),
    "a rank of any node fails": (
        "agents/test_nodes.py test_a_failure_on_one_node_restarts_the_ranks_of_both_and_leaves_no_error"
    ),
    "a worker pod is killed, evicted, preempted, paused or cut off": (
        "agents/test_nodes.py test_a_pod_that_is_killed_and_recreated_takes_its_place_and_the_job_succeeds"
    ),
    "a pod is told to stop (preempted, drained), and ranks use "
    "[`checkpoints()`](docs/checkpoints.md#a-pod-that-is-told-to-stop)": (
        "agents/test_preemption.py test_all_ranks_save_at_one_step_and_the_job_goes_on_from_it_when_the_pod_is_replaced"
    ),
    "the same worker is lost three times, and lives less than ten minutes each time it is back": (
        "unit/rendezvous/test_rendezvous_processes.py "
        "test_a_node_that_dies_soon_after_it_is_back_is_replaced_twice_and_the_job_says_why_it_ends"
    ),
    "a worker pod is lost after its ranks have succeeded": (
        "agents/test_nodes.py test_a_node_that_is_lost_after_its_ranks_have_succeeded_restarts_nobody"
    ),
    "one node cannot import your code, cannot fetch the inputs, or has no scratch": (
        "agents/test_arrival.py test_inputs_that_one_node_cannot_fetch_end_the_job_and_node_0_uploads_it"
    ),
    "a node comes late": "agents/test_nodes.py test_a_node_that_never_comes_is_named_in_the_verdict_of_node_0",
    "node 0's pod is killed, evicted, preempted": "agents/test_node_0_lost.py test_node_0_is_lost_while",
    "node 0 freezes, or is cut off": (
        "agents/test_node_0_lost.py test_node_0_wakes_from_a_pause_that_lasted_longer_than_the_heartbeat"
    ),
    "no new node 0 comes within `Timeouts.rendezvous`": (
        "agents/test_node_0_lost.py test_when_nobody_replaces_node_0_the_other_uploads_that_and_a_late_one_finds_it"
    ),
    "a pod comes back when the attempt's outputs or error are uploaded": (
        "agents/test_nodes.py test_a_pod_that_comes_back_when_the_attempt_has_ended_leaves_at_once"
    ),
    "node r > 0 is done before node 0 has uploaded": (
        "agents/test_nodes.py test_all_ranks_of_both_nodes_meet_and_node_0_alone_uploads"
    ),
    "the launcher's pod of an MPIJob is deleted": (
        "unit/container/test_mpi_launching.py "
        "test_a_launcher_that_is_told_to_stop_uploads_that_as_the_platforms_verdict"
    ),
    "the launcher's container of an MPIJob is killed": (
        "unit/container/test_mpi_launching.py test_a_launcher_that_starts_anew_finds_the_agent_that_runs"
    ),
    'in a range (`nodes="2:4"`), a node is lost for good': (
        "agents/test_elastic.py test_when_a_node_is_killed_in_a_collective_the_others_go_on_without_it"
    ),
}
"""By row: the file and the test that asserts it."""

HOST = "h" * 40
"""In the place of a node's name: as long as those of pods are."""

RANK_1 = f"rank 1 (local_rank 1) on node 0 ({HOST}) "
FIRST = {
    "USER:ValueError": RANK_1 + "raised ValueError: n",
    "USER:FlyteRecoverableException": RANK_1 + "raised FlyteRecovera",
    "SYSTEM:SIGKILL": RANK_1 + "was killed by SIGKIL",
    "SYSTEM:SIGTERM": RANK_1 + "was killed by SIGTER",
    "USER:SIGSEGV": RANK_1 + "was killed by SIGSEG",
    "USER:Exit3": RANK_1 + "ended with exit code",
    "USER:OSError": "rank 1 ran out of disk space. Scratch is ",
    "USER:PeersLost": "every rank that failed had only lost its connection to others: none failed by itself",
    "USER:CollectiveTimeout": "a collective timed out: most likely ranks called different collectives. rank 0",
    "USER:RanksNotReady": RANK_1.replace("1", "0", 2) + "raised LaunchError:",
    "SYSTEM:NodeDisk": RANK_1 + "raised OSError: [Er",
    "USER:OutputTooLargeError": RANK_1.replace("1", "0", 2) + "raised OutputTooLarg",
    "SYSTEM:Storage": RANK_1 + "raised FlyteUploadD",
    "SYSTEM:Storage for a node": "the task's inputs cannot be fetched from /nowhere/inputs.pb: ",
    "SYSTEM:RanksNotStarted": "the process that starts and watches this node's ranks is gone, and its ranks with it",
    "SYSTEM:Stopped": "told to stop by SIGTERM; every rank has been ended",
    "SYSTEM:RendezvousTimeout": "node 1 of 2 did not arrive within 1 s",
    "SYSTEM:NodeLost": "node 0 was lost, and none took its place within 3 s",
}
"""How the first 100 characters of each verdict begin: they are all that a list of executions shows."""

UPLOADS_NOTHING = (
    "nothing can be uploaded: the store is down, the pod is told to stop before the task is loaded, "
    "the rank server cannot be started"
)


def test_every_row_of_the_readmes_tables_is_asserted():
    assert {*CODES, *NODES} == {*ENDS, *ELSEWHERE, UPLOADS_NOTHING}
    for row, ends in ENDS.items():
        promised = {code for code in CODES[row][1].split("`")[1::2] if code.startswith(("USER:", "SYSTEM:"))}
        assert {code.split()[0] for code in ends} == promised


@pytest.mark.parametrize("row", ELSEWHERE)
def test_what_is_asserted_elsewhere_is_a_test(row):
    file, _, name = ELSEWHERE[row].partition(" ")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text()


BUDGETS = ("`max_restarts`", "`max_replacements`", FLYTE, "none")


def test_every_row_says_which_budget_it_takes():
    assert [row for row, cells in NODES.items() if not cells[2].startswith(BUDGETS)] == []


@pytest.mark.parametrize(("row", "code"), [(row, code) for row, ends in ENDS.items() for code in ends])
def test_an_end_uploads_what_its_row_says_and_exits_0(warm, tmp_path, ranks_gate: Gate, row, code):
    make, text = ENDS[row][code]
    ended = make(warm, tmp_path, ranks_gate)
    assert (ended.code, ended.left, ended.uploaded) == (0, [], ["error.pb"]), ended.err
    error = uploaded_error(ended)
    assert (error.code, PAYS[error.kind, error.origin]) == (code.split()[0], CODES[row][2])
    assert text in error.message
    assert said_at_last(ended) == error.message.splitlines()[0]
    shown = error.message.replace(f"({socket.gethostname()})", f"({HOST})")[:100]
    assert shown.startswith(FIRST[code][:100]), shown


def said_at_last(ended: Ended) -> str:
    """The last line of a failed pod's log, which is the first of its termination message: all of that is the verdict's
    first lines, for where a rank was killed for want of memory the kubelet says OOMKilled of the container, and Flyte
    reads no verdict."""
    message = (ended.files / "termination-log").read_bytes()
    assert message
    assert len(message) <= 4096
    first, *_ = message.decode().splitlines()
    if ended.uploaded == ["error.pb"]:
        assert f"{uploaded_error(ended).message}\n".startswith(message.decode().rstrip())
    assert f"[safedist] the job failed: {first}".startswith(ended.err.splitlines()[-1].removesuffix("..."))
    return first


def test_a_node_that_leaves_while_its_job_goes_on_says_that(warm, tmp_path, ranks_gate: Gate):
    job = OnePrefix(warm, tmp_path, "torch_not_replaced", "gate", ranks_gate.environment)
    stays, leaves = job.start(0), job.start(1)
    ranks_gate.heard(4)
    leaves.signal(TERM)
    ended = leaves.wait()
    stays.signal(KILL)
    stays.wait()
    said = "this node leaves (told to stop by SIGTERM; every rank has been ended): the job goes on when its replacement"
    assert ended.code == 137
    assert ended.err.splitlines()[-1] == f"[safedist] {said} is there"
    assert (ended.files / "termination-log").read_text() == f"{said} is there\n"
    assert "the job failed" not in ended.err
    assert "Flyte retries" not in ended.err


def test_where_nothing_can_be_uploaded_the_pod_exits_with_another_status(warm, tmp_path):
    (tmp_path / "file").write_text("in the way")
    place = ("--output-prefix", str(tmp_path / "file" / "outputs"))
    ended = one_pod("job_failing:one_fails", "raise", *place)(warm, tmp_path, None)  # type: ignore[arg-type]
    assert ended.code == 137
    assert "the pod exits [137]" in CODES[UPLOADS_NOTHING][2]
    assert "infrastructure failure, for Flyte to retry: FlyteUpload" in (ended.files / "termination-log").read_text()
