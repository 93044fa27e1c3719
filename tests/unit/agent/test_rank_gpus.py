"""Which failures come of what a GPU has reported."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from typing import Any

import pytest

from flytekitplugins_safedist.agent.rank_gpus import RankGpus
from flytekitplugins_safedist.agent.scratch import make_job
from flytekitplugins_safedist.failures import Failure
from flytekitplugins_safedist.hangs.gpus import GpuUse, fault_of
from flytekitplugins_safedist.rank.order import RankOrder
from flytekitplugins_safedist.rank.outcome import RankOutcome, Status, root_cause
from tests.harness.outcomes import failed, outcome, raised, rank_at

SECOND = 10**9
GPUS = (GpuUse(0, "GPU-a", busy=3), GpuUse(1, "GPU-b", busy=97))


class Watch:
    """Two GPUs; Xid 48 of the second one."""

    def __init__(self, seen: int) -> None:
        self.looks = 0
        self.reported = (fault_of(48, GPUS[1], seen),)

    def look(self) -> None:
        self.looks += 1

    def usage(self) -> tuple[GpuUse, ...]:
        return GPUS

    def faults(self) -> Any:
        return self.reported


@pytest.fixture
def gpus(tmp_path: Any) -> tuple[RankGpus, Watch, int]:
    job = make_job(tmp_path)
    ranks = [rank_at(tmp_path, rank=at, local_rank=at, world_size=2, local_world_size=2) for at in range(2)]
    watch = Watch(time.time_ns() + 60 * SECOND)
    made = RankGpus(
        watch, [RankOrder(each, {}, job.files(0, each.rank), job.log(0, each.rank), ran_before=False) for each in ranks]
    )  # type: ignore[arg-type]
    return made, watch, watch.faults()[0].time_ns


CUDAS = raised("RuntimeError", "CUDA error: unspecified launch failure")
LOST = raised("DistBackendError", "peer gone", failure=Failure.PEER_LOST)
ABORTED = outcome(1, Status.KILLED, exit_code=-signal.SIGABRT)


@pytest.mark.parametrize(
    ("failure", "is_named"),
    [
        (failed(1, of=CUDAS), True),
        (failed(1, of=raised("ValueError", "bad", traceback="... y = x.cuda() ...")), True),
        (failed(1, of=LOST), True),
        (ABORTED, True),
        (outcome(1, Status.EXITED, exit_code=1), True),
        (failed(0, of=CUDAS), False),
        (failed(1), False),
        (failed(1, of=replace(CUDAS, failure=Failure.RECOVERABLE)), False),
        (failed(1, of=replace(CUDAS, failure=Failure.STORAGE)), False),
        (outcome(1, Status.KILLED, exit_code=-signal.SIGKILL), False),
        (outcome(1, Status.KILLED, exit_code=-signal.SIGTERM), False),
    ],
)
def test_a_failure_is_named_by_the_fault_that_it_comes_with(gpus, failure: RankOutcome, is_named: bool) -> None:
    made, _, seen = gpus
    named = made.named(replace(failure, time_ns=seen + SECOND))
    assert (named.gpu is not None) == is_named


def test_the_driver_is_asked_once_for_all_ranks_that_fail_together(gpus, monkeypatch) -> None:
    monkeypatch.setattr("flytekitplugins_safedist.agent.rank_gpus._FRESH_SECONDS", 3600.0)
    made, watch, seen = gpus
    for rank in (0, 1, 0, 1):
        made.named(failed(rank, seen, of=CUDAS))
    assert watch.looks == 1


@pytest.mark.parametrize(
    ("xid", "index", "at", "later", "is_named"),
    [
        (48, 1, 0, -2, True),
        (48, 1, 0, 9, True),
        (48, 1, 0, 11, False),
        (43, 1, -65, 7, False),
        (48, 1, -65, 7, False),
        (79, 1, -65, 7, True),
        (43, 1, 0, 7, True),
        (43, 0, 0, 7, False),
        (74, -1, 0, 7, True),
    ],
)
def test_within_some_seconds_only_a_gpu_of_the_rank_and_of_the_round_is_a_cause_or_one_that_is_lost(
    gpus, xid: int, index: int, at: int, later: int, is_named: bool
) -> None:
    """The round has begun a minute before. The fault may be seen after the failure: the driver is asked again. Of one
    with no index nobody knows the GPU."""
    made, watch, seen = gpus
    watch.reported = (fault_of(xid, GpuUse(index, ""), seen + at * SECOND),)
    assert (made.named(failed(1, seen + (at + later) * SECOND, of=CUDAS)).gpu is not None) == is_named
    assert watch.looks == 1


def test_what_has_timed_out_may_have_waited_for_a_fault_of_any_time_of_the_round(gpus) -> None:
    made, _, seen = gpus
    late = replace(failed(1, seen + 1800 * SECOND, of=LOST), timed_out=True)
    assert made.named(late).gpu is not None
    assert made.behind(1) is not None
    assert made.behind(0) is None


def test_a_row_of_memory_that_was_remapped_long_before_is_no_cause(gpus) -> None:
    made, watch, seen = gpus
    watch.reported = (fault_of(63, GPUS[1], seen),)
    late = replace(failed(1, seen + 1800 * SECOND, of=LOST), timed_out=True)
    assert made.named(late).gpu is None
    assert made.named(failed(1, seen + SECOND, of=CUDAS)).gpu is not None


def test_whose_gpu_has_failed_is_the_root_cause_though_others_were_earlier(gpus) -> None:
    made, _, seen = gpus
    failures = [failed(0, seen + SECOND, of=LOST), failed(1, seen + 2 * SECOND, of=LOST)]
    assert all(each.echo for each in failures)
    cause = root_cause(map(made.named, failures))
    assert cause is not None
    assert cause.rank == 1
    assert not cause.echo


def test_a_rank_has_its_own_gpus_and_their_faults(gpus) -> None:
    made, watch, _ = gpus
    assert made.of(1) == (GPUS[1:], watch.faults())
    assert made.of(0) == (GPUS[:1], ())
