"""What registration pins, as the pod reads it."""

from __future__ import annotations

import pytest

from flytekitplugins_safedist import Timeouts
from flytekitplugins_safedist.config.registered import Registered, timeouts_text


@pytest.mark.parametrize(("nodes", "low", "high"), [("1", 1, 1), ("4", 4, 4), ("2:4", 2, 4)])
def test_the_size_and_the_times_come_back_as_they_were_pinned(nodes, low, high):
    timeouts = Timeouts(rendezvous=7.5, heartbeat=30, upload=86400)
    env = {
        "SAFEDIST_NODES": nodes,
        "SAFEDIST_NPROC_PER_NODE": "8",
        "SAFEDIST_TIMEOUTS": timeouts_text(timeouts),
    }
    found = Registered.from_env(env)
    assert found == Registered(low, high, 8, timeouts)


@pytest.mark.parametrize("env", [{}, {"SAFEDIST_NODES": "2"}, {"SAFEDIST_NODES": "x", "SAFEDIST_NPROC_PER_NODE": "2"}])
def test_a_pod_that_nothing_was_pinned_into_is_not_ours(env):
    assert Registered.from_env(env) is None


def test_a_pod_registered_without_times_has_the_defaults():
    found = Registered.from_env({"SAFEDIST_NODES": "2", "SAFEDIST_NPROC_PER_NODE": "2"})
    assert found == Registered(2, 2, 2, Timeouts())
