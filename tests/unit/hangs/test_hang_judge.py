"""Who holds up whom, from snapshots as real ranks gave them; and what is no hang."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flytekitplugins_safedist import Hangs
from flytekitplugins_safedist.hangs.gpus import GpuFault, GpuUse, fault_of
from flytekitplugins_safedist.hangs.judge import KINDS, Hang, judge
from flytekitplugins_safedist.hangs.processes import Process
from flytekitplugins_safedist.hangs.recorders import of_horovod
from flytekitplugins_safedist.hangs.snapshot import Snapshot
from flytekitplugins_safedist.hangs.stacks import Frame
from flytekitplugins_safedist.hangs.waits import CALL, STEP, Steps, Wait
from tests.harness.procs import ROOT

THREADS = ((Frame("/app/train.py", 7, "evaluate"),),)
TORCH = "/lib/torch/distributed/distributed_c10d.py"
TOLD_OF = {"is_whole": True, "begun": {}}
SILENT = {"is_whole": False, "begun": {}}
"""Of a rank's recorder: it has begun nothing; it does not answer."""


def wait(members: str, number: int = 4, operation: str = "all_reduce of Float[3]", **facts: Any) -> Wait:
    """In gloo's, 90 seconds old, where 60 are too long."""
    usual = {"group": "0", "since": 1.0, "source": "gloo", "timeout": 1800.0, "limit": 60.0, "age": 90.0}
    return Wait(0, members=members, number=number, operation=operation, **{**usual, **facts})


REDUCE, BARRIER = wait("0-3"), wait("0-3", operation="barrier")


def snapshot(rank: int, *some: Wait, **facts: Any) -> Snapshot:
    waits = tuple(replace(each, rank=rank) for each in some)
    return Snapshot(rank, **{"process": Process(rank, "S"), "threads": THREADS, "waits": waits, **TOLD_OF, **facts})


def waits(rank: int, *some: Wait, **facts: Any) -> Snapshot:
    """In these operations, as its recorder says."""
    some = some or (REDUCE,)
    latest = tuple((each.key, each.number, each.operation) for each in some)
    return snapshot(rank, *some, **{"begun": {each.key: each.number for each in some}, "latest": latest, **facts})


def elsewhere(rank: int, **facts: Any) -> Snapshot:
    """It has come to one collective less."""
    return snapshot(rank, **{"begun": {REDUCE.key: 3}, **facts})


def computes(rank: int, **facts: Any) -> Snapshot:
    return elsewhere(rank, **{"cpu": 1.0, **facts})


def in_state(state: str, wchan: str = "", **facts: Any) -> dict[str, Any]:
    """At both looks."""
    return {"process": Process(1, state, wchan), "stays": state, **facts}


def found(*snapshots: Snapshot) -> Hang:
    hang = judge(snapshots)
    assert hang is not None
    return hang


# --- one is missing -------------------------------------------------------------------------------------------------
QUIET_SAVE = {"steps": Steps(is_writing=True), **in_state("D")}
IN_LOADER = ((Frame("/lib/torchdata/stateful_dataloader/x.py", 9, "_get_data"),),)
IN_QUEUE = ((Frame("/lib/multiprocessing/connection.py", 395, "_recv"),),)
NO_ANSWER = {"threads": (), **SILENT}


@pytest.mark.parametrize(
    ("facts", "kind", "says"),
    [
        ({}, "missing", "rank 1 is at train.py:7 in evaluate, and does nothing (sleeping); rank 0 waits in all_reduce"),
        ({"holds_gil": True}, "gil", "in native code that holds Python's lock"),
        (in_state("T", **NO_ANSWER), "frozen", "rank 1 is stopped (SIGSTOP)"),
        (in_state("D"), "frozen", "rank 1 is in uninterruptible sleep"),
        (in_state("D", **NO_ANSWER), "frozen", "rank 1 is in uninterruptible sleep"),
        (in_state("D", stays="", cpu=0.9, moved=True), "slow", "moves"),
        (in_state("D", data=5_000_000), "slow", "reads or writes (5.0 MB a second)"),
        (in_state("S", "anon_pipe_read"), "input", "rank 1 waits for input at train.py:7"),
        ({"threads": IN_QUEUE}, "input", "in _recv (sleeping)"),
        ({"threads": IN_LOADER}, "input", "in _get_data ("),
        ({"process": Process(1, "S", children=(7, 8))}, "missing", "; its child process 7 has ended or is stopped;"),
        ({"returned": True, **SILENT}, "returned", "rank 1 has returned from the task's function"),
        ({"cpu": 1.0, "holds_gil": True}, "slow", "computes (1.0 core(s) in use)"),
        ({"cpu": 0.05, "stays": "R"}, "slow", "computes (0.1 core(s) in use)"),  # where all have little of a core
        ({"data": 20_000}, "slow", "reads or writes"),
        ({"steps": Steps(is_saving=True)}, "slow", "saves or restores a checkpoint"),
        ({"steps": Steps(is_fetched_for=True)}, "slow", "waits for an input that another rank of its node downloads"),
        (QUIET_SAVE, "slow", "saves or restores"),
        (in_state("T", steps=Steps(is_saving=True)), "frozen", "stopped (SIGSTOP)"),
        ({"threads": ((),)}, "missing", "is where nobody knows: its main thread is not among the hundred"),
        ({"handles": "ValueError: bad"}, "missing", "7 in evaluate as it handles ValueError: bad, and does nothing"),
        ({"gpus": (GpuUse(1, "GPU-b", busy=100),)}, "missing", "; its GPU is 100% busy;"),
        ({"gpus": (GpuUse(1, "GPU-b"),)}, "missing", "does nothing (sleeping);"),
    ],
)
def test_one_rank_is_told_apart_from_those_who_wait_for_it(facts: dict[str, Any], kind: str, says: str) -> None:
    hang = found(waits(0), elsewhere(1, **facts))
    assert (hang.kind, hang.culprits, hang.waiting, hang.rank) == (kind, (1,), (0,), 1)
    assert says in hang.why
    assert hang.seconds == 90


RECEIVES = {"threads": ((Frame(TORCH, 2300, "recv"), Frame("/app/train.py", 33, "backward")),), **TOLD_OF}
PAIR_A, PAIR_B, NEXT = wait("0,1", group="A"), wait("2,3", group="B"), wait("1,2", group="B", age=5.0)
NAMELESS = wait("", group="7")
MESSAGE = wait("0,1", 0, "recv 0<-1", group="0, between ranks 0,1")


def in_chain(rank: int, members: str, operation: str) -> Snapshot:
    """In a batch with its neighbours, each pair of which has a wait of its own."""
    return waits(rank, wait(members, 0, operation, group=f"0, between ranks {members}"))


def all_in(*operations: str, members: str = "0,1") -> list[Snapshot]:
    return [waits(rank, wait(members, operation=operation)) for rank, operation in enumerate(operations)]


WORLD_A, WORLD_B = wait("0-2", group="1"), wait("0-2", group="2")
DP_0, DP_1 = wait("0,2", group="dp0"), wait("1,3", 7, group="dp1")
EARLY, LATE = wait("0-2", operation="broadcast of Float[3]"), wait("0-2", 5)
PASSED = waits(2, LATE, latest=((EARLY.key, 4, EARLY.operation), (LATE.key, 5, LATE.operation)))
"""A rank that took another branch may let others pass: what each called at the earliest place tells."""


def stands(rank: int, operation: str = "all_reduce", age: float = 700.0, **facts: Any) -> Snapshot:
    """In a call of torch's of which nothing is recorded: a communicator is being made, say."""
    stack = (Frame(TORCH, 3068, operation), Frame("/app/train.py", 9, "step"))
    call = Wait(rank, "", "0-2", operation, 0, 1.0, CALL, limit=600.0, age=age)
    return snapshot(rank, call, **{"process": Process(rank, "R"), "threads": (stack,), "quiet": 700.0, **facts})


def idle(rank: int, **facts: Any) -> Snapshot:
    """Nothing of it goes on; it has begun no operation."""
    return snapshot(rank, **{"quiet": 700.0, **facts})


def in_step(rank: int, number: int, age: float = 0.0, **facts: Any) -> Snapshot:
    """It has told so many steps, and is late where it has been in this one for a minute."""
    steps = Steps((number, 0), number)
    own = Wait(rank, str(steps.told), "", f"step {number}", max(number, 0), 0.0, STEP, limit=60.0, age=age)
    return snapshot(rank, own, **{**SILENT, "steps": steps, "quiet": age, **facts})


def done(**facts: Any) -> Snapshot:
    return snapshot(1, **{**SILENT, "steps": Steps((4, 0), 4, is_over=True), **facts})


def for_horovod(
    rank: int, number: int, about: str = "", operation: str = "allreduce", *, age: float = 90.0, **facts: Any
) -> Snapshot:
    stack = (Frame("/lib/horovod/torch/mpi_ops.py", 254, operation),)
    record = of_horovod(rank, 3, (number, number - 1, about), stack)
    some = [replace(each, limit=60.0, age=age) for each in record.waits.values()]
    return snapshot(rank, *some, **{"begun": record.begun, "threads": (stack,), **facts})


def not_for_horovod(rank: int, **facts: Any) -> Snapshot:
    """It has come to the end of nine."""
    return snapshot(rank, **{"begun": of_horovod(rank, 3, (9, 9, "")).begun, **facts})


def of_gpu(xid: int) -> dict[str, tuple[GpuFault, ...]]:
    return {"faults": (fault_of(xid, GpuUse(1, "GPU-b"), 0),)}


BARRIER_OF_FS = {"threads": ((Frame("/lib/flytekitplugins_safedist/fs/collective.py", 7, "barrier"),),)}
SAVES = {"steps": Steps((4, 0), 4, is_saving=True), "waits": ()}
PDB = (Frame("/usr/lib/python3.11/cmd.py", 126, "cmdloop"), Frame("/usr/lib/python3.11/pdb.py", 360, "interaction"))
DEBUGPY = (Frame("/lib/debugpy/_vendored/pydevd/pydevd.py", 2188, "do_wait_suspend"),)
ADDS_PROCESS_SET = (Frame("/lib/horovod/common/basics.py", 385, "_add_process_set_impl"), *THREADS[0])
LOST_79 = "rank 1 has a GPU that has failed: GPU 1 (GPU-b) reported Xid 79: GPU has fallen off"


def verdict(*snapshots: Snapshot) -> str:
    """As text: kind, culprits, why; who waits, in what for how long, and what follows from that."""
    hang = judge(snapshots)
    if hang is None:
        return "no hang"
    flags = [name for name in ("is_endless", "may_come", "goes_on") if getattr(hang, name)]
    waiting, culprits = (",".join(map(str, some)) for some in (hang.waiting, hang.culprits))
    facts = f"{hang.what} of step {hang.step} for {hang.seconds:.0f} s"
    return f"{hang.kind} {culprits}: {hang.why} [{waiting} wait; {', '.join([facts, *flags])}]"


VERDICTS: dict[str, tuple[list[Snapshot], str]] = {
    # whom the others wait for
    "it has come, and waits for nothing": ([waits(0), elsewhere(1), elsewhere(2, begun={REDUCE.key: 4})], "missing 1:"),
    "in no group of theirs": (
        [elsewhere(0, begun={"gloo 0 ": 9}), waits(1, wait("1,2", group="1")), snapshot(2)],
        "missing 2:",
    ),  # rank 0 evaluates, and is in no group of the others
    "members of whom nobody knows": (
        [elsewhere(0), waits(1, NAMELESS), elsewhere(2, begun={NAMELESS.key: 3}, is_whole=False)],
        "missing 2:",
    ),
    "who does not say what it waits in is not behind": ([waits(0), elsewhere(1, **SILENT), elsewhere(2)], "missing 2:"),
    # it computes: what it may yet come to is waited for, and it may be the cause in a way that nobody sees
    "it may come": ([waits(0), computes(1, **SILENT)], "symmetric : … for 90 s, may_come]"),
    "it may come to who is idle": ([waits(0), computes(1, **SILENT), elsewhere(2)], "missing 2: … 90 s, may_come]"),
    "not to who has returned": ([waits(0), computes(1, **SILENT), elsewhere(2, returned=True)], "returned 2: … 90 s]"),
    "nor to other calls": ([waits(0), computes(1, **SILENT), waits(2, BARRIER), waits(3)], "mismatch 2: … 90 s]"),
    "nor to blame": ([waits(0), elsewhere(1, **SILENT)], "symmetric : … ; nobody knows what rank 1 waits in"),
    "in a library's call": (
        [waits(0, PAIR_A), elsewhere(1, **RECEIVES), waits(2, PAIR_B), snapshot(3)],
        f"missing 3: … ; rank 0 waits in {PAIR_A}, rank 2 waits in {PAIR_B}",
    ),  # of two stages rank 3 sleeps, and rank 1 waits for its message
    "and a culprit alone": (
        [waits(0, PAIR_A), elsewhere(1, **RECEIVES)],
        "missing 1: … rank 1 is in recv, called at train.py:33 in backward, and does nothing",
    ),
    "nor where it is stopped there": (
        [waits(0), elsewhere(1, **{**RECEIVES, **in_state("T", **SILENT)}), elsewhere(2)],
        "frozen 1,2: rank 1 is stopped … 90 s]",
    ),
    "it waits itself, not for long": ([waits(0, PAIR_A), waits(1, NEXT), snapshot(2)], "missing 2:"),
    "a message that nobody sends": ([waits(0, MESSAGE), snapshot(1), elsewhere(2)], "missing 1:"),
    "it has sent others before": ([waits(0, MESSAGE), snapshot(1, begun={MESSAGE.key: 0}), elsewhere(2)], "missing 1:"),
    "the most certain": (
        [waits(0), elsewhere(1), computes(2), elsewhere(3, returned=True)],
        "returned 1,2,3: … rank 3 has returned",
    ),
    "who may come before who is idle": ([waits(0), elsewhere(1), computes(2)], "slow 1,2: … rank 2 is at"),
    # its disk is full, say: it could not note who is in its group
    "of no known members": ([waits(0), elsewhere(1, begun={"gloo 0 ": 3})], "missing 1:"),
    "with them, of no known members": ([waits(0), waits(1, wait(""))], f"symmetric : all ranks wait in {REDUCE}:"),
    # nobody is missing
    "the few who called something else": ([waits(0), waits(1, BARRIER), waits(2), waits(3)], "mismatch 1:"),
    "at the earliest place": (
        [waits(0, EARLY), waits(1, wait("0-2", operation="barrier")), PASSED],
        "mismatch 1: … rank 1 has called barrier (#4 of group 0), where ranks 0, 2 have called broadcast",
    ),
    "its exception is the cause": (
        [waits(0), waits(1, BARRIER, handles="ValueError: a bad batch"), waits(2)],
        "mismatch 1: … ; rank 1 handles ValueError: a bad batch",
    ),  # nobody hears of it before the rank comes back from there
    "groups crossed": (
        [waits(0, WORLD_A), waits(1, WORLD_B), waits(2, WORLD_A)],
        "mismatch 1: … rank 1 waits in all_reduce of Float[3] (#4 of group 2), and ranks 0, 2 wait in all_reduce of",
    ),
    "groups of other ranks": (
        [waits(0, DP_0), waits(2, DP_0), waits(1, DP_1), waits(3, DP_1)],
        "symmetric : … ranks 0, 2 wait in all_reduce of Float[3] (#4 of group dp0), ranks 1, 3 wait in",
    ),  # the network of one machine is down
    "all in one": ([waits(0), waits(1)], f"symmetric : … all ranks wait in {REDUCE}: the network between them"),
    "both ends of a message": ([in_chain(0, "0,1", "recv 0<-1"), in_chain(1, "0,1", "send 1->0")], "symmetric :"),
    "two who both receive": ([in_chain(0, "0,1", "recv 0<-1"), in_chain(1, "0,1", "recv 1<-0")], "mismatch 1:"),
    "a pipeline of whole messages": (
        [in_chain(0, "0,1", "send 0->1"), in_chain(1, "0-2", "recv 1<-0, send 1->2"), in_chain(2, "1,2", "recv 2<-1")],
        "symmetric :",
    ),
    "a pipeline with a message of one end": (
        [in_chain(0, "0,1", "send 0->1"), in_chain(1, "0-2", "send 1->0, send 1->2"), in_chain(2, "1,2", "recv 2<-1")],
        "mismatch 2:",
    ),
    "other amounts": (all_in("all_to_all of Float[513, 8]", "all_to_all of Float[488, 8]"), "symmetric :"),
    "an amount on one rank alone": (all_in("scatter of Float[2, 2]", "scatter"), "symmetric :"),
    "of one operation": (
        all_in("reduce_scatter of Float[3]", "reduce_scatter of Float[5]"),
        "mismatch 1:",
    ),
    # nothing is recorded
    "a call that nothing records": (
        [stands(0), stands(1), idle(2)],
        "missing 2: … ; ranks 0-1 wait in all_reduce [ … for 700 s, is_endless]",
    ),
    "what is recorded is the better word": ([waits(0), stands(1), elsewhere(2)], "missing 2: … [0 wait;"),
    "a call that is young": ([stands(0, age=10), idle(2)], "no hang"),
    "the others go on": ([stands(0), idle(2, quiet=200.0)], "no hang"),
    "rank 1 may send what rank 0 receives, rank 2 will not": (
        [stands(0), idle(1, cpu=1.0), idle(2, returned=True, **SILENT)],
        "slow 1,2: rank 1 is at … may_come]",
    ),
    "not in the function yet": (
        [stands(0), stands(1), idle(2, has_entered=False, **SILENT)],
        "slow 2: … rank 2 is at train.py:7 in evaluate, and is not in the task's function yet … may_come]",
    ),  # the others are in init_process_group
    "nor answers": ([stands(0), stands(1), idle(2, has_entered=False, **NO_ANSWER)], "may_come]"),
    "both ends of messages that nothing records": (
        [stands(0, "send"), stands(1, "recv")],
        "symmetric : rank 0 waits in",
    ),
    "their first operations differ": (
        [stands(0), stands(1, "barrier"), stands(2)],
        "mismatch 1: rank 1 has called barrier",
    ),
    "all stand in such a call": (
        [stands(0), stands(1), stands(2)],
        "symmetric : all ranks wait in all_reduce, rank 0 in all_reduce, called at train.py:9 in step: the network",
    ),
    # steps
    "behind those who go on": (
        [in_step(0, 9), in_step(1, 4, 90)],
        "missing 1: … step 4 has not ended for 90 s, and 1 rank(s) go on [ … a step of step 4 for 90 s, is_endless]",
    ),
    "the least of all": ([in_step(0, 5, 50), in_step(1, 4, 90)], "missing 1: … step 4 has not ended for 90 s ["),
    "a step that computes": ([in_step(0, 4, 90, cpu=1.0)], "slow 0: … computes … a step of"),
    "who waits is a victim": (
        [in_step(0, 4, 90, **BARRIER_OF_FS), in_step(1, 4, 70)],
        "missing 1: rank 1 is at train.py",
    ),
    "for one that tells no steps": (
        [in_step(0, 4, 90, **BARRIER_OF_FS), elsewhere(1)],
        "missing 1: rank 1 is at train.py",
    ),
    "all wait in a step": ([in_step(0, 4, 90, **BARRIER_OF_FS)], "symmetric : all ranks wait, rank 0 in barrier"),
    "one saves": ([in_step(0, 4, 90), in_step(1, 4, **SAVES)], "slow 1: … saves or restores"),
    "steps without a number": ([in_step(0, -1, 90), in_step(1, -1, 80)], "missing 0,1: … no step has ended for 90 s"),
    "one works": (
        [in_step(0, 4, 90), in_step(1, 4, 90, cpu=1.0)],
        "slow 0,1: rank 1 is at train.py:7 in evaluate, and",
    ),
    "who tells none may work for the other": ([in_step(0, 4, 90), computes(1)], "missing 0: … is_endless, may_come]"),
    "who tells none, and is idle, will not": ([in_step(0, 4, 90), elsewhere(1)], "missing 0: … is_endless]"),
    "an epoch": (
        [in_step(rank, 4, 90, cpu=1.0, quiet=0.5) for rank in range(2)],
        "slow 0,1: … ; operations with others go on [ … goes_on]",
    ),
    "an epoch that one does nothing in": (
        [in_step(rank, 4, 90, cpu=1.0, quiet=0.5 + 80 * rank) for rank in range(2)],
        "slow 0,1: … for 90 s [ … is_endless, may_come]",
    ),
    "who has done its steps says nothing of others'": ([in_step(0, 4, 90), done()], "missing 0: … for 90 s ["),
    "but they may wait for it": ([in_step(0, 4, 90, **BARRIER_OF_FS), done(cpu=1.0)], "slow 1:"),
    "a library is believed": (
        [waits(0, steps=Steps((5, 0), 5)), in_step(1, 4, 90, begun={REDUCE.key: 3}, is_whole=True)],
        "missing 1: … a collective of step 4 for",
    ),
    "by its own age": (
        [in_step(0, 3, 9000, **BARRIER_OF_FS), replace(in_step(1, 3, 9000, cpu=1.0), begun={REDUCE.key: 3})],
        "slow 1: … a step of step 3 for 9000 s, is_endless",
    ),  # a step is hours old, and somebody has begun to wait for who evaluates
    # GPUs
    "all wait, and a GPU has failed": (
        [waits(0), waits(1, **of_gpu(79)), waits(2)],
        f"gpu 1: {LOST_79} … [0,2 wait; a collective of step -1 for 90 s]",
    ),
    "it spins": ([waits(0), computes(1, **of_gpu(79)), waits(2)], f"gpu 1: {LOST_79} … 90 s]"),
    "a fault of the program's": ([waits(0), elsewhere(1, **of_gpu(31))], "missing 1:"),
    "a row that was remapped": ([waits(0), elsewhere(1, **of_gpu(63))], "missing 1:"),
    "a fault of a rank that waits": ([waits(0, **of_gpu(74)), elsewhere(1)], "missing 1:"),
    "a fault alone": ([elsewhere(0), elsewhere(1, **of_gpu(79))], "no hang"),
    # Horovod
    "it has joined": (  # the others have more data; each of their waits is short
        [
            for_horovod(0, 900, "w", age=0.1),
            for_horovod(1, 4, operation="join", quiet=90.0),
            for_horovod(2, 900, age=0.1),
        ],
        "no hang",
    ),
    "one computes for a moment": ([not_for_horovod(0), for_horovod(1, 4, operation="join", quiet=90.0)], "no hang"),
    "not for who is idle": (
        [not_for_horovod(0, quiet=90.0), for_horovod(1, 4, operation="join", quiet=90.0)],
        "missing 0:",
    ),
    "the others' goes without it": (
        [for_horovod(0, 900, "w"), for_horovod(1, 4, operation="join"), for_horovod(2, 900, "w")],
        "symmetric :",
    ),
    "and it does not say that they call what has no name": (
        [for_horovod(0, 900, "w"), for_horovod(1, 4, operation="join"), for_horovod(2, 905, "w")],
        "symmetric :",
    ),
    "the odd tensor": (
        [for_horovod(0, 4, "w"), for_horovod(1, 4, "bias in process set 1"), for_horovod(2, 4, "w")],
        "mismatch 1: … rank 1 has called allreduce of bias in process set 1 (#4 … where ranks 0, 2 have called "
        "allreduce of w (#4",
    ),
    "tensors without a name": ([for_horovod(rank, 4) for rank in range(3)], "symmetric :"),
    "whose counts have come apart": (
        [for_horovod(0, 20, operation="allgather"), for_horovod(1, 26, operation="allgather")],
        "unnamed : … rank 0 waits in allgather (#20 of group Horovod), rank 1 waits in allgather (#26 of",
    ),
    "it has waited for none": ([for_horovod(0, 4, "w"), elsewhere(1, **SILENT)], "missing 1: … 90 s, is_endless]"),
    "it does not wait": ([for_horovod(0, 4, "w"), not_for_horovod(1), for_horovod(2, 4, "w")], "missing 1:"),
    "who waits by spinning, as for NCCL": ([waits(0, cpu=2.0), elsewhere(1)], "missing 1: … ; rank 0 waits in"),
    "who waits by waking": ([waits(0, cpu=0.14), elsewhere(1, cpu=0.56, threads=(ADDS_PROCESS_SET,))], "missing 1:"),
    "and who was called by that": ([waits(0), elsewhere(1, cpu=0.56, threads=(ADDS_PROCESS_SET[::-1],))], "slow 1:"),
    # no hang
    "nobody waits": ([elsewhere(0), elsewhere(1)], "no hang"),
    "one rank": ([waits(0)], "no hang"),
    "not for long": ([waits(0, wait("0-3", age=50.0)), elsewhere(1)], "no hang"),
    "a person debugs": ([waits(0), elsewhere(1, debugged=True)], "no hang"),
    "gdb": ([waits(0), elsewhere(1, process=Process(1, "t"))], "no hang"),
    "pdb": ([waits(0), elsewhere(1, threads=(PDB + THREADS[0],))], "no hang"),
    "debugpy": ([waits(0), elsewhere(1, threads=(*THREADS, DEBUGPY))], "no hang"),
    "it goes on beside": ([waits(0, moved=True), elsewhere(1)], "no hang"),
    "a step within its time": ([in_step(0, 4, 50), in_step(1, 4, 50)], "no hang"),
    "ahead of those who go on": ([in_step(0, 9, 90), in_step(1, 4)], "no hang"),
    "level with them": ([in_step(0, 4, 90), in_step(1, 4)], "no hang"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_who_holds_up_whom(name: str) -> None:
    snapshots, says = VERDICTS[name]
    text = verdict(*snapshots)
    assert all(part in text for part in says.split(" … ")), text


# --- two looks ------------------------------------------------------------------------------------------------------
AT_5 = [waits(0, wait("0-3", 5)), elsewhere(1, begun={REDUCE.key: 4})]


def beside_it(number: int) -> list[Snapshot]:
    """Of ranks that go on with other operations."""
    return [for_horovod(rank, number, "w", age=0.1) for rank in (0, 2)] + [for_horovod(1, 4, "b")]


@pytest.mark.parametrize(
    ("first", "later", "is_same"),
    [
        ([waits(0), elsewhere(1)], [waits(0, cpu=0.05), elsewhere(1, process=Process(1, "S", "futex"))], True),
        ([waits(0), elsewhere(1)], AT_5, False),
        ([in_step(0, 9), in_step(1, 4, 90)], [in_step(0, 12), in_step(1, 4, 93)], True),
        ([in_step(0, 9), in_step(1, 4, 90)], [in_step(0, 12), in_step(1, 5, 90)], False),
        (beside_it(900), beside_it(900), True),
        (beside_it(900), beside_it(901), False),
    ],
)
def test_the_same_hang_has_the_same_key(first: list[Snapshot], later: list[Snapshot], is_same: bool) -> None:
    assert (found(*first).key == found(*later).key) is is_same


# --- what follows ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("hangs", "facts", "ends"),
    [
        (Hangs(), {}, True),  # torch would end it, and cannot say for whom
        (Hangs(), {"may_come": True}, False),  # nor what would have come in time
        (Hangs(), {"is_endless": True}, False),  # nobody would: it is only told
        (Hangs(floor=10), {"is_endless": True}, True),
        (Hangs(floor=10, ceiling=500), {"may_come": True}, False),
        (Hangs(floor=10, ceiling=80), {"may_come": True}, True),
        (Hangs(floor=10, ceiling=80), {"goes_on": True}, False),
        (Hangs(action="fail"), {}, True),
        (Hangs(action="report", floor=10), {}, False),
    ],
)
def test_what_is_ended_is_what_torch_would_end_or_what_the_user_has_asked_for(
    hangs: Hangs, facts: dict[str, Any], ends: bool
) -> None:
    assert replace(found(waits(0), elsewhere(1)), **facts).may_end(hangs) is ends


def test_the_docs_have_the_table_of_kinds() -> None:
    lines = (ROOT / "docs" / "hangs.md").read_text().splitlines()
    first = lines.index("| Kind | What is seen of the rank that holds up the others |") + 2
    assert [line.split("`")[1] for line in lines[first : first + len(KINDS)]] == list(KINDS)
    assert not lines[first + len(KINDS)].startswith("|")


@pytest.mark.parametrize(
    ("used", "by_who_waits", "kind"),
    [(0.14, 0.11, "missing"), (0.14, 0.0, "slow"), (0.25, 0.11, "slow"), (0.25, 0.17, "missing"), (1.0, 1.0, "slow")],
)
def test_what_a_librarys_own_thread_uses_in_every_rank_is_no_work(used: float, by_who_waits: float, kind: str) -> None:
    assert found(waits(0, cpu=by_who_waits), elsewhere(1, cpu=used), waits(2, cpu=used)).kind == kind


@pytest.mark.parametrize("file", ["/app/horovod/train.py", "/lib/horovod/torch/functions.py"])
def test_who_computes_in_a_project_of_that_name_or_in_what_packs_objects_is_slow(file: str) -> None:
    assert found(waits(0), computes(1, threads=((Frame(file, 7, "evaluate"),),))).kind == "slow"
