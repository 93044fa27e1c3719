"""A round of ranks on one node: orders are values, outcomes come from records and from how processes ended."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flytekitplugins_safedist import Logs, SafeTorch, Timeouts
from flytekitplugins_safedist.agent import log_lines, memory
from flytekitplugins_safedist.agent import rank_set as module
from flytekitplugins_safedist.agent.rank_set import Ranks
from flytekitplugins_safedist.agent.scratch import make_job, make_rank
from flytekitplugins_safedist.errors import HangError, RankFailedError, ScratchError
from flytekitplugins_safedist.failures import Failure
from flytekitplugins_safedist.hangs import stacks
from flytekitplugins_safedist.hangs.gpus import GpuWatch
from flytekitplugins_safedist.plugin.users_error import as_users
from flytekitplugins_safedist.rank import main, shared_page
from flytekitplugins_safedist.rank.context import RankContext
from flytekitplugins_safedist.rank.order import RankOrder, TaskSource
from flytekitplugins_safedist.rank.outcome import Raised, RankOutcome, Status, root_cause
from flytekitplugins_safedist.rank.outcome_text import describe, how
from flytekitplugins_safedist.rank.places import JobScratch
from flytekitplugins_safedist.rank.shared_page import open_page
from flytekitplugins_safedist.rank_server.client import EndedRank
from tests.harness.outcomes import SIXTH, rank_at
from tests.harness.procs import until
from tests.unit.config.plans import planned

NO_GPUS = GpuWatch(print)
LATER_NS = 8_000_000_000_000_000_000
"""After anything that a test does."""


class Processes:
    """Stands in for the rank server: the test says which process ended how. Real ones are in tests/agents."""

    def __init__(self) -> None:
        self.to_come: list[EndedRank] = []
        self.signalled: list[tuple[tuple[int, ...], int]] = []
        self.unkillable: set[int] = set()
        self.when_told: Callable[[], list[EndedRank]] = list
        """What ranks do when they are asked to stop."""
        self.later: Callable[[], object] = list
        """What happens while the server is waited for."""

    def start(self, job: object, ranks: Sequence[RankOrder], *, fork: bool, timeout: float) -> list[int]:
        return [100 + number for number in range(len(ranks))]

    def ask_for_stacks(self, pid: int, number: int) -> None:
        raise AssertionError(f"process {pid} is not to be asked: it is none")

    def ended(self, *, wait: float = 0.0) -> list[EndedRank]:
        if wait:
            self.later()
        coming, self.to_come = self.to_come, []
        return coming

    def signal(self, pids: Sequence[int], number: int) -> None:
        self.signalled.append((tuple(pids), number))
        if number == signal.SIGTERM:
            self.to_come += self.when_told()
        if number == signal.SIGKILL:
            killed = [pid for pid in pids if pid not in self.unkillable | {each.pid for each in self.to_come}]
            self.to_come += [EndedRank(pid, -signal.SIGKILL, 9_000_000_000_000_000_000) for pid in killed]


@pytest.fixture
def job(tmp_path: Path) -> JobScratch:
    return make_job(tmp_path)


def contexts(job: JobScratch) -> list[RankContext]:
    return [
        rank_at(
            make_rank(job, 1, 4 + local).path,
            **{**SIXTH, "rank": 4 + local, "local_rank": local, "round": 1, "node_dir": job.node},
        )
        for local in range(2)
    ]


def made(
    processes: Processes,
    orders: list[RankOrder],
    settings: Any,
    show: Callable[[str], object] = str,
) -> Ranks:
    order = SimpleNamespace(source=TaskSource("train", "wf"))
    plan: Any = SimpleNamespace(server=processes, order=order, settings=settings, gpus=NO_GPUS)
    return Ranks(plan, orders, show)


def order_of(context: RankContext, job: JobScratch) -> RankOrder:
    files, log = job.files(context.round, context.rank), job.log(context.round, context.rank)
    return RankOrder(context, {}, files, log, ran_before=False)


def started(
    job: JobScratch, show: Callable[[str], object] = str, **timeouts: float
) -> tuple[Ranks, Processes, list[RankOrder]]:
    """Two ranks that run, their processes and orders."""
    orders = [order_of(context, job) for context in contexts(job)]
    processes = Processes()
    settings = planned(SafeTorch(nproc_per_node=2, timeouts=Timeouts(**{"stop": 0.01, "exit": 0.01, **timeouts})))
    ranks = made(processes, orders, settings, show=show)
    ranks.start(fork=True)
    return ranks, processes, orders


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many processes the kernel has ended so far because memory was out: 7, until a test says more."""
    counted = [7]
    monkeypatch.setattr(memory, "cgroup", lambda: memory.Cgroup(1 << 30, 1 << 28, counted[-1]))
    return counted


@pytest.fixture
def round_(job: JobScratch) -> Iterator[tuple[Ranks, Processes, list[RankOrder]]]:
    found = started(job)
    yield found
    found[0].stop()


@pytest.fixture
def late_round(job: JobScratch) -> Iterator[tuple[Ranks, Processes, list[RankOrder]]]:
    """Whose time to begin is over."""
    found = started(job, start=1e-9)
    yield found
    found[0].stop()


def answering(monkeypatch: pytest.MonkeyPatch, frames: dict[int, str]) -> list[object]:
    """Have ranks answer with these lines when they are asked where they are; what was asked. Real ones answer in
    tests/unit/hangs."""
    asked: list[object] = []

    def ask(ranks: object, send: object) -> dict[int, object]:
        asked.append(ranks)
        head = "Current thread 1 (most recent call first):\n"
        return {rank: stacks.parse(head + text) for rank, text in frames.items()}

    monkeypatch.setattr(stacks, "ask", ask)
    return asked


def leave(order: RankOrder, status: Status, *, time_ns: int = 1, raised: Raised | None = None) -> None:
    at = order.context
    record = RankOutcome(at.rank, at.local_rank, at.node_rank, at.round, "host", 1, status, time_ns, raised)
    open_page(order.files.page).end(record.to_json())


def test_orders_of_a_round_share_no_file_with_another_rank_or_round(job):
    here = contexts(job)
    again = [replace(each, round=2) for each in here]
    orders = [order_of(context, job) for context in (*here, *again)]
    assert len({order.log for order in orders}) == 4
    for name in ("page", "result", "types", "decks", "profile", "stacks", "records"):
        assert len({getattr(order.files, name) for order in orders}) == 4


@pytest.mark.parametrize(
    ("code", "status"), [(3, Status.EXITED), (0, Status.EXITED), (-15, Status.KILLED), (-6, Status.KILLED)]
)
def test_a_rank_that_ended_without_a_record_has_failed(round_, code, status):
    ranks, processes, orders = round_
    leave(orders[0], Status.SUCCEEDED)
    processes.to_come = [EndedRank(100, 0, 1), EndedRank(101, code, 5, 5 << 20)]
    ranks.poll()
    _, found = ranks.outcomes()
    assert (ranks.finished, ranks.failures) == (False, 1)
    assert (found.rank, found.status, found.exit_code, found.time_ns, found.memory) == (5, status, code, 5, "")


@pytest.mark.parametrize(
    ("kills_now", "reason"),
    [
        (8, "was killed by SIGKILL: the kernel's out-of-memory killer\n"),
        (7, "was killed by SIGKILL: most often the kernel's out-of-memory killer"),
    ],
)
def test_a_killed_rank_is_told_with_memory_and_surely_of_the_kernels_killer_where_that_has_counted_it(
    kills, round_, monkeypatch, kills_now, reason
):
    ranks, processes, _ = round_
    kills.append(kills_now)
    monkeypatch.setattr(memory, "high_water", lambda pid: {100: 3 << 20}[pid])
    processes.to_come = [EndedRank(101, -9, 5, 5 << 20)]
    ranks.poll()
    [outcome] = ranks.outcomes()
    told = describe(RankOutcome.from_json(outcome.to_json()))
    assert reason in told
    assert "\n\nMemory high-water of each rank of this node: rank 4 3.0 MiB, rank 5 5.0 MiB. " in told


WORKER = Raised("RuntimeError", "DataLoader worker (pid(s) 71) exited unexpectedly", "", failure=Failure.WORKER_KILLED)
RAYS = Raised(
    "ray.exceptions.OutOfMemoryError",
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2) was",
    "",
    failure=Failure.OUT_OF_MEMORY,
)
LOST = "lost DataLoader worker(s) 71 (process ids) to the kernel's out-of-memory killer, and raised RuntimeError: "


@pytest.mark.parametrize(
    ("raised", "kills_now", "code", "says"),
    [
        (WORKER, 8, "USER:OutOfMemory", LOST),
        (WORKER, 7, "USER:RuntimeError", f") raised RuntimeError: {WORKER.message}"),
        (RAYS, 7, "USER:OutOfMemory", f") raised {RAYS.type}: {RAYS.message}"),
    ],
    ids=["the kernel took it", "nobody knows who", "Ray took it before the kernel would"],
)
def test_a_worker_that_was_killed_for_memory_is_out_of_memory_and_is_named(
    kills, round_, raised, kills_now, code, says
):
    ranks, _, orders = round_
    kills.append(kills_now)
    leave(orders[1], Status.RAISED, time_ns=1, raised=raised)
    ranks.poll()
    [outcome] = ranks.outcomes()
    first, _, rest = describe(outcome).partition("\n")
    assert outcome.label == code
    assert says in first
    assert "Memory high-water of each rank" in rest
    assert ("requests=Resources(mem=" in rest) or raised is WORKER


def test_a_rank_that_has_not_begun_in_time_is_told_with_where_it_is(late_round, monkeypatch):
    ranks, _, orders = late_round
    open_page(orders[0].files.page).begin()
    asked = answering(monkeypatch, {5: '  File "users.py", line 7 in <module>\n'})
    late = ranks.late()
    assert late is not None
    assert asked == [{5: (101, orders[1].files.stacks)}]
    text = describe(late)
    assert "rank 5 " in text
    assert "ranks have not begun the task's function in time [ranks=5] (seen: still importing" in text
    assert 'File "users.py", line 7 in <module>' in text
    assert late.failed
    assert not late.raised.repeats, "another start may be quicker"
    assert ranks.late() is None, "it is told once"


@pytest.mark.parametrize("kind", [HangError, ScratchError])
def test_what_the_agent_has_found_can_be_caught_by_its_own_class_where_the_job_was_called(round_, kind):
    ranks, *_ = round_
    found = ranks.blame(4, kind("the job does not move"))
    assert found.raised is not None
    assert (found.raised.repeats, found.raised.is_agents) == (True, True)
    error = as_users(RankFailedError(describe(found)), found.raised)
    assert isinstance(error, kind)
    assert isinstance(error, RankFailedError)
    assert how(found) == kind.__name__
    assert "): the job does not move" in str(error)


def test_ranks_that_have_begun_have_all_the_time_of_the_world(late_round):
    ranks, processes, orders = late_round
    for order in orders:
        open_page(order.files.page).begin()
    assert ranks.late() is None
    assert processes.signalled == []


def test_while_a_person_is_in_a_ranks_debugger_nobody_is_late_and_afterwards_again(late_round):
    ranks, _, orders = late_round
    with open_page(orders[0].files.page).debugging():
        assert ranks.late() is None
        assert ranks.late() is None
    assert ranks.late() is not None


def test_who_has_gone_on_from_the_debugger_has_all_the_time_for_a_start_again(late_round):
    ranks, _, orders = late_round
    ranks.plan.settings = planned(SafeTorch(nproc_per_node=2, timeouts=Timeouts(stop=0.01)))
    with open_page(orders[0].files.page).debugging():
        assert ranks.late() is None
    assert ranks.late() is None


def test_ranks_that_have_reported_success_have_their_time_to_end_and_a_crash_then_takes_nothing_back(job, caplog):
    ranks, processes, orders = started(job, exit=600)
    for order in orders:
        leave(order, Status.SUCCEEDED)
    ranks.poll()
    assert (ranks.finished, ranks.ends()) == (False, []), "until its process has ended a rank may meet others"
    processes.to_come = [EndedRank(100, -11, 1), EndedRank(101, 0, 1)]
    ranks.poll()
    assert (ranks.finished, ranks.ends()) == (True, ranks.returned())
    assert (processes.signalled, caplog.messages) == ([], [])
    ranks.stop()


def test_a_rank_that_not_even_sigkill_ends_does_not_take_back_the_success_of_all(round_, monkeypatch, caplog):
    """Such a process (it waits in the kernel) cannot be made at will: the stand-in never reports its end."""
    monkeypatch.setattr(module, "KILL_SECONDS", 0.01)
    ranks, processes, orders = round_
    processes.unkillable.add(101)
    for order in orders:
        leave(order, Status.SUCCEEDED)
    processes.to_come = [EndedRank(100, 0, 1)]
    ranks.poll()
    until(lambda: ranks.finished, "the success that was reported counts")
    kills = [each for each in processes.signalled if each[1] == signal.SIGKILL]
    assert kills == [((101,), signal.SIGKILL)], "SIGKILL once: there is nothing stronger"
    assert "rank(s) 5 reported success but did not end" in caplog.messages[0]
    assert "rank(s) 5 (process 101) were not ended by SIGKILL within 0.01 s" in caplog.messages[1]
    ranks.stop()
    assert [each for each in processes.signalled if each[1] != signal.SIGKILL] == [], "nobody waits for it any more"


def raises_to_clean_up(order: RankOrder) -> None:
    leave(order, Status.RAISED, time_ns=LATER_NS, raised=Raised("SystemExit", "stopped", ""))


@pytest.mark.parametrize(
    ("code", "last_word"), [(1, raises_to_clean_up), (1, str), (-9, str)], ids=["raises", "exits", "is killed"]
)
def test_what_fails_after_being_told_to_stop_is_no_failure(round_, code, last_word):
    ranks, processes, orders = round_
    leave(orders[0], Status.RAISED, time_ns=1, raised=Raised("ValueError", "mine", ""))
    ranks.poll()

    def ends() -> list[EndedRank]:
        last_word(orders[1])
        return [EndedRank(100, 1, LATER_NS), EndedRank(101, code, LATER_NS)]

    processes.when_told = ends
    ranks.stop()
    first, second = ranks.outcomes()
    assert (first.status, first.raised.message) == (Status.RAISED, "mine")
    assert (second.status, ranks.failures) == (Status.STOPPED, 1)
    assert last_word is str or second.raised.message == "stopped"
    assert root_cause([second]) is None


def test_a_failure_from_before_the_order_to_stop_stays_one_though_it_is_seen_after_it(round_):
    ranks, processes, orders = round_

    def had_failed() -> list[EndedRank]:
        leave(orders[0], Status.RAISED, time_ns=1, raised=Raised("ValueError", "mine", ""))
        return [EndedRank(100, 1, 2), EndedRank(101, -11, 3)]

    processes.when_told = had_failed
    ranks.stop()
    assert [outcome.status for outcome in ranks.outcomes()] == [Status.RAISED, Status.KILLED]


def test_where_nccls_watchdog_aborts_a_rank_the_others_are_asked_where_they_are(round_, monkeypatch):
    """There is no NCCL here: its word is put into the log, as it stands before the stacks of the abort."""
    ranks, processes, orders = round_
    said = "[Rank 4] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE)"
    orders[0].log.write_text("\n".join([said, *["frame of its stack"] * 60]))
    open_page(orders[1].files.page).begin()
    processes.to_come = [EndedRank(100, -signal.SIGABRT, 1)]
    stack = '  File "train.py", line 7 in evaluate'
    ours = f'  File "{main.__file__}", line 1 in run'
    asked = answering(monkeypatch, {5: f"{stack}\n{ours}\n"})
    processes.later = lambda: processes.to_come.append(EndedRank(101, -signal.SIGABRT, 2))
    ranks.poll()
    ranks.note_stacks()
    ranks.poll()
    assert asked == [{5: (101, orders[1].files.stacks)}]
    cause = root_cause(ranks.outcomes())
    assert (cause.rank, cause.timed_out) == (4, True)
    assert cause.others == f"Where rank 5 was then:\n{stack}"


def is_full(_: str) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("how", ["is full", "is not read"])
def test_a_log_that_takes_nothing_hides_no_failure(job, monkeypatch, how):
    monkeypatch.setattr(module, "SHOW_SECONDS", 0.01)
    read = threading.Event()
    show = is_full if how == "is full" else lambda _: read.wait()
    ranks, _, orders = started(job, show)
    for order in orders:
        open_page(order.files.page).begin()
    answering(monkeypatch, {5: '  File "train.py", line 7 in evaluate\n'})
    ranks.note_stacks()
    assert ranks.has_stacks
    read.set()
    ranks.stop()


def test_a_log_that_is_not_read_is_waited_for_once(job, monkeypatch, caplog):
    waited = []

    def stop(self, within=log_lines.DRAIN_SECONDS):
        waited.append(within)
        return 5

    monkeypatch.setattr(log_lines.LogFollower, "stop", stop)
    settings = planned(SafeTorch(nproc_per_node=2, timeouts=Timeouts(stop=0.01)))
    orders = [replace(order_of(context, job), errors=job.errors(1, context.rank)) for context in contexts(job)]
    ranks = made(Processes(), orders, settings)
    ranks.start(fork=True)
    ranks.stop(drain=7)
    ranks.stop()
    assert len(waited) == 2, "standard output and standard error"
    assert max(waited) <= 7
    assert [line for line in caplog.messages if "not shown" in line] == [
        "10 B of the ranks' output were not shown: this node's log is not read"
    ]


@pytest.mark.parametrize("reported", [False, True])
def test_stopping_asks_each_rank_first_that_has_not_reported_and_then_kills_all_that_it_started(round_, reported):
    ranks, processes, orders = round_
    if reported:
        leave(orders[0], Status.SUCCEEDED)
        ranks.poll()
    ranks.stop()
    asked = (101,) if reported else (100, 101)
    assert processes.signalled == [(asked, signal.SIGTERM), ((100, 101), signal.SIGKILL)]


@pytest.mark.parametrize(("patience", "catches", "seconds"), [(9, True, 9), (9, False, 0.01), (0, True, 0.01)])
def test_a_rank_with_a_handler_has_the_longer_of_both_times(round_, monkeypatch, patience, catches, seconds):
    ranks, given = round_[0], []
    monkeypatch.setattr(module.cleanup, "catches", lambda *_: catches)
    monkeypatch.setattr(ranks, "_end", lambda _, seconds, __: given.append(seconds))
    ranks.stop(patience=patience)
    assert given[0] == seconds


def test_no_line_of_its_log_is_told_of_a_crash_where_none_is_asked_for(job):
    orders, processes = [order_of(context, job) for context in contexts(job)], Processes()
    at_once = Timeouts(stop=0.01, exit=0.01)
    ranks = made(processes, orders, planned(SafeTorch(nproc_per_node=2, logs=Logs(tail_lines=0), timeouts=at_once)))
    ranks.start(fork=True)
    orders[0].log.write_text("a secret\n")
    processes.to_come = [EndedRank(100, -signal.SIGSEGV, 1)]
    ranks.poll()
    assert [outcome.log_tail for outcome in ranks.outcomes()] == [()]
    ranks.stop()


def test_what_to_do_about_orders_that_cannot_be_written_is_said(job, monkeypatch):
    def fail(path: Path) -> None:
        raise OSError(errno.ENODEV, "no", str(path))

    settings = planned(SafeTorch(nproc_per_node=2))
    orders = [order_of(context, job) for context in contexts(job)]
    ranks = made(Processes(), orders, settings)
    monkeypatch.setattr(shared_page, "make", fail)
    with pytest.raises(ScratchError, match=r"rank=4.*mapped into memory"):
        ranks.start(fork=True)
