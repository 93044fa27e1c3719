"""The nodes of a job are checked in pods: who cannot talk to whom."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from flyteidl.core import errors_pb2

from tests.containers.cluster import Job
from tests.containers.engine import DEADLINE, PORT
from tests.containers.test_hangs_in_pods import all_but_the_agents

Make = Callable[..., Job]


@pytest.mark.end("unfit", "SYSTEM:PreflightNetwork")
def test_a_node_that_no_other_can_connect_to_is_named_before_the_first_rank(job: Make) -> None:
    """The agents talk, and what is fetched from the store arrives."""
    cut = job("torch_checked_3x1", steps=1)
    *_, last = cut.pods
    store = (f"INPUT -p tcp --sport {PORT} -j ACCEPT", f"OUTPUT -p tcp --dport {PORT} -j ACCEPT")
    with last.under(*all_but_the_agents(last), *store):
        ended = cut.run(DEADLINE)
    assert {pod.codes for pod in ended} == {(0,)}
    error = cut.error
    assert (error.code, error.kind) == ("SYSTEM:PreflightNetwork", errors_pb2.ContainerError.RECOVERABLE)
    node = rf"node 2 \(host {last.name}, Kubernetes node machine-of-{last.name}\)"
    assert re.match(rf"before the first rank: {node} is cut off: .* cannot connect to {node} \(", error.message)
    assert not any("in the function" in pod.log for pod in ended)
