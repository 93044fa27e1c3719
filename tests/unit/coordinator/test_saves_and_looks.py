"""All ranks save at one step; and a suspicion that they hang."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from flytekitplugins_safedist.coordinator.inquiry import AGAIN_SECONDS, ANSWER_SECONDS, CONFIRM_SECONDS, Inquiry
from flytekitplugins_safedist.coordinator.messages import Floor, HangNotice, Save, Status
from flytekitplugins_safedist.coordinator.saves import RoundSaves


class Saves:
    """The saves of a round of three, whose ranks would save when a pod is told to stop, or would not."""

    def __init__(self, *, listens: bool = True, silent: str = "") -> None:
        self.it = RoundSaves("abc")
        self.statuses = {each: Status("job", each, None, 1.0, listens=listens) for each in "abc"}
        for process in set("abc") - set(silent):
            self.say(process)

    def say(self, *processes: str, **changes: object) -> None:
        for process in processes:
            self.statuses[process] = replace(self.statuses[process], **changes)
            self.it.on_status(self.statuses[process])


@pytest.mark.parametrize(("floors", "step"), [((3, 9, 5), 9), ((-1, 4, -1), 4), ((-1, -1, -1), -1)])
def test_a_call_then_the_highest_floor_of_all_then_all_have_saved(floors, step):
    saves = Saves()
    saves.say("b", asks=1)
    assert saves.it.save == Save(1, is_urgent=False)
    for process, floor in zip("abc", floors, strict=True):
        assert saves.it.save.step is None
        saves.say(process, floor=Floor(1, floor))
    assert saves.it.save == Save(1, is_urgent=False, step=step)
    for process in "abc":
        assert not saves.it.save.is_done
        saves.say(process, saved=1)
    assert saves.it.save.is_done


def test_who_asks_while_a_save_is_made_is_called_after_it_and_what_was_said_of_that_one_answers_no_later_call():
    saves = Saves()
    saves.say("b", asks=1)
    saves.say("c", asks=1)
    saves.say("a", asks=2)
    saves.say(*"abc", floor=Floor(1, 3))
    saves.say(*"abc", saved=1)
    assert saves.it.save == Save(2, is_urgent=False), "who asked before is served by the first"
    saves.say("b", floor=Floor(1, 5))
    saves.say(*"ac", floor=Floor(2, 4))
    assert saves.it.save == Save(2, is_urgent=False)
    saves.say("b", floor=Floor(2, 4))
    assert saves.it.save == Save(2, is_urgent=False, step=4)


def test_a_node_that_is_told_to_stop_makes_the_next_save_urgent_and_that_is_the_last():
    saves = Saves()
    saves.say("b", asks=1)
    saves.say("a", is_preempted=True)
    assert saves.it.save == Save(1, is_urgent=False)
    saves.say(*"abc", floor=Floor(1, 3))
    saves.say(*"abc", saved=1)
    assert saves.it.save == Save(2, is_urgent=True)
    saves.say(*"abc", floor=Floor(2, 4), asks=3)
    saves.say(*"abc", saved=2)
    assert saves.it.save == Save(2, is_urgent=True, step=4, is_done=True)
    saves.say("b", is_preempted=True)
    assert saves.it.save.is_done


def test_where_nobody_would_save_a_pod_that_is_told_to_stop_may_go_when_all_have_said_so():
    saves = Saves(listens=False)
    saves.say("a", is_preempted=True)
    assert saves.it.save == Save(1, is_urgent=True), "who has not looked at its ranks yet does not know"
    saves.say("a", "b", "c", floor=Floor(1, -1))
    assert saves.it.save == Save(1, is_urgent=True, step=-1, is_empty=True)
    saves.say("a", "b", "c", saved=1)
    assert saves.it.save == Save(1, is_urgent=True, step=-1, is_done=True, is_empty=True)


@pytest.mark.parametrize("when", ["as it is called", "as it is told"])
def test_a_rank_that_would_save_and_is_heard_of_only_then_is_waited_for(when):
    saves = Saves(listens=False)
    saves.say("a", is_preempted=True)
    if when == "as it is called":
        saves.say("c", listens=True, floor=Floor(1, -1))
    saves.say("a", "b", "c", floor=Floor(1, -1))
    assert saves.it.save.is_empty == (when == "as it is told")
    saves.say("c", listens=True)
    saves.say("a", "b", saved=1)
    assert not saves.it.save.is_done
    saves.say("c", saved=1)
    assert saves.it.save == Save(1, is_urgent=True, step=-1, is_done=True)


def test_who_begins_to_listen_while_a_pod_stays_for_which_nobody_would_save_is_called_as_well():
    saves = Saves(listens=False)
    saves.say("a", is_preempted=True)
    saves.say("a", "b", "c", floor=Floor(1, -1))
    saves.say("a", "b", "c", saved=1)
    saves.say("c", listens=True)
    assert saves.it.save == Save(2, is_urgent=True)
    saves.say("a", "b", "c", floor=Floor(2, 4))
    saves.say("a", "b", "c", saved=2)
    assert saves.it.save == Save(2, is_urgent=True, step=4, is_done=True)


@pytest.mark.parametrize("when", ["before all have saved", "after that"])
def test_where_a_pod_that_was_told_to_stop_has_done_its_part_the_others_may_save_again(when):
    saves = Saves()
    saves.say("a", is_preempted=True)
    saves.say("a", "b", "c", floor=Floor(1, 4))
    for process in "bca" if when == "after that" else "bc":
        saves.say(process, saved=1)
    saves.it.on_leave("a")  # its ranks have returned meanwhile
    assert saves.it.save == Save(1, is_urgent=False, step=4, is_done=True)
    saves.say("b", asks=2)
    assert saves.it.save == Save(2, is_urgent=False)
    saves.say("c", is_preempted=True)
    saves.say("b", "c", floor=Floor(2, 9))
    saves.say("b", "c", saved=2)
    assert saves.it.save == Save(3, is_urgent=True), "what was saved for another pod is none of this one's"


def test_nobody_is_called_before_all_have_begun_in_this_round():
    saves = Saves(silent="c")
    saves.say("a", is_preempted=True)
    assert saves.it.save is None
    saves.say("c")
    assert saves.it.save == Save(1, is_urgent=True)


@pytest.mark.parametrize("when", ["floors are asked for", "they save"])
def test_who_is_lost_or_has_returned_is_not_waited_for(when):
    saves = Saves()
    saves.say("a", asks=1)
    saves.say("a", "b", floor=Floor(1, 5))
    if when == "they save":
        saves.say("c", floor=Floor(1, 4))
        saves.say("a", "b", saved=1)
    saves.it.on_leave("c")
    assert saves.it.save == Save(1, is_urgent=False, step=5, is_done=when == "they save")
    saves.say("c", saved=9)  # heard late
    saves.it.on_leave("a")
    saves.it.on_leave("b")
    assert saves.it.save.is_done


# --- hangs ------------------------------------------------------------------------------------------------------------
def hang(look: int, key: str = "rank 1") -> HangNotice:
    return HangNotice(look, key, 1, "it sleeps")


class Looks:
    """The inquiry of a round of two."""

    def __init__(self) -> None:
        self.it, self.now = Inquiry(), 100.0
        self.stall(30.0)

    def stall(self, seconds: float, *, is_urgent: bool = True) -> None:
        self.it.on_status(Status("job", "a", None, 1.0, stall=seconds, is_urgent=is_urgent))

    def take(self) -> int:
        """A picture is taken, where it is due, and is complete."""
        if self.it.is_due(self.now):
            self.it.begin("ab", self.now)
        for process in "ab":
            if self.it.complete():
                raise AssertionError("one picture is missing")
            self.it.on_status(Status("job", process, None, 1.0, looked=self.it.look))
        return self.it.complete()

    def find(self, seconds: float, *, is_urgent: bool) -> list[tuple[float, bool]]:
        """When the same hang is found, and whether it is to be shown, while a node goes on to say that it waits."""
        times, last = [], self.now + seconds
        while self.now < last:
            self.now += 1
            self.stall(self.now, is_urgent=is_urgent)
            if self.it.is_due(self.now):
                before, look = self.it.hang, self.take()
                key = b"rank 1".decode()  # as it comes with a message: each time another object
                self.it.on_hang(HangNotice(look, key, 1, "it sleeps", seconds=self.now), self.now)
                times += [(self.now, self.it.hang.is_news)] if self.it.hang not in (None, before) else []
        return times


@pytest.mark.parametrize("second", [hang(2), None, hang(2, "rank 0")], ids=["the same", "none", "another"])
def test_a_hang_is_what_two_pictures_show_some_seconds_apart(second):
    looks = Looks()
    assert looks.take() == 1
    looks.it.on_hang(hang(1), looks.now)
    assert looks.it.hang is None
    assert not looks.it.is_due(looks.now + CONFIRM_SECONDS - 1)
    looks.now += CONFIRM_SECONDS
    assert looks.take() == 2
    looks.it.on_hang(second, looks.now)
    assert looks.it.hang == (second if second == hang(2) else None)
    is_due = looks.it.is_due(looks.now + 20)
    assert is_due == (second == hang(2, "rank 0")), "where nothing is done about it, it is not told again so soon"


def test_a_picture_that_is_not_complete_in_time_shows_nothing_and_another_is_taken():
    looks = Looks()
    assert looks.it.is_due(looks.now)
    looks.it.begin("ab", looks.now)
    looks.it.on_status(Status("job", "a", None, 1.0, stall=30.0, looked=1))
    assert not looks.it.is_due(looks.now + ANSWER_SECONDS)
    looks.now += ANSWER_SECONDS + 1
    assert not looks.it.is_due(looks.now)
    looks.it.on_status(Status("job", "b", None, 1.0, looked=1))
    assert looks.it.complete() == 0
    looks.stall(45.0)
    assert looks.take() == 2


def test_nothing_is_looked_at_while_the_one_before_is_judged_or_where_nobody_waits_any_more():
    looks = Looks()
    looks.take()
    assert not looks.it.is_due(looks.now + 100)
    looks.it.on_hang(None, looks.now)
    assert not looks.it.is_due(looks.now + 100), "nobody has said again that a rank waits"
    looks.stall(31.0)
    assert looks.it.is_due(looks.now + 100)


def test_a_job_that_has_moved_on_between_pictures_is_looked_at_ever_more_rarely():
    looks, pauses = Looks(), []
    for number in range(6):
        looks.take()
        looks.it.on_hang(hang(looks.it.look, f"step {number}"), looks.now)
        began = looks.now
        while not looks.it.is_due(looks.now):
            looks.now += 1
        pauses.append(looks.now - began)
    assert pauses == [3, 6, 12, 24, 48, 48]
    assert looks.it.hang is None


def test_where_nothing_is_done_about_a_hang_it_is_shown_ever_more_rarely():
    news = [now for now, is_news in Looks().find(20_000, is_urgent=True) if is_news]
    gaps = [later - earlier for earlier, later in itertools.pairwise(news)]
    assert len(news) > 4
    assert gaps == sorted(gaps)
    assert gaps[-1] > 3600


def test_what_is_only_to_be_told_is_looked_at_as_rarely_and_what_will_be_ended_is_not_missed_for_it():
    looks = Looks()
    looks.take()
    looks.it.on_hang(None, looks.now)
    found = looks.find(2000, is_urgent=False)
    assert 0 < len(found) < 10
    assert all(is_news for _, is_news in found)
    began = looks.now
    assert looks.find(100, is_urgent=True)[0][0] < began + AGAIN_SECONDS + 2 * CONFIRM_SECONDS + 2
