"""What one node does with what its coordinator wants, with its ranks, signals, time and the store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flytekitplugins_safedist.agent import actions as act
from flytekitplugins_safedist.agent.policy import DECIDED, UNDECIDED, NodePolicy
from flytekitplugins_safedist.coordinator.books import NO_ROUND, Books, Cause, Leader, Memory, Outcome, Round, Verdict
from flytekitplugins_safedist.coordinator.messages import Course, Floor, HangNotice, Offer, Save, Status, Want
from flytekitplugins_safedist.coordinator.rules import Rules
from flytekitplugins_safedist.coordinator.sign import Sign, StoreLook

RULES = Rules("job", 3, 3, max_restarts=1)
ALONE = replace(RULES, min_nodes=1, max_nodes=1)
LEADER = Leader(1, "a")
FIRST, SECOND = Round(LEADER, 0), Round(LEADER, 1)
OWN = Cause(FIRST, 1, "ValueError", "text", 10)
ECHO = replace(OWN, name="ConnectionError", echo=4)
FAILED = Verdict("failed", "max_restarts=0", FIRST, OWN)


class Node:
    """A node's policy, what it was wanted to do last, and what it did."""

    def __init__(self, rules: Rules = RULES, *, leads: bool = False, node: int = 1, **facts: Any) -> None:
        self.now = 100.0
        is_replaced = facts.pop("is_replaced", True)
        me = Status("job", "a" if leads else "b", node, 1.0, **facts)
        self.it = NodePolicy(rules, me, self.now, leads=leads, is_replaced=is_replaced)
        self.course = Course(LEADER)
        self.done: list[act.Action] = []
        self.gave_up = float("inf")

    def take(self, actions: list[act.Action]) -> list[act.Action]:
        """What it does, but for what it says in the log."""
        self.done += actions
        return [each for each in actions if not isinstance(each, act.Say)]

    def want(self, node_rank: int = 1, leave: str = "", **course: Any) -> list[act.Action]:
        self.course = replace(self.course, **course)
        return self.take(self.it.on_want(Want(self.course, node_rank, leave), self.now))

    def run(self, key: Round = FIRST) -> list[act.Action]:
        """A round begins."""
        return self.want(round=key, runs=True, size=3, offer={"port": "7"}, books=Books(key, 3), save=None, look=0)

    def stop(self, **course: Any) -> list[act.Action]:
        """The round is over."""
        return self.want(runs=False, **course)

    def wait(self, seconds: float) -> list[act.Action]:
        """Time passes; what it does meanwhile."""
        actions: list[act.Action] = []
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            actions += self.take(self.it.on_tick(self.now))
        return actions

    def look(
        self, sign: Sign | None = None, *, is_decided: bool = False, since: float | None = None
    ) -> list[act.Action]:
        look = StoreLook(self.now if since is None else since, sign, is_decided)
        return self.take(self.it.on_look(look, self.now))

    @property
    def status(self) -> Status:
        return self.it.status

    @property
    def log(self) -> list[str]:
        return [each.text for each in self.done if isinstance(each, act.Say)]


def running(rules: Rules = RULES, **facts: Any) -> Node:
    node = Node(rules, **facts)
    node.run()
    assert node.status.phase == "running"
    return node


# --- what is wanted ---------------------------------------------------------------------------------------------------
def test_a_round_that_is_over_is_obeyed_also_where_nothing_was_started():
    node = Node()
    assert node.stop(round=FIRST, books=Books(FIRST, 3)) == []
    assert (node.status.round, node.status.node_rank, node.status.phase) == (FIRST, 1, "idle")


@pytest.mark.parametrize("is_over", [True, False], ids=["is over", "is followed"])
def test_the_ranks_of_a_round_start_when_none_of_the_one_before_is_left(is_over):
    node = running()
    if is_over:
        assert node.stop() == [act.EndRanks()]
    assert node.run(SECOND) == ([] if is_over else [act.EndRanks()])
    assert node.status.phase == "ending"
    assert node.take(node.it.on_quiet((), node.now)) == [act.StartRanks(SECOND, 1, 1, 3, {"port": "7"})]


def test_what_was_said_of_a_round_is_not_said_of_the_next():
    node = running()
    node.want(save=Save(1, is_urgent=False))
    for actions in (node.it.on_fact(100, listens=True), node.it.on_ask(100), node.it.on_fact(100, floor=Floor(1, 5))):
        node.take(actions)
    node.it.on_fact(100, saved=1)
    node.it.on_stall(5.0, 100)
    node.it.on_fact(100, looked=1)
    node.stop()
    node.it.on_quiet((1,), 100)
    assert node.status.ranks_returned == (1,)
    node.run(SECOND)
    fresh = Status("job", "b", 1, 1.0, leader=LEADER, round=SECOND, node_rank=1, phase="running")
    assert replace(node.status, books=None) == fresh
    assert node.want(save=Save(1, is_urgent=False)) == [act.CallRanks(1)]


def test_nor_of_one_in_which_this_node_has_no_part():
    """Else that round ends as one in which nobody could hear node 0, or ranks had returned early."""
    node = running()
    node.take(node.it.on_disconnect("reset", node.now))
    node.wait(RULES.grace + 0.5)
    node.take(node.it.on_quiet((2,), node.now))
    node.want(node_rank=-1, runs=False)
    assert (node.status.is_cut, node.status.ranks_returned) == (True, (2,))
    node.want(node_rank=-1, runs=True, round=SECOND, books=Books(SECOND, 2))
    assert (node.status.round, node.status.is_cut, node.status.ranks_returned) == (SECOND, False, ())


def test_after_ranks_have_returned_the_node_is_idle_again_unless_the_job_has_succeeded():
    node = running()
    node.it.on_return((2, 3), node.now)
    assert (node.status.phase, node.status.ranks_returned) == ("returned", (2, 3))
    node.want(runs=False, verdict=Verdict("success", round=FIRST))
    assert node.status.phase == "returned"
    node.stop(verdict=None)
    assert node.status.phase == "idle"


def test_a_lesser_leader_is_not_obeyed():
    node = running()
    node.want(leader=Leader(3, "c"))
    news = Books(FIRST, 3).noting(Outcome(FIRST, OWN))
    assert node.stop(leader=Leader(2, "z"), books=news) == [act.DropLink()]
    assert node.status.phase == "running"
    assert node.status.books.last.cause == OWN, "but what it knows of a failure is told to the one that is obeyed"


def test_a_node_without_a_place_waits_and_says_why():
    node = Node(machine="m1")
    node.want(node_rank=-1, round=FIRST, runs=True, books=Books(FIRST, 2))
    assert (node.status.round, node.status.node_rank) == (FIRST, -1)
    assert node.log[-1] == "round 0 runs: this node may take part in the next one"
    out = Books(SECOND, 2, outcomes=(Outcome(FIRST, without="m1"),))
    node.want(node_rank=-1, round=SECOND, books=out)
    assert node.log[-1].startswith("this node takes no part any more: its machine is most likely at fault")


def test_the_news_of_the_coordinator_are_in_the_log_once():
    node = Node()
    node.want(news="waiting for node 2")
    node.want(news="waiting for node 2", size=9)
    node.want(news="waiting for node 3")
    assert node.log == ["waiting for node 2", "waiting for node 3"]


# --- the books --------------------------------------------------------------------------------------------------------
def test_a_leader_is_told_what_it_does_not_know_and_on_a_new_connection_everything():
    node = running()
    assert node.status.books is None, "it is the leader's own"
    assert node.take(node.it.on_failure(OWN, node.now)) == [act.EndRanks()]
    mine = node.status.books
    assert mine.last.cause == OWN, "said at once, with its text"
    node.stop(books=mine)
    assert node.status.books is None
    node.take(node.it.on_disconnect("reset", node.now))
    assert node.status.books == mine
    node.want(leader=Leader(2, "c"), books=Books())
    assert node.status.books == mine


# --- failures ---------------------------------------------------------------------------------------------------------
def test_what_may_be_an_echo_is_said_and_has_a_moment_for_its_cause():
    node = running()
    assert node.take(node.it.on_failure(ECHO, node.now)) == []
    assert node.status.books.last.cause == ECHO
    assert node.wait(RULES.settle - 0.5) == []
    assert node.take(node.it.on_failure(OWN, node.now)) == [act.EndRanks()]
    assert node.status.books.last.cause == OWN
    node = running()
    for _ in range(2):  # the second is an echo as well, and puts nothing off
        node.take(node.it.on_failure(ECHO, node.now))
        ended = node.wait(RULES.settle / 2)
    assert ended == [act.EndRanks()]


def test_a_cause_that_shows_while_ranks_end_counts_and_one_of_another_round_does_not():
    node = running()
    node.take(node.it.on_failure(ECHO, node.now))
    node.stop()
    node.take(node.it.on_failure(OWN, node.now))
    assert node.status.books.last.cause == OWN
    node.take(node.it.on_return((1,), node.now))
    assert node.status.phase == "ending"
    node.take(node.it.on_failure(replace(OWN, round=SECOND), node.now))
    assert node.status.books.outcome(SECOND) == Outcome(SECOND)
    node.take(node.it.on_quiet((), node.now))
    assert node.status.phase == "idle"


def test_a_rank_that_has_returned_and_holds_up_the_others_is_a_failure_too():
    node = running()
    node.take(node.it.on_return((1,), node.now))
    node.take(node.it.on_failure(OWN, node.now))
    assert (node.status.books.last.cause, node.status.phase) == (OWN, "idle")


def test_where_a_collective_timed_out_the_others_show_where_their_ranks_stand():
    for is_timeout in (True, False):
        node, cause = running(), replace(ECHO, is_timeout=is_timeout)
        assert node.stop(books=Books(FIRST, 3).noting(Outcome(FIRST, cause))) == [act.EndRanks(is_timeout)]


# --- a leader that cannot be heard ------------------------------------------------------------------------------------
def test_ranks_that_run_are_ended_some_seconds_after_the_leader_was_lost():
    node = running()
    node.take(node.it.on_disconnect("reset by peer", node.now))
    assert node.log[-1] == "node 0 cannot be heard (reset by peer); waiting for its replacement"
    assert node.wait(RULES.grace - 1) == []
    node.take(node.it.on_disconnect("again, before it has said anything", node.now))
    assert node.wait(1) == []
    assert node.wait(0.5) == [act.EndRanks()]
    assert node.status.is_cut
    node = running()
    node.stop()
    node.take(node.it.on_disconnect("reset", node.now))
    node.wait(RULES.grace + 1)
    assert not node.status.is_cut, "they end for another reason"


def test_a_leader_that_is_heard_again_in_time_finds_them_running():
    node = running()
    node.take(node.it.on_disconnect("reset", node.now))
    node.wait(RULES.grace)
    node.want()
    assert {type(each) for each in node.wait(RULES.upload + RULES.heartbeat + 1)} == {act.LookAtStore}
    assert node.status.phase == "running"


def test_who_stood_still_has_its_time_afterwards():
    node = running()
    node.take(node.it.on_disconnect("reset", node.now))
    node.now += 100
    node.take(node.it.on_tick(node.now))
    assert node.status.phase == "running"
    for node in (leader(), running()):
        node.want(0, verdict=FAILED, runs=False)
        node.take(node.it.on_quiet((), node.now))
        node.now += RULES.upload + RULES.heartbeat + 1
        assert act.Exit not in map(type, node.take(node.it.on_tick(node.now)))


def until_it_gives_up(node: Node, sign: Sign | None, *, beats: bool = False) -> list[act.Action]:
    actions: list[act.Action] = []
    for number in range(round(RULES.rendezvous + 70)):
        actions += node.wait(1)
        if actions and isinstance(actions[-1], act.LookAtStore):
            sign = replace(sign, beat=number) if sign is not None and beats else sign
            actions += node.look(sign)
        if any(isinstance(each, act.Upload | act.Exit) for each in actions):
            node.gave_up = min(node.gave_up, node.now)
    return [each for each in actions if not isinstance(each, act.LookAtStore | act.EndRanks)]


@pytest.mark.parametrize(
    ("sign", "memory", "kind", "text"),
    [
        (Sign(LEADER, 7), None, "missing", "node 0 was lost, and none took its place within 900 s"),
        (None, Memory(99, 100), "memory", "node 0: it was lost, and none took its place within 900 s; its memory was"),
    ],
    ids=["an old sign", "no sign, and its memory was full"],
)
def test_where_no_leader_comes_and_no_sign_is_fresh_a_node_ends_the_job(sign, memory, kind, text):
    """In the midst of a round, with which its ranks lose their peers."""
    node = running(replace(RULES, max_restarts=0))
    node.want(memory=memory)
    node.take(node.it.on_failure(ECHO, node.now))
    node.take(node.it.on_disconnect("reset", node.now))
    node.wait(RULES.grace + 0.5)
    node.take(node.it.on_quiet((), node.now))
    (upload,) = until_it_gives_up(node, sign)
    assert upload.verdict.kind == kind
    assert text in upload.verdict.text


@pytest.mark.parametrize(
    ("late", "rendezvous"), [(False, 900.0), (True, 10.0)], ids=["looked before", "a look was under way"]
)
def test_what_the_leader_renewed_before_it_was_lost_is_no_sign_that_it_lives(late, rendezvous):
    """One that has only not been watched for long enough is watched on: else each pod in this one's place would begin
    to watch anew, and the job would never end."""
    node = Node(replace(RULES, rendezvous=rendezvous))
    node.look(Sign(LEADER, 3))
    node.run()
    began = node.now
    node.wait(1)
    node.take(node.it.on_disconnect("reset", node.now))
    if late:
        node.look(Sign(LEADER, 4), since=began)
    node.wait(RULES.grace + 0.5)
    node.take(node.it.on_quiet((), node.now))
    (upload,) = until_it_gives_up(node, Sign(LEADER, 7))
    assert upload.verdict.kind == "missing"
    assert node.gave_up - began >= RULES.stale


@pytest.mark.parametrize("why", ["a fresh sign", "it cannot begin"])
def test_a_node_that_has_no_say_leaves_undecided(why):
    node = Node(cannot=replace(OWN, round=NO_ROUND)) if why == "it cannot begin" else Node()
    sign = Sign(LEADER, 7) if why == "a fresh sign" else None
    (leaving,) = until_it_gives_up(node, sign, beats=True)
    assert leaving == act.Exit(UNDECIDED, "the leader of this job cannot be reached from here")


@pytest.mark.parametrize("paused", [0, 5])
def test_a_leader_that_came_and_was_lost_as_well_keeps_nobody_from_telling_the_cause(paused):
    """Nobody could reach it; its sign was renewed while it was there, and has not been since."""
    node = Node(replace(RULES, max_restarts=0))
    node.stop(round=FIRST, books=Books(FIRST, 3).noting(Outcome(FIRST, OWN)))
    node.take(node.it.on_disconnect("reset", node.now))
    node.wait(1)
    node.look(Sign(LEADER, 7))
    for beat in range(2):
        node.wait(RULES.renew)
        node.look(Sign(Leader(2, "z"), beat))
    node.wait(RULES.rendezvous - RULES.stale)
    node.now += paused
    (upload,) = until_it_gives_up(node, Sign(Leader(2, "z"), 1))
    assert upload.verdict == FAILED


def test_nodes_give_up_one_after_the_other_and_find_what_the_first_has_uploaded():
    first, second = Node(), Node(node=2)
    assert until_it_gives_up(first, None)
    second.wait(RULES.rendezvous + 6)
    assert [each for each in second.look() if isinstance(each, act.Upload)] == []
    assert second.look(is_decided=True) == [act.Exit(0, DECIDED)]


def test_of_nodes_that_give_up_the_one_that_knows_the_cause_is_the_first():
    first, knows = running(replace(RULES, max_restarts=0)), running(replace(RULES, max_restarts=0), node=9)
    for node in (first, knows):
        node.take(node.it.on_disconnect("reset", node.now))
    first.take(first.it.on_failure(ECHO, first.now))
    knows.take(knows.it.on_failure(OWN, knows.now))
    for node in (first, knows):
        node.wait(RULES.grace + 0.5)
        node.take(node.it.on_quiet((), node.now))
        node.wait(RULES.rendezvous - RULES.grace)
    assert [each for each in first.look() if isinstance(each, act.Upload)] == []
    (upload,) = knows.look()
    assert upload.verdict.cause == OWN


def test_a_store_that_is_away_is_no_sign_of_anything_and_at_last_the_node_leaves():
    node = Node()
    actions = node.wait(RULES.rendezvous + RULES.upload)
    assert {type(each) for each in actions} == {act.LookAtStore}
    assert node.wait(0.5)[-1] == act.Exit(UNDECIDED, "neither the leader nor the store can be reached from here")


# --- the store --------------------------------------------------------------------------------------------------------
def test_who_waits_looks_often_and_whose_ranks_run_looks_seldom_and_the_more_nodes_the_more_seldom():
    node = Node()
    assert len(node.wait(60)) in (5, 6)
    node.run()
    assert len(node.wait(610)) == 10
    assert len(running(replace(RULES, min_nodes=4096, max_nodes=4096)).wait(1650)) == 2
    assert running(leads=True, node=0).wait(600) == []


@pytest.mark.parametrize("waits", [True, False])
def test_a_leader_that_is_not_the_newest_is_dropped(waits):
    node = Node() if waits else running()
    node.want()
    assert node.look(Sign(LEADER, 3)) == []
    assert node.look(Sign(Leader(2, "z"), 1)) == [act.DropLink()]


def test_a_look_from_before_a_pause_says_nothing():
    node = Node()
    since = node.now
    node.now += 30
    assert node.look(is_decided=True, since=since) == []


# --- the end ----------------------------------------------------------------------------------------------------------
def leader(**facts: Any) -> Node:
    node = Node(leads=True, node=0, **facts)
    node.take(node.it.on_fact(node.now, offer=Offer(NO_ROUND, {"port": "7"})))
    return node


@pytest.mark.parametrize(
    ("sign", "is_decided", "does"),
    [
        (Sign(LEADER, 4), False, act.Upload(FAILED)),
        (Sign(LEADER, 4), True, act.Exit(0, DECIDED)),
        (Sign(Leader(2, "z"), 1), False, act.Exit(UNDECIDED, "another process leads this job")),
    ],
    ids=["it leads", "there is a verdict", "it is not the newest"],
)
def test_the_leader_uploads_after_a_look_and_once_the_verdict_that_it_has_then(sign, is_decided, does):
    node = leader()
    assert node.want(0, verdict=Verdict("lost", "gone")) == [act.LookAtStore()]
    node.want(0, verdict=FAILED)
    assert node.look(sign, is_decided=is_decided) == [does]
    assert node.look(sign, is_decided=is_decided) == []


def test_a_leader_that_cannot_look_at_the_store_tries_again_until_that_was_away_for_too_long():
    node = leader()
    node.want(0, verdict=FAILED)
    assert act.LookAtStore() in node.wait(RULES.renew / 6 + 1)
    late = [[each for each in node.wait(t) if isinstance(each, act.Exit)] for t in (RULES.upload - 30, 30)]
    assert late == [[], [act.Exit(UNDECIDED, "the verdict could not be uploaded: the store is away")]]


def test_the_others_wait_for_the_upload_from_its_verdict_on_however_often_that_is_said():
    node = running()
    node.wait(RULES.heartbeat + 1)
    node.want(verdict=FAILED, runs=False)
    node.take(node.it.on_quiet((), node.now))
    assert not [each for each in node.wait(RULES.upload) if isinstance(each, act.Exit)]
    node.want(news="the store is away")
    left = [each for each in node.wait(RULES.heartbeat + 1) if isinstance(each, act.Exit)]
    assert left == [act.Exit(UNDECIDED, "the leader has not uploaded the verdict in time")]


def test_the_others_wait_for_the_upload_and_leave_when_no_rank_is_left_though_the_leader_leaves_before():
    node = running()
    assert node.want(verdict=FAILED, runs=False) == [act.EndRanks()]
    assert node.want(is_decided=True) == []
    node.take(node.it.on_disconnect("it has left", node.now))
    assert node.take(node.it.on_quiet((), node.now)) == [act.Exit(0, DECIDED)]
    assert node.it.end == FAILED


def test_what_a_leader_was_to_upload_that_was_lost_is_not_how_the_job_has_ended():
    node = running()
    node.take(node.it.on_return((1,), node.now))
    node.want(verdict=Verdict("success", round=FIRST), runs=False)
    assert node.it.end is not None
    node.take(node.it.on_disconnect("reset", node.now))
    assert node.look(is_decided=True) == [act.Exit(0, DECIDED)]
    assert node.it.end is None, "others may have given it up"


def test_who_has_no_part_any_more_leaves_undecided_with_its_ranks_gone():
    node = running()
    assert node.want(leave="a new process has taken its place") == [act.EndRanks()]
    assert node.look(Sign(Leader(2, "z"), 1)) == []
    assert node.run(SECOND) == []
    assert node.take(node.it.on_quiet((), node.now)) == [act.Exit(UNDECIDED, "a new process has taken its place")]


# --- told to stop -----------------------------------------------------------------------------------------------------
def test_a_pod_that_is_told_to_stop_stays_for_the_save_by_all_and_then_leaves():
    node = running()
    assert node.take(node.it.on_stop("told to stop by SIGTERM", node.now, node.now, stays=True)) == []
    assert node.status.is_preempted
    assert node.want(save=Save(1, is_urgent=True)) == [act.CallRanks(1)]
    assert node.want(size=9) == []
    node.take(node.it.on_fact(node.now, floor=Floor(1, 5)))
    assert node.want(save=Save(1, is_urgent=True, step=6)) == [act.SaveAt(1, 6, is_urgent=True)]
    assert node.log[-1] == "a node was told to stop: all ranks save at step 6"
    node.take(node.it.on_fact(node.now, saved=1))
    assert node.want(save=Save(1, is_urgent=True, step=6, is_done=True)) == [act.EndRanks()]
    assert node.status.leaving == "told to stop by SIGTERM"


def test_a_connection_that_is_back_in_time_costs_a_pod_that_is_told_to_stop_no_save():
    node = running()
    node.want(save=Save(1, is_urgent=False, step=3, is_done=True))
    node.take(node.it.on_stop("told to stop", node.now, node.now, stays=True))
    node.want(save=Save(1, is_urgent=True))
    node.take(node.it.on_disconnect("reset", node.now))
    assert node.wait(RULES.grace - 0.5) == []
    assert not node.status.leaving
    node.take(node.it.on_fact(node.now, floor=Floor(1, 5)))
    assert node.want(save=Save(1, is_urgent=True, step=6)) == [act.SaveAt(1, 6, is_urgent=True)]


@pytest.mark.parametrize("why", ["time", "the round is over", "the leader is lost", "it does not stay"])
def test_it_does_not_stay_for_a_save_that_cannot_be(why):
    node = running()
    node.take(node.it.on_stop("told to stop", node.now - 5, node.now, stays=why != "it does not stay"))
    if why == "time":
        node.take(node.it.on_stop("told once more", node.now, node.now, stays=True))
        assert node.wait(RULES.preemption - 5.5) == [], "it counts from the signal"
        node.wait(0.5)
    elif why == "the round is over":
        node.stop()
    elif why == "the leader is lost":
        node.take(node.it.on_disconnect("reset", node.now))
        node.wait(RULES.grace + 0.5)
    assert node.status.leaving == "told to stop"
    node.take(node.it.on_quiet((), node.now))
    assert node.done[-1] == act.Exit(UNDECIDED, "told to stop")


URGENT = Save(1, is_urgent=True, step=-1, is_done=True)


def test_a_node_whose_ranks_have_left_the_function_stays_until_they_have_returned():
    node = running()
    node.take(node.it.on_left(node.now))
    node.take(node.it.on_stop("told to stop", node.now, node.now, stays=True))
    assert node.want(save=URGENT) == []
    assert node.take(node.it.on_return((1,), node.now)) == [act.Exit(UNDECIDED, "told to stop")]
    assert (node.status.phase, node.status.leaving) == ("returned", "told to stop")


@pytest.mark.parametrize(("save", "leaves"), [(replace(URGENT, is_empty=True), False), (URGENT, True)])
def test_a_leader_whose_ranks_have_returned_stays_for_the_others_that_save_or_return(save, leaves):
    node = running(leads=True, node=0)
    node.take(node.it.on_left(node.now))
    node.take(node.it.on_return((0,), node.now))
    assert node.take(node.it.on_stop("told to stop", node.now, node.now, stays=True)) == []
    assert node.status.is_preempted
    node.want(save=save)
    assert bool(node.status.leaving) == leaves


@pytest.mark.parametrize("leads", [True, False])
def test_a_pod_of_which_nobody_needs_anything_leaves_at_once(leads):
    node = running(leads=leads, node=0)
    node.take(node.it.on_return((0,), node.now))
    if leads:
        node.stop()
    node.take(node.it.on_stop("told to stop", node.now, node.now, stays=True))
    assert node.status.leaving


def test_a_lone_pod_that_is_told_to_stop_with_its_ranks_returned_has_a_success_to_upload():
    node = running(ALONE, leads=True, node=0, is_replaced=False)
    node.take(node.it.on_return((0,), node.now))
    assert node.take(node.it.on_stop("told to stop", node.now, node.now, stays=True)) == []
    success = Verdict("success", round=FIRST)
    assert node.want(verdict=success) == [act.Upload(success)]


def test_a_leader_that_has_a_verdict_uploads_it_though_it_is_told_to_stop():
    node = leader()
    node.want(0, verdict=FAILED)
    assert node.take(node.it.on_stop("told to stop", node.now, node.now, stays=True)) == []
    assert node.look(Sign(LEADER, 4)) == [act.Upload(FAILED)]


def test_a_leader_that_stays_for_a_save_uploads_the_verdict_that_comes_meanwhile():
    node = running(leads=True, node=0)
    node.take(node.it.on_stop("told to stop", node.now, node.now, stays=True))
    node.take(node.it.on_return((0,), node.now))
    assert node.want(0, runs=False, verdict=FAILED) == [act.LookAtStore()]
    assert node.look(Sign(LEADER, 4)) == [act.Upload(FAILED)]


def test_that_the_only_pod_of_a_job_is_told_to_stop_is_the_jobs_end_where_nobody_replaces_it():
    node = Node(ALONE, leads=True, node=0, is_replaced=False)
    node.take(node.it.on_fact(node.now, offer=Offer(NO_ROUND, {})))
    node.want(0, round=FIRST, runs=True, size=1, books=Books(FIRST, 1))
    ended = node.take(node.it.on_stop("told to stop by SIGTERM", node.now, node.now, stays=False))
    verdict = Verdict("stopped", "told to stop by SIGTERM", FIRST)
    assert ended == [act.EndRanks(), act.Upload(verdict)]


def test_the_only_pod_of_a_job_asks_the_store_nothing_and_uploads_at_once():
    node = Node(ALONE, leads=True, node=0, is_replaced=False)
    assert node.want(0, verdict=FAILED)[0] == act.Upload(FAILED)
    assert node.wait(100) == []


# --- what rides on a round --------------------------------------------------------------------------------------------
def test_the_leader_has_something_ready_for_each_round_and_nobody_else_has():
    node = Node(leads=True, node=0)
    assert node.wait(0.5) == [act.MakeOffer(NO_ROUND)]
    assert node.wait(5) == []
    node.take(node.it.on_fact(node.now, offer=Offer(NO_ROUND, {"port": "7"})))
    node.want(0, round=FIRST, runs=True, size=3, offer={"port": "7"}, books=Books(FIRST, 3))
    node.want(0, runs=False)
    assert node.take(node.it.on_quiet((), node.now)) == [act.MakeOffer(FIRST)]
    assert [each for each in Node().wait(5) if isinstance(each, act.MakeOffer)] == []


def test_checks_are_done_in_place_of_ranks_and_come_back_with_a_report():
    node = Node()
    (start,) = node.want(round=FIRST, runs=True, is_checks=True, ran_before=True, size=3, books=Books(FIRST, 3))
    assert (start.is_checks, start.ran_before) == (True, True)
    node.take(node.it.on_return((), node.now, "fit"))
    assert (node.status.phase, node.status.report) == ("returned", "fit")


def test_a_save_before_a_node_joins_is_made_whether_or_not_it_is_due_and_told():
    node = running()
    node.want(save=Save(1, is_urgent=False, is_forced=True))
    assert node.want(save=Save(1, is_urgent=False, step=6, is_forced=True)) == [act.SaveAt(1, 6, False, True)]
    assert node.log == ["a node joins: all ranks save at step 6"]


def test_where_no_rank_saves_by_steps_a_node_that_is_told_to_stop_says_so():
    node = running()
    node.take(node.it.on_stop("told to stop", node.now, node.now, stays=True))
    node.want(save=Save(1, is_urgent=True))
    node.want(save=Save(1, is_urgent=True, step=-1))
    assert node.log[-1] == "a node was told to stop: no rank saves by steps"
    assert node.want(save=replace(URGENT, is_empty=True)) == [act.EndRanks()]


def test_a_rank_that_asks_is_served_by_the_next_call_also_while_the_leader_is_not_heard():
    node = running()
    node.take(node.it.on_ask(node.now))
    assert node.status.asks == 1
    node.want(save=Save(1, is_urgent=False))
    node.take(node.it.on_ask(node.now))
    assert node.status.asks == 2
    node.take(node.it.on_fact(node.now, floor=Floor(1, 5)))
    node.want(save=Save(1, is_urgent=False, step=6, is_done=True))
    node.take(node.it.on_disconnect("reset", node.now))
    node.take(node.it.on_ask(node.now))
    assert node.status.asks == 2


def test_a_picture_is_taken_once_for_each_look_again_where_it_may_be_lost_and_not_of_ranks_that_end():
    node = running()
    assert node.want(look=1) == [act.TakePicture(1)]
    assert node.want(size=9) == []
    node.take(node.it.on_fact(node.now, looked=1))
    assert node.status.looked == 1
    hang = HangNotice(2, "rank 1", 1, "it sleeps")
    assert node.want(hang=hang) == [act.Blame(hang)]
    assert node.want(size=3) == []
    node.take(node.it.on_disconnect("reset", node.now))
    assert node.status.looked == 0
    assert node.want() == [act.TakePicture(1)]
    node.stop()
    assert node.status.phase == "ending"
    assert node.want(look=2) == []


def test_memory_is_said_when_it_comes_near_its_limit_and_not_by_a_pod_that_is_told_to_stop():
    node = running()
    for used in (10, 50, 90, 96, 99, 20, 97):
        node.take(node.it.on_memory(Memory(used, 100), node.now))
        assert node.status.memory.used == {10: 10, 50: 10, 90: 10, 96: 96, 99: 96, 20: 20, 97: 97}[used]
    node.want(memory=Memory(99, 100))
    node.take(node.it.on_disconnect("reset", node.now))
    assert node.status.leader_memory == Memory(99, 100), "what the leader says of its own is kept"
    node.take(node.it.on_stop("told to stop by SIGTERM", node.now, node.now, stays=False))
    assert (node.status.leaving, node.status.memory) == ("told to stop by SIGTERM", None)
