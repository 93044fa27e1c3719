"""Every decision of a job's coordinator, rule by rule; random orders of faults are in :mod:`.test_simulation`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flytekitplugins_safedist.config.options import Preflight
from flytekitplugins_safedist.job.ending import verdict_of
from flytekitplugins_safedist.job.facts import Cause, End, History, Spent
from flytekitplugins_safedist.job.messages import (
    Again,
    Alarm,
    CannotBegin,
    Ended,
    Go,
    Greet,
    Leave,
    Leaves,
    Message,
    Refused,
    Returned,
    Stop,
    Tell,
    TheEnd,
    Told,
    Uploaded,
    Waits,
    Welcome,
)
from flytekitplugins_safedist.job.preflight_messages import Checked, Cleared
from flytekitplugins_safedist.preflight.judge import NodeReport, Trouble
from flytekitplugins_safedist.rank.outcome import Raised, RankOutcome, Status
from tests.unit.job.coordination import FIXED, RANGE, STEP, Job, begun, cause, stopped

ENDED = "ended"


# --- a round comes together -------------------------------------------------------------------------------------------
def test_a_fixed_round_begins_when_every_node_is_there_each_in_its_own_place():
    job = Job()
    job.hello("c")
    job.hello("b")
    assert job.heard(Go) == {}
    job.hello("a")
    went = job.heard(Go)
    assert {process: (go.round, go.node_rank, go.nnodes) for process, go in went.items()} == {
        "a": (0, 0, 3),
        "b": (0, 1, 3),
        "c": (0, 2, 3),
    }
    assert went["b"].history == job.it.history


@pytest.mark.parametrize("node", [-1, 3])
def test_a_node_that_the_job_does_not_have_is_refused(node):
    job = Job()
    job.hello("x", node)
    assert job.heard(Refused)["x"].why == "range"


def test_who_is_missing_is_said_every_thirty_seconds_and_at_last_ends_the_job():
    job = Job()
    job.hello("a")
    job.wait(29)
    assert job.heard(Waits) == {}
    job.wait(1)
    assert "node(s) 1, 2" in job.heard(Waits)["a"].why
    job.wait(FIXED.timeout - 29)
    end = job.heard(TheEnd)["a"]
    assert (end.end.kind, end.end.missing, end.uploads) == ("timeout", ("1", "2"), True)
    assert "nodes 1, 2 of 3 did not arrive within 900 s" in end.end.text


def test_a_node_that_never_comes_back_ends_the_job_as_lost():
    job = begun()
    job.lose("b")
    job.wait(FIXED.grace + STEP)
    job.all_end("a", "c")
    job.wait(FIXED.timeout + STEP)
    assert (job.it.end.kind, job.it.end.missing) == ("lost", ("1",))


def test_a_range_begins_at_once_when_it_is_full_and_its_host_is_node_0():
    job = Job(RANGE)
    for process in "bcad":
        job.hello(process)
    assert {process: go.node_rank for process, go in job.heard(Go).items()} == {"a": 0, "b": 1, "c": 2, "d": 3}


def test_a_range_waits_for_further_nodes_once_the_minimum_is_there_and_not_without_its_host():
    job = Job(RANGE)
    job.hello("b")
    job.wait(RANGE.last_call * 2)
    job.hello("c")
    job.wait(RANGE.last_call - STEP)
    assert job.heard(Go) == {}
    job.hello("a")
    job.wait(STEP)
    assert job.heard(Go).keys() == set("abc")
    job = Job(RANGE)
    job.hello("b")
    job.hello("c")
    job.wait(RANGE.last_call * 2)
    assert job.heard(Go) == {}


@pytest.mark.parametrize("gone", ["while it ran", "between two rounds"])
def test_a_range_goes_on_at_once_when_those_who_are_left_of_the_round_before_are_there(gone):
    job = begun(RANGE, "abcd")
    if gone == "while it ran":
        job.say("d", Leaves("told to stop"))
        job.all_end("a", "b", "c")
    else:
        job.say("a", Ended(0, cause()))
        job.all_end("b", "c", "d")
        job.sent.clear()
        for process in "cd":  # at once: the first of them may begin the round without the other
            job.say(process, Leaves("told to stop"))
        job.all_end("a", "b", "c", "d")
    went = job.heard(Go)
    assert set(went) == ({"a", "b", "c"} if gone == "while it ran" else {"a", "b"})
    assert job.now == 100 + RANGE.last_call + STEP


def test_a_range_that_waits_for_a_slow_node_does_not_wait_for_one_that_has_left():
    job = begun(RANGE, "abcd")
    job.say("a", Ended(0, cause()))
    job.all_end("b")
    job.wait(RANGE.patience + STEP)  # c and d are only slow
    assert job.heard(Go) == {}
    job.say("c", Ended(0))
    job.say("d", Leaves("told to stop"))
    assert job.heard(Go).keys() == {"a", "b", "c"}


def test_who_comes_later_to_a_range_starts_a_new_round_and_echoes_of_that_cost_nothing():
    job = begun(RANGE, "ab")
    job.hello("c")
    assert job.sent[-1][1] == Stop(0, "a node joins", job.it.history)
    assert stopped(job) == {"a", "b"}
    job.all_end("a", "b", cause=cause(1, echo=4))
    assert {process: go.node_rank for process, go in job.heard(Go).items()} == {"a": 0, "b": 1, "c": 2}
    assert job.budgets == (0, 0)


@pytest.mark.parametrize("why", ["full", "done"])
def test_who_comes_to_a_range_that_is_full_or_nearly_done_waits(why):
    job = begun(RANGE, "abcd" if why == "full" else "ab")
    if why == "done":
        job.say("b", Returned(0))
    job.hello("x")
    sent = job.sent.copy()
    assert "x" in job.heard(Waits)
    assert not any(isinstance(message, Stop) for _, message in sent)
    job.say("a", Ended(0, cause()))
    job.all_end(*("bcd" if why == "full" else "b"))
    assert ("x" in job.heard(Go)) == (why == "done")


def test_a_survivor_whose_ranks_were_still_ending_joins_a_range_that_has_begun_again():
    job = Job(RANGE)
    job.hello("a")
    job.hello("b")
    job.hello("c", state="running", round=4, history=History(9, 4, 3))
    job.wait(RANGE.last_call + STEP)
    assert job.heard(Go).keys() == {"a", "b"}
    job.say("c", Ended(4))
    assert stopped(job) == {"a", "b"}


def test_a_range_takes_no_more_processes_than_it_may_lose_and_counts_none_twice():
    job = begun(RANGE, "ab")
    job.lose("b")
    job.wait(RANGE.grace + STEP)
    for _ in range(3):
        job.hello("b", state=ENDED, round=0)
        job.lose("b")
        job.wait(RANGE.grace + STEP)
    job = begun(RANGE, "abcd")
    for number in range(RANGE.max_nodes * RANGE.max_replacements):
        job.hello(f"x{number}")
    assert job.heard(Refused) == {}
    job.hello("y")
    assert job.heard(Refused)["y"].why == "too many"


@pytest.mark.parametrize("left", [1, 2], ids=["too few are left", "enough are left"])
def test_a_range_that_may_take_nobody_any_more_and_has_too_few_nodes_ends_and_does_not_wait_for_more(left):
    job = begun(replace(RANGE, max_replacements=1), "ab")
    for number in range(6):
        job.hello(f"x{number}")
    for process in ("b", *(f"x{number}" for number in range(6)))[left - 1 :]:
        job.say(process, Leaves("told to stop"))
    job.say("a", Ended(0))
    job.sent.clear()
    job.hello("y")
    assert job.sent[-1] == ("y", Refused("too many", job.sent[-1][1].text))
    assert (job.it.end is None) == (left == 2)
    if left == 1:
        end = job.heard(TheEnd)["a"].end
        assert end == End("replacements", end.text)
        assert end.text.startswith("1 of at least 2 nodes are left, and 8 processes have joined this job")


# --- who is there -----------------------------------------------------------------------------------------------------
def test_a_connection_that_comes_back_in_time_costs_nothing_and_ends_no_round():
    job = begun()
    before = job.it.history
    job.lose("b")
    job.wait(FIXED.grace - STEP)
    job.hello("b", state="running", round=0)
    job.wait(10)
    assert job.sent == [("b", Welcome("a", before))]
    assert job.it.history == before


@pytest.mark.parametrize(("silent", "seconds"), [(False, FIXED.grace), (True, FIXED.heartbeat)])
def test_a_node_is_lost_that_does_not_come_back_or_says_nothing(silent, seconds):
    job = begun()
    if silent:
        job.silent.add("b")
    else:
        job.lose("b")
    job.wait(seconds)
    assert stopped(job) == set()
    job.wait(STEP)
    stop = job.heard(Stop)
    assert stop.keys() == {"a", "c"}
    assert "node 1" in stop["a"].left
    assert stop["a"].history.losses == job.it.history.losses
    assert job.it.history.losses[0].node == "1"
    assert job.budgets == (0, 1)


def test_after_a_pause_of_its_own_the_coordinator_hears_the_others_before_it_judges():
    job = begun()
    job.silent.add("b")
    job.wait(FIXED.heartbeat - STEP)
    job.pause(1000)
    assert job.budgets == (0, 0)
    job.say("a", Ended(0, cause()))
    job.pause(1000)
    assert job.it.end is None
    assert not job.heard(Again)  # those who have answered meanwhile are not given up
    job.wait(FIXED.patience + STEP)
    assert job.heard(Again)


@pytest.mark.parametrize("how", ["disconnected", "silent", "they tell of it", "while the round ends"])
def test_that_node_0_was_cut_off_from_all_others_is_one_loss_however_many_they_are(how):
    job = begun(replace(FIXED, min_nodes=4, max_nodes=4, max_replacements=1), "abcd")
    others = ("b", "c", "d")
    if how == "they tell of it":
        job.all_end(*others, cut=True)
    else:
        if how == "while the round ends":
            job.say("a", Ended(0, cause(echo=4)))
        job.lose(*others) if how == "disconnected" else job.silent.update(others)
        job.wait(FIXED.grace if how == "disconnected" else FIXED.heartbeat)
        assert job.budgets == (0, 0)
        job.wait(STEP)
        for process in others:
            job.hello(process, state=ENDED, round=0)
    job.say("a", Ended(0))
    assert job.budgets == (0, 1)
    job.silent.clear()
    assert job.heard(Go).keys() == set("abcd")


def test_that_node_0_was_cut_off_when_all_others_were_done_is_one_loss_where_its_own_ranks_fail_for_it():
    job = begun(replace(FIXED, max_restarts=0))
    for process in "bc":
        job.say(process, Returned(0))
    job.lose("b", "c")
    job.wait(FIXED.grace + STEP)
    job.say("a", Ended(0, cause(0, echo=4)))
    assert [(loss.who, loss.lived) for loss in job.it.history.losses] == [("a/0", -1.0)]
    assert job.it.end is None


def test_where_all_others_are_lost_one_after_the_other_nobody_is_judged_before_the_last_is_overdue():
    job = begun(replace(RANGE, max_replacements=1), "abcd")
    for process in "bcd":
        job.lose(process)
        job.wait(1)
    job.wait(RANGE.grace - 1)
    assert job.budgets == (0, 0)
    job.wait(STEP)
    assert job.budgets == (0, 1)


def test_where_all_others_were_cut_off_the_last_to_come_back_has_its_time_after_the_first():
    job = begun(RANGE, "abcd")
    job.lose("b", "c", "d")
    job.wait(RANGE.grace - STEP)
    job.hello("b", state="running", round=0)
    job.wait(STEP + RANGE.grace)
    assert job.budgets == (0, 0)
    job.wait(STEP)
    assert job.budgets == (0, 2)


def test_the_only_other_node_has_no_longer_time_than_any():
    job = begun(RANGE, "ab")
    job.lose("b")
    job.wait(RANGE.grace + STEP)
    assert job.budgets == (0, 1)


def test_who_was_given_up_and_speaks_is_asked_to_come_anew():
    job = begun()
    job.silent.add("b")
    job.wait(FIXED.heartbeat + STEP)
    job.all_end("a", "c")
    job.sent.clear()
    job.say("b", Returned(0))
    assert job.heard(Greet).keys() == {"b"}
    job.hello("b", state="running", round=0)
    assert job.heard(Stop).keys() == {"b"}
    job.say("b", Ended(0))
    assert {go.round for go in job.heard(Go).values()} == {1}
    assert job.budgets == (0, 1)


@pytest.mark.parametrize(
    ("connected", "started", "wins"),
    [(True, 2, True), (True, 1, True), (True, 0, False), (False, 2, True), (False, 0, True)],
    ids=["later", "at the same time", "a clock behind", "the older is gone", "the older is gone, a clock behind"],
)
def test_of_two_processes_in_one_place_the_newer_one_stays(connected, started, wins):
    job = begun()
    if not connected:
        job.lose("b")
    job.hello("b2", 1, started_ns=started)
    refused = [(name, each.why) for name, each in job.sent if isinstance(each, Refused)]
    assert dict(refused) == {"b" if wins else "b2": "fenced"}
    assert stopped(job) == ({"a", "c"} if wins else set())
    assert job.budgets == (0, int(wins))
    if wins:
        job.all_end("a", "c")
        assert job.heard(Go).keys() == {"a", "b2", "c"}


def test_a_process_whose_place_was_taken_never_has_it_again_whatever_the_clocks_say():
    job = begun()
    job.lose("b")
    job.hello("b2", 1, started_ns=0)
    job.sent.clear()
    job.hello("b", state="running", round=0)
    assert job.heard(Refused).keys() == {"b"}


def test_nobody_takes_the_place_of_node_0_from_the_process_that_leads_the_job():
    job = begun()
    job.hello("z", 0, started_ns=99)
    assert job.heard(Refused) == {"z": Refused("fenced", "node 0 is the process that leads the job")}
    assert job.budgets == (0, 0)


def test_a_new_process_in_the_place_of_a_node_that_was_done_waits_and_nothing_is_lost():
    job = begun()
    job.say("b", Returned(0))
    job.hello("b2", 1)
    assert "b2" in job.heard(Waits)
    job.say("a", Returned(0))
    job.say("c", Returned(0))
    assert job.it.end == End("done")
    assert job.budgets == (0, 0)


def test_a_new_process_in_the_place_of_a_node_that_was_done_takes_part_in_the_next_round():
    job = begun()
    job.say("b", Returned(0))
    job.lose("b")
    job.hello("b2", 1)
    job.say("c", Ended(0, cause(2)))
    assert stopped(job) == {"a"}
    job.all_end("a")
    assert job.heard(Go).keys() == {"a", "b2", "c"}
    assert job.budgets == (1, 0)


def test_a_new_process_comes_while_a_round_is_over_and_the_one_before_it_had_returned():
    job = begun()
    job.say("b", Returned(0))
    job.say("c", Ended(0, cause(2)))
    job.hello("b2", 1)
    job.all_end("a")
    assert job.heard(Go).keys() == {"a", "b2", "c"}


# --- what is lost is counted once -------------------------------------------------------------------------------------
def test_one_loss_is_counted_once_whoever_tells_of_it():
    job = begun()
    job.say("b", Leaves("told to stop"))
    job.lose("b")
    job.all_end("a", "c")
    job.wait(FIXED.heartbeat + STEP)
    job.hello("b2", 1)
    assert job.budgets == (0, 1)


def test_the_loss_of_a_coordinator_is_counted_once_however_many_tell_of_it():
    first = begun()
    history = first.it.history
    job = Job(host="a2")
    job.hello("a2", 0)
    job.hello("b", state="running", round=0, history=history, lost=("a",))
    job.hello("c", state=ENDED, round=0, history=history, lost=("a",))
    job.say("b", Ended(0))
    assert job.budgets == (0, 1)
    assert {go.round for go in job.heard(Go).values()} == {1}


def test_more_losses_than_replacements_end_the_job():
    job = begun(replace(FIXED, max_replacements=1))
    job.say("b", Leaves("told to stop"))
    job.hello("b2", 1)
    job.all_end("a", "c")
    job.say("c", Leaves("told to stop"))
    end = job.heard(TheEnd)["a"]
    assert (end.end.kind, end.end.text) == ("replacements", "node 2: told to stop; and 1 replacements are used up")
    assert job.budgets == (0, 1)


def test_several_nodes_that_are_lost_in_one_round_are_one_replacement():
    job = begun(replace(FIXED, max_replacements=1))
    for process in ("b", "c"):
        job.say(process, Leaves("told to stop"))
    job.all_end("a")
    for process, node in (("b2", 1), ("c2", 2)):
        job.hello(process, node)
    assert job.heard(Go)["c2"].round == 1
    job.say("b2", Leaves("told to stop"))
    assert job.heard(TheEnd)["a"].end.kind == "replacements"


def test_a_node_that_comes_and_is_lost_while_others_are_waited_for_is_a_replacement_each_time():
    job = Job(replace(FIXED, max_replacements=1))
    job.hello("a")
    for process in ("b", "b2"):
        job.hello(process, 1)
        job.say(process, Leaves("told to stop"))
    assert job.heard(TheEnd)["a"].end.kind == "replacements"


@pytest.mark.parametrize(
    ("lives", "rules", "ends"),
    [
        ((5000, 10, 10), FIXED, True),
        ((10, 10), FIXED, False),
        ((10, 700, 10), FIXED, False),
        ((10, 10, 700), FIXED, False),
        ((10, 10, 10), RANGE, False),
    ],
)
def test_a_node_that_dies_in_one_place_again_and_again_is_not_replaced_any_more(lives, rules, ends):
    job = begun(rules, "abc")
    process = "b"
    for number, life in enumerate(lives):
        job.wait(life)
        job.lose(process)
        job.wait(rules.grace + STEP)
        job.all_end("a", "c")
        process = f"b{number}"
        job.hello(process, 1 if rules.fixed else None)
    assert (job.it.end is not None) == ends


@pytest.mark.end("the same worker is lost three times, and lives less than ten minutes each time it is back")
def test_a_node_that_dies_soon_after_it_is_back_is_replaced_twice_and_the_job_says_why_it_ends():
    job = begun(replace(FIXED, about="Its container's memory is limited to 2.0 GiB."))
    for number, process in enumerate(("b1", "b2", "b3")):
        job.hello(process, 1)
        job.all_end("a", "c", round_no=number)
    assert all(loss.why.endswith("a new process has taken its place") for loss in job.it.history.losses)
    assert job.it.end.text.startswith("node 1 was lost 3 times, and lived less than 600 s each time it was back")
    assert job.it.end.text.endswith("memory is limited to 2.0 GiB.")
    assert verdict_of(TheEnd(job.it.end, uploads=True), None, 2).code == "SYSTEM:NodeLost"


def test_a_process_that_was_there_before_this_coordinator_has_lived_nobody_knows_how_long():
    losses = tuple(Spent(n, f"x{n}", "node 1: lost", "1", 10.0) for n in range(2))
    job = Job()
    job.hello("a")
    job.hello("b", state=ENDED, round=3, history=History(9, 3, 3, losses=losses))
    job.say("b", Leaves("told to stop"))
    assert job.it.end is None
    assert job.budgets == (0, 3)


def test_a_done_node_that_is_lost_or_leaves_costs_nothing_and_the_round_goes_on():
    job = begun()
    job.say("b", Returned(0))
    job.say("b", Leaves("told to stop"))
    job.say("c", Returned(0))
    job.lose("c")
    job.wait(FIXED.grace + STEP)
    assert "node 2 lost after its ranks had succeeded" in job.heard(Waits)["a"].why
    assert job.budgets == (0, 0)
    job.say("a", Returned(0))
    assert job.it.end == End("done")


def test_an_echo_of_a_done_node_that_was_lost_is_no_restart_but_its_loss():
    job = begun(replace(FIXED, max_restarts=0))
    job.say("b", Returned(0))
    job.lose("b")
    job.wait(FIXED.grace + STEP)
    assert job.budgets == (0, 0)
    job.say("c", Ended(0, cause(2, echo=4)))
    job.all_end("a")
    assert job.it.end is None
    assert job.budgets == (0, 1)
    job.hello("b2", 1)
    assert job.heard(Go).keys() == {"a", "b2", "c"}


def test_a_done_node_that_was_lost_is_not_paid_for_where_another_loss_has_ended_the_round():
    job = begun()
    job.say("b", Returned(0))
    for process in "bc":
        job.say(process, Leaves("told to stop"))
    job.all_end("a", cause=cause(0, echo=4))
    assert job.budgets == (0, 1)


def test_a_done_node_that_could_not_hear_node_0_for_a_while_has_still_done_its_part():
    job = begun()
    job.say("b", Returned(0))
    job.say("b", Ended(0, cut=True))
    job.say("a", Returned(0))
    job.say("c", Returned(0))
    assert job.it.end == End("done")


@pytest.mark.parametrize("first", ["the node", "an echo of it"])
def test_a_node_that_could_not_hear_node_0_counts_as_lost_and_its_echoes_as_echoes(first):
    job = begun(replace(FIXED, max_restarts=0))
    if first == "the node":
        job.say("b", Ended(0, cut=True))
        assert stopped(job) == {"a", "c"}
        job.all_end("a", "c", cause=cause(0, echo=4))
    else:
        job.say("c", Ended(0, cause(2, echo=4)))
        job.say("b", Ended(0, cause(1, echo=4), cut=True))
        job.all_end("a")
    assert job.heard(Go).keys() == {"a", "b", "c"}
    assert job.budgets == (0, 1)


def test_where_node_0_itself_had_stood_still_nobody_is_blamed_for_not_hearing_it():
    job = begun(replace(FIXED, max_restarts=0))
    job.pause(FIXED.grace + 1)
    job.say("b", Ended(0, cut=True))
    job.all_end("a", "c", cause=cause(0, echo=4))
    assert job.heard(Go).keys() == {"a", "b", "c"}
    assert job.budgets == (0, 0)


# --- leaving ----------------------------------------------------------------------------------------------------------
def test_who_leaves_between_two_rounds_is_not_counted_in_the_next():
    job = begun()
    job.say("c", Ended(0, cause(2)))
    job.say("a", Ended(0))
    job.say("c", Leaves("told to stop"))
    job.say("b", Ended(0))
    assert job.heard(Go) == {}
    assert job.budgets == (1, 1)
    job.hello("c", state=ENDED, round=0)
    assert job.heard(Refused).keys() == {"c"}
    job.hello("c2", 2)
    assert job.heard(Go).keys() == {"a", "b", "c2"}


def test_who_leaves_before_the_first_round_is_not_waited_for():
    job = Job()
    job.hello("b")
    job.say("b", Leaves("told to stop"))
    job.hello("c")
    job.hello("a")
    assert job.heard(Go) == {}
    assert job.budgets == (0, 1)


def test_node_0_leaves_and_everybody_knows_that_its_loss_is_counted():
    job = begun()
    job.hello("b", state="running", round=0)
    job.sent.clear()
    job.say("a", Leaves("told to stop"))
    stops = job.heard(Stop)
    assert stops.keys() == {"a", "b", "c"}
    assert stops["b"].left == {"node 0": "told to stop"}
    history = stops["b"].history
    assert [loss.who for loss in history.losses] == ["a"]
    job.all_end("b", "c")
    assert job.sent == []  # nothing is decided here any more
    after = Job(host="a2")
    for process in ("b", "c"):
        after.hello(process, state=ENDED, round=0, history=history, lost=("a",))
    after.hello("a2", 0)
    assert after.heard(Go)["b"].round == 1
    assert after.budgets == (0, 1)


def test_node_0_leaves_once_too_often_and_the_next_node_0_ends_the_job():
    job = begun(replace(FIXED, max_replacements=0))
    job.say("a", Leaves("told to stop"))
    sent = job.sent.copy()
    assert not any(isinstance(message, TheEnd) for _, message in sent)  # nobody is left who would upload it
    history = job.heard(Stop)["b"].history
    after = Job(replace(FIXED, max_replacements=0), host="a2")
    after.hello("a2", 0)
    after.hello("b", state=ENDED, round=0, history=history, lost=("a",))
    assert after.heard(TheEnd)["a2"].uploads
    assert after.it.end.kind == "replacements"


# --- a failure --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("timed_out", [False, True])
def test_a_failure_stops_the_others_and_all_start_again_when_each_has_said_how_it_ended(timed_out):
    job = begun()
    job.say("b", Ended(0, cause(1, timed_out=timed_out)))
    stops = job.heard(Stop)
    assert stops.keys() == {"a", "c"}
    assert stops["a"].timed_out is timed_out
    assert stops["a"].why == "node 1: rank 1 failed (ValueError)"
    job.all_end("a")
    assert job.sent == []
    job.all_end("c")
    again = [message for process, message in job.sent if isinstance(message, Again) and process == "a"]
    assert [each.why for each in again] == ["rank 1 failed (ValueError); all ranks start again: restart 1 of 2"]
    assert {go.round for go in job.heard(Go).values()} == {1}
    assert job.budgets == (1, 0)


@pytest.mark.parametrize(
    ("causes", "rank"),
    [
        ([cause(0, echo=4, time_ns=1), cause(1, time_ns=9)], 1),
        ([cause(0, time_ns=9), cause(1, time_ns=1)], 1),
        ([cause(2, time_ns=1), cause(1, time_ns=1)], 1),
        ([cause(0, echo=4, time_ns=1), cause(1, echo=1, time_ns=9)], 1),
    ],
    ids=["no echo", "the earliest", "the lowest rank", "the weaker echo"],
)
def test_the_root_cause_is_the_earliest_failure_that_speaks_for_itself(causes, rank):
    job = begun()
    for process, each in zip("ab", causes, strict=True):
        job.say(process, Ended(0, each))
    job.all_end("c")
    assert [spent.who for spent in job.it.history.restarts] == [str(rank)]


def fails(job: Job, *processes: str, others: str = "ac", **facts: object) -> None:
    number = job.it.history.round
    for process in processes:
        job.say(process, Ended(number, cause(1, **facts), (7,)))
    job.all_end(*others, round_no=number)


@pytest.mark.parametrize(
    ("rules", "facts", "rounds", "reason"),
    [
        (replace(FIXED, max_restarts=0), {}, 1, "max_restarts=0"),
        (FIXED, {}, 3, "all 2 restart(s) of max_restarts are spent, and it was ValueError each time"),
        (FIXED, {"repeats": True}, 1, "the same ValueError would come again"),
    ],
)
def test_a_failure_that_cannot_be_mended_ends_the_job_with_the_root_causes_own_words(rules, facts, rounds, reason):
    job = begun(rules)
    for _ in range(rounds):
        job.sent.clear()
        fails(job, "b", **facts)
    number = rounds - 1
    assert job.heard(Tell) == {"b": Tell(number)}
    job.say("b", Told(number, "the record", "the disk"))
    ends = job.heard(TheEnd)
    assert {process: end.uploads for process, end in ends.items()} == {"a": True, "b": False, "c": False}
    assert ends["c"].end == End("failed", outcome="the record", reason=reason, disk="the disk")
    assert ends["c"].history.end == ends["c"].end  # for the next node 0, where this one is lost before its upload


def test_with_an_echo_the_error_says_which_ranks_had_returned():
    job = begun(replace(FIXED, max_restarts=0))
    job.say("b", Ended(0, cause(1, echo=4), (7, 3)))
    job.say("a", Ended(0, None, (5,)))
    job.say("c", Ended(0))
    job.say("b", Told(0, "the record"))
    assert job.it.end.returned == (3, 5, 7)


@pytest.mark.parametrize(
    ("second", "asked"), [({"time_ns": 2000}, {"c"}), ({"echo": 4}, set())], ids=["a real one", "an echo"]
)
def test_where_the_root_causes_node_is_lost_the_next_real_failure_speaks(second, asked):
    job = begun(replace(FIXED, max_restarts=0))
    job.say("b", Ended(0, cause(1)))
    job.say("c", Ended(0, cause(2, **second)))
    job.say("a", Ended(0))
    job.lose("b")
    job.sent.clear()
    job.wait(FIXED.grace + STEP)
    sent = job.sent.copy()
    assert job.heard(Tell).keys() == asked
    if asked:
        job.say("c", Told(0, "another record"))
        assert job.it.end.outcome == "another record"
    else:
        assert job.it.end.kind == "lost"
        assert "rank 1 on node 1 failed (ValueError)" in job.it.end.text
        assert any(isinstance(message, TheEnd) for _, message in sent)


def test_who_does_not_answer_what_it_is_asked_is_not_waited_for_without_end():
    job = begun(replace(FIXED, max_restarts=0))
    fails(job, "b")
    job.wait(FIXED.patience)
    assert job.it.end is None
    job.wait(STEP)
    assert job.it.end.kind == "lost"


def test_who_was_asked_for_its_failure_and_lost_its_connection_is_asked_again():
    job = begun(replace(FIXED, max_restarts=0))
    fails(job, "b")
    job.lose("b")
    job.sent.clear()
    job.hello("b", state=ENDED, round=0)
    assert job.heard(Tell) == {"b": Tell(0)}


def test_a_loss_while_the_root_cause_is_asked_for_does_not_take_its_place():
    job = begun(replace(FIXED, max_restarts=0, max_replacements=0))
    fails(job, "b")
    job.say("c", Leaves("told to stop"))
    job.say("b", Told(0, "the record"))
    assert job.it.end.kind == "failed"


def test_who_returns_when_the_round_is_over_has_still_to_say_how_it_ended_there():
    job = begun()
    job.say("b", Ended(0, cause(1, echo=4)))
    job.say("a", Ended(0))
    job.say("c", Returned(0))
    assert not job.heard(Again)
    job.say("c", Ended(0, cause(2)))
    assert [spent.who for spent in job.it.history.restarts] == ["2"]
    assert job.heard(Go).keys() == set("abc")


# --- a cause is told at once, and counts when it comes late -----------------------------------------------------------
NO_RESTART = replace(FIXED, max_restarts=0)


def test_a_cause_that_is_told_at_once_stops_the_others_and_its_node_may_take_its_time_to_end():
    job = begun()
    job.say("b", Alarm(0, cause(1), "the record"))
    assert stopped(job) == {"a", "c"}
    job.all_end("a", "c")
    job.wait(FIXED.patience - STEP)
    assert job.heard(Again) == {}
    job.say("b", Ended(0, cause(1)))
    assert job.heard(Go).keys() == set("abc")
    assert job.budgets == (1, 0)


def test_an_echo_that_is_told_at_once_gives_way_to_the_cause_that_its_node_tells_at_the_end():
    job = begun(NO_RESTART)
    job.say("b", Alarm(0, cause(1, echo=4)))
    job.all_end("a", "c")
    job.say("b", Ended(0, cause(2)))
    assert job.heard(Tell).keys() == {"b"}
    job.say("b", Told(0, "the record"))
    assert (job.it.end.kind, job.it.end.outcome) == ("failed", "the record")


@pytest.mark.parametrize("then", ["it is lost", "it does not end its ranks", "it does not answer"])
def test_what_was_told_at_once_is_the_end_though_its_node_never_says_more(then):
    job = begun(NO_RESTART)
    job.say("b", Alarm(0, cause(1), "the record"))
    if then == "it is lost":
        job.lose("b")
    elif then == "it does not answer":
        job.say("b", Ended(0, cause(1)))
    job.all_end("a", "c")
    job.wait(2 * FIXED.patience + 2 * STEP)
    assert job.it.end == End("failed", outcome="the record", reason="max_restarts=0")
    assert job.it.history.round == 0


def test_the_coordinator_waits_for_all_that_a_node_may_need_to_say_how_it_ended():
    assert FIXED.patience >= FIXED.heartbeat + FIXED.grace + FIXED.settle + FIXED.stop + FIXED.kill


def lost_with_its_cause(job: Job) -> None:
    """Node 1's agent stands still as its rank fails; the others lose their peer, and end; then it is given up."""
    job.say("a", Ended(0, cause(0, echo=4)))
    job.all_end("c")
    job.lose("b")
    job.wait(FIXED.grace + STEP)
    assert job.budgets == (0, 1)
    job.sent.clear()


def test_a_cause_that_comes_when_its_node_was_given_up_ends_a_job_without_restarts():
    job = begun(NO_RESTART)
    lost_with_its_cause(job)
    job.hello("b", state=ENDED, round=0, alarm=Alarm(0, cause(1)))
    job.say("b", Ended(0, cause(1)))
    assert job.heard(Tell) == {"b": Tell(0)}
    assert job.heard(Go) == {}
    job.say("b", Told(0, "the record"))
    assert job.it.end == End("failed", outcome="the record", reason="max_restarts=0")


def test_a_cause_that_comes_late_is_the_restart_that_it_would_have_been_and_counts_once():
    job = begun()
    lost_with_its_cause(job)
    job.hello("b", state=ENDED, round=0, alarm=Alarm(0, cause(1)))
    job.say("b", Ended(0, cause(1)))
    job.say("b", Ended(0, cause(1)))
    assert job.budgets == (1, 1)
    assert job.heard(Go).keys() == set("abc")


def test_a_cause_that_comes_late_ends_the_round_that_has_begun_without_it():
    job = begun(replace(RANGE, max_restarts=0), "abc")
    job.lose("b")
    job.wait(RANGE.grace + STEP)
    job.all_end("a", "c")
    assert job.heard(Go).keys() >= {"a", "c"}
    job.hello("b", state=ENDED, round=0, alarm=Alarm(0, cause(1)))
    job.say("b", Ended(0, cause(1)))
    assert job.heard(Tell) == {"b": Tell(0)}
    job.say("b", Told(0, "the record"))
    assert {end.end.kind for end in job.heard(TheEnd).values()} == {"failed"}


def test_a_cause_counts_that_a_process_brings_whose_place_was_taken():
    job = begun(NO_RESTART)
    lost_with_its_cause(job)
    job.hello("b2", 1, started_ns=2)
    job.sent.clear()
    job.hello("b", state=ENDED, round=0, alarm=Alarm(0, cause(1), "the record"))
    sent = job.sent.copy()
    assert [message.why for process, message in sent if process == "b" and isinstance(message, Refused)] == ["fenced"]
    assert job.it.end == End("failed", outcome="the record", reason="max_restarts=0")


@pytest.mark.parametrize("was_counted", [False, True])
def test_the_next_coordinator_counts_a_cause_that_the_one_before_has_not(was_counted):
    history = replace(begun().it.history, version=9)
    if was_counted:
        history = replace(history, restarts=(Spent(0, "1", "rank 1 failed"),))
    after = Job(replace(FIXED, max_restarts=1), host="a2")
    after.hello("b", state=ENDED, round=0, history=history, lost=("a",), alarm=Alarm(0, cause(1)))
    after.say("b", Ended(0, cause(1)))
    after.hello("c", state=ENDED, round=0, history=history, lost=("a",), alarm=Alarm(0, cause(2, echo=4)))
    after.say("c", Ended(0, cause(2, echo=4)))
    after.hello("a2", 0)
    assert after.heard(Go).keys() == {"a2", "b", "c"}
    assert after.budgets == (1, 1)


# --- nodes that do not answer -----------------------------------------------------------------------------------------
def test_a_slow_node_is_left_behind_where_the_cause_is_known_and_comes_when_it_is_ready():
    job = begun()
    job.say("b", Ended(0, cause(1)))
    job.say("a", Ended(0))
    job.wait(FIXED.patience + STEP)
    assert job.heard(Again)
    assert job.budgets == (1, 0)
    job.say("c", Ended(0))
    assert job.heard(Go).keys() == set("abc")


def test_a_node_without_a_word_is_lost_where_the_others_only_echo():
    job = begun()
    job.say("b", Ended(0, cause(1, echo=4)))
    job.say("a", Ended(0))
    job.wait(FIXED.patience + STEP)
    assert job.budgets == (0, 1)
    assert job.it.history.losses[0].node == "2"
    job.say("c", Ended(0))
    assert job.heard(Greet).keys() == {"c"}


@pytest.mark.parametrize("late", [False, True], ids=["in time", "left behind"])
def test_a_node_that_has_missed_the_stop_is_told_again(late):
    job = begun()
    job.lose("c")
    job.say("b", Ended(0, cause(1)))
    job.say("a", Ended(0))
    if late:
        job.hello("c", state="running", round=0)
        job.wait(FIXED.patience + STEP)
        job.lose("c")
    job.sent.clear()
    job.hello("c", state="running", round=0)
    assert stopped(job) == {"c"}
    job.say("c", Ended(0))
    assert job.heard(Go).keys() == set("abc")


def test_a_node_that_has_missed_the_start_is_told_again():
    job = begun()
    job.lose("c")
    job.hello("c")
    assert job.heard(Go).keys() == {"c"}


def test_a_node_that_has_missed_both_start_and_stop_hears_both_in_order():
    job = begun()
    job.lose("c")
    job.say("b", Ended(0, cause(1)))
    job.sent.clear()
    job.hello("c")
    assert [type(message) for process, message in job.sent if process == "c"] == [Welcome, Go, Stop]


def test_what_is_said_of_another_round_or_twice_counts_for_nothing():
    job = begun()
    for message in (Returned(5), Ended(5, cause()), Told(0, "x"), Uploaded(ok=True)):
        job.say("b", message)
    assert job.sent == []
    job.say("b", Returned(0))
    job.say("b", Returned(0))
    assert job.sent == []


# --- a node that cannot begin -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("rules", [FIXED, RANGE], ids=["fixed", "range"])
def test_a_node_that_cannot_begin_ends_a_job_that_has_not_begun_and_node_0_uploads(rules):
    job = Job(rules)
    job.hello("a")
    job.hello("b", state="cannot")
    job.say("b", CannotBegin("no module", "no rank was started"))
    ends = job.heard(TheEnd)
    assert ends["b"].end == End("failed", outcome="no module", reason="no rank was started")
    assert (ends["a"].uploads, ends["b"].uploads) == (True, False)


@pytest.mark.parametrize("rules", [FIXED, RANGE], ids=["fixed", "range"])
def test_a_node_that_cannot_begin_while_the_job_runs_is_turned_away_alone(rules):
    job = begun(rules, "abc")
    job.lose("c")
    job.wait(FIXED.grace + STEP)
    before = job.budgets
    job.hello("c2", 2 if rules.fixed else None, state="cannot")
    job.say("c2", CannotBegin("no disk", "no rank was started"))
    assert job.heard(Refused)["c2"].why == "begun"
    assert job.it.end is None
    assert job.budgets == before


def test_why_a_replacement_cannot_begin_is_said_where_it_is_missing():
    job = begun()
    job.lose("b")
    job.wait(FIXED.grace + STEP)
    job.all_end("a", "c")
    raised = Raised("ImportError", "libcuda.so.1: no such file", "")
    outcome = RankOutcome(-1, -1, 1, -1, "host", 1, Status.RAISED, 1, raised=raised)
    job.hello("b2", 1, state="cannot")
    job.say("b2", CannotBegin(outcome.to_json(), "no rank was started"))
    text = "node 1 came, and could not begin (ImportError: libcuda.so.1: no such file)"
    job.wait(31)
    assert text in job.heard(Waits)["a"].why
    job.wait(FIXED.timeout)
    assert text in job.it.end.text


@pytest.mark.parametrize(("lost", "why"), [((), "was not heard"), (("z",), "coordinator was lost")])
def test_a_node_that_is_back_after_its_loss_is_told_whose_it_was(lost, why):
    job = begun()
    job.lose("b")
    job.wait(FIXED.grace + STEP)
    job.sent.clear()
    job.hello("b", state="running", round=0, lost=lost)
    assert why in job.heard(Stop)["b"].why


def test_nor_does_a_newcomer_that_cannot_begin_in_a_later_round_of_a_range():
    job = begun(RANGE, "abc")
    job.say("c", Leaves("told to stop"))
    job.all_end("a", "b")
    job.wait(RANGE.last_call + STEP)
    assert job.heard(Go)["a"].round == 1
    job.hello("d", state="cannot")
    job.say("d", CannotBegin("no disk", "no rank was started"))
    assert job.heard(Refused)["d"].why == "begun"
    assert job.it.end is None


def test_a_process_that_cannot_begin_starts_no_round_in_a_fixed_job():
    job = Job()
    for process in "abc":
        job.hello(process, state="cannot" if process == "c" else "new")
    assert job.heard(Go) == {}


# --- the end ----------------------------------------------------------------------------------------------------------
def test_the_job_is_done_when_all_ranks_have_returned_and_over_when_that_is_uploaded():
    job = begun()
    for process in "bac":
        job.say(process, Returned(0))
    assert {process: (end.end.kind, end.uploads) for process, end in job.heard(TheEnd).items()} == {
        "a": ("done", True),
        "b": ("done", False),
        "c": ("done", False),
    }
    job.say("b", Uploaded(ok=True))
    assert job.heard(Leave) == {}
    job.say("a", Uploaded(ok=False, why="full"))
    assert job.heard(Leave) == {"b": Leave(ok=False, why="full"), "c": Leave(ok=False, why="full")}


def test_who_comes_after_the_end_is_told_of_it():
    job = begun()
    for process in "abc":
        job.say(process, Returned(0))
    job.lose("b")
    job.say("a", Uploaded(ok=True))
    job.sent.clear()
    for process in ("b", "c2"):
        job.hello(process, ord(process[0]) - ord("a"), state="done", round=0)
        told: list[Message] = [message for name, message in job.sent if name == process]
        assert told[1:3] == [TheEnd(End("done"), uploads=False, history=job.it.history), Leave(ok=True)]


def test_after_the_end_nothing_is_lost_any_more():
    job = begun()
    for process in "abc":
        job.say(process, Returned(0))
    job.lose("b", "c")
    job.wait(FIXED.heartbeat * 2)
    assert job.it.end == End("done")
    assert job.budgets == (0, 0)


# --- a new coordinator ------------------------------------------------------------------------------------------------
def test_of_what_survivors_bring_the_latest_counts_and_no_round_is_numbered_twice():
    old = History(3, 4, 3, restarts=(Spent(1, "0", "x"),))
    new = History(5, 6, 3, restarts=(Spent(1, "0", "x"), Spent(5, "0", "x")))
    for order in ((old, new), (new, old)):
        job = Job(host="a2")
        job.hello("a2", 0)
        for process, history in zip("bc", order, strict=True):
            job.hello(process, state=ENDED, round=history.round, history=history, lost=("a",))
        assert job.heard(Go)["b"].round == 7
        assert job.budgets == (2, 1)


@pytest.mark.parametrize("state", ["running", "done"])
def test_survivors_end_their_ranks_first(state):
    job = Job(host="a2")
    job.hello("a2", 0)
    job.hello("c", state=ENDED, round=2, history=History(3, 2, 3))
    job.hello("b", state=state, round=2, history=History(3, 2, 3))
    sent = job.sent.copy()
    assert job.heard(Stop)["b"].round == 2
    assert not any(isinstance(message, Go) for _, message in sent)
    job.say("b", Ended(2))
    assert job.heard(Go)["b"].round == 3


def test_a_failure_that_was_decided_and_not_uploaded_stays_decided():
    ended = End("failed", outcome="the record", reason="max_restarts=0")
    job = Job(host="a2")
    job.hello("a2", 0)
    job.hello("c", state=ENDED, round=2, history=History(9, 2, 3))
    job.hello("b", state=ENDED, round=2, history=History(8, 2, 3, end=ended), lost=("a",))
    assert {process: (end.end, end.uploads) for process, end in job.heard(TheEnd).items()} == {
        "a2": (ended, True),
        "b": (ended, False),
        "c": (ended, False),
    }


def test_a_survivor_that_comes_when_the_others_have_begun_anew_knows_of_higher_rounds_and_of_losses():
    job = begun(RANGE, "ab")
    history = History(20, 7, 3, losses=(Spent(3, "q/3", "x"),))
    job.hello("c", state=ENDED, round=7, history=history, lost=("z",))
    assert stopped(job) == {"a", "b"}
    job.all_end("a", "b", round_no=0)
    assert {go.round for go in job.heard(Go).values()} == {8}
    assert [loss.who for loss in job.it.history.losses] == ["q/3", "z"]


def fails_on(job: Job, process: str, failure: Cause) -> None:
    """A round ends with this failure of one node."""
    number, others = job.it.history.round, set(job.connected) - {process}
    job.say(process, Ended(number, failure))
    job.all_end(*sorted(others), round_no=number)


@pytest.mark.parametrize(
    ("steps", "ends"),
    [((7, 7, 7), True), ((7, 5, 6), True), ((7, 5, 8), False), ((5, 7, 7), False), ((7, -1, 6), False)],
    ids=["one place", "before it", "further at last", "further at first", "who knows where"],
)
def test_restarts_that_bring_no_progress_end_the_job_though_some_are_left(steps, ends):
    job = begun(replace(FIXED, max_restarts=9))
    for rank, step in enumerate(steps):  # of another rank each time, or else it is the code's or the data's at once
        job.sent.clear()
        fails_on(job, "abc"[rank], replace(cause(rank), step=step))
    assert (job.heard(Tell).keys() == {"c"}) == ends
    job.say("c", Told(2, "the record"))
    reason = f"3 rounds in a row have failed at or before step {steps[0]}: restarts bring no progress"
    assert (job.it.end == End("failed", outcome="the record", reason=reason)) == ends


@pytest.mark.parametrize(
    ("nodes", "names", "suspect"),
    [
        ("bbb", ("ValueError", "RuntimeError", "OSError"), True),
        ("bbc", ("ValueError", "RuntimeError", "OSError"), False),
        ("bbb", ("ValueError", "ValueError", "ValueError"), False),
    ],
    ids=["one node, many errors", "two nodes", "one error"],
)
def test_a_node_on_which_all_failed_with_different_errors_is_named(nodes, names, suspect):
    job = begun()
    for process, name in zip(nodes, names, strict=True):
        fails_on(job, process, replace(cause(1), name=name))
    job.say(nodes[-1], Told(2, "the record"))
    assert job.it.end.reason.startswith("all 2 restart(s) of max_restarts are spent")
    named = (
        "Every failure so far was on node 1 (host host-b), with different errors (ValueError, RuntimeError, OSError)"
    )
    assert (named in job.it.end.reason) == suspect


def test_the_only_node_of_a_job_is_not_suspected():
    job = begun(replace(FIXED, min_nodes=1, max_nodes=1), "a")
    for name in ("ValueError", "RuntimeError", "OSError"):
        job.say("a", Ended(job.it.history.round, replace(cause(0), name=name)))
    job.say("a", Told(2, "the record"))
    assert job.it.end.reason == "all 2 restart(s) of max_restarts are spent"


# --- what it costs ----------------------------------------------------------------------------------------------------
def test_reasons_are_short_and_kept_of_the_latest_only():
    job = begun(replace(FIXED, max_restarts=100))
    for _ in range(20):
        job.say("b", Ended(job.it.history.round, replace(cause(1), name="E" * 5000)))
        job.all_end("a", "c")
    assert len(job.it.history.restarts) == 20
    assert sum(len(spent.why) for spent in job.it.history.restarts) < 2000


@pytest.mark.parametrize(
    ("again", "ends"),
    [({}, True), ({"step": 8}, False), ({"rank": 1}, False), ({"name": "KeyError"}, False), ({"step": -1}, False)],
    ids=["the same", "further", "another rank", "another error", "who knows where"],
)
def test_a_failure_that_comes_again_at_the_same_step_is_the_codes_or_the_datas(again, ends):
    job = begun()
    first = replace(cause(0), step=again.get("step", 7) if again.get("step") == -1 else 7)
    job.say("a", Ended(0, first))
    job.all_end("b", "c")
    assert job.heard(Go).keys() == set("abc")
    job.say("a", Ended(1, replace(first, **again)))
    job.all_end("b", "c", round_no=1)
    assert (job.heard(Tell).keys() == {"a"}) == ends
    assert job.budgets == ((1, 0) if ends else (2, 0))


# --- a machine at fault ---------------------------------------------------------------------------------------------
BROKEN = {"name": "Xid 79", "repeats": True, "broken": True}


def on_machines(rules=RANGE, **of: str) -> Job:
    """A job in its first round, its nodes on machines of a cluster."""
    job = Job(replace(rules, max_restarts=3))
    for process, machine in of.items():
        job.hello(process, machine=machine)
    job.wait(rules.last_call + STEP)
    assert job.heard(Go).keys() == set(of)
    return job


@pytest.mark.parametrize("errors", [[{"name": "KeyError"}, {"name": "OSError"}], [BROKEN]], ids=["errors", "a GPU"])
def test_a_range_goes_on_without_a_machine_that_is_most_likely_at_fault(errors):
    job = on_machines(a="m0", b="m1", c="m2")
    for error in errors:
        job.sent.clear()
        fails_on(job, "c", replace(cause(2), **error))
    assert job.heard(Go).keys() == {"a", "b"}, "at once: nobody else is waited for"
    assert job.it.history.excluded == ("m2",)
    why = job.it.history.restarts[-1].why
    assert why.endswith(
        ", without the node on host-c (host host-c, Kubernetes node m2), whose machine is most likely at fault"
    )
    job.lose("c")
    job.wait(RANGE.grace + 2 * STEP)
    assert job.budgets == (len(errors), 0), "its end costs nothing"
    job.hello("c2", machine="m2")
    assert "its machine is most likely at fault" in job.heard(Waits)["c2"].why
    job.hello("d", machine="m3")
    assert stopped(job) == {"a", "b"}, "one on another machine is welcome"
    job.all_end("a", "b")
    assert job.heard(Go).keys() == {"a", "b", "d"}


def test_all_nodes_of_such_a_machine_stay_out():
    job = on_machines(a="m0", b="m1", c="m2", d="m2")
    fails_on(job, "c", replace(cause(2), **BROKEN))
    assert job.heard(Go).keys() == {"a", "b"}


def test_what_failed_on_a_machine_that_is_left_out_says_nothing_of_others():
    job = on_machines(a="m0", b="m1", c="m2", d="m3")
    for process, name in (("c", "A"), ("c", "B"), ("b", "C")):
        job.sent.clear()
        fails_on(job, process, replace(cause(1), name=name))
    assert job.it.history.excluded == ("m2",), "one failure alone is no pattern"
    assert job.heard(Go).keys() == {"a", "b", "d"}


@pytest.mark.parametrize(
    ("rules", "of", "who"),
    [
        (RANGE, {"a": "m0", "b": "m1"}, "b"),
        (RANGE, {"a": "m0", "b": "m1", "c": "m2"}, "a"),
        (FIXED, {"a": "m0", "b": "m1", "c": "m2"}, "c"),
    ],
    ids=["too few are left", "node 0's", "a fixed size"],
)
def test_where_nobody_can_go_on_without_it_the_error_names_the_machine(rules, of, who):
    job = on_machines(rules, **of)
    fails_on(job, who, replace(cause(1), **BROKEN))
    job.say(who, Told(0, "the record"))
    assert job.it.end.reason.startswith("the same Xid 79 would come again. It was on ")
    assert f"(host host-{who}, Kubernetes node {of[who]}): keep the next attempt off that machine" in job.it.end.reason
    assert job.it.history.excluded == ()


def test_the_next_coordinator_keeps_to_what_was_excluded():
    first = on_machines(a="m0", b="m1", c="m2", d="m3")
    fails_on(first, "c", replace(cause(2), **BROKEN))
    history = first.it.history
    job = Job(replace(RANGE, max_restarts=3), host="a2")
    job.hello("a2", machine="m2")  # node 0's pod has come to that machine: there is no other
    for process, machine in (("b", "m1"), ("c", "m2"), ("d", "m3")):
        job.hello(process, machine=machine, history=history, lost=("a",))
    job.wait(RANGE.last_call + STEP)
    assert job.heard(Go).keys() == {"a2", "b", "d"}


# --- checks before the first rank -----------------------------------------------------------------------------------
CHECKED = replace(FIXED, preflight=Preflight())
FIT, UNFIT = NodeReport(), NodeReport((Trouble("Gpu", True, "no GPU"),))


def test_ranks_start_when_every_node_is_found_fit_and_later_rounds_are_not_checked():
    job = Job(CHECKED)
    for process in "abc":
        job.hello(process)
    assert all(go.checks for go in job.heard(Go).values())
    job.say("b", Checked(0, FIT))
    job.say("a", Checked(0, FIT))
    job.say("a", Checked(0, FIT))  # again, on another connection
    assert not job.heard(Cleared)
    job.say("c", Checked(0, FIT))
    assert {cleared.text for cleared in job.heard(Cleared).values()} == {"all is well. 3 node(s): nothing was measured"}
    fails_on(job, "b", cause(1))
    assert {(go.round, go.checks) for go in job.heard(Go).values()} == {(1, False)}


@pytest.mark.parametrize("action", ["fail", "report"])
def test_a_node_that_is_not_fit_ends_the_job_or_is_told(action):
    job = begun(replace(FIXED, preflight=Preflight(action=action)))
    for process, report in (("a", FIT), ("b", UNFIT), ("c", FIT)):
        job.say(process, Checked(0, report))
    named = "node 1 (host host-b): no GPU. 3 node(s): nothing was measured"
    if action == "report":
        assert {cleared.text for cleared in job.heard(Cleared).values()} == {named}
    else:
        assert job.it.end == End("preflight", named, reason="SYSTEM:PreflightGpu")
        assert not job.heard(Cleared)


def test_where_a_node_is_lost_while_it_is_checked_all_are_checked_anew():
    job = begun(CHECKED)
    job.say("a", Checked(0, FIT))
    job.say("b", Leaves("told to stop"))
    assert stopped(job) == {"a", "c"}
    job.all_end("a", "c")
    job.hello("b2", 1)
    assert {(go.round, go.checks) for go in job.heard(Go).values()} == {(1, True)}
    job.say("c", Checked(0, UNFIT))  # of the round before
    for process in ("a", "b2", "c"):
        job.say(process, Checked(1, FIT))
    assert job.heard(Cleared).keys() == {"a", "b2", "c"}


def test_who_has_not_heard_that_ranks_may_start_hears_it_on_the_next_connection():
    job = begun(CHECKED)
    for process in "abc":
        job.say(process, Checked(0, FIT))
    job.lose("b")
    job.hello("b", state="new", round=-1)
    assert [go.checks for go in job.heard(Go).values()] == [False]
