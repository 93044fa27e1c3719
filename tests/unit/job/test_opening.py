"""What a node says of itself."""

from __future__ import annotations

import pytest

from flytekitplugins_safedist.job.facts import Cause
from flytekitplugins_safedist.job.messages import Ended, Message
from flytekitplugins_safedist.job.opening import Membership
from flytekitplugins_safedist.job.rules import Rules
from flytekitplugins_safedist.topology import Topology


@pytest.fixture
def job():
    place = Topology(
        node_rank=0, min_nodes=1, max_nodes=1, nproc_per_node=1, endpoint=None, source="a test", alone=True
    )
    it = Membership(Rules("job", 1, 1, fixed=True), place, open_round=lambda _: {}, local=None, say=lambda _: None)
    yield it
    it.close(ended=False)


def test_how_the_ranks_have_ended_is_said_as_the_next_hello_says_it(job, monkeypatch):
    said: list[Message] = []
    monkeypatch.setattr(job, "tell", said.append)
    cause = Cause(4, True, 1, 0, "ConnectionError")
    job.now(round=3, state="ended", cause=cause, returned=(1,), cut=True)
    job.say_ended()
    assert said == [Ended(3, cause, (1,), cut=True)]
