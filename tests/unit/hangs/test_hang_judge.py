"""Who holds up whom, from snapshots as real ranks gave them; and what is no hang."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from flytekitplugins_safedist import Hangs
from flytekitplugins_safedist.hangs.gpus import GpuFault, GpuUse, fault_of
from flytekitplugins_safedist.hangs.judge import KINDS, Hang, judge
from flytekitplugins_safedist.hangs.processes import Process
from flytekitplugins_safedist.hangs.recorders import RankRecord, merge, of_horovod
from flytekitplugins_safedist.hangs.snapshot import Snapshot
from flytekitplugins_safedist.hangs.stacks import Frame, Stack
from flytekitplugins_safedist.hangs.waits import CALL, Steps, Wait
from tests.harness.procs import ROOT

NOW = 1000.0
THREADS = ((Frame("/app/train.py", 7, "evaluate"),),)
TORCH = "/lib/torch/distributed/distributed_c10d.py"


def of_group(
    members: str, number: int = 4, operation: str = "all_reduce of Float[3]", name: str = "0", **facts: Any
) -> Wait:
    """A wait in gloo's, 90 seconds old, where 60 are too long."""
    usual = {"since": NOW - 90, "source": "gloo", "timeout": 1800.0, "limit": 60.0}
    return Wait(0, name, members, operation, number, **{**usual, **facts})


REDUCE, BARRIER = of_group("0-3"), of_group("0-3", operation="barrier")


def recorded(*waits: Wait, **begun: int) -> RankRecord:
    """Of a rank that waits in these, and has begun so many in other groups, by name."""
    counts = {f"gloo {name[1:]}": count for name, count in begun.items()}
    latest = tuple((wait.key, wait.number, wait.operation) for wait in waits)
    return RankRecord(waits, {**counts, **{wait.key: wait.number for wait in waits}}, latest, is_whole=True)


def waits(rank: int, *some: Wait, **facts: Any) -> Snapshot:
    record = recorded(*(replace(each, rank=rank) for each in some or (REDUCE,)))
    return Snapshot(rank, **{"process": Process(rank, "S"), "time": NOW, "threads": THREADS, "record": record, **facts})


def elsewhere(rank: int, **facts: Any) -> Snapshot:
    """It has come to one collective less."""
    record = RankRecord(begun={REDUCE.key: 3}, is_whole=True)
    return Snapshot(rank, **{"process": Process(rank, "S"), "time": NOW, "threads": THREADS, "record": record, **facts})


def found(*snapshots: Snapshot) -> Hang:
    hang = judge(snapshots)
    assert hang is not None
    return hang


# --- one is missing -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("facts", "kind", "says"),
    [
        ({}, "missing", "rank 1 is at train.py:7 in evaluate, and does nothing (sleeping); rank 0 waits in all_reduce"),
        ({"holds_gil": True}, "gil", "in native code that holds Python's lock"),
        ({"process": Process(1, "T"), "threads": (), "record": RankRecord()}, "frozen", "rank 1 is stopped (SIGSTOP)"),
        ({"process": Process(1, "D"), "is_stuck": True}, "frozen", "rank 1 is in uninterruptible sleep"),
        (
            {"process": Process(1, "D"), "is_stuck": True, "threads": (), "record": RankRecord()},
            "frozen",
            "rank 1 is in uninterruptible sleep",
        ),
        ({"process": Process(1, "D"), "cpu": 0.9, "moved": True}, "slow", "moves"),
        (
            {"process": Process(1, "D"), "is_stuck": True, "data": 5_000_000},
            "slow",
            "reads or writes (5.0 MB a second)",
        ),
        ({"process": Process(1, "S", "anon_pipe_read")}, "input", "rank 1 waits for input at train.py:7"),
        ({"threads": ((Frame("/lib/multiprocessing/connection.py", 395, "_recv"),),)}, "input", "in _recv (sleeping)"),
        (
            {"threads": ((Frame("/lib/torchdata/stateful_dataloader/x.py", 9, "_get_data"),),)},
            "input",
            "in _get_data (",
        ),
        ({"process": Process(1, "S", children=(7, 8))}, "missing", "; its child process 7 has ended or is stopped;"),
        ({"returned": True, "record": RankRecord()}, "returned", "rank 1 has returned from the task's function"),
        ({"cpu": 1.0, "holds_gil": True}, "slow", "computes (1.0 core(s) in use)"),
        ({"cpu": 0.05, "is_running": True}, "slow", "computes (0.1 core(s) in use)"),  # where all have little of a core
        ({"data": 20_000}, "slow", "reads or writes"),
        ({"steps": Steps(is_saving=True)}, "slow", "saves or restores a checkpoint"),
        ({"steps": Steps(is_fetched_for=True)}, "slow", "waits for an input that another rank of its node downloads"),
        ({"steps": Steps(is_writing=True), "process": Process(1, "D"), "is_stuck": True}, "slow", "saves or restores"),
        ({"steps": Steps(is_saving=True), "process": Process(1, "T")}, "frozen", "stopped (SIGSTOP)"),
        ({"threads": ((),)}, "missing", "is where nobody knows: its main thread is not among the hundred"),
    ],
)
def test_one_rank_is_told_apart_from_those_who_wait_for_it(facts: dict[str, Any], kind: str, says: str) -> None:
    hang = found(waits(0), elsewhere(1, **facts))
    assert (hang.kind, hang.culprits, hang.waiting, hang.rank) == (kind, (1,), (0,), 1)
    assert says in hang.why
    assert hang.seconds == 90


def test_who_has_come_to_the_collective_and_waits_for_nothing_is_not_to_blame() -> None:
    ahead = elsewhere(2, record=RankRecord(begun={REDUCE.key: 4}, is_whole=True))
    assert found(waits(0), elsewhere(1), ahead).culprits == (1,)


def test_only_members_of_a_group_are_missing_from_it() -> None:
    """Rank 0 evaluates, and is in no group of the others."""
    pair = of_group("1,2", name="1")
    evaluator = elsewhere(0, record=recorded(_0=9))
    assert found(evaluator, waits(1, pair), elsewhere(2, record=recorded())).culprits == (2,)


def test_where_nobody_knows_the_members_they_are_those_who_have_used_the_group() -> None:
    wait = of_group("", name="7")
    used = elsewhere(2, record=RankRecord(begun={wait.key: 3}))
    assert found(elsewhere(0), waits(1, wait), used).culprits == (2,)


def test_a_rank_that_does_not_say_what_it_waits_in_is_not_behind() -> None:
    silent = elsewhere(1, record=RankRecord())
    hang = found(waits(0), silent, elsewhere(2))
    assert hang.culprits == (2,)
    hang = found(waits(0), silent)
    assert (hang.kind, hang.culprits) == ("symmetric", ())
    assert hang.why.endswith("; nobody knows what rank 1 waits in")


@pytest.mark.parametrize(
    ("others", "kind", "is_sure"),
    [
        ([], "symmetric", False),
        ([elsewhere(2)], "missing", False),  # it may wait for rank 1 in a way that nobody sees
        ([elsewhere(2, returned=True)], "returned", True),
        ([waits(2, BARRIER), waits(3)], "mismatch", True),
    ],
)
def test_what_a_rank_that_does_not_say_may_yet_come_to_is_waited_for(
    others: list[Snapshot], kind: str, *, is_sure: bool
) -> None:
    """Its recorder is too long for one look, say, and it computes."""
    hang = found(waits(0), elsewhere(1, record=RankRecord(), cpu=1.0), *others)
    assert (hang.kind, 1 in hang.culprits) == (kind, False)
    assert hang.may_end(Hangs(floor=10, ceiling=7200)) is is_sure
    assert hang.may_end(Hangs(floor=10, ceiling=90))


def test_who_stands_in_a_librarys_call_is_a_victim_before_a_culprit() -> None:
    """Two stages, two replicas: rank 3 sleeps, and rank 1 waits for what it is to send."""
    one, other = of_group("0,1", name="A"), of_group("2,3", name="B")
    receives = ((Frame(TORCH, 2300, "recv"), Frame("/app/train.py", 33, "backward")),)
    ranks = [
        waits(0, one),
        elsewhere(1, threads=receives, record=recorded()),
        waits(2, other),
        elsewhere(3, record=recorded()),
    ]
    hang = found(*ranks)
    assert (hang.culprits, hang.waiting) == ((3,), (0, 2))
    assert hang.why.endswith("; " + ", ".join(f"rank {rank} waits in {wait}" for rank, wait in ((0, one), (2, other))))
    alone = found(ranks[0], ranks[1])
    assert alone.culprits == (1,), "where there is no other"
    assert "rank 1 is in recv, called at train.py:33 in backward, and does nothing" in alone.why


def test_who_is_waited_for_and_waits_itself_is_followed_to_whom_it_waits_for() -> None:
    """The wait of rank 1 is not old yet: it came late to it."""
    one, other = of_group("0,1", name="A"), of_group("1,2", name="B", since=NOW - 5)
    assert found(waits(0, one), waits(1, other), elsewhere(2, record=recorded())).culprits == (2,)


def test_the_most_certain_of_several_who_are_missing_decides() -> None:
    returned, idle, busy = elsewhere(3, returned=True), elsewhere(1), elsewhere(2, cpu=1.0)
    assert found(waits(0), idle, busy, returned).rank == 3
    hang = found(waits(0), idle, busy)
    assert (hang.kind, hang.rank, hang.culprits) == ("slow", 2, (1, 2)), (
        "rank 1 may wait for it in a way that nobody sees"
    )


def test_what_nobody_sends_is_waited_for_from_the_rank_that_is_to_send_it() -> None:
    message = of_group("0,1", number=0, operation="recv 0<-1", name="0, between ranks 0,1")
    assert found(waits(0, message), elsewhere(1, record=recorded()), elsewhere(2)).culprits == (1,)
    again = elsewhere(1, record=RankRecord(begun={message.key: 0}))
    assert found(waits(0, message), again, elsewhere(2)).culprits == (1,), "it has sent it others before"


# --- nobody is ------------------------------------------------------------------------------------------------------
def test_where_all_wait_the_few_who_called_something_else_are_named() -> None:
    hang = found(waits(0), waits(1, BARRIER), waits(2), waits(3))
    assert (hang.kind, hang.culprits) == ("mismatch", (1,))
    # A rank that took another branch may let others pass: what each called at the earliest place tells.
    early, late = of_group("0-2", operation="broadcast of Float[3]"), of_group("0-2", number=5)
    passed = waits(2, late)
    latest = ((early.key, 4, "broadcast of Float[3]"), *passed.record.latest)
    passed = replace(passed, record=replace(passed.record, latest=latest))
    hang = found(waits(0, early), waits(1, of_group("0-2", operation="barrier")), passed)
    assert (hang.kind, hang.culprits) == ("mismatch", (1,))
    assert hang.why.startswith("rank 1 has called barrier (#4 of group 0), where ranks 0, 2 have called broadcast")


def test_who_stands_somewhere_as_it_handles_an_exception_is_told_with_it() -> None:
    """It is the cause, and nobody hears of it before the rank comes back from there."""
    hang = found(waits(0), waits(1, BARRIER, handles="ValueError: a bad batch"), waits(2))
    assert hang.why.endswith("; rank 1 handles ValueError: a bad batch")
    hang = found(waits(0), elsewhere(1, handles="ValueError: a bad batch"))
    assert "rank 1 is at train.py:7 in evaluate as it handles ValueError: a bad batch, and does nothing" in hang.why


def test_ranks_that_wait_for_each_other_in_two_groups_have_crossed_them() -> None:
    one, other = of_group("0-2", name="1"), of_group("0-2", name="2")
    hang = found(waits(0, one), waits(1, other), waits(2, one))
    assert (hang.kind, hang.culprits) == ("mismatch", (1,))
    assert hang.why == f"rank 1 waits in {other}, and ranks 0, 2 wait in {one}"
    assert str(one) == "all_reduce of Float[3] (#4 of group 1)"


def test_groups_that_share_no_rank_do_not_differ() -> None:
    """The network of one machine is down, in a job of two data-parallel groups."""
    one, other = of_group("0,2", name="dp0"), of_group("1,3", 7, name="dp1")
    hang = found(waits(0, one), waits(2, one), waits(1, other), waits(3, other))
    assert (hang.kind, hang.culprits, hang.waiting) == ("symmetric", (), (0, 1, 2, 3))
    assert "ranks 0, 2 wait in all_reduce of Float[3] (#4 of group dp0), ranks 1, 3 wait in" in hang.why
    together = found(waits(0), waits(1))
    assert together.why.startswith("all ranks wait in all_reduce of Float[3] (#4 of group 0): the network between them")


def test_both_ends_of_a_message_that_does_not_arrive_are_one_and_two_who_both_receive_are_not() -> None:
    def between(rank: int, operation: str) -> Snapshot:
        return waits(rank, of_group("0,1", number=0, operation=operation, name="0, between ranks 0,1"))

    assert found(between(0, "recv 0<-1"), between(1, "send 1->0")).kind == "symmetric"
    assert found(between(0, "recv 0<-1"), between(1, "recv 1<-0")).kind == "mismatch"


def in_chain(rank: int, members: str, operation: str) -> Snapshot:
    """In a batch with its neighbours, each pair of which has a wait of its own."""
    return waits(rank, of_group(members, number=0, operation=operation, name=f"0, between ranks {members}"))


def test_in_a_pipeline_whose_messages_all_have_both_ends_it_is_the_network() -> None:
    first, last = in_chain(0, "0,1", "send 0->1"), in_chain(2, "1,2", "recv 2<-1")
    hang = found(first, in_chain(1, "0-2", "recv 1<-0, send 1->2"), last)
    assert (hang.kind, hang.culprits) == ("symmetric", ())
    hang = found(first, in_chain(1, "0-2", "send 1->0, send 1->2"), last)
    assert hang.kind == "mismatch", "nobody sends what rank 1 is to receive from rank 0, and rank 0 receives nothing"


@pytest.mark.parametrize(
    "operations",
    [
        ("all_to_all of Float[513, 8]", "all_to_all of Float[488, 8]"),
        ("scatter of Float[2, 2]", "scatter"),
    ],
)
def test_what_each_rank_hands_in_another_amount_of_is_one_operation(operations: tuple[str, str]) -> None:
    one, other = (of_group("0,1", operation=operation) for operation in operations)
    assert found(waits(0, one), waits(1, other)).kind == "symmetric"
    sums = (of_group("0,1", operation=f"reduce_scatter of Float[{size}]") for size in (3, 5))
    assert found(*(waits(rank, each) for rank, each in enumerate(sums))).kind == "mismatch"


PDB = (Frame("/usr/lib/python3.11/cmd.py", 126, "cmdloop"), Frame("/usr/lib/python3.11/pdb.py", 360, "interaction"))
DEBUGPY = (Frame("/lib/debugpy/_vendored/pydevd/pydevd.py", 2188, "do_wait_suspend"),)


def test_a_wait_counts_by_its_own_age_and_no_other() -> None:
    """A step is hours old, and somebody has just begun to wait for the rank that evaluates."""
    steps = {"steps": Steps((3, 0), 3), "step": Wait(0, "", "", "step 3", 3, NOW - 9000, "step", limit=7200.0)}
    hang = found(waits(0, of_group("0-3", since=NOW - 20), **steps), elsewhere(1, cpu=1.0, **steps))
    assert (hang.what, hang.seconds) == ("a step", 9000)
    assert not hang.may_end(Hangs())


def test_the_same_hang_has_the_same_key_and_a_step_further_it_is_another() -> None:
    first = found(waits(0), elsewhere(1))
    again = found(waits(0, cpu=0.05), elsewhere(1, process=Process(1, "S", "futex")))
    further = found(waits(0, of_group("0-3", 5)), elsewhere(1, record=RankRecord(begun={REDUCE.key: 4}, is_whole=True)))
    assert first.key == again.key != further.key


# --- where nothing is recorded --------------------------------------------------------------------------------------
def stands(rank: int, since: float = NOW - 700, **facts: Any) -> Snapshot:
    """In a collective whose communicator is being made."""
    stack: Stack = (Frame(TORCH, 3068, "all_reduce"), Frame("/app/train.py", 9, "step"))
    call = Wait(rank, "", "0-2", "all_reduce", 0, since, CALL, limit=600.0)
    record = RankRecord(is_whole=True)
    usual = {"process": Process(rank, "R"), "time": NOW, "threads": (stack,), "record": record, "call": call}
    return Snapshot(rank, **{**usual, "quiet": 700.0, **facts})


def test_a_call_that_nothing_records_counts_where_nothing_else_does() -> None:
    hang = found(stands(0), stands(1), elsewhere(2, record=RankRecord(is_whole=True), quiet=700.0))
    assert (hang.kind, hang.culprits, hang.is_endless) == ("missing", (2,), True)
    assert hang.why.endswith("; ranks 0-1 wait in all_reduce")
    assert found(waits(0), stands(1), elsewhere(2)).waiting == (0,), "what is recorded is the better word"
    assert judge([stands(0, NOW - 10), elsewhere(2, quiet=700.0)]) is None
    assert judge([stands(0), elsewhere(2, quiet=200.0)]) is None, "the others go on: they may have no part in it"


def test_of_a_call_whose_members_nobody_knows_who_may_come_is_waited_for() -> None:
    """Rank 0 receives what rank 1 is to send; rank 2 had no part in it, and is done."""
    computes = elsewhere(1, record=RankRecord(is_whole=True), quiet=700.0, cpu=1.0)
    hang = found(stands(0), computes, elsewhere(2, record=RankRecord(), returned=True))
    assert (hang.kind, hang.rank, hang.may_come) == ("slow", 1, True)


def test_a_rank_that_is_not_in_the_function_yet_may_come() -> None:
    """The others are in init_process_group."""
    late = elsewhere(2, record=RankRecord(), quiet=700.0, has_entered=False)
    hang = found(stands(0), stands(1), late)
    assert (hang.kind, hang.culprits, hang.may_come) == ("slow", (2,), True)
    assert "rank 2 is at train.py:7 in evaluate, and is not in the task's function yet" in hang.why
    assert found(stands(0), stands(1), replace(late, threads=())).may_come, "it does not answer"


def test_where_all_stand_in_such_a_call_it_is_the_network() -> None:
    hang = found(stands(0), stands(1), stands(2))
    assert (hang.kind, hang.culprits) == ("symmetric", ())
    assert hang.why.startswith(
        "all ranks wait in all_reduce, rank 0 in all_reduce, called at train.py:9 in step: the network"
    )


# --- what follows ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("hangs", "wait", "facts", "ends"),
    [
        (Hangs(), {}, {}, True),  # torch would end it, and cannot say for whom
        (Hangs(), {}, {"cpu": 1.0}, False),  # nor what would have come in time
        (Hangs(), {"timeout": math.inf}, {}, False),  # nobody would: it is only told
        (Hangs(floor=10), {"timeout": math.inf}, {}, True),
        (Hangs(floor=10, ceiling=500), {}, {"cpu": 1.0}, False),
        (Hangs(floor=10, ceiling=80), {}, {"cpu": 1.0}, True),
        (Hangs(action="fail"), {}, {}, True),
        (Hangs(action="report", floor=10), {}, {}, False),
    ],
)
def test_what_is_ended_is_what_torch_would_end_or_what_the_user_has_asked_for(
    hangs: Hangs, wait: dict[str, Any], facts: dict[str, Any], ends: bool
) -> None:
    assert found(waits(0, of_group("0-3", **wait)), elsewhere(1, **facts)).may_end(hangs) is ends


def test_the_docs_have_the_table_of_kinds() -> None:
    lines = (ROOT / "docs" / "hangs.md").read_text().splitlines()
    first = lines.index("| Kind | What is seen of the rank that holds up the others |") + 2
    assert lines[first : first + len(KINDS)] == [f"| `{name}` | {kind.means} |" for name, kind in KINDS.items()]


def test_what_a_gpu_has_recorded_is_judged() -> None:
    said = json.loads((ROOT / "tests/unit/hangs/nccl_said.json").read_text())["all_reduce, the other sleeps"]
    names = {("nccl", "3"): "4", ("nccl", "2"): "3"}
    ranks = []
    for rank in (0, 1):
        answer = said[str(rank)]
        record = merge(rank, {"groups": {"0": "0,1"}}, {"nccl": answer["nccl"]}, names)
        record = replace(record, waits=tuple(replace(wait, limit=1.0) for wait in record.waits))
        cpu = 2.0 if rank == 0 else 0.0  # as it was: who waits for NCCL spins
        ranks.append(elsewhere(rank, record=record, time=answer["now_ns"] / 1e9, cpu=cpu))
    hang = found(*ranks)
    assert (hang.kind, hang.culprits) == ("missing", (1,))
    assert hang.why.endswith("rank 0 waits in all_reduce of Float[7] (#4 of group 0)")


# --- in a job that tells its steps ----------------------------------------------------------------------------------
def in_step(rank: int, number: int, still: float = 0.0, **facts: Any) -> Snapshot:
    """It has told so many steps, and is late where it has been in this one for a minute."""
    steps = Steps((number, 0), number)
    wait = Wait(rank, str(steps.told), "", f"step {number}", max(number, 0), NOW - still, "step", limit=60.0)
    return elsewhere(rank, **{"record": RankRecord(), "steps": steps, "step": wait, "quiet": still, **facts})


BARRIER_OF_FS = ((Frame("/lib/flytekitplugins_safedist/fs/collective.py", 7, "barrier"),),)
SAVES = {"steps": Steps((4, 0), 4, is_saving=True), "step": None}


@pytest.mark.parametrize(
    ("snapshots", "kind", "culprits", "says"),
    [
        ([in_step(0, 4, 90)], "missing", (0,), "rank 0 is at train.py:7 in evaluate, and does nothing"),
        ([in_step(0, 9), in_step(1, 4, 90)], "missing", (1,), "step 4 has not ended for 90 s, and 1 rank(s) go on"),
        ([in_step(0, 5, 50), in_step(1, 4, 90)], "missing", (1,), "step 4 has not ended for 90 s"),
        ([in_step(0, 4, 90, cpu=1.0)], "slow", (0,), "computes"),
        ([in_step(0, 4, 90, threads=BARRIER_OF_FS), in_step(1, 4, 70)], "missing", (1,), "rank 1 is at train.py"),
        ([in_step(0, 4, 90, threads=BARRIER_OF_FS), elsewhere(1)], "missing", (1,), "rank 1 is at train.py"),
        ([in_step(0, 4, 90, threads=BARRIER_OF_FS)], "symmetric", (), "all ranks wait, rank 0 in barrier"),
        ([in_step(0, 4, 90), in_step(1, 4, **SAVES)], "slow", (1,), "saves or restores"),
        ([in_step(0, -1, 90), in_step(1, -1, 80)], "missing", (0, 1), "no step has ended for 90 s"),
        ([in_step(0, 4, 90), in_step(1, 4, 90, cpu=1.0)], "slow", (0, 1), "rank 1 is at train.py:7 in evaluate, and"),
    ],
    ids=["alone", "behind", "all", "computes", "others wait", "silent", "all wait", "saves", "no count", "one works"],
)
def test_who_is_in_a_step_for_too_long(snapshots: list[Snapshot], kind: str, culprits: tuple[int, ...], says: str):
    hang = found(*snapshots)
    assert (hang.kind, hang.culprits, hang.what, hang.is_endless) == (kind, culprits, "a step", True)
    assert says in hang.why


def test_who_tells_no_steps_and_computes_may_be_whom_a_rank_in_its_step_waits_for() -> None:
    """By a file, say, which nobody sees."""
    hang = found(in_step(0, 4, 90), elsewhere(1, cpu=1.0))
    assert (hang.kind, hang.culprits, hang.may_come) == ("missing", (0,), True)
    assert not found(in_step(0, 4, 90), elsewhere(1)).may_come


def test_a_step_in_which_operations_with_others_go_on_is_told_of_and_never_ended() -> None:
    """An epoch, say, which takes longer than any rank works alone."""
    hangs = Hangs(floor=10, ceiling=60)
    epoch = found(in_step(0, 4, 90, cpu=1.0, quiet=0.5), in_step(1, 4, 90, cpu=1.0, quiet=0.5))
    assert epoch.why.endswith("; operations with others go on")
    assert not epoch.may_end(hangs)
    assert found(in_step(0, 4, 90, cpu=1.0, quiet=0.5), in_step(1, 4, 90, cpu=1.0, quiet=80.0)).may_end(hangs)


def test_who_has_done_its_steps_says_nothing_of_those_of_others() -> None:
    done = in_step(1, 4, steps=Steps((4, 0), 4, is_over=True), step=None)
    hang = found(in_step(0, 4, 90), done)
    assert (hang.kind, hang.culprits) == ("missing", (0,))
    assert hang.why.endswith("step 4 has not ended for 90 s")
    hang = found(in_step(0, 4, 90, threads=BARRIER_OF_FS), replace(done, cpu=1.0))
    assert (hang.kind, hang.culprits) == ("slow", (1,)), "whom the other waits for"


def test_where_a_library_says_who_waits_it_is_believed_and_the_step_is_named() -> None:
    culprit = in_step(1, 4, 90, record=RankRecord(begun={REDUCE.key: 3}, is_whole=True))
    hang = found(waits(0, steps=Steps((5, 0), 5)), culprit)
    assert (hang.culprits, hang.step, hang.what) == ((1,), 4, "a collective")


def test_what_is_no_hang() -> None:
    groups = {
        "nobody waits": [elsewhere(0), elsewhere(1)],
        "one rank": [waits(0)],
        "not for long": [waits(0, of_group("0-3", since=NOW - 50)), elsewhere(1)],
        "a person debugs": [waits(0), elsewhere(1, debugged=True)],
        "gdb": [waits(0), elsewhere(1, process=Process(1, "t"))],
        "pdb": [waits(0), elsewhere(1, threads=(PDB + THREADS[0],))],
        "debugpy": [waits(0), elsewhere(1, threads=(*THREADS, DEBUGPY))],
        "it goes on beside": [waits(0, moved=True), elsewhere(1)],
    }
    steps = {
        "within its time": [in_step(0, 4, 50), in_step(1, 4, 50)],
        "ahead of those who go on": [in_step(0, 9, 90), in_step(1, 4)],
        "level with them": [in_step(0, 4, 90), in_step(1, 4)],
        "a person debugs one in its step": [in_step(0, 4, 90, debugged=True)],
    }
    assert {name: hang for name, some in (groups | steps).items() if (hang := judge(some)) is not None} == {}


def test_a_step_that_ends_between_two_looks_is_another_hang_and_one_that_goes_on_elsewhere_is_not() -> None:
    first, further = found(in_step(0, 9), in_step(1, 4, 90)), found(in_step(0, 12), in_step(1, 4, 93))
    assert first.key == further.key != found(in_step(0, 12), in_step(1, 5, 90)).key


# --- GPUs -----------------------------------------------------------------------------------------------------------
def of_gpu(xid: int) -> tuple[GpuFault, ...]:
    return (fault_of(xid, GpuUse(1, "GPU-b"), 0),)


@pytest.mark.parametrize(
    "others",
    [[waits(1, faults=of_gpu(79)), waits(2)], [elsewhere(1, cpu=1.0, faults=of_gpu(79)), waits(2)]],
    ids=["all wait", "it spins"],
)
def test_a_hang_is_of_the_gpu_that_has_failed_where_its_rank_holds_up_the_others(others: list[Snapshot]) -> None:
    hang = found(waits(0), *others)
    assert (hang.kind, hang.culprits, hang.waiting) == ("gpu", (1,), (0, 2))
    assert hang.may_end(Hangs())
    assert hang.why.startswith("rank 1 has a GPU that has failed: GPU 1 (GPU-b) reported Xid 79: GPU has fallen off")


@pytest.mark.parametrize(
    ("xid", "of"), [(31, 1), (63, 1), (74, 0)], ids=["the program's", "a row that was remapped", "of a rank that waits"]
)
def test_a_fault_that_does_not_hold_up_anybody_takes_no_blame(xid: int, of: int) -> None:
    faults = {rank: of_gpu(xid) if rank == of else () for rank in (0, 1)}
    assert found(waits(0, faults=faults[0]), elsewhere(1, faults=faults[1])).kind == "missing"


def test_nobody_hangs_for_a_fault_alone() -> None:
    assert judge([elsewhere(0), elsewhere(1, faults=of_gpu(79))]) is None


@pytest.mark.parametrize(("busy", "says"), [(100, "; its GPU is 100% busy;"), (None, "does nothing (sleeping);")])
def test_how_busy_the_gpu_is_is_told(busy: int | None, says: str) -> None:
    assert says in found(waits(0), elsewhere(1, gpus=(GpuUse(1, "GPU-b", busy=busy),))).why


# --- Horovod --------------------------------------------------------------------------------------------------------
def for_horovod(
    rank: int, number: int, about: str = "", operation: str = "allreduce", *, age: float = 90, **facts: Any
) -> Snapshot:
    stack = (Frame("/lib/horovod/torch/mpi_ops.py", 254, operation),)
    record = of_horovod(rank, 3, (number, number - 1, about), stack)
    record = replace(record, waits=tuple(replace(wait, since=NOW - age, limit=60.0) for wait in record.waits))
    return elsewhere(rank, record=record, threads=(stack,), **facts)


def test_who_has_joined_waits_for_ranks_that_go_on_with_good_reason() -> None:
    """They have more data; each of their waits is short."""
    joined = for_horovod(1, 4, operation="join", quiet=90.0)
    assert judge([for_horovod(0, 900, "w", age=0.1), joined, for_horovod(2, 900, "w", age=0.1)]) is None
    assert judge([elsewhere(0, record=of_horovod(0, 3, (9, 9, ""))), joined]) is None, "it computes for a moment"
    idle = elsewhere(0, record=of_horovod(0, 3, (9, 9, "")), quiet=90.0)
    assert found(idle, joined).culprits == (0,)
    hang = found(for_horovod(0, 900, "w"), joined, for_horovod(2, 900, "w"))
    assert (hang.kind, hang.culprits) == ("symmetric", ()), "what the others call goes without it"
    hang = found(for_horovod(0, 900, "w"), joined, for_horovod(2, 905, "w"))
    assert hang.kind == "symmetric", "nor does it say that they call what has no name"


def test_ranks_of_which_some_go_on_with_other_operations_are_no_hang_that_is_seen_twice() -> None:
    first, later = (
        found(for_horovod(0, number, "w", age=0.1), for_horovod(1, 4, "b"), for_horovod(2, number, "w", age=0.1))
        for number in (900, 901)
    )
    assert first.kind == later.kind == "mismatch"
    assert first.key != later.key


def test_of_horovods_ranks_that_wait_for_different_tensors_the_odd_one_is_the_culprit() -> None:
    hang = found(for_horovod(0, 4, "w"), for_horovod(1, 4, "bias in process set 1"), for_horovod(2, 4, "w"))
    assert (hang.kind, hang.culprits) == ("mismatch", (1,))
    assert "rank 1 has called allreduce of bias in process set 1 (#4" in hang.why
    assert "where ranks 0, 2 have called allreduce of w (#4" in hang.why
    assert found(for_horovod(0, 4), for_horovod(1, 4), for_horovod(2, 4)).kind == "symmetric"


def test_ranks_that_wait_in_one_operation_for_tensors_without_a_name_are_told_to_give_them_one() -> None:
    hang = found(for_horovod(0, 20, operation="allgather"), for_horovod(1, 26, operation="allgather"))
    assert (hang.kind, hang.culprits) == ("unnamed", ())
    assert (
        "rank 0 waits in allgather (#20 of group Horovod), rank 1 waits in allgather (#26 of group Horovod)" in hang.why
    )
    assert "name=" in KINDS[hang.kind].hint


def test_of_horovods_ranks_whoever_does_not_wait_is_missing_whatever_it_has_counted() -> None:
    ahead = elsewhere(1, record=of_horovod(1, 3, (9, 9, "")))
    assert found(for_horovod(0, 4, "w"), ahead, for_horovod(2, 4, "w")).culprits == (1,)


@pytest.mark.parametrize(
    ("used", "by_who_waits", "kind"),
    [(0.14, 0.11, "missing"), (0.14, 0.0, "slow"), (0.25, 0.11, "slow"), (0.25, 0.17, "missing"), (1.0, 1.0, "slow")],
)
def test_what_a_librarys_own_thread_uses_in_every_rank_is_no_work(used: float, by_who_waits: float, kind: str) -> None:
    assert found(waits(0, cpu=by_who_waits), elsewhere(1, cpu=used), waits(2, cpu=used)).kind == kind


def test_a_rank_that_stands_in_a_call_of_horovods_waits_whatever_it_uses() -> None:
    stack = (
        Frame("/lib/horovod/common/basics.py", 385, "_add_process_set_impl"),
        Frame("/app/train.py", 7, "evaluate"),
    )
    assert found(waits(0, cpu=0.14), elsewhere(1, cpu=0.56, threads=(stack,))).kind == "missing"
    assert found(waits(0), elsewhere(1, cpu=0.56, threads=(stack[::-1],))).kind == "slow"


@pytest.mark.parametrize("file", ["/app/horovod/train.py", "/lib/horovod/torch/functions.py"])
def test_who_computes_in_a_project_of_that_name_or_in_what_packs_objects_is_slow(file: str) -> None:
    assert found(waits(0), elsewhere(1, cpu=1.0, threads=((Frame(file, 7, "evaluate"),),))).kind == "slow"
