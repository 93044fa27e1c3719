"""All ranks of a job come to one step, wherever each of them is: agents as threads, ranks as threads, a real store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist.errors import StoreLostError
from flytekitplugins_safedist.job.agreement import Agreement
from flytekitplugins_safedist.ranks import shared_page
from flytekitplugins_safedist.ranks.shared_page import AgentPage, AgreedSave, RankPage
from flytekitplugins_safedist.rendezvous.agreement import RoundAgreement
from flytekitplugins_safedist.rendezvous.client import Connection
from flytekitplugins_safedist.rendezvous.protocol import Keys
from tests.harness.procs import until

DEADLINE = 60.0


class Node:
    """An agent without its ranks."""

    def __init__(self, directory: Path, number: int, store: Any, *, nodes: int, ranks: int) -> None:
        paths = [directory / f"{number}-{rank}" for rank in range(ranks)]
        self.pages: list[AgentPage] = [shared_page.make(path) for path in paths]
        self.ranks: list[RankPage] = [shared_page.open_page(path) for path in paths]
        self.said: list[str] = []
        self.connection = Connection.within(store, heartbeat_timeout=DEADLINE, label=f"node-{number}")
        agreement = RoundAgreement(self.connection.call, Keys("job"), round_no=0, nodes=nodes)
        self.agreement = Agreement(self.pages, agreement, say=self.said.append)


@contextmanager
def job(directory: Path, *, nodes: int, ranks: int) -> Iterator[list[Node]]:
    from torch.distributed import HashStore

    store = HashStore()
    made = [Node(directory, number, store, nodes=nodes, ranks=ranks) for number in range(nodes)]
    for node in made:
        node.agreement.start()
    try:
        yield made
    finally:
        for node in made:
            node.agreement.stop()
            node.connection.close()


def at_once(calls: list[Callable[[], object]]) -> None:
    """Run each call in a thread of its own, and wait for all."""
    failed: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive(), "a rank is stuck"
    assert not failed, failed


def train(rank: RankPage, together: threading.Barrier, first: int, stop: Callable[[AgreedSave], bool]) -> list[tuple]:
    """Steps whose middle is a collective, until a save for which ``stop`` is true."""
    saves: list[tuple[int, AgreedSave]] = []
    rank.take_part(first)
    step = first
    while True:
        found = rank.at(step)
        if found is not None:
            saves.append((step, found))
            rank.finish(found.call)
            if stop(found):
                rank.leave()
                return saves
        together.wait(DEADLINE)
        step += 1


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("told", [1, 3])
def test_every_rank_saves_at_one_step_after_any_node_is_told_to_stop(tmp_path, nodes, ranks, told):
    with job(tmp_path, nodes=nodes, ranks=ranks) as made:
        together = threading.Barrier(nodes * ranks)
        saves: dict[RankPage, list[tuple[int, AgreedSave]]] = {}

        def run(rank: RankPage) -> None:
            saves[rank] = train(rank, together, 7, lambda save: save.urgent)

        def tell() -> None:
            for node in made[:told]:
                node.agreement.preempt()

        pages = [rank for node in made for rank in node.ranks]
        at_once([tell, *(lambda rank=rank: run(rank) for rank in pages)])
        assert len({tuple(each) for each in saves.values()}) == 1, saves
        assert all(rank.preempted for rank in pages)
        until(lambda: all(node.agreement.settled for node in made[:told]), "the agents know that all have saved")


def test_asked_for_by_several_ranks_at_once_it_is_one_save_and_a_preemption_is_another(tmp_path):
    with job(tmp_path, nodes=2, ranks=2) as made:
        together = threading.Barrier(4)
        pages = [rank for node in made for rank in node.ranks]
        saves: dict[RankPage, list[tuple[int, AgreedSave]]] = {}

        def stop(save: AgreedSave) -> bool:
            # The job goes on after the first; it is only then that a node is told to stop.
            made[1].agreement.preempt()
            return save.urgent

        def run(rank: RankPage) -> None:
            rank.ask()
            saves[rank] = train(rank, together, 0, stop)

        at_once([lambda rank=rank: run(rank) for rank in pages])
        assert len({tuple(each) for each in saves.values()}) == 1, saves
        (asked,) = {tuple(save.urgent for _, save in each) for each in saves.values()}
        assert asked == (False, True)


def test_a_rank_that_stands_still_is_answered_though_the_others_never_come(tmp_path):
    with job(tmp_path, nodes=2, ranks=1) as made:
        ahead, behind = made[0].ranks[0], made[1].ranks[0]
        ahead.take_part(3)
        behind.take_part(2)  # and is in a collective from now on, until the other comes
        made[0].agreement.preempt()
        until(lambda: ahead.preempted and behind.preempted, "both know")
        answered = threading.Event()
        found: list[AgreedSave | None] = []

        def reach() -> None:
            found.append(ahead.at(3))
            answered.set()

        threading.Thread(target=reach, daemon=True).start()
        assert answered.wait(DEADLINE), "it waits for a rank that waits for it"
        steps = iter(range(2, 9))
        saved_behind = next(step for step in steps if behind.at(step))
        saved_ahead = 3 if found[0] else next(step for step in range(4, 9) if ahead.at(step))
        assert saved_ahead == saved_behind


def test_a_state_that_is_held_is_saved_at_its_own_step_without_another_one(tmp_path):
    with job(tmp_path, nodes=2, ranks=1) as made:
        pages = [node.ranks[0] for node in made]
        for rank in pages:
            rank.take_part(5)
            assert rank.at(5) is None
            rank.hold(5)  # as in an evaluation
        made[1].agreement.preempt()
        found: dict[RankPage, AgreedSave | None] = dict.fromkeys(pages)

        def both() -> bool:
            for rank in pages:
                found[rank] = found[rank] or rank.held(5)
            return all(found.values())

        until(both, "both save while they hold the state")


def test_a_held_state_cannot_be_saved_any_more_when_another_rank_has_gone_on(tmp_path):
    with job(tmp_path, nodes=2, ranks=1) as made:
        holds, goes_on = (node.ranks[0] for node in made)
        for rank in (holds, goes_on):
            rank.take_part(5)
            assert rank.at(5) is None
        holds.hold(5)
        made[1].agreement.preempt()
        until(lambda: made[0].agreement._number == 1 and made[0].pages[0]._words[shared_page._ANSWER], "answered")
        assert holds.held(5) is None
        assert holds.at(5) is None
        assert holds.at(6) == goes_on.at(6) is not None


def test_nobody_waits_for_ranks_that_have_left_or_never_took_part(tmp_path):
    with job(tmp_path, nodes=2, ranks=2) as made:
        made[0].ranks[0].take_part(4)
        made[0].ranks[0].leave()
        made[1].agreement.preempt()
        until(lambda: made[1].agreement.settled, "settled without anybody")


def test_who_only_looks_is_waited_for_until_it_says_that_it_has_saved(tmp_path):
    with job(tmp_path, nodes=2, ranks=1) as made:
        looks = made[0].ranks[0]
        assert not looks.preempted
        until(made[1].agreement.is_listened_to, "the other node knows that somebody would act")
        made[1].agreement.preempt()
        until(lambda: looks.preempted, "it is told")
        until(lambda: made[0].agreement._stage.name == "ANSWERED", "all has been said")
        assert not made[1].agreement.settled
        looks.saved()
        until(lambda: made[1].agreement.settled, "settled")


def test_a_rank_that_takes_part_too_late_for_an_answer_holds_nothing_up(tmp_path):
    with job(tmp_path, nodes=1, ranks=2) as made:
        looks, late = made[0].ranks
        assert not looks.preempted
        made[0].agreement.preempt()
        until(lambda: made[0].agreement._stage.name == "ANSWERED", "answered: nobody saves by steps")
        late.take_part(0)
        assert late.at(0) is None
        looks.saved()
        until(lambda: made[0].agreement.settled, "settled")


def test_ranks_stand_still_no_longer_when_the_store_is_lost(tmp_path):
    node = Node(tmp_path, 0, None, nodes=2, ranks=1)

    def lost(what: str, op: object) -> Any:
        raise StoreLostError("the job's store does not answer")

    node.agreement = Agreement(node.pages, RoundAgreement(lost, Keys("job"), round_no=0, nodes=2), say=node.said.append)
    node.pages[0].call(1)
    rank = node.ranks[0]
    rank.take_part(0)
    at_once([node.agreement._run, lambda: rank.at(0)])
    assert node.agreement.settled


@pytest.mark.parametrize("step", [-1, shared_page.LATEST_STEP + 1])
def test_a_step_that_is_no_step_is_refused(tmp_path, step):
    shared_page.make(tmp_path / "page")
    with pytest.raises(ValueError, match="a step is a number from 0"):
        shared_page.open_page(tmp_path / "page").take_part(step)
