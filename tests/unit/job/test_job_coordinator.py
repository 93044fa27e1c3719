"""What the agents decide together, on the store that two real nodes share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from flytekitplugins_safedist.errors import NodeLostError, StoreLostError
from flytekitplugins_safedist.job import coordinator
from flytekitplugins_safedist.job.coordinator import JobCoordinator
from flytekitplugins_safedist.job.policy import Action
from flytekitplugins_safedist.ranks.outcome import RankOutcome, Status
from flytekitplugins_safedist.rendezvous import departures
from flytekitplugins_safedist.rendezvous.handler import SafedistHandler
from flytekitplugins_safedist.rendezvous.jobstore import JobStore
from tests.harness.outcomes import failed, outcome, raised
from tests.harness.procs import DEADLINE
from tests.harness.two_nodes import one_node, together, two_nodes

Pair = tuple[SafedistHandler, SafedistHandler]
WHY = "told to stop by SIGTERM"
ECHO = failed(1, time_ns=50, of=raised("horovod.common.exceptions.HorovodInternalError", consequence=True))

OWN = failed(0, of=raised("ValueError"))


@pytest.fixture
def pair() -> Iterator[Pair]:
    with two_nodes() as both:
        yield both


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def job(pair: Pair, said: list[str]) -> JobCoordinator:
    """The job as node 0 sees it; with one restart, and no patience with who does not report."""
    return job_of(pair[0], said)


def job_of(node: SafedistHandler, said: list[str] | None = None, **more: Any) -> JobCoordinator:
    options: dict[str, Any] = {"max_restarts": 1, "stop_seconds": -5, "heartbeat": 1, **more}
    return JobCoordinator(node, say=([] if said is None else said).append, **options)


def asked_for_a_round(node: SafedistHandler) -> bool:
    """What the store says: num_nodes_waiting tells it a moment later."""
    return node._group._read_state().generation == node.round + 1


@pytest.fixture
def no_replacements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SafedistHandler, "max_replacements", property(lambda _: 0))


def not_there(*_: object) -> None:
    raise StoreLostError("the job's store is lost")


# --- leaving --------------------------------------------------------------------------------------------------------


def test_the_one_node_of_a_job_leaves_without_a_word():
    with one_node() as node:
        job_of(node).leave(WHY)
        assert node.jobs.left(node.round) == {}
        assert node.jobs.known().losses == {}
        assert node.jobs.end() is None
        assert not asked_for_a_round(node)


def test_a_node_that_leaves_says_why_spends_a_replacement_and_asks_for_a_new_round(pair):
    first, second = pair
    round_ = second.round
    job_of(second).leave(WHY)
    assert first.jobs.left(round_) == {1: WHY}
    assert [(number, unit.why) for number, unit in first.jobs.known().losses.items()] == [(round_, f"node 1 was {WHY}")]
    assert first.jobs.end() is None
    assert asked_for_a_round(first)


def test_a_node_that_leaves_gives_up_its_place(pair, monkeypatch):
    stepped: list[str] = []
    monkeypatch.setattr(pair[1], "step_down", lambda: stepped.append("down"))
    job_of(pair[1]).leave(WHY)
    assert stepped == ["down"]


@pytest.mark.usefixtures("no_replacements")
def test_who_leaves_when_no_replacement_is_left_ends_the_job_with_the_reason(pair):
    first, second = pair
    job_of(second).leave(WHY)
    end = first.jobs.end()
    assert end.kind == "replacements"
    assert end.text == f"node 1 was {WHY}, and 0 replacements are used up"


def test_the_node_with_the_store_says_that_the_store_leaves_too_and_spends_nothing(pair, job):
    second = pair[1]
    second.jobs.report(second.round, None)
    job.leave(WHY)
    assert second.jobs.left(second.round) == {0: WHY}
    assert second.jobs.store_leaves(second.round)
    assert second.jobs.known().losses == {}
    assert asked_for_a_round(second)


def test_the_node_with_the_store_stays_until_the_others_know_why_or_for_as_long_as_leaving_may_take(
    pair, job, monkeypatch
):
    waits: list[tuple[int, float]] = []
    monkeypatch.setattr(JobStore, "wait_reports", lambda self, *args: waits.append(args))
    job.leave(WHY)
    assert waits == [(pair[0].round, coordinator.LEAVE_SECONDS)]


def test_a_worker_whose_ranks_have_succeeded_leaves_without_a_word(pair):
    first, second = pair
    job = job_of(second)
    assert not job.all_done()
    job.leave(WHY)
    assert first.jobs.left(first.round) == {}
    assert not asked_for_a_round(first)


def test_node_0_says_that_it_leaves_although_its_ranks_have_succeeded_also_where_another_holds_the_store(
    pair, job, monkeypatch
):
    first, second = pair
    monkeypatch.setattr(SafedistHandler, "holds_store", property(lambda _: False))
    assert not job.all_done()
    job.leave(WHY)
    assert second.jobs.left(first.round) == {0: WHY}


def test_the_node_with_rank_0s_outputs_says_that_it_leaves_although_its_ranks_have_succeeded(pair, job):
    second = pair[1]
    second.jobs.report(second.round, None)
    assert not job.all_done()
    job.leave(WHY)
    assert second.jobs.left(second.round) == {0: WHY}


def test_a_store_that_hangs_does_not_eat_the_time_to_stop(pair, job, monkeypatch):
    answered = threading.Event()
    told: list[bool] = []
    monkeypatch.setattr(coordinator, "LEAVE_SECONDS", 0.01)
    monkeypatch.setattr(job, "_tell_that_it_leaves", lambda why: told.append(answered.wait(DEADLINE)))
    job.leave(WHY)
    assert told == []
    answered.set()


def test_leaving_is_no_error_where_the_store_is_lost(pair, monkeypatch):
    monkeypatch.setattr(JobStore, "leave_round", not_there)
    threads: list[object] = []
    monkeypatch.setattr("threading.excepthook", threads.append)
    job_of(pair[1]).leave(WHY)
    assert threads == []


def test_who_left_is_told_and_asked_for(pair, job, said):
    second = pair[1]
    assert job.anybody_left() is False
    second.jobs.leave_round(second.round, WHY)
    assert job.anybody_left() is True
    job.say_who_left()
    assert said == [f"node 1 has left: {WHY}"]


def test_nobody_is_known_to_have_left_where_the_store_is_lost(job, monkeypatch):
    monkeypatch.setattr(JobStore, "left", not_there)
    assert job.anybody_left() is False


# --- failures -------------------------------------------------------------------------------------------------------


def test_the_first_failure_of_a_round_is_reported_as_it_is_and_no_second_one(pair, job):
    second = pair[1]
    cause = failed(3, time_ns=70, node_rank=0)
    job.report(cause, [1, 2])
    job.report(failed(0, time_ns=1), [])
    found = second.jobs.root_cause(second.round)
    assert (found.node, found.rank, found.time_ns, found.consequence) == (0, 3, 70, 0)
    assert RankOutcome.from_json(found.text) == cause
    assert second.jobs.returned(second.round) == (1, 2)


def test_an_echo_is_reported_as_one(pair, job):
    job.report(ECHO, [])
    assert pair[1].jobs.root_cause(pair[1].round).consequence == 4


def test_the_next_round_is_reported_anew(pair, job):
    job.report(None, [])
    together(*(node.next_rendezvous for node in pair))
    job.report(failed(0), [])
    assert pair[1].jobs.root_cause(pair[1].round).rank == 0


def test_an_agent_that_first_speaks_in_a_later_round_is_heard(pair, job, said, monkeypatch):
    together(*(node.next_rendezvous for node in pair))
    assert pair[0].round == 1
    job.report(OWN, [])
    assert pair[1].jobs.root_cause(1).rank == 0
    job_of(pair[1]).all_done()
    watching(job, monkeypatch, 1).watch_nodes()
    assert said == ["node(s) 1 lost after their ranks had succeeded: the round goes on"]
    assert job.all_done()


def test_a_restart_stops_the_others_and_names_who_failed_and_the_budget(pair, job, said):
    second = pair[1]
    second.jobs.report(second.round, None)
    decision = job.settle(failed(3, node_rank=0), "")
    assert (decision.action, decision.reason) == (Action.RESTART, "restart 1 of 1")
    assert said == ["rank 3 failed (ValueError); all ranks start again: restart 1 of 1"]
    (unit,) = second.jobs.known().restarts.values()
    assert unit.why == "rank 3 on node 0: ValueError"
    assert second.jobs.end() is None
    assert asked_for_a_round(second)


def test_the_root_cause_of_another_node_decides_and_not_the_own_echo(pair, job):
    second = pair[1]
    cause = failed(5, time_ns=90, node_rank=1, of=raised("ImportError", repeats=True))
    job_of(second).report(cause, [4])
    assert job.settle(ECHO, "16 MiB", [0]).action is Action.GIVE_UP
    ended = job_of(second).ended()
    assert ended is not None
    assert (ended.cause, ended.disk, ended.returned) == (cause, "16 MiB", ())
    assert len(second.jobs.known().restarts) == 0
    assert job.over()


def test_what_a_rank_was_killed_by_is_its_name_where_it_raised_nothing(pair, job, said):
    pair[1].jobs.report(pair[1].round, None)
    killed = outcome(2, Status.KILLED, exit_code=-9)
    job.settle(killed, "")
    assert said == [f"rank 2 failed ({Status.KILLED.value}); all ranks start again: restart 1 of 1"]


def test_nodes_have_the_time_that_ending_ranks_takes_and_some_seconds_more(pair, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(JobStore, "wait_reports", lambda self, round_, seconds: (waits.append(seconds), (None, ()))[1])
    for heartbeat in (1, 8, 60):
        job_of(pair[0], stop_seconds=30, heartbeat=heartbeat, max_restarts=9).settle(failed(0), "")
    assert waits == [35.0, 38.0, 45.0]


def test_an_echo_of_a_node_that_does_not_answer_is_its_loss_and_no_restart(pair, job, said):
    first, second = pair
    decision = job.settle(ECHO, "")
    assert (decision.action, decision.reason) == (Action.RESTART, "node(s) 1 are replaced")
    seen = "no report from them; on node 0, rank 1 lost its peer"
    assert said == [
        f"node(s) 1 lost ({seen}); waiting for them to come back: replacement 1 of {first.max_replacements}"
    ]
    (loss,) = second.jobs.known().losses.values()
    assert loss.why == f"node(s) 1 lost ({seen})"
    assert len(second.jobs.known().restarts) == 0


def test_a_cause_of_its_own_spends_a_restart_although_the_node_with_the_store_has_left(pair, job):
    first, second = pair
    second.jobs.leave_round(second.round, WHY, with_store=True)
    assert job.settle(OWN, "").reason == "restart 1 of 1"
    assert len(first.jobs.known().restarts) == 1


def test_a_cause_of_its_own_spends_a_restart_although_a_node_does_not_answer(pair, job):
    assert job.settle(failed(0), "").reason == "restart 1 of 1"
    assert pair[1].jobs.known().losses == {}


def test_an_echo_of_the_node_with_the_store_costs_nothing_when_that_has_left(pair):
    first, second = pair
    first.jobs.leave_round(first.round, WHY, with_store=True)
    said: list[str] = []
    decision = job_of(second, said).settle(ECHO, "")
    assert (decision.action, decision.reason) == (Action.RESTART, "the node with the job's store has left")
    assert said == [f"node 0 has left: {WHY}"]
    assert second.jobs.known().losses == {}
    assert len(second.jobs.known().restarts) == 0


@pytest.mark.usefixtures("no_replacements")
def test_a_node_that_is_lost_once_too_often_is_named_with_the_round_and_what_to_look_at(pair, job):
    with pytest.raises(NodeLostError) as caught:
        job.settle(ECHO, "")
    text = str(caught.value)
    assert "node(s) 1 were lost, and 0 replacements are used up" in text
    assert f"round={pair[0].round}" in text
    assert "seen: no report from them; on node 0, rank 1 lost its peer" in text
    assert "look at the pods of those nodes: evicted, out of memory, or their machine gone" in text
    assert pair[1].jobs.end().kind == "replacements"


# --- whose restart an echo costs --------------------------------------------------------------------------------------


def test_who_had_returned_on_any_node_is_told_with_a_failure_that_only_echoes(pair):
    first, second = pair
    second.jobs.report(second.round, None, returned=(2, 3))
    job = JobCoordinator(first, max_restarts=0, stop_seconds=60, heartbeat=60, say=lambda _: None)
    assert job.settle(ECHO, "", returned=(1,)).action is Action.GIVE_UP
    ended = job.ended()
    assert ended is not None
    assert ended.returned == (1, 2, 3)


@pytest.mark.parametrize(
    ("cause", "ended_for", "restarts"),
    [
        (ECHO, None, 1),
        (ECHO, "a lost node", 0),
        (ECHO, "a node that joins", 0),
        (OWN, "a lost node", 1),
        (OWN, "a node that joins", 1),
    ],
)
def test_an_echo_in_a_round_that_was_ended_for_a_node_costs_no_restart_of_the_users(pair, cause, ended_for, restarts):
    first, second = pair
    round_ = first.round
    if ended_for == "a lost node":
        second.jobs.spend_replacement(10, round_no=round_)
    if ended_for == "a node that joins":
        second._group.control.call("", lambda store: departures.make_room(store, second._group.keys, round_))
    second.jobs.report(round_, None)
    job = JobCoordinator(first, max_restarts=3, stop_seconds=60, heartbeat=60, say=lambda _: None)
    decision = job.settle(cause, "")
    assert decision.action is Action.RESTART
    assert len(first.jobs.known().restarts) == restarts
    if not restarts:
        assert decision.reason == f"the round was ended for {ended_for}"


# --- nodes without heartbeats -----------------------------------------------------------------------------------------


def watching(job: JobCoordinator, monkeypatch: pytest.MonkeyPatch, *overdue: int) -> JobCoordinator:
    """As if these nodes' heartbeats were overdue."""
    monkeypatch.setattr(job._monitor, "due", lambda: True)
    monkeypatch.setattr(job._monitor, "overdue", lambda round_, beats: overdue)
    return job


def test_a_node_without_heartbeats_is_replaced_and_a_new_round_asked_for(pair, job, said, monkeypatch):
    watching(job, monkeypatch, 1).watch_nodes()
    assert said == [
        "node(s) 1 lost (no sign of life for 1 s); waiting for them to come back: "
        f"replacement 1 of {pair[0].max_replacements}"
    ]
    assert list(pair[1].jobs.known().losses) == [pair[0].round]
    assert asked_for_a_round(pair[1])


def test_after_a_loss_every_node_has_its_whole_time_again(pair, job, monkeypatch):
    forgotten: list[bool] = []
    watching(job, monkeypatch, 1)
    monkeypatch.setattr(job._monitor, "forget", lambda: forgotten.append(True))
    job.watch_nodes()
    assert forgotten == [True]


def test_the_loss_of_one_node_more_than_may_be_replaced_ends_the_job_for_all(pair, monkeypatch):
    first, second = pair
    limit = first.max_replacements
    said: list[str] = []
    job = JobCoordinator(first, max_restarts=0, stop_seconds=60, heartbeat=60, say=said.append)
    monkeypatch.setattr(job._monitor, "due", lambda: True)
    monkeypatch.setattr(job._monitor, "overdue", lambda round_, beats: (1,))
    for number in range(1, limit + 1):
        job.watch_nodes()
        assert f"replacement {number} of {limit}" in said[-1]
        together(first.next_rendezvous, second.next_rendezvous)
    with pytest.raises(NodeLostError, match=rf"node\(s\) 1 were lost, and {limit} replacements are used up"):
        job.watch_nodes()
    assert second.jobs.end().kind == "replacements"


@pytest.mark.parametrize("overdue", [(), (0,), (0, 1)], ids=["nobody", "itself", "both"])
def test_nobody_is_replaced_who_is_not_this_nodes_to_miss(pair, job, said, monkeypatch, overdue):
    watching(job, monkeypatch, *overdue).watch_nodes()
    assert said == []
    assert not asked_for_a_round(pair[1])


def test_only_the_node_with_the_store_watches_where_that_is_node_0_of_every_round(pair, said, monkeypatch):
    watching(job_of(pair[1], said), monkeypatch, 0).watch_nodes()
    assert said == []


def test_counters_are_read_only_when_it_is_time_to_look(pair, job, said, monkeypatch):
    watching(job, monkeypatch, 1)
    monkeypatch.setattr(job._monitor, "due", lambda: False)
    job.watch_nodes()
    assert said == []


def test_node_0_is_replaced_although_its_ranks_had_succeeded_for_it_has_rank_0s_outputs(pair, said, monkeypatch):
    first, second = pair
    monkeypatch.setattr(SafedistHandler, "node_0_holds_store", property(lambda _: False))
    first.jobs.mark_done(first.round)
    watching(job_of(second, said), monkeypatch, 0).watch_nodes()
    assert said[0].startswith("node(s) 0 lost (no sign of life for 1 s); waiting for them to come back")
    assert asked_for_a_round(second)


def test_a_lost_node_whose_ranks_had_succeeded_is_told_once_and_ends_no_round(pair, job, said, monkeypatch):
    pair[1].jobs.mark_done(pair[1].round)
    watching(job, monkeypatch, 1)
    job.watch_nodes()
    job.watch_nodes()
    assert said == ["node(s) 1 lost after their ranks had succeeded: the round goes on"]
    assert not asked_for_a_round(pair[1])


# --- the end --------------------------------------------------------------------------------------------------------


def test_the_job_is_done_when_the_ranks_of_every_node_have_succeeded_however_often_one_asks(pair, job):
    other = job_of(pair[1])
    assert [job.all_done(), job.all_done(), job.over()] == [False, False, False]
    assert other.all_done()
    assert job.all_done()
    assert job.over()
    assert other.over()
    assert job.ended() is None


def test_a_job_that_ran_out_of_replacements_is_not_over_for_who_could_read_its_failure(pair, job):
    pair[1].jobs.close("replacements", "x")
    assert not job.over()
    assert job.ended() is None
