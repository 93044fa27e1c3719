"""What the checks of all nodes come to: the code of the error, and who is named. And how nodes measure in pairs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flytekitplugins_safedist.preflight.judge import Judged, NodeReport, Trouble, judge
from flytekitplugins_safedist.preflight.probe import Peers

NAMES = {node: f"node {node}" for node in range(5)}


def judged(*reports: NodeReport) -> Judged:
    return judge(dict(enumerate(reports)), NAMES, slow=0.5)


def disk(speed: float, **facts: Any) -> NodeReport:
    return NodeReport(measured={"disk, MB/s:": {"": speed}, "x, TFLOP/s:": {"": 9}}, **facts)


WELL = disk(900.0)


def test_all_is_well() -> None:
    found = judged(WELL, disk(700.0, ahead=-1.4, slack=0.5))
    assert found == Judged("all is well. 2 node(s): disk, MB/s: 700 to 900, x, TFLOP/s: 9 to 9", "")


@pytest.mark.parametrize(
    ("report", "code", "says"),
    [
        (disk(300.0), "", "node 2: disk, MB/s: 300, where most have 900"),
        (
            NodeReport(measured={"disk, MB/s:": {"": 900}, "x, TFLOP/s:": {"": 1}}),
            "Speed",
            "node 2: x, TFLOP/s: 1, where",
        ),
        (disk(900, unreached={0: "10.0.0.1:4000: timed out"}), "Network", "node 2 cannot connect to node 0 (10.0.0.1:"),
        (disk(900, troubles=(Trouble("Gpu", True, "2 GPUs are asked for"),)), "Gpu", "node 2: 2 GPUs are asked for"),
        (NodeReport((Trouble("Checks", True, "found nothing in 9 s"),)), "Checks", "node 2: found nothing in 9 s"),
        (disk(900, troubles=(Trouble("Dns", False, "no PTR record"),)), "", "node 2: no PTR record"),
        (disk(900, ahead=7.26, slack=0.01), "", "node 2: its clock is +7.3 s off node 0's"),
        (disk(900, ahead=-1.2, slack=0.1), "", "node 2: its clock is -1.2 s off node 0's"),
    ],
)
def test_a_node_that_is_not_fit_is_named(report: NodeReport, code: str, says: str) -> None:
    found = judged(WELL, WELL, report)
    assert found.code == (f"SYSTEM:Preflight{code}" if code else "")
    assert found.text.startswith(says)


def test_what_is_broken_comes_before_what_may_be_meant_so() -> None:
    warning, broken = Trouble("Dns", False, "no PTR record"), Trouble("Gpu", True, "no GPU")
    found = judged(WELL, disk(900, troubles=(warning,)), disk(900, troubles=(broken,)))
    assert found.code == "SYSTEM:PreflightGpu"
    assert found.text.startswith("node 2: no GPU; node 1: no PTR record. 3 node(s)")


def test_what_several_nodes_have_is_told_once() -> None:
    same = disk(900, troubles=(Trouble("Dns", False, "no PTR record"),))
    assert judged(same, WELL, same).text.startswith("node 0, node 2: no PTR record. 3 node(s)")


def test_one_that_is_in_all_pairs_is_cut_off() -> None:
    late = "timed out"
    found = judged(
        disk(900, unreached={1: late}), disk(900, unreached={0: late, 2: late}), disk(900, unreached={1: late})
    )
    assert found.text.startswith("node 1 is cut off: node 0 cannot connect to node 1 (timed out), node 1 cannot")


def test_of_all_pairs_of_many_nodes_some_are_listed_and_all_are_counted() -> None:
    nodes = range(40)
    reports = {node: NodeReport(unreached={other: "no" for other in nodes if other != node}) for node in nodes}
    found = judge(reports, {node: f"n{node}" for node in nodes}, slow=0.5)
    assert found.code == "SYSTEM:PreflightNetwork"
    assert found.text.count("cannot connect") == 50
    assert ", and 1510 more. 40 node(s)" in found.text


def test_every_gpu_is_compared_with_all_gpus() -> None:
    def gpus(*speeds: float) -> NodeReport:
        return NodeReport(
            measured={"matrix product, TFLOP/s:": {f"GPU {at}": speed for at, speed in enumerate(speeds)}}
        )

    found = judged(gpus(310, 305), gpus(120, 300))
    assert found.code == "SYSTEM:PreflightSpeed"
    assert found.text.startswith("node 1, GPU 0: matrix product, TFLOP/s: 120, where most have 302")


def test_neighbours_measure_in_an_order_in_which_nobody_waits_for_ever() -> None:
    """Each pair begins when both have no earlier one left."""
    for nodes in (2, 3, 4, 5, 8):
        left = {node: Peers.pairs(SimpleNamespace(node=node, nodes=nodes)) for node in range(nodes)}  # type: ignore[arg-type]
        assert {len(pairs) for pairs in left.values()} == ({1} if nodes == 2 else {2})
        while any(left.values()):
            first = {pairs[0] for pairs in left.values() if pairs}
            ready = {pair for pair in first if all(left[node][0] == pair for node in pair)}
            assert ready, left
            for one, other in ready:
                del left[one][0], left[other][0]
