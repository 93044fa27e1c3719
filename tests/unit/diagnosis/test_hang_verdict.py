"""Who holds up whom, from evidence as real ranks gave it (torch 2.13, gloo); and when a wait is suspicious."""

from __future__ import annotations

import random
from typing import Any

import pytest

from flytekitplugins_safedist.diagnosis.gpus import GpuFault, GpuUse, fault_of
from flytekitplugins_safedist.diagnosis.picture import Standing
from flytekitplugins_safedist.diagnosis.processes import Process
from flytekitplugins_safedist.diagnosis.progress import Progress, Steps
from flytekitplugins_safedist.diagnosis.records import Begun, Recorded, of_horovod, parse
from flytekitplugins_safedist.diagnosis.stacks import Frame
from flytekitplugins_safedist.diagnosis.verdict import judge

REDUCE, BARRIER = Begun("0", 4, "all_reduce of Float[3]"), Begun("0", 4, "barrier")


def entry(number: int, name: str, **facts: Any) -> dict[str, Any]:
    """As torch's flight recorder has it, less what nobody reads."""
    return {
        "collective_seq_id": number,
        "input_dtypes": ["Float"],
        "input_sizes": [[3]],
        "is_p2p": False,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": f"gloo:{name}",
        "timeout_ms": 600_000,
        "retired": True,
        **facts,
    }


def dump(enqueued: int, completed: int, *entries: dict[str, Any]) -> dict[str, Any]:
    """One process group's."""
    status = {"last_completed_collective": str(completed), "last_enqueued_collective": str(enqueued)}
    return {"entries": list(entries), "pg_status": {"0": status}, "pg_config": {}}


def recorded(number: int, *, pending: Begun | None = None, latest: tuple[Begun, ...] = ()) -> Recorded:
    return Recorded({"0": number}, (pending,) if pending is not None else (), latest or ((pending,) if pending else ()))


def waits(rank: int, pending: Begun = REDUCE, **facts: Any) -> Standing:
    return Standing(rank, Process(rank, "S"), record=recorded(pending.number, pending=pending), **facts)


def elsewhere(rank: int, **facts: Any) -> Standing:
    threads = ((Frame("/app/train.py", 7, "evaluate"),),)
    usual: dict[str, Any] = {"process": Process(rank, "S"), "threads": threads, "record": recorded(3)}
    return Standing(rank, **{**usual, **facts})


def test_a_record_says_what_a_rank_has_begun_and_what_has_not_ended() -> None:
    done = entry(3, "broadcast")
    found = parse(dump(4, 3, done, entry(4, "all_reduce", retired=False), entry(9, "send", is_p2p=True, retired=False)))
    assert found.counts == {"0": 4}
    assert found.pending == (REDUCE,)
    assert found.latest == (Begun("0", 3, "broadcast of Float[3]"), REDUCE)
    # Collectives that torch waited for are retired a moment after they have ended: the count is the newer word.
    assert parse(dump(4, 4, entry(4, "all_reduce", retired=False))).pending == ()


@pytest.mark.parametrize(
    ("facts", "kind", "says"),
    [
        ({}, "missing", "rank 1 is at train.py:7 in evaluate, and does nothing (sleeping); rank 0 waits in all_reduce"),
        ({"holds_gil": True}, "gil", "in native code that holds Python's lock"),
        ({"process": Process(1, "T"), "threads": ()}, "frozen", "rank 1 is stopped (SIGSTOP)"),
        ({"process": Process(1, "D")}, "frozen", "rank 1 is in uninterruptible sleep"),
        ({"process": Process(1, "S", "anon_pipe_read")}, "input", "rank 1 waits for input at train.py:7"),
        ({"threads": ((Frame("/lib/multiprocessing/connection.py", 395, "_recv"),),)}, "input", "in _recv (sleeping)"),
        ({"process": Process(1, "S", children=(7, 8))}, "missing", "; its child process 7 has ended or is stopped;"),
        ({"returned": True, "record": Recorded()}, "returned", "rank 1 has returned from the task's function"),
        ({"cpu": 1.0, "holds_gil": True}, "slow", "computes (1.0 core(s) in use)"),
        ({"moved": True}, "slow", "moves"),
    ],
)
def test_one_rank_is_told_apart_from_those_who_wait_for_it(facts: dict[str, Any], kind: str, says: str) -> None:
    hang = judge([waits(0), elsewhere(1, **facts)])
    assert hang is not None
    assert (hang.kind, hang.culprits, hang.waiting) == (kind, (1,), (0,))
    assert says in hang.why
    assert hang.may_end == (kind == "slow")


def test_of_those_who_do_not_wait_the_one_behind_is_the_culprit() -> None:
    ahead = elsewhere(2, record=recorded(4))
    hang = judge([waits(0), elsewhere(1), ahead])
    assert hang is not None
    assert hang.culprits == (1,), "rank 2 has been in that collective: it waits for nothing, and nobody waits for it"


def test_where_all_wait_the_few_who_called_something_else_are_named() -> None:
    hang = judge([waits(0), waits(1, BARRIER), waits(2)])
    assert hang is not None
    assert (hang.kind, hang.culprits) == ("mismatch", (1,))
    # A rank that took another branch may let others pass: what each called at the earliest place tells.
    early, late = Begun("0", 4, "broadcast of Float[3]"), Begun("0", 5, "all_reduce of Float[3]")
    passed = Standing(2, Process(2, "S"), record=recorded(5, pending=late, latest=(early, late)))
    hang = judge([waits(0, early), waits(1, BARRIER), passed])
    assert hang is not None
    assert (hang.kind, hang.culprits) == ("mismatch", (1,))
    assert hang.why.startswith("rank 1 has called barrier (#4 of group 0), where ranks 0, 2 have called broadcast")


def test_ranks_that_wait_in_different_groups_or_all_in_one_are_told_apart() -> None:
    crossed = judge([waits(0), waits(1, Begun("1", 4, "all_reduce of Float[3]")), waits(2)])
    assert crossed is not None
    assert (crossed.kind, crossed.culprits) == ("mismatch", (1,))
    together = judge([waits(0), waits(1)])
    assert together is not None
    assert (together.kind, together.culprits, together.waiting) == ("symmetric", (), (0, 1))


def on(rank: int, own: str, *others: str) -> Standing:
    """It waits, and what it sends to *others* does not arrive."""
    process = Process(rank, "S", cut=tuple((own, other) for other in others), addresses=(own,))
    return Standing(rank, process, record=recorded(4, pending=REDUCE))


@pytest.mark.parametrize(
    ("standing", "culprits", "says"),
    [
        (
            [waits(0), on(1, "10.0.0.1", "10.0.0.2"), waits(2), on(3, "10.0.0.2", "10.0.0.1")],
            (),
            ": nothing arrives between 10.0.0.1 (rank 1) and 10.0.0.2 (rank 3)",
        ),
        (
            [on(0, "10.0.0.1", "10.0.0.3"), on(1, "10.0.0.2", "10.0.0.3"), on(2, "10.0.0.3", "10.0.0.1")],
            (2,),
            ": 10.0.0.3 (rank 2) is cut off; nothing arrives between 10.0.0.1 (rank 0) and 10.0.0.3 (rank 2); 10.0.0.2",
        ),
        (
            [on(0, "10.0.0.1", "10.0.0.2"), on(1, "10.0.0.2"), on(2, "10.0.0.3", "10.0.0.4")],
            (),
            ": nothing arrives between 10.0.0.1 (rank 0) and 10.0.0.2 (rank 1); 10.0.0.3 (rank 2) and 10.0.0.4",
        ),
    ],
    ids=["two machines", "one of three", "two pairs"],
)
def test_where_all_wait_machines_that_do_not_hear_each_other_are_named(
    standing: list[Standing], culprits: tuple[int, ...], says: str
) -> None:
    hang = judge(standing)
    assert hang is not None
    assert (hang.kind, hang.culprits) == ("symmetric", culprits)
    assert says in hang.why
    later = judge([waits(each.rank) for each in standing])
    assert later is not None
    assert later.key == hang.key, "the kernel tells of it a moment later"


@pytest.mark.parametrize(
    "standing",
    [
        [elsewhere(0), elsewhere(1)],
        [waits(0)],
        [waits(0), elsewhere(1, debugged=True)],
        [waits(0), elsewhere(1, process=Process(1, "t"))],
        [waits(0, moved=True), elsewhere(1)],
    ],
    ids=["nobody waits", "one rank", "a person debugs", "a debugger is attached", "an operation beside others"],
)
def test_what_is_no_hang(standing: list[Standing]) -> None:
    assert judge(standing) is None


def test_the_same_hang_has_the_same_key_and_a_step_further_it_is_another() -> None:
    first = judge([waits(0), elsewhere(1)])
    again = judge([waits(0, cpu=0.05), elsewhere(1, process=Process(1, "S", "futex"))])
    further = judge([waits(0, Begun("0", 5, "all_reduce of Float[3]")), elsewhere(1, record=recorded(4))])
    assert first is not None
    assert again is not None
    assert further is not None
    assert first.key == again.key != further.key


# --- in a job that tells its steps ----------------------------------------------------------------------------------
def in_step(rank: int, step: int, still: float = 0.0, **facts: Any) -> Standing:
    """It has told ``step`` steps, and is late where it has been in this one for a minute."""
    facts = {"record": Recorded(), "steps": Steps((step, 0), step), "still": still, "is_late": still >= 60, **facts}
    return elsewhere(rank, **facts)


BARRIER_OF_FS = ((Frame("/lib/flytekitplugins_safedist/fs/collective.py", 7, "barrier"),),)


@pytest.mark.parametrize(
    ("standing", "kind", "culprits", "says"),
    [
        ([in_step(0, 4, 90)], "missing", (0,), "rank 0 is at train.py:7 in evaluate, and does nothing"),
        ([in_step(0, 9), in_step(1, 4, 90)], "missing", (1,), "step 4 has not ended for 90 s, and 1 rank(s) go on"),
        ([in_step(0, 5, 50), in_step(1, 4, 90)], "missing", (1,), "step 4 has not ended for 90 s"),
        ([in_step(0, 4, 90, cpu=1.0)], "slow", (0,), "computes"),
        ([in_step(0, 4, 90, threads=BARRIER_OF_FS), in_step(1, 4, 70)], "missing", (1,), "rank 1 is at train.py"),
        ([in_step(0, 4, 90, threads=BARRIER_OF_FS), elsewhere(1)], "missing", (1,), "rank 1 is at train.py"),
        ([in_step(0, 4, 90, threads=BARRIER_OF_FS)], "symmetric", (), "all ranks wait, rank 0 in barrier"),
        ([in_step(0, 4, 90), in_step(1, 4, steps=Steps((4, 0), 4, is_saving=True))], "slow", (1,), "saves or restores"),
        ([in_step(0, -1, 90), in_step(1, -1, 80)], "missing", (0, 1), "no step has ended for 90 s"),
    ],
    ids=["alone", "behind", "all", "computes", "others wait", "silent", "all wait", "saves", "no count"],
)
def test_who_is_in_a_step_for_too_long(standing: list[Standing], kind: str, culprits: tuple[int, ...], says: str):
    hang = judge(standing)
    assert hang is not None
    assert (hang.kind, hang.culprits, hang.by_steps) == (kind, culprits, True)
    assert says in hang.why


def test_where_a_library_says_who_waits_it_is_believed_and_the_step_is_named() -> None:
    culprit = in_step(1, 4, 90, record=recorded(3))
    hang = judge([waits(0, steps=Steps((5, 0), 5), still=90.0, is_late=True), culprit])
    assert hang is not None
    assert (hang.culprits, hang.step, hang.by_steps) == ((1,), 4, False)


@pytest.mark.parametrize(
    "standing",
    [
        [in_step(0, 4, 50), in_step(1, 4, 50)],
        [in_step(0, 9, 90), in_step(1, 4)],
        [in_step(0, 4, 90), in_step(1, 4)],
        [in_step(0, 4, 90, debugged=True)],
    ],
    ids=["within its time", "ahead of those who go on", "level with them", "a person debugs"],
)
def test_what_is_no_hang_by_its_steps(standing: list[Standing]) -> None:
    assert judge(standing) is None


def test_a_step_that_ends_between_two_looks_is_another_hang_and_one_that_goes_on_elsewhere_is_not() -> None:
    first, further = judge([in_step(0, 9), in_step(1, 4, 90)]), judge([in_step(0, 12), in_step(1, 4, 93)])
    ended = judge([in_step(0, 12), in_step(1, 5, 90)])
    assert first is not None
    assert further is not None
    assert ended is not None
    assert first.key == further.key != ended.key


def test_a_save_is_waited_for_whatever_it_waits_in() -> None:
    """Its thread: the others' wait for it in a group of their own, while all go on training, or end."""
    for steps in (Steps(is_saving=True), Steps(is_writing=True)):
        for facts in ({}, {"process": Process(1, "D")}, {"process": Process(1, "S", "pipe_read")}):
            hang = judge([waits(0), elsewhere(1, steps=steps, **facts)])
            assert hang is not None
            assert (hang.kind, hang.may_end) == ("slow", True)
    stopped = judge([waits(0), elsewhere(1, steps=Steps(is_saving=True), process=Process(1, "T"))])
    assert stopped is not None
    assert stopped.kind == "frozen", "it does not come back by itself"


# --- when a wait is suspicious --------------------------------------------------------------------------------------
def waiting(number: int) -> Recorded:
    return recorded(number, pending=Begun("0", number, "all_reduce"))


def test_a_wait_is_suspicious_at_the_floor_and_after_longer_ones_at_five_times_those_up_to_the_ceiling() -> None:
    progress = Progress(floor=60, ceiling=600, every=10)
    suspicious = [now for now in range(0, 200, 10) if progress.look({0: waiting(1)}, {}, float(now)) is not None]
    assert suspicious == list(range(60, 200, 10))
    progress.look({0: waiting(2)}, {}, 200.0)
    for now in range(210, 800, 10):
        assert progress.look({0: waiting(2)}, {}, float(now)) is None, "the longest that has ended took 200 s"
    assert progress.look({0: waiting(2)}, {}, 800.0) == 600


def test_without_a_floor_torchs_own_timeout_decides_and_is_come_before() -> None:
    progress = Progress(floor=None, ceiling=7200, every=30)
    [begun] = parse(dump(1, 0, entry(1, "all_reduce", retired=False))).pending
    rank = recorded(1, pending=begun)
    assert [now for now in range(0, 600, 30) if progress.look({0: rank}, {}, float(now))] == [540, 570]


def test_a_rank_that_does_not_answer_is_where_it_was_and_one_that_waits_for_nothing_is_not_suspicious() -> None:
    progress = Progress(floor=60, ceiling=600, every=10)
    found = [progress.look({} if now else {0: waiting(1), 1: recorded(1)}, {}, float(now)) for now in range(0, 70, 10)]
    assert found == [None] * 6 + [60]


def test_a_pause_of_the_machine_is_nobodys_wait() -> None:
    progress = Progress(floor=60, ceiling=600, every=10)
    progress.look({0: waiting(1)}, {}, 0.0)
    progress.look({0: waiting(1)}, {}, 10.0)
    assert progress.look({0: waiting(1)}, {}, 10_000.0) is None, "a laptop that was shut"
    later = [progress.look({0: waiting(1)}, {}, float(now)) for now in range(10_010, 10_050, 10)]
    assert later == [None, None, None, 60]


@pytest.mark.parametrize("seed", range(5))
def test_no_false_alarm_in_a_day_of_uneven_steps_and_evaluations_on_one_rank(seed: int) -> None:
    """Steps of log-normal length (the longest twenty times the median and more), a slow first one, and an evaluation
    of three minutes on rank 0 each hour with the others at a barrier; by the defaults, looked at as agents do."""
    chance = random.Random(seed)
    progress = Progress(floor=None, ceiling=7200, every=30)
    now, number, looked = 0.0, 0, 0.0
    while now < 24 * 3600:
        number += 1
        hourly = number % 360 == 0
        step = 900.0 if number == 1 else 180.0 if hourly else chance.lognormvariate(2.3, 1.0)
        now += step
        while looked < now:
            looked += 30
            assert progress.look({0: recorded(number - 1), 1: waiting(number)}, {}, looked) is None


def test_horovod_ends_no_wait_by_itself_so_that_without_a_floor_it_is_suspicious_after_the_ceiling() -> None:
    progress = Progress(floor=None, ceiling=7200, every=7000)
    waiting = {0: of_horovod(4, 3), 1: of_horovod(3, 3)}
    assert [progress.look(waiting, {}, now) for now in (0, 7000, 14000)] == [None, None, 14000]


def test_a_wait_for_horovod_is_called_by_the_operation_that_the_user_has_called() -> None:
    stack = (
        Frame("/lib/horovod/torch/mpi_ops.py", 1285, "synchronize"),
        Frame("/lib/torch/autograd/function.py", 625, "apply"),
        Frame("/lib/horovod/torch/mpi_ops.py", 254, "allreduce"),
        Frame("/app/train.py", 11, "train"),
    )
    assert [str(each) for each in of_horovod(4, 3, stack).pending] == ["allreduce (#4 of group Horovod)"]
    assert of_horovod(4, 4, stack).pending == ()


# --- when a step is suspicious --------------------------------------------------------------------------------------
def at(step: int, **facts: Any) -> dict[int, Steps]:
    return {0: Steps((step, 0), step, **facts)}


def test_a_step_is_suspicious_at_five_times_the_longest_of_the_round_and_the_first_only_at_the_ceiling() -> None:
    progress = Progress(floor=60, ceiling=600, every=10)
    assert [now for now in range(0, 640, 10) if progress.look({}, at(1), float(now))] == [600, 610, 620, 630]
    progress = Progress(floor=60, ceiling=600, every=10)
    for now in range(0, 100, 20):
        assert progress.look({}, at(1 + now), float(now)) is None
        assert progress.look({}, at(1 + now), now + 10.0) is None
    assert [now for now in range(100, 230, 10) if progress.look({}, at(81), float(now))] == [180, 190, 200, 210, 220]
    assert progress.still(at(81), 230.0) == {0: 150.0}
    assert progress.still(at(82), 230.0) == {}, "it has ended meanwhile"


def test_without_a_floor_a_step_is_suspicious_at_the_ceiling_and_without_steps_never() -> None:
    progress = Progress(floor=None, ceiling=600, every=10)
    looks = [(now, progress.look({}, at(1 + min(now, 20)), float(now))) for now in range(0, 640, 10)]
    assert [now for now, late in looks if late] == [620, 630]
    progress = Progress(floor=1, ceiling=2, every=1)
    assert [progress.look({}, {0: Steps()}, float(now)) for now in range(100)] == [None] * 100


def test_a_save_and_a_pause_of_the_machine_are_no_part_of_a_step() -> None:
    progress = Progress(floor=60, ceiling=600, every=10)
    for now in range(0, 30, 10):
        progress.look({}, at(1 + now), float(now))
    for now in range(30, 530, 10):
        assert progress.look({}, at(21, is_saving=True), float(now)) is None
        assert progress.still(at(21, is_saving=True), float(now)) == {}
    assert progress.look({}, at(21), 530.0) is None
    assert progress.look({}, at(21), 5030.0) is None
    assert progress.step_threshold == 60.0, "neither is what a step takes"
    late = [progress.look({}, at(21), float(now)) for now in range(5040, 5100, 10)]
    assert late[:-2] == [None] * 4
    assert late[-1] == 70.0


def of_gpu(xid: int) -> tuple[GpuFault, ...]:
    return (fault_of(xid, GpuUse(1, "GPU-b"), 0),)


@pytest.mark.parametrize(
    "others",
    [[waits(1, faults=of_gpu(79)), waits(2)], [elsewhere(1, cpu=1.0, faults=of_gpu(79)), waits(2)]],
    ids=["all wait", "it spins"],
)
def test_a_hang_is_of_the_gpu_that_has_failed_whatever_its_rank_does(others: list[Standing]) -> None:
    hang = judge([waits(0), *others])
    assert hang is not None
    assert (hang.kind, hang.culprits, hang.waiting, hang.may_end) == ("gpu", (1,), (0, 2), False)
    assert hang.why.startswith("rank 1 has a GPU that has failed: GPU 1 (GPU-b) reported Xid 79: GPU has fallen off")


def test_what_the_program_has_done_to_its_gpu_is_no_fault_of_the_hardware() -> None:
    hang = judge([waits(0), elsewhere(1, faults=of_gpu(31))])
    assert hang is not None
    assert hang.kind == "missing"


def test_a_row_of_memory_that_was_remapped_is_no_cause_of_a_hang() -> None:
    hang = judge([waits(0), elsewhere(1, faults=of_gpu(63))])
    assert hang is not None
    assert hang.kind == "missing"


def test_nobody_hangs_for_a_fault_alone() -> None:
    assert judge([elsewhere(0), elsewhere(1, faults=of_gpu(79))]) is None


@pytest.mark.parametrize(("busy", "says"), [(100, "; its GPU is 100% busy;"), (None, "does nothing (sleeping);")])
def test_how_busy_the_gpu_is_is_told(busy: int | None, says: str) -> None:
    hang = judge([waits(0), elsewhere(1, gpus=(GpuUse(1, "GPU-b", busy=busy),))])
    assert hang is not None
    assert says in hang.why


def test_of_horovods_ranks_that_wait_for_different_tensors_the_odd_one_is_the_culprit() -> None:
    stack = (Frame("/lib/horovod/torch/mpi_ops.py", 254, "allreduce"),)

    def of(rank: int, about: str) -> Standing:
        return Standing(rank, Process(rank, "S"), record=of_horovod(4, 3, stack, about))

    hang = judge([of(0, "w"), of(1, "bias in process set 1"), of(2, "w")])
    assert hang is not None
    assert (hang.kind, hang.culprits) == ("mismatch", (1,))
    assert "rank 1 has called allreduce of bias in process set 1 (#4" in hang.why
    assert "where ranks 0, 2 have called allreduce of w (#4" in hang.why
    assert judge([of(0, ""), of(1, "")]).kind == "symmetric"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("used", "by_who_waits", "kind"),
    [(0.14, 0.11, "missing"), (0.14, 0.0, "slow"), (0.25, 0.11, "slow"), (0.25, 0.17, "missing"), (1.0, 1.0, "slow")],
)
def test_what_a_librarys_own_thread_uses_in_every_rank_is_no_work(used: float, by_who_waits: float, kind: str) -> None:
    hang = judge([waits(0, cpu=by_who_waits), elsewhere(1, cpu=used), waits(2, cpu=used)])
    assert hang is not None
    assert hang.kind == kind


def test_a_rank_that_stands_in_a_call_of_horovods_waits_whatever_it_uses() -> None:
    stack = (
        Frame("/lib/horovod/common/basics.py", 385, "_add_process_set_impl"),
        Frame("/app/train.py", 7, "evaluate"),
    )
    hang = judge([waits(0, cpu=0.14), elsewhere(1, cpu=0.56, threads=(stack,))])
    assert hang is not None
    assert hang.kind == "missing"
    assert judge([waits(0), elsewhere(1, cpu=0.56, threads=((stack[1], stack[0]),))]).kind == "slow"  # type: ignore[union-attr]


@pytest.mark.parametrize("file", ["/app/horovod/train.py", "/lib/horovod/torch/functions.py"])
def test_who_computes_in_a_project_of_that_name_or_in_what_packs_objects_is_slow(file: str) -> None:
    hang = judge([waits(0), elsewhere(1, cpu=1.0, threads=((Frame(file, 7, "evaluate"),),))])
    assert hang is not None
    assert hang.kind == "slow"


def test_a_project_in_a_directory_called_horovod_is_the_users() -> None:
    users = Standing(0, Process(1, "S"), threads=((Frame("/app/horovod/train.py", 7, "evaluate"),),))
    assert (users.waits_in, users.where) == ("", "at train.py:7 in evaluate")
    assert str(of_horovod(4, 3, users.stack).pending[0]).startswith("a collective ")
