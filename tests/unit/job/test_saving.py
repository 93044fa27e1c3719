"""A node's part in a save by all ranks, where its connection breaks meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from flytekitplugins_safedist.job.messages import (
    AllSaved,
    Answer,
    Asks,
    Floor,
    Gather,
    Listens,
    Message,
    Preempted,
    Saved,
)
from flytekitplugins_safedist.job.saving import RoundSaving
from flytekitplugins_safedist.rank import shared_page


class Node:
    def __init__(self, path: Path) -> None:
        self.said: list[Message] = []
        page = shared_page.make(path / "page")
        self.rank = shared_page.open_page(path / "page")
        self.it = RoundSaving(4, [page], self.said.append, lambda _: None)

    def says(self) -> list[Message]:
        self.it.look()
        said, self.said[:] = list(self.said), []
        return said


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_what_may_have_been_lost_with_a_connection_is_said_again(node):
    node.rank.take_part(0)
    node.rank.ask()
    assert node.says() == [Listens(4), Asks(4)]
    node.it.again()
    assert node.says() == [Listens(4), Asks(4)]
    node.it.heard(Gather(4, 1))
    node.says()
    node.it.again()
    assert node.says() == [Listens(4)]  # the call has come of it
    node.it.preempt()
    node.says()
    node.it.again()
    assert node.says() == [Listens(4), Preempted(4)]


def test_a_call_and_its_answer_that_are_told_again_are_answered_again_and_ranks_save_once(node):
    node.rank.take_part(0)
    node.says()
    for _ in range(2):
        node.it.heard(Gather(4, 1))
        assert node.says() == [Floor(4, 1, 0)]
    node.it.heard(Answer(4, 1, 0, urgent=False))
    save = node.rank.at(0)
    assert save is not None
    node.rank.finish(save.call)
    assert node.says() == [Saved(4, 1)]
    node.it.heard(Answer(4, 1, 0, urgent=False))
    assert node.says() == [Saved(4, 1)]
    assert node.rank.at(1) is None


def test_only_an_urgent_save_by_all_lets_a_node_go_that_is_told_to_stop(node):
    node.it.heard(AllSaved(4, 1, urgent=False))
    assert not node.it.settled
    node.it.heard(AllSaved(3, 1, urgent=True))
    assert not node.it.settled
    node.it.heard(AllSaved(4, 2, urgent=True))
    assert node.it.settled
