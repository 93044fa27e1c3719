"""A suspicion is followed up: all nodes look, twice, and only what both pictures show is a hang."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from flytekitplugins_safedist.diagnosis.picture import Standing
from flytekitplugins_safedist.diagnosis.processes import Process
from flytekitplugins_safedist.diagnosis.records import Begun, Recorded
from flytekitplugins_safedist.diagnosis.stacks import Frame
from flytekitplugins_safedist.frames import NODE_BYTES
from flytekitplugins_safedist.job.hang_messages import Hung, Look
from flytekitplugins_safedist.job.inquiry import ANSWER_SECONDS, CONFIRM_SECONDS, Inquiry


def standing(rank: int, number: int, *, waits: bool) -> Standing:
    begun = Begun("0", number, "all_reduce")
    record = Recorded({"0": number}, (begun,), (begun,)) if waits else Recorded({"0": number})
    return Standing(rank, Process(rank, "S"), record=record)


HELD_UP, CULPRIT = standing(0, 4, waits=True), standing(1, 3, waits=False)


class Asked:
    """An inquiry of two nodes with one rank each, and what it has asked."""

    def __init__(self) -> None:
        self.looks: list[Any] = []
        self.inquiry = Inquiry(2, [0, 1], self.looks.append)

    def answered(self, now: float, *ranks: Standing) -> Any:
        """What both say in answer to the latest question."""
        number = self.looks[-1].number
        return [self.inquiry.seen(rank.rank, number, (rank,), now) for rank in ranks][-1]


def test_two_pictures_that_agree_are_a_hang_and_the_culprits_node_hears_of_it() -> None:
    asked = Asked()
    asked.inquiry.tick(0.0)
    assert asked.looks == [], "without a suspicion nobody is asked"
    asked.inquiry.stalled(1800.0, 10.0)
    assert asked.looks == [Look(2, 1)]
    assert asked.answered(11.0, HELD_UP, CULPRIT) is None
    asked.inquiry.tick(11.0 + CONFIRM_SECONDS / 2)
    assert len(asked.looks) == 1
    asked.inquiry.tick(11.0 + CONFIRM_SECONDS)
    assert asked.looks == [Look(2, 1), Look(2, 2)]
    found = asked.answered(15.0, HELD_UP, CULPRIT)
    assert (found.node, found.rank, found.hang.kind) == (1, 1, "missing")
    assert "rank 1 (1 of 2)" in found.picture


def test_all_that_was_seen_fits_one_message() -> None:
    name = "ε" * 1000
    threads = ((Frame("/app/train.py", 7, name),),) * 9
    ranks = [Standing(rank, Process(rank, "T"), threads, record=CULPRIT.record) for rank in range(1, 1000)]
    ranks = [replace(each, threads=((Frame("/app/train.py", each.rank, name),), *threads)) for each in ranks]
    looks: list[Any] = []
    inquiry = Inquiry(2, [0], looks.append)
    inquiry.stalled(1800.0, 10.0)
    assert inquiry.seen(0, 1, (HELD_UP, *ranks), 11.0) is None
    inquiry.tick(11.0 + CONFIRM_SECONDS)
    found = inquiry.seen(0, 2, (HELD_UP, *ranks), 15.0)
    assert found is not None
    assert found.evidence.endswith(" characters in all]")
    assert len(Hung(2, 1, "frozen", "", 0.0, False, found.picture, evidence=found.evidence).dump()) < NODE_BYTES
    assert "another thread" not in found.picture


def test_a_job_that_has_moved_on_meanwhile_does_not_hang() -> None:
    asked = Asked()
    asked.inquiry.stalled(1800.0, 0.0)
    assert asked.answered(1.0, HELD_UP, CULPRIT) is None
    asked.inquiry.tick(5.0)
    assert asked.answered(6.0, standing(0, 5, waits=True), standing(1, 4, waits=False)) is None, "a step further"
    asked.inquiry.tick(10.0)
    assert asked.answered(11.0, standing(0, 6, waits=False), standing(1, 6, waits=False)) is None
    asked.inquiry.tick(100.0)
    assert len(asked.looks) == 3, "nobody is asked again without a new suspicion"


def test_a_node_that_does_not_answer_leaves_it_open_and_later_answers_count_for_nothing() -> None:
    asked = Asked()
    asked.inquiry.stalled(1800.0, 0.0)
    assert asked.inquiry.seen(0, 1, (HELD_UP,), 1.0) is None
    asked.inquiry.tick(ANSWER_SECONDS + 1)
    assert asked.inquiry.seen(1, 1, (CULPRIT,), ANSWER_SECONDS + 2) is None
    asked.inquiry.stalled(1811.0, ANSWER_SECONDS + 3)
    assert asked.looks == [Look(2, 1), Look(2, 2)]
    assert asked.inquiry.seen(1, 1, (CULPRIT,), ANSWER_SECONDS + 4) is None


def test_where_nothing_is_done_about_it_it_is_told_ever_more_rarely() -> None:
    asked, now, told = Asked(), 0.0, []
    while now < 4000:
        now += 1
        before = len(asked.looks)
        asked.inquiry.stalled(now, now)
        if len(asked.looks) > before and asked.answered(now, HELD_UP, CULPRIT) is not None:
            told.append(now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(told)]
    assert len(told) > 5
    assert gaps == sorted(gaps)
    assert gaps[-1] > 600
