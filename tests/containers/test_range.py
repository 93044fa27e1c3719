"""A range of nodes over real pods: who is there takes part, and one of them uploads."""

from __future__ import annotations

import signal
from collections.abc import Callable

from tests.containers.cluster import Ended, Job, Pod, gated
from tests.containers.test_node_0_in_pods import SOON, standing
from tests.harness.procs import Gate

Make = Callable[..., Job]


def succeeded(job: Job, pods: list[Pod], *, ranks: int, runs: int = 1) -> list[Ended]:
    """One output, from *ranks* ranks, and every one of *pods* left with 0 in the end; the last has run *runs* times."""
    ended = [pod.wait(within=SOON) for pod in pods[:-1]] + [pods[-1].wait(runs=runs, within=SOON)]
    assert [pod.code for pod in ended] == [0] * len(pods)
    assert job.uploaded == ["outputs.pb"]
    assert job.output["size"] == ranks
    assert job.output["ranks"] == [f"{rank} is 0 on node {rank}" for rank in range(ranks)]
    # A node that comes or goes spends no restart.
    assert not any("start again: restart" in pod.log for pod in ended)
    return ended


def test_the_others_go_on_without_a_pod_that_is_gone_for_good(job: Make, pods_gate: Gate) -> None:
    # Nothing but the heartbeat says that it is gone.
    going = job("horovod_range", **gated(pods_gate, TEST_HEARTBEAT="10"), steps=20)
    first, second, third = going.start()
    standing(pods_gate, 3, after=-1)
    third.remove()
    standing(pods_gate, 2, after=0)
    pods_gate.let_go(2)
    succeeded(going, [first, second], ranks=2)


def test_a_pod_that_is_told_to_stop_is_let_in_again_when_it_comes_back(job: Make, pods_gate: Gate) -> None:
    going = job("torch_range", **gated(pods_gate), steps=20)
    *_, third = going.start()
    standing(pods_gate, 3, after=-1)
    third.signal(signal.SIGTERM)
    standing(pods_gate, 3, after=0)
    pods_gate.let_go(3)
    ended = succeeded(going, going.pods, ranks=3, runs=2)
    assert ended[-1].codes[0] == 137
    assert "told to stop by SIGTERM" in ended[-1].log
