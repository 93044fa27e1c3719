"""One policy for everything that is asked of a store: what is tried again, for how long, and how often."""

from __future__ import annotations

import pytest

from flytekitplugins_safedist.store.patience import Retry

PASSES = ConnectionResetError("the store is away")


class Time:
    """A clock that stands until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def waited(time: Time, retry: Retry, error: Exception = PASSES) -> list[float]:
    """The pauses of an outage that does not end."""
    pauses: list[float] = []
    while (pause := retry.pause(error)) is not None:
        assert len(pauses) < 1000, "it is tried for ever"
        pauses.append(pause)
        time.now += pause
    return pauses


def test_pauses_grow_to_the_longest_and_the_last_ends_with_the_time() -> None:
    time = Time()
    pauses = waited(time, Retry(200.0, first=1.0, longest=8.0, clock=time))
    bounds = [1.0, 2.0, 4.0, *[8.0] * (len(pauses) - 4)]
    assert all(bound / 2 <= pause <= bound for bound, pause in zip(bounds, pauses[:-1], strict=True))
    assert time.now == pytest.approx(200.0)


def test_the_time_begins_with_the_first_failure() -> None:
    time = Time()
    retry = Retry(10.0, clock=time)
    time.now = 1000.0  # the first try took so long
    assert retry.left() == 10.0
    assert sum(waited(time, retry)) == pytest.approx(10.0)


def test_what_does_not_pass_is_not_waited_for() -> None:
    assert waited(Time(), Retry(10.0), PermissionError("denied")) == []


def test_of_two_that_meet_one_outage_each_waits_its_own_time() -> None:
    assert len({tuple(waited(time := Time(), Retry(100.0, clock=time))) for _ in range(5)}) == 5
