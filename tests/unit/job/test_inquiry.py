"""A suspicion is followed up: all nodes look, twice, and only what both looks show is a hang."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from flytekitplugins_safedist.frames import NODE_BYTES
from flytekitplugins_safedist.hangs.processes import Process
from flytekitplugins_safedist.hangs.recorders import RankRecord
from flytekitplugins_safedist.hangs.snapshot import Snapshot
from flytekitplugins_safedist.hangs.stacks import Frame
from flytekitplugins_safedist.hangs.waits import Wait
from flytekitplugins_safedist.job import messages
from flytekitplugins_safedist.job.hang_messages import Hung, Look, Seen
from flytekitplugins_safedist.job.inquiry import AGAIN_SECONDS, ANSWER_SECONDS, CONFIRM_SECONDS, Inquiry

NOW = 5000.0


def of(rank: int, number: int, *, waits: bool) -> Snapshot:
    """It has begun so many collectives, and has waited in the last one for half an hour."""
    wait = Wait(rank, "0", "0-1", "all_reduce", number, NOW - 1800, "gloo", 1800.0, limit=1770.0)
    record = RankRecord((wait,) if waits else (), {wait.key: number}, is_whole=True)
    return Snapshot(rank, Process(rank, "S"), time=NOW, record=record)


HELD_UP, CULPRIT = of(0, 4, waits=True), of(1, 3, waits=False)


class Asked:
    """An inquiry of two nodes with one rank each, and what it has asked."""

    def __init__(self) -> None:
        self.looks: list[Any] = []
        self.inquiry = Inquiry(2, [0, 1], self.looks.append, run=lambda judges: judges())

    def answered(self, now: float, *ranks: Snapshot) -> Any:
        """What both say in answer to the latest question."""
        number = self.looks[-1].number
        return [self.inquiry.seen(rank.rank, number, (rank,), now) for rank in ranks][-1]


def test_two_looks_that_agree_are_a_hang_and_the_culprits_node_hears_of_it() -> None:
    asked = Asked()
    asked.inquiry.tick(0.0)
    assert asked.looks == [], "without a suspicion nobody is asked"
    asked.inquiry.stalled(True, 10.0)
    assert asked.looks == [Look(2, 1)]
    assert asked.answered(11.0, HELD_UP, CULPRIT) is None
    asked.inquiry.tick(11.0 + CONFIRM_SECONDS / 2)
    assert len(asked.looks) == 1
    asked.inquiry.tick(11.0 + CONFIRM_SECONDS)
    assert asked.looks == [Look(2, 1), Look(2, 2)]
    found = asked.answered(15.0, HELD_UP, CULPRIT)
    assert (found.node, found.hang.rank, found.hang.kind, found.hang.seconds) == (1, 1, "missing", 1800)
    assert "rank 1 (1 of 2)" in found.hang.picture
    assert messages.parse(Hung(2, found.hang).dump()) == Hung(2, found.hang)
    assert messages.parse(Seen(2, 1, (HELD_UP, CULPRIT)).dump()) == Seen(2, 1, (HELD_UP, CULPRIT))


def test_who_judges_does_not_keep_the_coordinator_from_hearing_its_nodes() -> None:
    judges: list[Any] = []
    looks: list[Any] = []
    inquiry = Inquiry(2, [0], looks.append, run=judges.append)
    inquiry.stalled(True, 10.0)
    for now in (11.0, 15.0):
        assert inquiry.seen(0, len(looks), (HELD_UP, CULPRIT), now) is None
        assert inquiry.tick(now + 1) is None, "not judged yet"
        assert len(looks) == len(judges), "nobody is asked again meanwhile"
        judges[-1]()
        found = inquiry.tick(now + 2)
        inquiry.tick(now + 2 + CONFIRM_SECONDS)
    assert found is not None
    assert found.hang.culprits == (1,)


def test_all_that_was_seen_fits_one_message() -> None:
    name = "ε" * 1000
    threads = ((Frame("/app/train.py", 7, name),),) * 9
    ranks = [Snapshot(rank, Process(rank, "T"), threads, NOW, record=CULPRIT.record) for rank in range(1, 1000)]
    ranks = [replace(each, threads=((Frame("/app/train.py", each.rank, name),), *threads)) for each in ranks]
    looks: list[Any] = []
    inquiry = Inquiry(2, [0], looks.append, run=lambda judges: judges())
    inquiry.stalled(True, 10.0)
    assert inquiry.seen(0, 1, (HELD_UP, *ranks), 11.0) is None
    inquiry.tick(11.0 + CONFIRM_SECONDS)
    found = inquiry.seen(0, 2, (HELD_UP, *ranks), 15.0)
    assert found is not None
    assert found.hang.evidence.endswith(" characters in all]")
    assert len(Hung(2, found.hang).dump()) < NODE_BYTES
    assert "another thread" not in found.hang.picture


def test_a_job_that_has_moved_on_meanwhile_does_not_hang_and_is_looked_at_ever_more_rarely() -> None:
    asked, now, times = Asked(), 1.0, []
    asked.inquiry.stalled(True, now)
    for number in range(4, 9):
        times.append(now)
        assert asked.answered(now, of(0, number, waits=True), of(1, number - 1, waits=False)) is None, "a step further"
        while len(asked.looks) == len(times):
            now += 1
            asked.inquiry.tick(now)
    assert [later - earlier for earlier, later in itertools.pairwise([*times, now])] == [3, 6, 12, 24, 48]
    assert asked.answered(now, of(0, 9, waits=False), of(1, 9, waits=False)) is None
    asked.inquiry.tick(now + 1000)
    assert len(asked.looks) == 6, "nobody is asked again without a new suspicion"


def test_a_node_that_does_not_answer_leaves_it_open_and_later_answers_count_for_nothing() -> None:
    asked = Asked()
    asked.inquiry.stalled(True, 0.0)
    assert asked.inquiry.seen(0, 1, (HELD_UP,), 1.0) is None
    asked.inquiry.tick(ANSWER_SECONDS + 1)
    assert asked.inquiry.seen(1, 1, (CULPRIT,), ANSWER_SECONDS + 2) is None
    asked.inquiry.stalled(True, ANSWER_SECONDS + 3)
    assert asked.looks == [Look(2, 1), Look(2, 2)]
    assert asked.inquiry.seen(1, 1, (CULPRIT,), ANSWER_SECONDS + 4) is None


def found_each_second(asked: Asked, first: float, last: float, *, is_urgent: bool) -> list[tuple[float, bool]]:
    """When a hang is found, and whether it is to be told, while nodes go on to say that they wait."""
    times, now = [], first
    while now < last:
        now += 1
        before = len(asked.looks)
        asked.inquiry.stalled(is_urgent, now)
        ranks = [replace(each, time=NOW + now) for each in (HELD_UP, CULPRIT)]
        found = asked.answered(now, *ranks) if len(asked.looks) > before else None
        times += [(now, found.is_news)] if found is not None else []
    return times


def test_where_nothing_is_done_about_it_it_is_told_ever_more_rarely() -> None:
    news = [now for now, is_news in found_each_second(Asked(), 0, 20_000, is_urgent=True) if is_news]
    gaps = [later - earlier for earlier, later in itertools.pairwise(news)]
    assert len(news) > 4
    assert gaps == sorted(gaps)
    assert gaps[-1] > 3600


def test_what_is_only_to_be_told_is_looked_at_as_rarely_and_what_will_be_ended_is_not_missed_for_it() -> None:
    asked = Asked()
    found = found_each_second(asked, 0, 2000, is_urgent=False)
    assert len(found) < 4
    assert all(is_news for _, is_news in found)
    [first, *_] = found_each_second(asked, 2000, 2100, is_urgent=True)
    assert first[0] < 2000 + AGAIN_SECONDS + 2 * CONFIRM_SECONDS
