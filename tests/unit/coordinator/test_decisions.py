"""Every decision of a job's coordinator, event by event; random orders of faults are in :mod:`tests.simulation`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flytekitplugins_safedist.coordinator.books import NO_LEADER, NO_ROUND, Books, Cause, Leader, Memory, Outcome, Round
from flytekitplugins_safedist.coordinator.coordinator import FENCED
from flytekitplugins_safedist.coordinator.messages import Floor, Save
from flytekitplugins_safedist.coordinator.sign import Sign
from tests.unit.coordinator.coordination import FIXED, RANGE, STEP, Job, begun, join, succeeded_by


# --- a round comes together -------------------------------------------------------------------------------------------
def test_a_fixed_round_begins_when_every_node_is_there_each_in_its_own_place():
    job = Job()
    job.come("c", "b")
    assert job.members == set()
    job.come("a")
    assert {process: job.wants[process].node_rank for process in job.members} == {"a": 0, "b": 1, "c": 2}
    assert job.wants["b"].course.size == 3
    assert job.wants["b"].course.offer == {"port": "-1"}, "what node 0 has ready for this round"


@pytest.mark.parametrize("node", [-1, 3])
def test_a_node_that_the_job_does_not_have_is_turned_away(node):
    job = Job()
    job.come("x", node=node)
    assert job.left("x") == f"the job has 3 nodes, and none is node {node}"


@pytest.mark.parametrize("order", ["abc", "bca"])
def test_a_node_with_another_number_of_ranks_than_node_0_is_turned_away_and_named(order):
    job = Job(FIXED)
    for process in order:
        job.come(process, ranks=4 if process == "c" else 8)
    job.follow()
    why = "it has 4 rank(s), and node 0 has 8: all nodes of a job have the same number"
    assert job.wants["c"].leave == why
    assert job.members == set()
    job.wait(FIXED.rendezvous + 1)
    assert job.it.verdict.kind == "missing"
    assert job.it.verdict.text.endswith(f"; node 2 came, and could not begin ({why})")
    assert job.costs == (0, 0)


def test_a_range_goes_on_without_a_node_that_has_less_ranks():
    job = Job(RANGE)
    job.come("a", "b", ranks=8)
    job.come("c", ranks=7)
    job.follow()
    job.wait(RANGE.last_call + STEP)
    assert job.members == {"a", "b"}
    assert not job.left("c"), "its pod would begin anew again and again, of which the operator counts so many"
    assert "takes no part: it has 7 rank(s), and node 0 has 8" in job.wants["c"].course.news
    job.follow()
    job.fail("b")
    job.follow()
    assert (job.members, job.number) == ({"a", "b"}, 1), "nor is it waited for"
    job.miss("c")
    job.come("c2", ranks=8)
    job.wait(RANGE.preemption + STEP)
    job.follow()
    assert job.members == {"a", "b", "c2"}


def test_who_is_missing_is_said_every_thirty_seconds_and_at_last_ends_the_job():
    job = Job()
    job.come("a")
    job.wait(29)
    assert job.wants["a"].course.news == ""
    job.wait(1)
    assert job.wants["a"].course.news.startswith("waiting for nodes 1, 2 for 30 s, 870 s more at most")
    job.wait(FIXED.rendezvous - 29)
    verdict = job.wants["a"].course.verdict
    assert (verdict.kind, verdict.nodes) == ("missing", ("1", "2"))
    assert verdict.text == "nodes 1, 2 of 3 did not arrive within 900 s"


def test_a_range_begins_at_once_when_it_is_full_and_its_leader_is_node_0():
    job = Job(RANGE)
    job.come("b", "c", "a", "d")
    assert {process: job.wants[process].node_rank for process in job.members} == {"a": 0, "b": 1, "c": 2, "d": 3}


def test_a_range_waits_for_further_nodes_once_the_minimum_is_there_and_not_without_its_leader():
    job = Job(RANGE)
    job.come("b", "c")
    job.wait(RANGE.last_call * 2)
    assert job.members == set()
    job.come("a")
    assert job.members == set("abc")
    job = Job(RANGE)
    job.come("a")
    job.wait(RANGE.last_call * 2)
    job.come("b")
    job.wait(RANGE.last_call - STEP)
    assert job.members == set()
    job.wait(STEP)
    assert job.members == {"a", "b"}


def test_who_finds_a_sign_that_nobody_can_read_is_not_the_first_and_waits_for_those_who_know_more():
    job = Job(RANGE, sign=Sign(NO_LEADER))
    job.come("a", "b")
    job.wait(RANGE.last_call + RANGE.heartbeat + RANGE.grace - STEP)
    assert job.members == set()
    job.wait(STEP)
    assert job.members == {"a", "b"}


def test_a_range_goes_on_when_those_who_are_left_are_back_and_it_has_looked_who_leads():
    job = begun(RANGE, "abcd")
    job.say("d", leaving="told to stop")
    job.follow()
    assert (job.members, job.it.lead.in_doubt) == (set(), True), "they may have gone to another leader"
    assert job.it.lead.is_due(job.now), "at once"
    job.look()
    assert job.members == set("abc")


def test_what_fails_as_the_round_ends_for_a_node_that_joins_costs_nothing():
    job = begun(RANGE, "ab", listens=True)
    job.come("c")
    job.follow("c")
    job.wait(RANGE.rendezvous)
    assert "a node joins" in job.wants["a"].course.news
    job.fail("b", "ConnectionError", echo=4)
    job.follow()
    assert job.members == set("abc")
    assert job.costs == (0, 0)


def test_all_save_before_a_node_joins_and_it_waits_for_that_but_not_for_ever():
    job = begun(RANGE, "ab", listens=True)
    job.come("c")
    job.follow("c")
    assert job.wants["b"].course.save == Save(1, is_urgent=False, is_forced=True)
    job.say(*"ab", floor=Floor(1, 4))
    assert job.wants["b"].course.save == Save(1, is_urgent=False, step=4, is_forced=True)
    job.say("a", saved=1)
    job.wait(RANGE.rendezvous - STEP)
    assert job.it.course.runs
    job.wait(STEP)
    job.follow()
    assert job.members == set("abc")
    assert job.costs == (0, 0)


def test_a_node_that_comes_after_one_that_has_left_again_has_a_save_of_its_own():
    job = begun(RANGE, "ab", listens=True)
    job.come("c")
    job.follow("c")
    job.say(*"ab", floor=Floor(1, 4))
    job.miss("c")
    job.say(*"ab", saved=1)
    assert job.it.course.runs
    job.come("d")
    job.follow("d")
    assert job.wants["b"].course.save == Save(2, is_urgent=False, is_forced=True)


@pytest.mark.parametrize("has_saved", [True, False])
def test_a_node_that_could_not_join_while_nobody_knew_who_leads_has_a_save_of_that_moment(has_saved):
    job = begun(RANGE, "ab", listens=True)
    job.come("c")
    job.follow("c")
    job.say(*"ab", floor=Floor(1, 4))
    job.pause(RANGE.preemption)
    for process in "ab" if has_saved else "":
        job.say(process, saved=1)
    job.wait(60)  # the store is away
    job.lead()
    assert job.it.course.runs, "what they have done since that save would be lost"
    for process in "" if has_saved else "ab":
        job.say(process, saved=1)
    assert job.it.course.save == Save(2, is_urgent=False, is_forced=True)
    for process in "abab":
        job.say(process, floor=Floor(2, 9), saved=1 if job.it.course.save.step is None else 2)
    job.follow()
    assert job.members == set("abc")


def test_who_comes_to_a_range_waits_for_the_save_for_a_pod_that_is_told_to_stop():
    job = begun(RANGE, "ab", listens=True)
    job.say("a", asks=1)
    job.say("b", is_preempted=True)
    job.come("c")
    job.follow("c")
    for call, process in ((1, "a"), (1, "b"), (2, "a"), (2, "b")):
        job.say(process, floor=Floor(call, call))
        if process == "b":
            job.say("a", saved=call)
            assert job.it.course.runs, "what they have done since the last save would be lost"
            job.say("b", saved=call)
    assert not job.it.course.runs
    assert "a node joins" in job.wants["a"].course.news


@pytest.mark.parametrize("why", ["full", "nearly done", "checked"])
def test_who_comes_to_a_range_that_has_no_place_now_waits(why):
    job = begun(replace(RANGE, checks=why == "checked"), "abcd" if why == "full" else "ab")
    if why == "nearly done":
        job.say("b", phase="returned")
    job.come("x")
    job.follow("x")
    assert job.wants["a"].course.runs
    assert not job.wants["x"].runs


def test_a_range_with_room_stops_for_who_comes_which_costs_nothing_and_only_so_often():
    job = begun(RANGE, "ab")
    joins = [Outcome(Round(Leader(0, "z"), number), free="a node joins") for number in range(RANGE.most_free)]
    job.say("b", books=Books(outcomes=tuple(joins[1:])))
    job.come("c")
    job.follow("a", "c")
    assert job.it.course.runs, "whether b's ranks would save is not known yet"
    job.follow()
    assert job.members == set("abc")
    assert job.it.books.outcomes[-1].free == "a node joins"
    assert job.costs == (0, 0)
    job = begun(RANGE, "ab")
    job.say("b", books=Books(outcomes=tuple(joins)))
    job.come("c")
    job.follow()
    assert job.members == set("ab")


# --- who is there -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("is_silent", [True, False])
def test_a_node_is_lost_that_does_not_come_back_or_says_nothing(is_silent):
    job = begun()
    seconds = FIXED.heartbeat if is_silent else FIXED.grace
    if is_silent:
        job.silent.add("b")
    else:
        job.lose("b")
    job.wait(seconds)
    assert job.wants["a"].course.runs
    job.wait(STEP)
    assert not job.wants["a"].course.runs
    seen = "no sign of life for 20 s" if is_silent else "its connection was lost, and it did not come back within 3 s"
    assert job.wants["a"].course.news == f"round 0 is over: node 1: {seen}"
    job.follow("a", "c")
    assert job.costs == (0, 1)
    assert not job.it.on_beat("b", job.now), "its connection is closed, so that it says how it is on the next one"
    job.come("b2", node=1)
    job.follow("b2")
    assert job.members == {"a", "b2", "c"}


def test_a_coordinator_that_stood_still_hears_the_others_before_it_judges_and_blames_nobody():
    job = begun()
    job.silent.add("b")
    job.wait(FIXED.heartbeat - STEP)
    job.pause(1000)
    assert job.wants["a"].course.runs
    job.fail("c")
    job.pause(1000)
    assert job.costs == (1, 0), "known at once"
    job.lead()
    job.follow("a", "c")
    assert job.it.verdict is None
    assert "b" not in {process for process, want in job.wants.items() if want.leave}


@pytest.mark.parametrize("how", ["disconnected", "silent", "they could not hear it"])
def test_that_node_0_is_cut_off_from_all_others_is_one_loss_however_many_they_are(how):
    job = begun(replace(FIXED, min_nodes=4, max_nodes=4, max_replacements=1), "abcd")
    if how == "they could not hear it":
        job.say(*"bcd", phase="idle", is_cut=True)
    else:
        job.lose(*"bcd") if how == "disconnected" else job.silent.update("bcd")
        job.wait((FIXED.grace if how == "disconnected" else FIXED.heartbeat) + STEP)
    job.follow("a")
    job.silent.clear()
    job.linked |= set("bcd")
    job.say(*"bcd", phase="idle", is_cut=True)
    job.follow()
    assert job.costs == (0, 1)
    assert job.members == set("abcd")


@pytest.mark.parametrize(
    ("cut_off", "why"), [("b", "node 1: it could not hear node 0"), ("bc", "node 0: other nodes could not hear it")]
)
def test_who_alone_could_not_hear_node_0_is_the_one_that_is_named(cut_off, why):
    job = begun(replace(FIXED, max_replacements=0))
    for process in cut_off:
        job.say(process, phase="idle", is_cut=True)
    job.follow()
    assert job.it.verdict.text == f"{why}; and max_replacements=0 are used up"


@pytest.mark.parametrize("first", ["cut off", "an echo"])
def test_where_node_0_itself_stood_still_nobody_is_blamed_for_not_hearing_it(first):
    job = begun()
    job.pause(10)
    job.lead()
    if first == "an echo":
        job.fail("c", "ConnectionError", echo=4)
    job.say("b", phase="idle", is_cut=True)
    if first != "an echo":
        job.fail("c", "ConnectionError", echo=4)
    job.follow()
    assert job.members == set("abc")
    assert job.costs == (0, 0)


@pytest.mark.parametrize(
    ("is_linked", "started", "wins"),
    [(True, 2.0, True), (True, 1.0, True), (True, 0.0, False), (False, 2.0, True), (False, 0.0, True)],
    ids=["later", "at the same time", "a clock behind", "the older is gone", "the older is gone, a clock behind"],
)
def test_of_two_processes_in_one_place_the_newer_one_stays(is_linked, started, wins):
    job = begun()
    if not is_linked:
        job.lose("b")
    job.come("b2", node=1, started=started)
    assert bool(job.wants["b"].leave) == wins
    assert bool(job.wants["b2"].leave) == (not wins)
    assert job.wants["a"].course.runs == (not wins)
    if wins:
        job.follow("a", "b2", "c")
        assert job.members == {"a", "b2", "c"}
        assert job.costs == (0, 1)
        job.say("b", phase="running")
        assert job.left("b") == f"{FENCED}a new process has taken its place", (
            "it never has it again, whatever clocks say"
        )


def test_nobody_takes_the_place_of_node_0_from_the_process_that_leads():
    job = begun()
    job.come("z", node=0, started=99.0)
    assert job.left("z") == f"{FENCED}node 0 is the process that leads the job"
    assert job.wants["a"].course.runs


def test_who_leaves_is_lost_at_once_and_who_leaves_between_two_rounds_is_not_in_the_next():
    job = begun()
    job.say("b", leaving="told to stop by SIGTERM")
    assert job.wants["a"].course.news == "round 0 is over: node 1 has left: told to stop by SIGTERM"
    job.come("b2", node=1)
    job.follow("a", "b2")
    job.say("b2", leaving="told to stop by SIGTERM")
    job.follow("a", "c")
    assert job.members == set()
    job.come("b3", node=1)
    job.follow("b3")
    assert job.members == {"a", "b3", "c"}
    assert job.costs == (0, 1)


def test_nodes_that_are_lost_in_one_round_are_one_replacement():
    job = begun(replace(FIXED, max_replacements=1))
    job.miss("b", "c")
    job.follow("a")
    job.come("b2", node=1)
    job.come("c2", node=2)
    job.follow()
    assert job.costs == (0, 1)
    assert job.members == {"a", "b2", "c2"}
    lost = "node 1: its connection was lost, and it did not come back within 3 s; with it 1 more of 3 nodes"
    assert [str(each.loss) for each in job.it.books.losses] == [lost]


def test_a_node_that_says_in_one_word_that_its_ranks_have_returned_and_it_leaves_has_done_its_part():
    job = begun()
    job.say("b", phase="returned", leaving="told to stop by SIGTERM")
    job.say(*"ac", phase="returned")
    assert job.it.verdict.kind == "success"


def test_where_the_leader_is_told_to_stop_with_its_ranks_returned_the_others_save():
    job = begun()
    job.say(*"abc", listens=True)
    job.say("a", phase="returned", is_preempted=True)
    save = job.wants["c"].course.save
    assert (save.is_urgent, save.is_done) == (True, False)


def test_what_the_others_have_saved_for_the_leader_is_the_last_save_also_where_its_ranks_return_meanwhile():
    job = begun()
    job.say(*"abc", listens=True)
    job.say("a", is_preempted=True)
    job.say(*"abc", floor=Floor(1, 4))
    job.say(*"bc", saved=1)
    job.say("a", phase="returned")
    assert job.wants["a"].course.save == Save(1, is_urgent=True, step=4, is_done=True)


def test_where_others_fail_for_the_want_of_a_node_that_had_returned_it_is_its_loss():
    job = begun(replace(FIXED, max_restarts=0))
    job.say("b", phase="returned")
    job.miss("b")
    job.fail("c", "ConnectionError", echo=4)
    job.follow("a", "c")
    assert job.costs == (0, 1)
    assert job.it.verdict is None


def test_a_member_that_never_started_in_a_round_is_waited_for_until_it_has_heard_that_it_is_over():
    job = Job()
    job.come("a", "b", "c")
    job.follow("a", "b")  # c has not heard of the round yet
    job.fail("b")
    job.follow("a", "b")
    job.say("c", host="renamed")
    assert job.members == set(), "what c says is of no round"
    job.follow("c")
    assert job.members == set("abc")


def test_a_status_is_answered_with_the_want_and_the_same_one_where_nothing_has_changed():
    job = begun()
    first = job.it.on(job.statuses["b"], job.now)
    again = job.it.on(job.statuses["b"], job.now)
    assert first == again
    assert first.keys() == {"b"}
    assert again["b"].course is first["b"].course


# --- what a failure comes to ------------------------------------------------------------------------------------------
def test_a_failure_stops_the_others_and_all_start_again_when_no_rank_is_left():
    job = begun()
    cause = job.fail("b")
    assert not job.wants["a"].course.runs
    assert job.wants["a"].course.books.last.cause == cause, "its text travels with it"
    assert job.wants["c"].course.news == "round 0 is over: rank 1 failed (ValueError) on node b"
    job.follow("a", "c")
    assert not job.members
    job.follow("b")
    assert job.members == set("abc")
    assert (job.number, job.costs) == (1, (1, 0))


@pytest.mark.parametrize(
    ("failures", "root"),
    [
        ([("b", 4, 10), ("c", 0, 20)], "c"),
        ([("b", 0, 20), ("c", 0, 10)], "c"),
        ([("b", 3, 20), ("c", 4, 10)], "b"),
        ([("b", 0, 10), ("c", 0, 10)], "b"),
    ],
    ids=["an echo came first", "the earliest", "nearer to a cause", "the lowest rank"],
)
def test_the_root_cause_is_the_earliest_failure_that_speaks_for_itself(failures, root):
    job = begun(replace(FIXED, max_restarts=0))
    for process, echo, time_ns in failures:
        job.fail(process, echo=echo, time_ns=time_ns)
    job.follow()
    assert job.it.verdict.kind == "failed"
    assert job.it.verdict.cause.text == f"ValueError on {root}"


def test_a_failure_that_ends_the_job_is_news_once():
    job = begun(replace(FIXED, max_restarts=0))
    job.fail("b")
    said = job.wants["c"].course.news
    job.follow()
    assert job.it.verdict.kind == "failed"
    assert job.it.course.news == said == "round 0 is over: rank 1 failed (ValueError) on node b"


def test_a_cause_is_known_however_long_its_node_takes_to_end():
    job = begun(replace(FIXED, max_restarts=0))
    job.fail("c", "ConnectionError", echo=4)
    job.follow("a", "c")
    job.fail("b")
    job.wait(job.rules.stop + job.rules.kill)
    assert job.it.verdict is None
    job.follow("b")
    assert (job.it.verdict.cause.name, job.it.verdict.text) == ("ValueError", "max_restarts=0")
    assert job.number == 0, "max_restarts=0 is one round"


def test_a_node_that_does_not_end_its_ranks_is_given_up_and_its_cause_counts_all_the_same():
    job = begun(replace(FIXED, max_restarts=1))
    job.fail("b")
    job.follow("a", "c")
    job.wait(FIXED.patience)
    assert not job.wants["b"].leave
    job.wait(2 * STEP)
    assert job.left("b") == "it did not end its ranks, or did not come back, in time"
    assert job.costs == (1, 0)


def test_a_cause_that_comes_when_its_node_was_given_up_ends_the_round_that_must_not_be():
    job = begun(replace(FIXED, max_restarts=0))
    job.miss("b")
    job.come("b2", node=1)
    job.follow("a", "b2", "c")
    assert job.number == 1
    first = Round(job.it.lead.leader, 0)
    late = Cause(first, 1, "ValueError", "ValueError on b", 1)
    job.say("b", phase="idle", books=Books(first, 3, outcomes=(Outcome(first, late),)))
    assert not job.wants["a"].course.runs
    job.follow("a", "b2", "c")
    assert (job.it.verdict.kind, job.it.verdict.cause.text) == ("failed", "ValueError on b")


def test_until_it_is_uploaded_a_verdict_gives_way_to_a_cause_that_comes_late():
    job = begun(replace(FIXED, max_restarts=0, max_replacements=0))
    job.miss("b")
    job.follow("a", "c")
    assert job.it.verdict.kind == "lost"
    late = Cause(job.it.books.round, 1, "ValueError", "ValueError on b", 1)
    job.say("b", phase="idle", books=job.it.books.noting(Outcome(late.round, late)))
    assert job.wants["a"].course.verdict.cause == late


def test_an_echo_without_anything_that_it_echoes_is_a_failure_and_says_who_had_returned():
    job = begun(replace(FIXED, max_restarts=0))
    job.say("a", phase="returned", ranks_returned=(0, 1))
    job.fail("c", "ConnectionError", echo=4)
    job.follow()
    assert job.it.verdict.kind == "failed"
    assert job.it.verdict.returned == (0, 1)


def test_a_verdict_is_wanted_of_all_and_the_upload_of_the_leader_lets_them_go():
    job = begun()
    job.say(*"abc", phase="returned")
    assert {job.wants[process].course.verdict.kind for process in "abc"} == {"success"}
    assert not job.wants["b"].course.is_decided
    job.lose("c")
    job.wait(100)
    assert job.it.verdict.kind == "success", "after the end nothing is lost any more"
    job.say("a", is_uploaded=True)
    assert job.wants["b"].course.is_decided
    job.come("c2", node=2)
    assert job.wants["c2"].course.is_decided


# --- nodes that cannot begin ------------------------------------------------------------------------------------------
CANNOT = Cause(NO_ROUND, -1, "ImportError", "no module named nothing", 1)


@pytest.mark.parametrize(("rules", "process"), [(FIXED, "a"), (RANGE, "b")], ids=["fixed, node 0", "a range's other"])
def test_a_node_that_cannot_begin_ends_a_job_that_has_not_begun(rules, process):
    job = Job(rules)
    job.come(process, cannot=CANNOT)
    if process != "a":
        job.come("a")
    assert job.it.verdict.cause == CANNOT
    assert job.it.verdict.text == "no rank was started"


def test_later_it_is_turned_away_and_its_error_is_told_where_nobody_takes_its_place():
    job = begun()
    job.say("b", leaving="told to stop")
    job.follow("a", "c")
    job.come("b2", node=1, cannot=CANNOT)
    assert job.left("b2") == "it cannot begin, and the job goes on without it"
    assert job.it.verdict is None
    job.linked.discard("b2")
    job.wait(FIXED.rendezvous + STEP)
    trouble = "node 1 came, and could not begin (ImportError: no module named nothing)"
    assert trouble in job.it.verdict.text


def test_what_keeps_a_pod_from_coming_is_told_where_none_takes_its_place():
    job = Job()
    job.come("a", "c")
    job.come("b", leaving="LaunchTimeoutError: libraries were not imported in time")
    job.wait(31)
    said = "node 1 came, and could not begin (LaunchTimeoutError: libraries were not imported in time)"
    assert said in job.wants["c"].course.news
    job.wait(FIXED.rendezvous)
    assert job.it.verdict.kind == "missing"
    assert said in job.it.verdict.text


def test_a_replacement_of_node_0_that_cannot_begin_never_ends_a_job_that_has_begun():
    before = begun()
    job = Job(FIXED, "a2", before.sign, leads=False)
    job.come("a2", node=0, cannot=CANNOT)
    job.look()
    assert job.left("a2") == "node 0 cannot begin, and another process has led this job"
    assert job.sign == before.sign, "it does not sign"
    job = Job(FIXED, "a2", before.sign)
    job.come("a2", node=0, cannot=CANNOT)
    join(job, before, "b")
    assert job.it.verdict is None
    assert job.it.is_retired


# --- another leader ---------------------------------------------------------------------------------------------------
def test_a_new_leader_goes_on_with_what_survivors_bring_and_the_loss_of_node_0_is_one_replacement():
    before = begun()
    before.fail("b")
    before.follow()
    job = succeeded_by(before, "a2")
    join(job, before, "c")
    assert job.it.lead.leader == Leader(2, "a2")
    assert job.wants["c"].course.round == before.it.books.round
    assert not job.wants["c"].course.runs, "whose ranks run is to end them"
    join(job, before, "b", phase="idle", is_cut=True)
    job.follow()
    assert job.members == {"a2", "b", "c"}
    assert job.it.books.round == Round(Leader(2, "a2"), 2)
    assert job.costs == (1, 1)


def test_survivors_are_waited_for_as_long_as_the_leader_before_would_have():
    before = begun()
    for round_ in (NO_ROUND, before.it.books.round):  # the leader before may have said that it runs without this one
        job = succeeded_by(before, "a2")
        join(job, before, "b", phase="idle", is_cut=True)
        job.come("c2", node=2, round=round_)  # somebody else has the place of c
        job.follow()
        assert job.members == {"a2", "b", "c2"}
    job = succeeded_by(before, "a3")
    join(job, before, "b", phase="idle", is_cut=True)
    job.wait(FIXED.patience + 2 * STEP)
    assert job.costs == (0, 1)


def test_an_end_that_a_leader_has_decided_and_not_uploaded_is_the_next_ones_too():
    before = begun(replace(FIXED, max_restarts=0))
    before.fail("b")
    before.follow()
    assert before.it.verdict.kind == "failed"
    job = succeeded_by(before, "a2")
    join(job, before, "b")
    assert job.it.verdict is None, "not before all that may know of a cause have come"
    job.come("c2", node=2)
    job.follow()
    assert (job.it.verdict.text, job.it.verdict.cause.text) == ("max_restarts=0", "ValueError on b")


def test_after_a_success_that_was_not_uploaded_the_ranks_run_again():
    before = begun()
    before.say(*"abc", phase="returned")
    job = succeeded_by(before, "a2")
    join(job, before, "b", "c")
    job.follow()
    assert job.members == {"a2", "b", "c"}
    assert job.costs == (0, 1)


def test_where_all_nodes_are_lost_at_once_the_next_know_that_ranks_may_have_run_before():
    before = begun()
    assert not before.it.course.ran_before
    job = succeeded_by(before, "a2")
    job.come("b2", node=1)
    job.come("c2", node=2)
    assert (job.members, job.number) == ({"a2", "b2", "c2"}, 0)
    assert job.it.course.ran_before


def test_leaders_that_are_lost_before_they_begin_a_round_are_replacements():
    first = Job(replace(FIXED, max_replacements=1))
    second = Job(first.rules, "a2", first.sign)
    third = Job(first.rules, "a3", second.sign)
    third.come("a3", node=0)
    assert third.it.verdict is None
    third.come("b", "c")
    assert third.it.verdict.kind == "lost"
    assert "node 0 was lost 2 time(s) before it began a round" in third.it.verdict.text


def test_rounds_are_numbered_on_from_those_of_a_survivor_that_came_when_others_had_begun():
    before = begun(RANGE, "abc")
    for name in ("ValueError", "OSError"):
        before.fail("c", name)
        before.follow()
    last = before.it.books.round
    assert last.number == 2
    job = succeeded_by(before, "a2")
    job.come("d")
    job.wait(RANGE.last_call + RANGE.heartbeat + RANGE.grace)
    job.follow()
    assert (job.members, job.it.books.number) == ({"a2", "d"}, 0)
    join(job, before, "b", phase="idle", is_cut=True)
    job.follow()
    job.wait(RANGE.preemption + STEP)
    job.follow()
    assert job.members == {"a2", "b", "d"}
    assert job.it.books.round.number > last.number, "b has directories of the rounds before"


def test_who_comes_from_a_later_round_of_another_leader_ends_this_one():
    before = begun(RANGE, "abcd")
    job = Job(RANGE, "a2")
    job.come("a2", "y")
    job.wait(RANGE.last_call + STEP)
    job.follow()
    assert job.members == {"a2", "y"}
    later = replace(before.it.books, round=Round(Leader(9, "z"), 5))
    job.come("b", round=later.round, node_rank=1, leader=Leader(9, "z"), books=later, phase="running")
    assert not job.wants["y"].course.runs
    assert job.it.lead.in_doubt, "somebody has obeyed a greater leader"


def test_a_survivor_that_comes_when_others_have_begun_anew_has_lost_its_leader_and_its_echo_is_of_that():
    before = begun(replace(FIXED, max_restarts=0))
    job = succeeded_by(before, "a2")
    job.come("b2", "c2", started=2.0)
    job.follow()
    assert job.members == {"a2", "b2", "c2"}
    before.fail("b", "ConnectionError", echo=4)
    join(job, before, "b")
    assert job.left("b") == f"{FENCED}a newer process is node 1"
    assert job.costs == (0, 1)
    assert job.wants["a2"].course.runs


def test_a_leader_that_hears_of_a_greater_one_decides_nothing_until_it_has_read_its_sign_again():
    job = begun()
    job.say("b", leader=Leader(5, "z"))
    job.fail("c")
    job.follow()
    assert not job.members
    job.sign = Sign(Leader(5, "z"), 1)
    job.look()
    assert job.it.is_retired
    assert job.left("a") == "another process leads this job"


def test_a_leader_that_stood_still_begins_and_ends_nothing_before_a_new_look():
    job = begun()
    since = job.now
    job.fail("b")
    job.pause(FIXED.grace + 1)
    job.follow()
    job.look(since)
    job.look(since)
    assert not job.members, "a look from before says nothing"
    job.lead()
    assert job.members == set("abc")


def test_a_node_0_that_stood_still_before_it_led_leaves_the_job_to_who_has_led_it_meanwhile():
    newer = begun()
    job = Job(FIXED, "a0", newer.sign, leads=False)
    job.come("a0", node=0)
    job.pause(FIXED.grace + 1)
    job.look()
    assert job.left("a0") == "node 0 stood still before it began, and another process has led this job"
    assert job.sign == newer.sign, "it does not sign"
    job = Job(FIXED, "a0", leads=False)
    job.come("a0", node=0)
    job.pause(FIXED.grace + 1)
    job.lead()
    assert not job.it.is_retired, "nobody has led it"
    job = Job(FIXED, "a0", newer.sign, leads=False)
    job.now += 60.0
    job.come("a0", node=0)
    job.lead()
    assert not job.it.is_retired, "it was long in coming, and replaces the one before"


def test_a_leader_that_cannot_read_the_store_for_too_long_leaves_undecided():
    job = begun()
    job.pause(FIXED.grace + 1)
    for _ in range(4):
        job.wait(FIXED.upload / 4)
    job.wait(2 * STEP)
    assert job.left("a") == "the store is away, and nobody knows who leads this job"


def test_node_0_leaves_who_hears_it_ends_its_ranks_at_once_and_the_next_leader_tells_why_that_was():
    before = begun(replace(FIXED, max_replacements=0))
    before.say("a", leaving="LaunchError: it may start no process")
    assert before.it.is_retired
    assert not before.wants["b"].course.runs
    assert before.wants["b"].course.news == "round 0 is over: node 0 has left: LaunchError: it may start no process"
    job = succeeded_by(before, "a2")
    join(job, before, "b", "c")
    job.follow()
    assert job.it.verdict.kind == "lost"
    assert job.it.verdict.text.startswith("node 0: LaunchError: it may start no process; ")
    assert job.costs == (0, 1)


def test_a_leader_that_finds_the_verdict_in_the_store_says_so_before_it_has_a_term():
    job = Job(leads=False)
    job.is_decided = True
    job.look()
    job.come("b")
    assert job.wants["b"].course.is_decided


# --- the only node ----------------------------------------------------------------------------------------------------
def test_the_only_node_of_a_job_leads_without_a_store():
    alone = replace(FIXED, min_nodes=1, max_nodes=1)
    job = Job(alone, leads=False)
    assert not job.it.lead.in_doubt
    assert not job.it.lead.is_due(job.now)
    job.come("a")
    assert job.members == {"a"}


# --- a machine at fault -----------------------------------------------------------------------------------------------
BROKEN = {"name": "Xid 79", "repeats": True, "is_machines": True}


def on_machines(rules=RANGE, **of: str) -> Job:
    """A job in its first round, its nodes on machines of a cluster."""
    job = Job(replace(rules, max_restarts=3))
    for process, machine in of.items():
        job.come(process, machine=machine)
    job.wait(rules.last_call + STEP)
    job.follow()
    assert job.members == set(of)
    return job


@pytest.mark.parametrize("errors", [[{"name": "KeyError"}, {"name": "OSError"}], [BROKEN]], ids=["errors", "a GPU"])
def test_a_range_goes_on_without_a_machine_that_is_most_likely_at_fault(errors):
    job = on_machines(a="m0", b="m1", c="m2")
    for error in errors:
        job.fail("c", **error)
        job.follow()
    assert job.members == {"a", "b"}, "at once: nobody else is waited for"
    assert job.it.books.without == {"m2"}
    assert job.costs == (len(errors), 0)
    job.miss("c")
    assert job.members == {"a", "b"}, "its end costs nothing"
    job.come("c2", machine="m2")
    job.follow("c2")
    assert job.members == {"a", "b"}
    job.come("d", machine="m3")
    job.follow()
    assert job.members == {"a", "b", "d"}, "one on another machine is welcome"


def test_all_nodes_of_such_a_machine_stay_out_and_the_next_leader_keeps_to_that():
    job = on_machines(a="m0", b="m1", c="m2", d="m2")
    job.fail("c", **BROKEN)
    job.follow()
    assert job.members == {"a", "b"}
    after = Job(job.rules, "a2", job.sign)
    after.come("a2", machine="m2")  # node 0's pod has come to that machine: there is no other
    join(after, job, "b", "c", "d", phase="idle", is_cut=True)
    after.follow()
    after.wait(RANGE.patience + 2 * STEP)
    after.look()
    after.follow()
    assert after.members == {"a2", "b"}


def test_what_failed_on_a_machine_that_is_left_out_says_nothing_of_others():
    job = on_machines(a="m0", b="m1", c="m2", d="m3")
    for process, name in (("c", "A"), ("c", "B"), ("b", "C")):
        job.fail(process, name)
        job.follow()
    assert job.it.books.without == {"m2"}, "one failure alone is no pattern"
    assert job.members == {"a", "b", "d"}


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
    job.fail(who, **BROKEN)
    job.follow()
    assert job.it.verdict.text.startswith("the same Xid 79 would come again. It was on node ")
    assert job.it.books.without == frozenset()


@pytest.mark.parametrize("comes_back", [True, False])
def test_whether_enough_are_left_is_known_when_who_has_lost_its_connection_is_back_or_lost(comes_back):
    job = on_machines(a="m0", b="m1", c="m2")
    job.fail("c", **BROKEN)
    job.follow("a", "b")
    job.lose("b")
    job.follow("a", "c")
    if comes_back:
        job.come_back("b")
        job.follow()
        assert job.members == {"a", "b"}
        assert job.it.books.without == {"m2"}
        return
    job.wait(RANGE.grace + 2 * STEP)
    job.look()  # b may have gone to another leader
    assert job.it.verdict.text.startswith("the same Xid 79 would come again. It was on node c")
    assert job.it.books.without == frozenset()


# --- checks before the first rank -------------------------------------------------------------------------------------
CHECKED = replace(FIXED, checks=True)


def test_checks_are_a_round_of_their_own_and_ranks_start_when_every_node_is_fit():
    job = begun(CHECKED)
    assert job.wants["a"].course.is_checks
    job.say(*"abc", phase="returned", report="fit")
    assert job.it.verdict is None
    assert job.wants["a"].course.news == "preflight: all is well"
    job.follow()
    assert job.members == set("abc")
    assert not job.wants["a"].course.is_checks
    assert job.number == 0, "ranks count from 0, whatever was before"
    job.fail("b")
    job.follow()
    assert (job.number, job.wants["a"].course.is_checks) == (1, False)


@pytest.mark.parametrize("has_reported", [False, True])
def test_where_a_node_is_lost_while_nodes_are_checked_all_are_checked_anew(has_reported):
    job = begun(CHECKED)
    job.say("a", phase="returned", report="fit")
    if has_reported:
        job.say("b", phase="returned", report="fit")
    job.say("b", leaving="told to stop")
    job.come("b2", node=1)
    job.follow("a", "c", "b2")
    assert job.members == {"a", "b2", "c"}
    assert job.wants["a"].course.is_checks
    job.say("a", "b2", "c", phase="returned", report="fit")
    job.follow("a", "b2", "c")
    assert (job.number, job.wants["a"].course.is_checks) == (0, False)


def test_the_next_leader_does_not_check_again():
    before = begun(CHECKED)
    before.say(*"abc", phase="returned", report="fit")
    before.follow()
    job = succeeded_by(before, "a2")
    join(job, before, "b", "c")
    job.follow()
    assert job.members == {"a2", "b", "c"}
    assert (job.number, job.wants["b"].course.is_checks) == (1, False)


# --- saves, hangs, memory: what rides on a round ----------------------------------------------------------------------
def test_who_is_lost_or_has_returned_holds_up_no_picture_of_the_others():
    job = begun(ranks=2)
    job.say("b", phase="returned")
    job.miss("b")
    job.say("a", stall=30.0)
    job.wait(STEP)
    job.say(*"ac", looked=1)
    assert job.it.look_to_judge() == 1
    assert job.it.gone == [2, 3]


def test_a_connection_that_comes_back_in_time_ends_no_round_and_until_then_nobody_knows_whether_all_wait():
    job = begun()
    job.lose("b")
    job.say("a", stall=30.0)
    job.wait(FIXED.grace - STEP)
    job.say(*"ac", looked=1)
    assert job.it.look_to_judge() == 0
    job.come_back("b")
    job.say("b", looked=1)
    assert job.it.look_to_judge() == 1
    job.wait(10)
    assert job.wants["a"].course.runs


def test_a_node_that_is_gone_with_its_memory_full_is_told_so_at_its_first_loss():
    job = begun(replace(FIXED, max_replacements=0))
    job.say("b", memory=Memory(99 << 30, 100 << 30))
    job.miss("b")
    assert "; its memory was full (99.0 GiB of 100.0 GiB in use)" in job.wants["a"].course.news
    job.follow("a", "c")
    assert job.it.verdict.kind == "memory"


@pytest.mark.parametrize("away", ["b", "c"])
def test_so_is_one_that_never_comes_back_and_no_other_though_all_were_lost_at_once(away):
    job = begun()
    job.say("c", memory=Memory(99 << 30, 100 << 30))
    job.miss("b", "c")
    job.follow("a")
    job.come("c2" if away == "b" else "b2", node=2 if away == "b" else 1, starts=1)
    job.follow()
    job.wait(FIXED.rendezvous + STEP)
    assert job.it.verdict.kind == {"b": "missing", "c": "memory"}[away]
    node = f"node {'abc'.index(away)}"
    assert job.it.verdict.text.startswith(f"{node}: its connection was lost, and it did not come back within 3 s; ")
    assert job.it.verdict.text.endswith(f"{node} of 3 did not arrive within 900 s")


@pytest.mark.parametrize("is_back_early", [True, False], ids=["before the round is settled", "after"])
def test_so_is_one_whose_container_was_ended_at_once_by_what_the_next_process_finds_there(is_back_early):
    full = Memory(99 << 30, 100 << 30)
    job = begun(replace(FIXED, max_replacements=0 if is_back_early else 1))
    job.miss("b")
    if is_back_early:
        job.come("b2", node=1, starts=1, ended=full)
        job.follow("a", "c")
        assert job.it.verdict.kind == "memory"
        return
    job.follow("a", "c")
    job.come("b2", node=1, starts=1, ended=full)
    job.say("b2")
    assert job.it.books.outcomes[-1].loss.memory == full


@pytest.mark.parametrize("process", ["a", "b"])
def test_of_one_that_says_why_it_leaves_its_memory_counts_only_where_it_still_says_so(process):
    full = Memory(99 << 30, 100 << 30)
    for memory, kind in ((None, "lost"), (full, "memory")):
        job = begun(replace(FIXED, max_replacements=0))
        job.say(process, memory=full)
        job.say(process, leaving="told to stop by SIGTERM", memory=memory)
        if process == "a":
            known, before = job.wants["b"].course.memory, job
            job = succeeded_by(before, "a2")
            join(job, before, "b", "c", leader_memory=known)
        job.follow()
        assert job.it.verdict.kind == kind


def test_what_a_process_has_found_of_the_one_before_it_says_nothing_of_a_loss_of_its_own():
    job = Job(replace(FIXED, max_replacements=0))
    job.come("a", "c")
    job.come("b", starts=1, ended=Memory(99 << 30, 100 << 30))
    job.follow()
    job.miss("b")
    job.come_back("b")
    job.follow()
    assert job.it.verdict.kind == "lost"
    assert "memory" not in job.it.verdict.text


def test_so_is_node_0_by_what_the_others_have_heard():
    before = begun(replace(FIXED, max_replacements=0))
    full = Memory(99 << 30, 100 << 30)
    before.say("a", memory=full)
    assert before.wants["b"].course.memory == full
    job = succeeded_by(before, "a2")
    join(job, before, "b", "c", leader_memory=full)
    job.follow()
    assert (job.it.verdict.kind, job.it.verdict.text[:6]) == ("memory", "node 0")
