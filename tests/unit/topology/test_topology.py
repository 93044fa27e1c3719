"""Which node of how many: from each operator's variables, and never from a guess."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
from flytekit import Resources
from flytekit.extras.accelerators import A100
from hypothesis import given
from hypothesis import strategies as st

from flytekitplugins_safedist import SafeTorch
from flytekitplugins_safedist.config.registered import Registered
from flytekitplugins_safedist.errors import TopologyError
from flytekitplugins_safedist.topology import ADAPTERS, Endpoint, Topology, from_env
from tests.harness.registered import registered
from tests.unit.config.plans import planned


def asked(low: int, high: int, nproc: int, **more: Any) -> Registered:
    """What the code asks for."""
    found = Registered.from_env(registered(nodes=f"{low}:{high}", nproc_per_node=nproc, **more))
    assert found is not None
    return found


def pinned(nodes: int | str, nproc: int, **more: Any) -> dict[str, str]:
    return registered(nodes=str(nodes), nproc_per_node=nproc, **more)


def pytorchjob(rank: int, nodes: int, nproc: int) -> dict[str, str]:
    return pinned(nodes, nproc) | {
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": "f1-n0-0-master-0",
        "MASTER_PORT": "23456",
        "PET_MASTER_ADDR": "f1-n0-0-master-0",
        "PET_MASTER_PORT": "23456",
        "WORLD_SIZE": str(nodes),
        "RANK": str(rank),
        "PET_NODE_RANK": str(rank),
        "PET_NPROC_PER_NODE": "auto",
        "PET_NNODES": str(nodes),
    }


def elastic(nodes: str, nproc: int) -> dict[str, str]:
    return pinned(nodes, nproc) | {
        "PET_RDZV_ENDPOINT": "f1-n0-0-worker-0:23456",
        "PET_RDZV_BACKEND": "c10d",
        "PET_NNODES": nodes,
        "PET_MAX_RESTARTS": "3",
        "PET_NPROC_PER_NODE": str(nproc),
    }


HANDMADE = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "2"}
"""Torch's own names, which say nothing of nodes."""


@pytest.mark.parametrize(
    ("env", "source"), [({"PATH": "/bin"}, "local run"), (HANDMADE, "local run"), (pinned(1, 4), "single pod")]
)
def test_a_task_of_one_node_needs_no_operator(env: dict[str, str], source: str) -> None:
    assert from_env(env, asked(1, 1, 4)) == Topology(0, 1, 1, 4, None, source, alone=True)


def test_a_pod_of_flytes_without_an_operators_word_has_no_identity() -> None:
    with pytest.raises(TopologyError, match="nothing says which node of the job this pod is"):
        from_env({"FLYTE_INTERNAL_EXECUTION_ID": "f1"}, asked(2, 2, 4))


def test_the_operator_of_a_job_of_fixed_size_gives_rank_size_and_endpoint_and_reading_changes_nothing() -> None:
    found = from_env(MappingProxyType(pytorchjob(1, 3, 4)), asked(3, 3, 4))

    assert (found.node_rank, found.nnodes, found.world_size) == (1, "3", 12)
    assert str(found.endpoint) == "f1-n0-0-master-0:23456"


def test_an_elastic_job_has_no_rank_before_its_rendezvous() -> None:
    topology = from_env(elastic("2:4", 8), asked(2, 4, 8))

    assert topology.node_rank is None
    assert (topology.nnodes, topology.is_elastic, topology.world_size) == ("2:4", True, 32)
    assert topology.endpoint == Endpoint("f1-n0-0-worker-0", 23456)


@pytest.mark.parametrize("pod", [{}, pinned(2, 4)], ids=["a shell", "a pod"])
def test_torchs_own_names_alone_say_nothing_of_nodes_and_the_error_says_what_is_missing(pod: dict[str, str]) -> None:
    with pytest.raises(TopologyError, match="nothing says which node of the job this pod is") as caught:
        from_env(HANDMADE | pod, asked(2, 2, 4))

    assert "seen: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, which name ranks and not nodes" in str(caught.value)
    assert "unset RANK" in caught.value.hint
    assert "PET_NODE_RANK, PET_NNODES, MASTER_ADDR and MASTER_PORT are what a PyTorchJob" in caught.value.hint


def test_what_was_not_registered_has_the_ranks_that_its_own_command_asks_for() -> None:
    env = {name: value for name, value in pytorchjob(0, 1, 4).items() if name != "SAFEDIST_JOB"}
    assert from_env(env, asked(1, 1, 4)).nproc_per_node == 4


def test_an_endpoint_that_the_user_set_wins() -> None:
    env = pytorchjob(1, 2, 4) | {"SAFEDIST_ENDPOINT": "[fd00::1]:29999"}

    topology = from_env(env, asked(2, 2, 4))

    assert topology.endpoint == Endpoint("fd00::1", 29999)
    assert str(topology.endpoint) == "[fd00::1]:29999"


def leaves_open(low: int, high: int, nproc: int) -> Registered:
    """The user named no number of ranks."""
    return asked(low, high, nproc, nproc_is_open=True)


EIGHT, TWO = pinned(1, 8, gpus=8), pytorchjob(1, 2, 1)
SEES, CUDA = "NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
FILES = "/var/run/nvidia-container-devices"
RANKS: dict[str, tuple[dict[str, str], Registered, tuple[str, ...], int]] = {
    **{
        f"{listed or 'nothing'} is there, or cannot be counted": (EIGHT | {SEES: listed}, asked(1, 1, 8), (), 8)
        for listed in ("all", "void", "", "0,1,2,3,4,5,6,7")
    },
    **{
        case: (EIGHT | env, leaves_open(1, 1, 8), devices, ranks)
        for case, env, devices, ranks in (
            ("as many", {SEES: "0,1,2,3,4,5,6,7"}, (), 8),
            ("fewer", {SEES: "GPU-1,GPU-2,GPU-3,GPU-4"}, (), 4),
            ("files alone", {SEES: "all"}, ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"), 2),
            ("handed over as files", {SEES: FILES}, ("nvidia3",), 1),
            ("CUDA is narrowed", {SEES: "GPU-1,GPU-2", CUDA: "0"}, (), 1),
            ("CUDA is told of more", {SEES: "GPU-1,GPU-2", CUDA: "0,1,2,3"}, (), 2),
            ("time slices", {SEES: "GPU-1,GPU-1,GPU-2"}, (), 2),
            ("more", {SEES: ",".join(f"GPU-{one}" for one in range(16))}, (), 16),
            ("slices", {SEES: "MIG-1,MIG-2"}, (), 8),
            ("nothing says it", {}, ("kfd", "null"), 8),
        )
    },
    "every node follows, and the operator's word is compared with what was registered": (
        elastic("2:4", 8) | pinned("2:4", 8, gpus=8) | {SEES: "GPU-1,GPU-2"},
        leaves_open(2, 4, 8),
        (),
        2,
    ),
    "an override adds some": (TWO | {SEES: "GPU-1,GPU-2"}, leaves_open(2, 2, 1), (), 2),
    "an override adds some, and ranks are named": (TWO | {SEES: "GPU-1,GPU-2"}, asked(2, 2, 1), (), 1),
    **{
        f"{listed}, where none were asked for": (
            TWO | {SEES: listed},
            leaves_open(2, 2, 1),
            ("nvidia0", "nvidia1"),
            ranks,
        )
        for listed, ranks in (("void", 2), (FILES, 2), ("all", 1))
    },
    "files of a machine": (pinned(1, 1), leaves_open(1, 1, 1), ("nvidia0", "nvidia1"), 1),
    "a local run has what the task asks for": ({SEES: "0"}, leaves_open(1, 1, 8), ("nvidia0",), 8),
    "fewer ranks than GPUs": ({**pinned(1, 2, gpus=8), CUDA: "0,1,2,3"}, asked(1, 1, 2), (), 2),
    "GPUs that ranks share": ({**pinned(1, 4, gpus=2), CUDA: "0,1"}, asked(1, 1, 4), (), 4),
}


def test_ranks_follow_the_gpus_that_a_pod_really_has_and_that_is_told() -> None:
    found = {case: from_env(env, wanted, devices) for case, (env, wanted, devices, _) in RANKS.items()}

    assert {case: topology.nproc_per_node for case, topology in found.items()} == {
        case: ranks for case, (*_, ranks) in RANKS.items()
    }
    assert {case for case, topology in found.items() if topology.notes} == {
        case for case, (_, wanted, _, ranks) in RANKS.items() if ranks != wanted.nproc_per_node
    }


def test_slices_of_one_gpu_are_one_file() -> None:
    """Each of its ranks sees one of them (gloo), and with CDI nothing lists them."""
    plan = planned(SafeTorch(nproc_per_node=2), accelerator=A100.partition_1g_5gb, limits=Resources(gpu="2"))
    env = {**plan.pinned(), "NVIDIA_VISIBLE_DEVICES": "void"}

    assert from_env(env, plan, ("nvidia0", "nvidia-caps")).nproc_per_node == 2


@pytest.mark.parametrize(
    ("devices", "is_told"),
    [
        (("null", "nvidiactl", "nvidia-uvm"), True),
        (("null", "nvidia0", "nvidia1"), False),
        (("null", "kfd", "dri"), False),
        (("null", "dxg"), False),
        ((), False),
    ],
)
@pytest.mark.parametrize("listed", ["GPU-1,GPU-2", ""])
def test_a_pod_whose_machine_hands_over_none_of_its_gpus_is_told(
    devices: tuple[str, ...], listed: str, *, is_told: bool
) -> None:
    """The device plugin names them in a variable, which a container runtime that is not NVIDIA's does not read."""
    notes = from_env(pinned(1, 2, gpus=2) | {SEES: listed}, asked(1, 1, 2), devices).notes

    assert [note.partition(" (")[0] for note in notes] == [
        "this task was registered with 2 GPUs, and its pod has no device of one"
    ] * is_told
    assert from_env(pinned(1, 2), asked(1, 1, 2), devices).notes == (), "one that asks for none needs none"


NETWORKS: list[tuple[dict[str, str], tuple[str, ...], str]] = [
    ({"NCCL_IB_DISABLE": "1"}, ("infiniband", "null"), "NCCL_IB_DISABLE=1"),
    ({"NCCL_NET": "Socket"}, ("infiniband",), "NCCL_NET=Socket"),
    ({"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}, ("infiniband",), "NCCL_NET=Socket"),
    ({"NCCL_IB_DISABLE": "0"}, ("infiniband",), ""),
    ({"NCCL_IB_DISABLE": "1"}, ("null",), ""),
    ({"NCCL_IB_DISABLE": "1", "NCCL_NET": "AWS Libfabric"}, ("infiniband",), ""),
    ({"NCCL_IB_DISABLE": "1", "NCCL_NET_PLUGIN": "ofi"}, ("infiniband",), ""),
    ({}, ("infiniband",), ""),
]


def test_a_fast_network_that_nccl_is_told_not_to_use_is_named_before_the_first_step() -> None:
    for env, devices, told in NETWORKS:
        notes = from_env(pytorchjob(1, 2, 1) | env, asked(2, 2, 1), devices).notes
        line = f"and {told} has NCCL use TCP sockets: unset it if not meant so"
        assert (env, *notes) == (env, *([f"this pod has RDMA devices (/dev/infiniband), {line}"] if told else []))
        assert from_env(pinned(1, 1) | env, asked(1, 1, 1), devices).notes == (), "one node needs no network"


@pytest.mark.parametrize("nodes", [1, 2, 12])
def test_nodes_are_told_apart_and_meet_at_one_place(nodes: int) -> None:
    found = [from_env(pytorchjob(rank, nodes, 3), asked(nodes, nodes, 3)) for rank in range(nodes)]

    assert [one.node_rank for one in found] == list(range(nodes))
    assert len({one.endpoint for one in found}) == 1


@given(st.data())
def test_no_adapter_invents_an_identity(data: st.DataObject) -> None:
    """Whatever is taken away from what the operator said, the answer is the same node or an error."""
    nodes, nproc = 3, 2
    rank = data.draw(st.integers(1, nodes - 1))
    env = pytorchjob(rank, nodes, nproc)
    for name in data.draw(st.lists(st.sampled_from(sorted(env)), unique=True)):
        del env[name]
    if not any(adapter.recognises(env) for adapter in ADAPTERS) and "SAFEDIST_JOB" not in env:
        return  # nothing distinguishes this from the user's own machine

    try:
        topology = from_env(env, asked(nodes, nodes, nproc))
    except TopologyError:
        return
    assert topology.node_rank == rank


@given(st.dictionaries(st.sampled_from(sorted(pytorchjob(0, 2, 2) | elastic("1:2", 2))), st.text()))
def test_any_text_gives_a_topology_within_the_asked_size_or_our_error(env: dict[str, str]) -> None:
    try:
        topology = from_env(env, asked(2, 2, 2))
    except TopologyError:
        return
    assert topology.node_rank in (0, 1)
