"""How long a wait has lasted, by its own beginning; and when that is too long."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest

from flytekitplugins_safedist.hangs.waits import CALL, TOLD_SECONDS, Ages, Steps, Wait


def waits(number: int, since: float = 0.0, *, rank: int = 0, timeout: float = math.inf, group: str = "0") -> Wait:
    return Wait(rank, group, "0-1", "all_reduce", number, since, "gloo", timeout)


def late(
    ages: Ages, now: float, *some: Wait, running: Collection[int] = (0, 1), silent: Collection[int] = ()
) -> list[float]:
    """How long those have lasted that do so for too long."""
    return [wait.age for wait in ages.see(some, running, silent, now) if wait.is_late]


def first_late(ages: Ages, wait: Wait | None, times: Iterable[int], **answers: Any) -> float | None:
    """When a wait is too long."""
    return next((now for now in times if late(ages, now, *filter(None, [wait]), **answers)), None)


@pytest.fixture
def ages() -> Ages:
    return Ages(floor=60, ceiling=600, began=0.0)


def test_a_wait_is_too_long_at_the_floor_and_after_longer_ones_at_five_times_those_up_to_the_ceiling(
    ages: Ages,
) -> None:
    assert first_late(ages, waits(1), range(10, 200, 10)) == 70, "since it was seen first"
    assert late(ages, 200.0, waits(2, 200.0)) == []
    assert late(ages, 290.0, waits(2, 200.0)) == [], "the one before lasted 60 s at least, so that 300 are too long"
    assert late(ages, 295.0) == []
    assert first_late(ages, waits(3, 1000.0), range(1000, 3000, 10)) == 1450, (
        "the longest that ended took 90 s at least"
    )


@pytest.mark.parametrize(
    ("timeout", "too_long"), [(1800.0, 1770.0), (600.0, 570.0), (60.0, 30.0), (15.0, 7.5), (math.inf, TOLD_SECONDS)]
)
def test_without_a_floor_the_librarys_own_timeout_decides_and_is_come_before(timeout: float, too_long: float) -> None:
    assert Ages(floor=None, ceiling=7200, began=0.0).limit(waits(1, timeout=timeout)) == too_long
    assert Ages(floor=6000, ceiling=7200, began=0.0).limit(waits(1, timeout=timeout)) == min(
        6000, too_long if timeout < 1e9 else 6000
    )


def test_a_wait_is_as_old_as_its_source_says_also_where_nobody_has_looked() -> None:
    ages = Ages(floor=None, ceiling=7200, began=0.0)
    assert late(ages, 5000.0, waits(1, 5000.0 - 571, timeout=600.0)) == [571]
    assert late(ages, 5030.0, waits(1, 5029.0, timeout=600.0)) == [], "the same number, of another group of that name"


def test_a_wait_is_the_same_whatever_its_operation_is_called_at_one_look(ages: Ages) -> None:
    """What a rank of Horovod's waits in is in its stack, which it cannot always show."""
    late(ages, 10.0, replace(waits(4), operation="allreduce"))
    [wait] = ages.see([replace(waits(4), operation="a collective")], [0], [], 50.0)
    assert (wait.age, wait.operation) == (40.0, "a collective")


def test_each_wait_has_its_own_clock(ages: Ages) -> None:
    """A thread of rank 0's exchanges something in a group of its own all the time."""
    for now in range(10, 60, 10):
        assert late(ages, now, waits(1, 1.0), waits(now, now - 1.0, group="side")) == []
    assert late(ages, 61.0, waits(1, 1.0), waits(61, 60.0, group="side")) == [60]


def test_a_rank_that_does_not_answer_is_where_it_was_and_one_that_has_returned_waits_no_more(ages: Ages) -> None:
    late(ages, 10.0, waits(1), waits(1, rank=1))
    assert late(ages, 40.0, silent=[0, 1]) == []
    assert late(ages, 75.0, waits(1), running=[0], silent=[]) == [65], "rank 1 has returned, and its wait with it"
    assert late(ages, 85.0, waits(2, 84.0), running=[0]) == []
    assert ages.limit(waits(3)) == 325, "five times the one that has ended, not that of rank 1"


@pytest.mark.parametrize("since", [0.0, 1.0], ids=["by looks", "by its source"])
def test_a_pause_of_the_machine_is_nobodys_wait(ages: Ages, since: float) -> None:
    late(ages, 1.0, waits(1, since))
    ages.shift(20.0, 9980.0)  # a laptop that was shut from then on
    assert late(ages, 10_000.0, waits(1, since)) == []
    assert late(ages, 10_041.0, waits(1, since)) == [60]
    assert late(ages, 10_101.0, waits(1, since), waits(1, 10_001.0, rank=1)) == [120, 100], "it began after the pause"


@pytest.mark.parametrize("since", [0.0, 9990.0], ids=["by looks", "by its source"])
def test_a_clock_that_is_set_back_makes_nothing_older(since: float) -> None:
    """By NTP, or as a machine is taken up again with a clock of its own."""
    ages = Ages(floor=60, ceiling=600, began=9900.0)
    late(ages, 9990.0, waits(1, since), waits(7, since))
    ages.shift(10_020.0, -3600.0)
    assert late(ages, 6425.0, waits(1, since), waits(2, 6424.0)) == [], "what begins after it is young"
    assert late(ages, 6455.0, waits(1, since), waits(2, 6424.0)) == [65]
    assert late(ages, 10_030.0, waits(3, 10_019.0)) == [], "and what begins an hour later, at the same time of day"
    assert ages.limit(waits(4)) == 325, "nothing that has ended was older than 65 s"


def test_looks_come_as_often_as_the_shortest_timeout_or_the_floor_needs_and_cost_little() -> None:
    ages = Ages(floor=None, ceiling=7200, began=0.0)
    both = waits(1, 990.0, timeout=1800.0), waits(1, 995.0, timeout=60.0, group="1")
    [world, pair] = ages.see(both, [0], [], 1000.0)
    assert ages.next_look([world], 1800.0, 0.1, 1000.0) == 30
    assert ages.next_look([world, pair], 60.0, 0.1, 1000.0) == 15
    assert ages.next_look([], 60.0, 0.1, 1000.0) == 15, "another one may begin right now"
    assert ages.next_look([replace(pair, age=25.0)], 60.0, 0.1, 1020.0) == 5, "when it is too long"
    assert Ages(floor=60, ceiling=7200, began=0.0).next_look([world], 1800.0, 0.1, 1000.0) == 15
    assert Ages(floor=4, ceiling=7200, began=0.0).next_look([], 1800.0, 0.5, 1000.0) == 10
    assert Ages(floor=None, ceiling=7200, began=996.0).next_look([], math.inf, 0.0, 1000.0) == 1, "nobody knows yet"


def test_a_wait_in_a_call_of_which_nothing_is_recorded_is_told_after_ten_minutes() -> None:
    call = Wait(0, "", "0-1", "all_reduce", 0, 100.0, CALL)
    assert first_late(Ages(floor=None, ceiling=7200, began=0.0), call, range(100, 2000, 30)) == 700


def test_how_long_the_calls_of_a_start_take_says_nothing_of_collectives(ages: Ages) -> None:
    late(ages, 100.0, Wait(0, "", "0-1", "init_process_group", 0, 10.0, CALL))
    late(ages, 110.0)
    assert (ages.limit(waits(1)), ages.limit(Wait(0, "", "0-1", "new_group", 0, 110.0, CALL))) == (60, 450)


# --- steps ----------------------------------------------------------------------------------------------------------
def at(step: int, *, is_saving: bool = False) -> Wait | None:
    return Steps((step, 0), step, is_saving=is_saving).wait(0)


def walked(floor: float | None, seconds: int, until: int, **answers: Any) -> Ages:
    """Through steps of so many seconds, looked at each ten."""
    ages = Ages(floor=floor, ceiling=600, began=0.0)
    for now in range(0, until, 10):
        first_late(ages, at(1 + now // seconds), [now], **answers)
    return ages


def test_a_step_is_too_long_at_five_times_the_longest_of_the_round_and_the_first_only_at_the_ceiling(
    ages: Ages,
) -> None:
    assert first_late(ages, at(1), range(0, 700, 10)) == 600
    assert first_late(walked(60, 20, 100), at(5), range(100, 300, 10)) == 180


def test_without_a_floor_a_step_is_told_of_at_the_ceiling_and_without_steps_never() -> None:
    assert first_late(walked(None, 10, 30), at(3), range(30, 700, 10)) == 620
    assert Steps().wait(0) is None


def test_how_long_steps_take_is_known_of_ranks_that_have_no_recorder() -> None:
    assert first_late(walked(60, 20, 60, silent=[0]), at(3), range(60, 300, 10), silent=[0]) == 40 + 5 * 20


def test_a_save_is_no_part_of_a_step() -> None:
    assert at(3, is_saving=True) is None
    ages = walked(60, 10, 30)
    assert first_late(ages, None, range(30, 530, 10)) is None
    assert first_late(ages, at(3), range(530, 700, 10)) == 590
