"""Which node of how many: from each operator's variables, and never from a guess."""

from __future__ import annotations

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


def trainjob(rank: int, nodes: int, nproc: int) -> dict[str, str]:
    """A pod of Kubeflow Trainer v2.3.0 (torch.go, EnforceMLPolicy); the index is the kubelet's."""
    return pinned(nodes, nproc) | {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": "auto",
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": "f1-node-0-0.f1",
        "PET_MASTER_PORT": "29500",
        "JOB_COMPLETION_INDEX": str(rank),
    }


def elastic(nodes: str, nproc: int) -> dict[str, str]:
    return pinned(nodes, nproc) | {
        "PET_RDZV_ENDPOINT": "f1-n0-0-worker-0:23456",
        "PET_RDZV_BACKEND": "c10d",
        "PET_NNODES": nodes,
        "PET_MAX_RESTARTS": "3",
        "PET_NPROC_PER_NODE": str(nproc),
    }


def jobset(rank: int, nodes: int, nproc: int) -> dict[str, str]:
    return {
        "JOBSET_NAME": "f1",
        "JOBSET_RESTART_ATTEMPT": "0",
        "JOB_COMPLETION_INDEX": str(rank),
        "NNODES": str(nodes),
        "NPROC_PER_NODE": str(nproc),
        "MASTER_PORT": "29500",
    }


FIXED = {"pytorchjob": pytorchjob, "trainjob": trainjob, "jobset": jobset}


def test_a_plain_machine_is_a_local_run_of_one_node() -> None:
    topology = from_env({"PATH": "/bin"}, asked(1, 1, 4))

    assert topology == Topology(
        node_rank=0, min_nodes=1, max_nodes=1, nproc_per_node=4, endpoint=None, source="local run", alone=True
    )


def test_the_one_pod_of_a_one_node_task_needs_no_operator() -> None:
    topology = from_env(pinned(1, 8), asked(1, 1, 8))

    assert (topology.node_rank, topology.world_size, topology.source) == (0, 8, "single pod")


def test_a_pod_of_flytes_without_an_operators_word_has_no_identity() -> None:
    with pytest.raises(TopologyError, match="nothing says which node of the job this pod is"):
        from_env({"FLYTE_INTERNAL_EXECUTION_ID": "f1"}, asked(2, 2, 4))


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("operator", FIXED)
def test_operators_of_fixed_size_jobs_give_rank_size_and_endpoint(operator: str, rank: int) -> None:
    topology = from_env(FIXED[operator](rank, 3, 4), asked(3, 3, 4))

    hosts = {"pytorchjob": "f1-n0-0-master-0", "jobset": "f1-workers-0-0.f1"}
    hosts["trainjob"] = "f1-node-0-0.f1"
    port = 29500 if operator in ("jobset", "trainjob") else 23456
    assert (topology.node_rank, topology.nnodes, topology.world_size) == (rank, "3", 12)
    assert topology.endpoint == Endpoint(hosts.get(operator, "10.0.0.7"), port)


def test_an_elastic_job_has_no_rank_before_its_rendezvous() -> None:
    topology = from_env(elastic("2:4", 8), asked(2, 4, 8))

    assert topology.node_rank is None
    assert (topology.nnodes, topology.is_elastic, topology.world_size) == ("2:4", True, 32)
    assert topology.endpoint == Endpoint("f1-n0-0-worker-0", 23456)


HANDMADE = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize("pod", [{}, pinned(2, 4)], ids=["a shell", "a pod"])
def test_torchs_own_names_alone_say_nothing_of_nodes_and_the_error_says_what_is_missing(pod: dict[str, str]) -> None:
    with pytest.raises(TopologyError, match="nothing says which node of the job this pod is") as caught:
        from_env(HANDMADE | pod, asked(2, 2, 4))

    assert "seen: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, which name ranks and not nodes" in str(caught.value)
    assert "unset RANK" in caught.value.hint
    assert "PET_NODE_RANK, PET_NNODES, MASTER_ADDR and MASTER_PORT are what a PyTorchJob" in caught.value.hint


def test_torchs_own_names_make_nobody_of_one_node_an_operators_pod() -> None:
    topology = from_env(HANDMADE, asked(1, 1, 4))

    assert (topology.source, topology.alone, topology.endpoint) == ("local run", True, None)


REFUSED = {
    "master and elastic": (pytorchjob(0, 2, 4) | elastic("2", 4), asked(2, 2, 4), "more than one operator"),
    "fixed said, range asked": (
        pytorchjob(0, 2, 4) | pinned("2:4", 4),
        asked(2, 4, 4),
        "nnodes=2; expected: nnodes=2:4",
    ),
    "range said, fixed asked": (elastic("2:4", 4) | pinned(4, 4), asked(4, 4, 4), "nnodes=2:4; expected: nnodes=4"),
    "endpoint port": (pytorchjob(0, 2, 4) | {"SAFEDIST_ENDPOINT": "a:0"}, asked(2, 2, 4), "HOST:PORT"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_refused(case: str) -> None:
    env, asked, text = REFUSED[case]

    with pytest.raises(TopologyError) as caught:
        from_env(env, asked)

    assert text in str(caught.value)


def test_a_trainjob_that_was_not_registered_here_is_told_by_its_own_variables() -> None:
    env = {name: value for name, value in trainjob(1, 2, 4).items() if name.startswith("PET_")}

    topology = from_env(env, asked(2, 2, 4))

    assert (topology.source, topology.node_rank) == ("Kubeflow Trainer's TrainJob", 1)
    assert str(topology.endpoint) == "f1-node-0-0.f1:29500"


def test_an_endpoint_that_the_user_set_wins() -> None:
    env = pytorchjob(1, 2, 4) | {"SAFEDIST_ENDPOINT": "[fd00::1]:29999"}

    topology = from_env(env, asked(2, 2, 4))

    assert topology.endpoint == Endpoint("fd00::1", 29999)
    assert str(topology.endpoint) == "[fd00::1]:29999"


EIGHT = pinned(1, 8, gpus=8)


@pytest.mark.parametrize("listed", ["all", "void", "", "0,1,2,3,4,5,6,7"])
def test_gpus_that_are_there_or_cannot_be_counted_are_fine(listed: str) -> None:
    assert from_env(EIGHT | {"NVIDIA_VISIBLE_DEVICES": listed}, asked(1, 1, 8)).world_size == 8


def leaves_open(low: int, high: int, nproc: int) -> Registered:
    """The user named no number of ranks."""
    return asked(low, high, nproc, nproc_is_open=True)


@pytest.mark.parametrize(
    ("env", "devices", "ranks"),
    [
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2,GPU-3,GPU-4"}, (), 4),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"), 2),
        ({"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"}, ("nvidia3",), 1),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2", "CUDA_VISIBLE_DEVICES": "0"}, (), 1),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (), 2),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-1,GPU-2"}, (), 2),  # time slices
        ({"NVIDIA_VISIBLE_DEVICES": ",".join(f"GPU-{one}" for one in range(16))}, (), 16),
        ({"NVIDIA_VISIBLE_DEVICES": "MIG-1,MIG-2"}, (), 8),
        ({}, ("null",), 8),
    ],
)
def test_ranks_follow_the_gpus_that_a_pod_really_has(env: dict[str, str], devices: tuple[str, ...], ranks: int) -> None:
    topology = from_env(EIGHT | env, leaves_open(1, 1, 8), devices)

    assert topology.nproc_per_node == ranks
    assert len(topology.notes) == (ranks != 8)
    assert all(("1 rank on each node" in one) == (ranks == 1) for one in topology.notes)


def test_every_node_of_a_job_follows_and_the_operators_word_is_compared_with_what_was_registered() -> None:
    env = elastic("2:4", 8) | pinned("2:4", 8, gpus=8) | {"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2"}

    topology = from_env(env, leaves_open(2, 4, 8))

    assert (topology.nproc_per_node, topology.world_size) == (2, 8)


def test_gpus_that_an_override_adds_get_a_rank_each() -> None:
    env = pytorchjob(1, 2, 1) | {"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2"}

    assert from_env(env, leaves_open(2, 2, 1)).nproc_per_node == 2
    assert from_env(env, asked(2, 2, 1)).nproc_per_node == 1


@pytest.mark.parametrize(("listed", "ranks"), [("void", 2), ("/var/run/nvidia-container-devices", 2), ("all", 1)])
def test_gpus_that_are_added_as_files_get_a_rank_each_and_files_of_the_whole_machine_none(
    listed: str, ranks: int
) -> None:
    env = pytorchjob(1, 2, 1) | {"NVIDIA_VISIBLE_DEVICES": listed}

    assert from_env(env, leaves_open(2, 2, 1), ("nvidia0", "nvidia1", "null")).nproc_per_node == ranks


def test_slices_of_one_gpu_are_one_file() -> None:
    """Each of its ranks sees one of them (gloo), and with CDI nothing lists them."""
    plan = planned(SafeTorch(nproc_per_node=2), accelerator=A100.partition_1g_5gb, limits=Resources(gpu="2"))
    env = {**plan.pinned(), "NVIDIA_VISIBLE_DEVICES": "void"}

    assert from_env(env, plan, ("nvidia0", "nvidia-caps")).nproc_per_node == 2


def test_device_files_say_nothing_where_no_gpus_were_asked_for() -> None:
    assert from_env(pinned(1, 1), leaves_open(1, 1, 1), ("nvidia0", "nvidia1")).nproc_per_node == 1


@pytest.mark.parametrize(
    ("env", "devices", "told"),
    [
        ({"NCCL_IB_DISABLE": "1"}, ("infiniband", "null"), "NCCL_IB_DISABLE=1"),
        ({"NCCL_NET": "Socket"}, ("infiniband",), "NCCL_NET=Socket"),
        ({"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}, ("infiniband",), "NCCL_NET=Socket"),
        ({"NCCL_IB_DISABLE": "0"}, ("infiniband",), ""),
        ({"NCCL_IB_DISABLE": "1"}, ("null",), ""),
        ({"NCCL_IB_DISABLE": "1", "NCCL_NET": "AWS Libfabric"}, ("infiniband",), ""),
        ({"NCCL_IB_DISABLE": "1", "NCCL_NET_PLUGIN": "ofi"}, ("infiniband",), ""),
        ({}, ("infiniband",), ""),
    ],
)
def test_a_fast_network_that_nccl_is_told_not_to_use_is_named_before_the_first_step(
    env: dict[str, str], devices: tuple[str, ...], told: str
) -> None:
    notes = from_env(pytorchjob(1, 2, 1) | env, asked(2, 2, 1), devices).notes
    line = f"this pod has RDMA devices (/dev/infiniband), and {told} has NCCL use TCP sockets: unset it if not meant so"
    assert notes == ((line,) if told else ())
    assert from_env(pinned(1, 1) | env, asked(1, 1, 1), devices).notes == (), "one node needs no network"


def test_a_local_run_has_the_ranks_that_the_task_asks_for() -> None:
    assert from_env({"NVIDIA_VISIBLE_DEVICES": "0"}, leaves_open(1, 1, 8), ("nvidia0",)).nproc_per_node == 8


def test_reading_leaves_the_environment_alone() -> None:
    env = pytorchjob(0, 2, 4)
    before = dict(env)

    from_env(env, asked(2, 2, 4))

    assert env == before


sizes = st.tuples(st.integers(1, 12), st.integers(1, 9))


@given(st.sampled_from(sorted(FIXED)), sizes)
def test_nodes_are_told_apart_and_meet_at_one_place(operator: str, size: tuple[int, int]) -> None:
    nodes, nproc = size
    found = [from_env(FIXED[operator](rank, nodes, nproc), asked(nodes, nodes, nproc)) for rank in range(nodes)]

    assert [one.node_rank for one in found] == list(range(nodes))
    assert len({one.endpoint for one in found}) == 1


@given(st.sampled_from(sorted(FIXED)), st.data())
def test_no_adapter_invents_an_identity(operator: str, data: st.DataObject) -> None:
    """Whatever is taken away from what the operator said, the answer is the same node or an error."""
    nodes, nproc = 3, 2
    rank = data.draw(st.integers(1, nodes - 1))
    env = FIXED[operator](rank, nodes, nproc)
    for name in data.draw(st.lists(st.sampled_from(sorted(env)), unique=True)):
        del env[name]
    if not any(adapter.recognises(env) for adapter in ADAPTERS) and "SAFEDIST_JOB" not in env:
        return  # nothing distinguishes this from the user's own machine

    try:
        topology = from_env(env, asked(nodes, nodes, nproc))
    except TopologyError:
        return
    assert topology.node_rank == rank


@given(st.dictionaries(st.sampled_from(sorted(pytorchjob(0, 2, 2) | jobset(0, 2, 2))), st.text()))
def test_any_text_gives_a_topology_within_the_asked_size_or_our_error(env: dict[str, str]) -> None:
    try:
        topology = from_env(env, asked(2, 2, 2))
    except TopologyError:
        return
    assert topology.node_rank in (0, 1)


@pytest.mark.parametrize(("gpus", "nproc", "here"), [(8, 2, 4), (2, 4, 2)], ids=["fewer ranks", "shared by ranks"])
def test_a_pod_with_a_gpu_for_all_that_was_asked_for_is_no_contradiction(gpus: int, nproc: int, here: int) -> None:
    env = {**pinned(1, nproc, gpus=gpus), "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(here)))}
    assert from_env(env, asked(1, 1, nproc)).nproc_per_node == nproc
