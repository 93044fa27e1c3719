"""A node's part in a save by all ranks: what its ranks have written on their pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from flytekitplugins_safedist.agent.actions import SaveAt
from flytekitplugins_safedist.agent.policy import NodePolicy
from flytekitplugins_safedist.agent.saving import RoundSaving
from flytekitplugins_safedist.coordinator.messages import Floor, Status
from flytekitplugins_safedist.coordinator.rules import Rules
from flytekitplugins_safedist.rank import shared_page


class Node:
    def __init__(self, path: Path) -> None:
        page = shared_page.make(path / "page")
        self.rank = shared_page.open_page(path / "page")
        self.policy = NodePolicy(Rules("job", 1, 1), Status("job", "a", 0, 1.0), 0.0, leads=True)
        self.it = RoundSaving([page], self.policy, lambda _: None)

    @property
    def status(self) -> Status:
        self.it.look()
        return self.policy.status


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_what_a_rank_wants_is_in_the_status(node):
    assert (node.status.listens, node.status.asks) == (False, 0)
    node.rank.take_part(0)
    node.rank.ask()
    assert (node.status.listens, node.status.asks) == (True, 1)


def test_a_call_is_answered_with_the_floor_and_ranks_save_once(node):
    node.rank.take_part(0)
    node.it.call(1)
    assert node.status.floor == Floor(1, 0)
    for _ in range(2):
        node.it.save(SaveAt(1, 0, is_urgent=False))
    assert node.status.saved == 0
    save = node.rank.at(0)
    assert save is not None
    node.rank.finish(save.call)
    assert node.status.saved == 1
    assert node.rank.at(1) is None


def test_a_call_is_answered_with_whether_a_rank_would_save_by_what_its_page_says_then(node):
    node.rank.take_part(0)
    node.it.call(1)
    assert (node.policy.status.floor, node.policy.status.listens) == (Floor(1, 0), True)


def test_of_a_node_whose_ranks_save_by_no_steps_the_floor_says_so(node):
    node.it.call(1)
    assert node.status.floor == Floor(1, -1)


def test_ranks_that_have_left_are_waited_for_until_they_have_returned_where_a_pod_is_told_to_stop(node):
    node.rank.take_part(0)
    node.rank.leave()
    node.it.save(SaveAt(1, 0, is_urgent=False))
    assert node.status.saved == 1
    node.it.save(SaveAt(2, 0, is_urgent=True))
    assert node.status.saved == 1
