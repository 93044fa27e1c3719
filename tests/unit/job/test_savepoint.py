"""All ranks of a round save at one step: the coordinator's part, node by node."""

from __future__ import annotations

import pytest

from flytekitplugins_safedist.job.messages import (
    AllSaved,
    Answer,
    Asks,
    Ended,
    Floor,
    Gather,
    Go,
    Listens,
    Message,
    Preempted,
    Returned,
    Saved,
)
from flytekitplugins_safedist.job.saving import SavePoint
from tests.unit.job.coordination import begun


class Round:
    """A save point, and what it has told all nodes."""

    def __init__(self, *nodes: int, listening: bool = True) -> None:
        self.told: list[Message] = []
        self.it = SavePoint(3, nodes, self.told.append)
        if listening:
            self.it.listens(nodes[0])

    def heard(self) -> list[Message]:
        told, self.told[:] = list(self.told), []
        return told

    def saved(self, call: int, *nodes: int) -> None:
        for node in nodes:
            self.it.saved(node, call)


@pytest.mark.parametrize(
    ("floors", "step"), [((7, 9), 9), ((9, 7), 9), ((None, 4), 4), ((None, None), None), ((0, 0), 0)]
)
def test_all_save_at_the_highest_floor_when_every_node_has_said_its_own(floors, step):
    point = Round(0, 1)
    point.it.asks()
    assert point.heard() == [Gather(3, 1)]
    point.it.floor(0, 1, floors[0])
    assert point.heard() == []
    point.it.floor(1, 1, floors[1])
    assert point.heard() == [Answer(3, 1, step, urgent=False)]
    point.saved(1, 0)
    assert point.heard() == []
    point.saved(1, 1)
    assert point.heard() == [AllSaved(3, 1, urgent=False)]


def test_what_is_asked_for_while_a_call_is_open_is_one_call_afterwards():
    point = Round(0, 1)
    for _ in range(3):
        point.it.asks()
    point.it.floor(0, 1, 5)
    point.it.floor(1, 1, 5)
    point.it.asks()
    point.saved(1, 0, 1)
    assert [type(message) for message in point.heard()] == [Gather, Answer, AllSaved, Gather]
    point.it.floor(0, 2, 6)
    point.it.floor(1, 2, 6)
    point.saved(2, 0, 1)
    assert [type(message) for message in point.heard()] == [Answer, AllSaved]


@pytest.mark.parametrize("when", ["before", "unanswered", "answered"])
def test_a_call_after_a_preemption_is_urgent_and_one_that_was_answered_before_is_followed_by_another(when):
    point = Round(0)
    if when != "before":
        point.it.asks()
    if when == "answered":
        point.it.floor(0, 1, 5)
    point.it.preempted()
    if when != "answered":
        point.it.floor(0, 1, 5)
    point.saved(1, 0)
    told = point.heard()
    urgent = [message.urgent for message in told if isinstance(message, Answer)]
    assert urgent == [when != "answered"]
    assert (told[-1] == Gather(3, 2)) == (when == "answered")
    if when == "answered":
        point.it.floor(0, 2, 6)
        point.saved(2, 0)
        assert point.heard()[-1] == AllSaved(3, 2, urgent=True)


@pytest.mark.parametrize("why", ["nobody would save", "all have saved already", "who would save has returned"])
def test_who_is_told_to_stop_may_go_at_once_where_there_is_nothing_to_wait_for(why):
    point = Round(0, 1, listening=why != "nobody would save")
    if why == "all have saved already":
        point.it.preempted()
        point.it.floor(0, 1, 5)
        point.it.floor(1, 1, 5)
        point.saved(1, 0, 1)
        point.heard()
    elif why == "who would save has returned":
        point.it.done(0)
    point.it.preempted()
    assert point.heard() == [AllSaved(3, 1 if why == "all have saved already" else 0, urgent=True)]


@pytest.mark.parametrize("stage", ["called", "answered"])
def test_nobody_waits_for_a_node_whose_ranks_have_returned(stage):
    point = Round(0, 1)
    if stage == "called":
        point.it.done(1)
    point.it.asks()
    point.it.floor(0, 1, 5)
    if stage == "answered":
        point.it.floor(1, 1, 5)
        point.it.done(1)
    point.saved(1, 0)
    assert point.heard()[-1] == AllSaved(3, 1, urgent=False)


def test_what_is_said_of_an_earlier_call_counts_for_nothing():
    point = Round(0)
    point.it.asks()
    point.it.floor(0, 1, 5)
    point.saved(1, 0)
    point.it.asks()
    point.heard()
    point.it.floor(0, 1, 99)
    point.saved(1, 0)
    assert point.heard() == []


@pytest.mark.parametrize("stage", ["idle", "called", "answered", "saved"])
def test_a_node_on_a_new_connection_is_told_how_far_a_call_is(stage):
    point = Round(0, 1)
    if stage != "idle":
        point.it.preempted()
    if stage in ("answered", "saved"):
        point.it.floor(0, 1, 5)
        point.it.floor(1, 1, 8)
    if stage == "saved":
        point.saved(1, 0, 1)
    again: list[Message] = []
    point.it.again(again.append)
    expected = {
        "idle": [],
        "called": [Gather(3, 1)],
        "answered": [Answer(3, 1, 8, urgent=True)],
        "saved": [AllSaved(3, 1, urgent=True)],
    }
    assert again == expected[stage]


# --- in a job ---------------------------------------------------------------------------------------------------------
def test_nodes_of_a_job_hear_of_a_call_and_a_node_that_reconnects_hears_of_it_again():
    job = begun()
    job.say("b", Listens(0))
    job.say("c", Preempted(0))
    assert job.heard(Gather).keys() == set("abc")
    job.say("b", Floor(0, 1, 4))
    job.lose("a")
    job.hello("a", state="running", round=0)
    assert job.heard(Gather).keys() == {"a"}
    job.say("a", Floor(0, 1, 6))
    job.say("c", Floor(0, 1, None))
    assert {answer.step for answer in job.heard(Answer).values()} == {6}
    for process in "abc":
        job.say(process, Saved(0, 1))
    assert job.heard(AllSaved).keys() == set("abc")


def test_the_end_of_a_round_ends_its_calls_and_the_next_begins_anew():
    job = begun()
    job.say("b", Asks(0))
    job.say("c", Ended(0))
    job.all_end("a", "b")
    assert job.heard(Go)
    for process in "abc":
        job.say(process, Floor(0, 1, 4))
    assert job.heard(Answer) == {}
    job.say("a", Asks(1))
    assert {(call.round, call.call) for call in job.heard(Gather).values()} == {(1, 1)}


def test_a_node_whose_ranks_have_returned_is_not_waited_for_in_a_job():
    job = begun()
    job.say("b", Listens(0))
    job.say("a", Returned(0))
    job.lose("c")
    job.hello("c", state="running", round=0)
    job.say("c", Returned(0))
    job.say("b", Asks(0))
    job.say("b", Floor(0, 1, 4))
    assert job.heard(Answer)["b"].step == 4
