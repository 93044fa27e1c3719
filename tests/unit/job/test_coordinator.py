"""What the agents of all nodes decide together, as far as it is a matter of values."""

from __future__ import annotations

import pytest

from flytekitplugins_safedist.job.coordinator import Ended, _failure, is_to_report_the_lost
from flytekitplugins_safedist.job.policy import Action, Decision
from flytekitplugins_safedist.ranks.outcome import RankOutcome
from flytekitplugins_safedist.rendezvous.failure import Failure
from flytekitplugins_safedist.rendezvous.heartbeat_monitor import HeartbeatMonitor
from flytekitplugins_safedist.rendezvous.jobstore import TEXT_LIMIT
from tests.harness.outcomes import failed, raised


@pytest.mark.parametrize(
    ("node_rank", "overdue", "reports"),
    [
        (0, (2,), True),
        (1, (2,), False),  # node 0 does
        (1, (0,), True),  # node 0 of a round need not be the one that holds the store
        (2, (0,), False),
        (2, (0, 1), True),
        (0, (0,), False),  # nobody has heard from this node either: it is the others' to say
        (1, (0, 1), False),
    ],
)
def test_the_first_node_whose_own_heartbeat_is_not_overdue_reports_the_others(node_rank, overdue, reports):
    assert is_to_report_the_lost(node_rank, overdue) is reports


def test_a_node_whose_counter_stands_still_for_longer_than_the_limit_is_overdue(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monitor = HeartbeatMonitor(10.0)
    assert monitor.overdue(0, [5, 5]) == ()
    clock[0] = 9.0
    assert monitor.overdue(0, [6, 5]) == ()
    clock[0] = 10.0
    assert monitor.overdue(0, [7, 5]) == ()
    clock[0] = 11.0
    assert monitor.overdue(0, [8, 5]) == (1,)
    monitor.forget()
    assert monitor.overdue(0, [7, 5]) == ()


@pytest.mark.parametrize(("limit", "after"), [(4.0, 1.0), (60.0, 2.0)])
def test_it_is_time_to_look_again_after_a_quarter_of_the_limit_and_at_most_two_seconds(monkeypatch, limit, after):
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monitor = HeartbeatMonitor(limit)
    for _ in range(2):
        assert not monitor.due()
        clock[0] += after - 0.25
        assert not monitor.due()
        clock[0] += 0.25
        assert monitor.due()
        monitor.overdue(0, [])


def test_a_node_rank_that_the_next_round_does_not_have_is_not_overdue_there(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monitor = HeartbeatMonitor(10.0)
    assert monitor.overdue(0, [5, 5, 5]) == ()
    clock[0] = 5.0
    assert monitor.overdue(1, [7, 5]) == ()
    clock[0] = 12.0
    assert monitor.overdue(1, [8, 6]) == ()


ODD = ["語" * 5_000, "😀" * 2_500, '"' * 8_500, "caf\udce9.txt", "\\" * 70_000, "\n" * 70_000]


@pytest.mark.parametrize("text", ODD, ids=["CJK", "emoji", "quotes", "surrogate", "backslashes", "lines"])
def test_no_error_is_lost_for_its_length_or_its_letters(text):
    cause = failed(3, of=raised(message=f"start {text} end", traceback=text), log_tail=(text,) * 50)
    sent = _failure(cause).dump()
    assert len(sent.encode()) <= TEXT_LIMIT
    for read in (
        RankOutcome.from_json(Failure.parse(sent.encode()).text),
        Ended.from_json(Ended(cause, Decision(Action.GIVE_UP, "no restarts"), text).to_json()).cause,
    ):
        assert (read.rank, read.raised.type) == (3, cause.raised.type)
        assert read.raised.message.startswith("start ")
        assert read.raised.message.endswith(" end")
    assert len(Ended(cause, Decision(Action.GIVE_UP, ""), text).to_json().encode()) <= TEXT_LIMIT
