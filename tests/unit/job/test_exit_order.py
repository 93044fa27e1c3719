"""Nodes leave when the upload is there, whoever can say so; real nodes: tests/agents, tests/containers."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from flytekitplugins_safedist.errors import GroupClosedError, NodeLostError, StoreLostError
from flytekitplugins_safedist.job import exit_order


class Gone:
    """A rendezvous whose node 0 ended before its upload."""

    node_rank = 1
    left = False

    @property
    def jobs(self) -> Gone:
        return self

    def wait_uploaded(self, _timeout: float) -> None:
        raise GroupClosedError("node 0 closed the group")

    def leave(self) -> None:
        self.left = True


def test_an_upload_that_storage_shows_is_enough() -> None:
    handler = Gone()
    exit_order.follow(handler, timeout=1, exists=lambda: True)
    assert handler.left


def test_without_an_upload_the_attempt_is_lost() -> None:
    handler = Gone()
    with pytest.raises(NodeLostError, match="no upload by node 0 can be seen"):
        exit_order.follow(handler, timeout=1, exists=lambda: False)
    assert handler.left


def test_a_storage_that_cannot_be_asked_hides_nothing_of_what_happened() -> None:
    def unreachable() -> bool:
        raise OSError("no route to host")

    with pytest.raises(NodeLostError, match="no upload by node 0 can be seen") as caught:
        exit_order.follow(Gone(), timeout=1, exists=unreachable)
    text = str(pickle.loads(pickle.dumps(caught.value)))
    assert "node 0 closed the group" in text
    assert "storage cannot be asked: OSError: no route to host" in text


class HostGone:
    """A rendezvous of a range whose store was on another node, which is gone."""

    node_rank = 0
    left = False

    @property
    def jobs(self) -> HostGone:
        return self

    def set_uploaded(self) -> None:
        raise StoreLostError("the store's host is gone")

    def set_not_uploaded(self, _reason: str) -> None:
        raise StoreLostError("the store's host is gone")

    def shutdown(self) -> None:
        self.left = True
        raise StoreLostError("the store's host is gone")


@pytest.mark.parametrize("uploaded", [True, False])
def test_a_store_that_is_gone_takes_nothing_back_of_what_is_uploaded(uploaded: bool) -> None:
    handler: Any = HostGone()
    exit_order.stay(handler)
    exit_order.leave(uploaded=uploaded)
    assert handler.left
