"""Which operator an error names, and what it says was missing, unreadable or contradicted: by these words a platform
team finds the fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flytekitplugins_safedist.errors import TopologyError
from flytekitplugins_safedist.topology import ADAPTERS, from_env
from flytekitplugins_safedist.topology.adapters import is_alone
from tests.unit.topology.test_topology import FIXED, Asked, elastic

NAMES = {
    "pytorchjob": "PyTorchJob",
    "trainjob": "Kubeflow Trainer's TrainJob",
    "mpijob": "MPIJob worker",
    "mpirun": "MPIJob worker (mpirun)",
    "jobset": "JobSet",
    "volcano": "Volcano's pytorch plugin",
    "elastic": "PyTorchJob with an elastic policy",
}
NUMBERS = {
    "pytorchjob": ("PET_NODE_RANK", "PET_NNODES", "RANK", "MASTER_PORT"),
    "trainjob": ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_PORT"),
    "mpijob": ("SAFEDIST_MPI_NODE_RANK", "SAFEDIST_MPI_NODES"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "jobset": ("JOB_COMPLETION_INDEX", "NNODES", "MASTER_PORT"),
    "volcano": ("RANK", "WORLD_SIZE", "MASTER_PORT"),
}
OTHERS = {
    "pytorchjob": ("MASTER_ADDR",),
    "trainjob": ("PET_MASTER_ADDR",),
    "mpijob": ("SAFEDIST_MPI_ENDPOINT",),
    "mpirun": ("SAFEDIST_ENDPOINT",),
    "volcano": ("MASTER_ADDR",),
    "elastic": ("PET_NNODES", "PET_RDZV_ENDPOINT"),
}
NODES_FROM = {"pytorchjob": "PET_NNODES", "trainjob": "PET_NNODES", "mpijob": "SAFEDIST_MPI_NODES"} | {
    "mpirun": "OMPI_COMM_WORLD_SIZE",
    "jobset": "NNODES",
}
Variables = dict[str, str]


def variables(operator: str) -> tuple[Variables, Asked]:
    return (elastic("2:4", 8), Asked(2, 4, 8)) if operator == "elastic" else (FIXED[operator](1, 3, 8), Asked(3, 3, 8))


def told(operator: str, change: Callable[[Variables], object]) -> str:
    env, asked = variables(operator)
    change(env)
    with pytest.raises(TopologyError) as caught:
        from_env(env, asked)
    return str(caught.value)


def pairs(table: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(operator, name) for operator, names in table.items() for name in names]


@pytest.mark.parametrize("operator", NAMES)
def test_a_node_knows_who_has_placed_it(operator: str) -> None:
    assert from_env(*variables(operator)).source == NAMES[operator]
    assert NAMES[operator] in [adapter.source for adapter in ADAPTERS]


@pytest.mark.parametrize(("operator", "name"), pairs(NUMBERS))
@pytest.mark.parametrize("text", ["x", "-1", "1.0", "²"])
def test_what_is_no_number_is_told_with_its_variable_and_its_operator(operator: str, name: str, text: str) -> None:
    said = told(operator, lambda env: env.update({name: text}))
    assert said.startswith(f"{name} of {NAMES[operator]} cannot be read [")
    assert f"{name}={text}" in said
    assert said.endswith(f"(seen: {text!r}; expected: a whole number, 0 or more)")


@pytest.mark.parametrize(("operator", "name"), [*pairs(NUMBERS), *pairs(OTHERS)])
def test_an_empty_variable_is_told_with_its_operator(operator: str, name: str) -> None:
    said = told(operator, lambda env: env.update({name: ""}))
    source = "the user" if (operator, name) == ("mpirun", "SAFEDIST_ENDPOINT") else NAMES[operator]
    assert said.startswith(f"{NAMES[operator]} does not say {name} [") or said.startswith(f"{source} does not say")
    assert f"expected: {name} beside the other variables of {NAMES[operator]}" in said
    assert said.endswith("a guessed identity would make two nodes believe they are the same one")


@pytest.mark.parametrize("operator", NODES_FROM)
def test_another_number_of_nodes_is_told_with_both(operator: str) -> None:
    said = told(operator, lambda env: env.update({NODES_FROM[operator]: "5"}))
    assert said.startswith(f"{NAMES[operator]} contradicts the task's configuration [")
    assert "(seen: nodes=5; expected: nodes=3)" in said
    assert said.endswith("register the task again; if it stays, something sets the operator's variables a second time")


def test_another_elastic_range_is_told_with_both() -> None:
    said = told("elastic", lambda env: env.update(PET_NNODES="2:5"))
    assert said.startswith(f"{NAMES['elastic']} contradicts the task's configuration [")
    assert "(seen: nodes=2:5; expected: nodes=2:4)" in said


@pytest.mark.parametrize("text", ["2:", ":4", "a:4", "2:b", "2-4"])
def test_a_range_that_cannot_be_read_is_told(text: str) -> None:
    said = told("elastic", lambda env: env.update(PET_NNODES=text))
    assert said.startswith(f"PET_NNODES of {NAMES['elastic']} cannot be read [")
    assert said.endswith(f"(seen: {text!r}; expected: MIN:MAX)")


def test_an_elastic_policy_over_a_task_of_a_fixed_size_is_told() -> None:
    with pytest.raises(TopologyError) as caught:
        from_env(elastic("3", 8), Asked(3, 3, 8))
    assert str(caught.value).startswith(f"{NAMES['elastic']} contradicts the task's configuration [")
    assert "(seen: an elastic policy; expected: a job of exactly 3 nodes, with a Master)" in str(caught.value)


@pytest.mark.parametrize(
    ("operator", "name"),
    [("pytorchjob", "PET_NPROC_PER_NODE"), ("elastic", "PET_NPROC_PER_NODE"), ("jobset", "NPROC_PER_NODE")],
)
def test_another_number_of_ranks_is_told_with_both(operator: str, name: str) -> None:
    said = told(operator, lambda env: env.update({name: "7"}))
    assert said.startswith(f"{NAMES[operator]} contradicts the task's configuration [")
    assert f"(seen: {name}=7; expected: 8, as the task is configured)" in said


@pytest.mark.parametrize("operator", ["mpijob", "mpirun", "elastic"])
@pytest.mark.parametrize("text", [":1", "h:0", "h:65536", "h:x"])
def test_an_endpoint_that_cannot_be_read_is_told(operator: str, text: str) -> None:
    name = {"mpijob": "SAFEDIST_MPI_ENDPOINT", "mpirun": "SAFEDIST_ENDPOINT", "elastic": "PET_RDZV_ENDPOINT"}[operator]
    said = told(operator, lambda env: env.update({name: text}))
    assert said.startswith(f"{name} of {NAMES[operator]} cannot be read [")
    assert said.endswith(f"(seen: {text!r}; expected: HOST:PORT)")


@pytest.mark.parametrize("text", ["0", "65536"])
def test_a_port_that_cannot_be_is_told(text: str) -> None:
    said = told("pytorchjob", lambda env: env.update(MASTER_PORT=text))
    assert said.startswith("MASTER_PORT of PyTorchJob cannot be read [")
    assert said.endswith(f"(seen: {text!r}; expected: a TCP port, 1 to 65535)")


def test_the_ranks_of_an_elastic_node_are_known_only_after_its_rendezvous() -> None:
    with pytest.raises(TopologyError) as caught:
        from_env(*variables("elastic")).ranks()
    assert str(caught.value) == (
        "the ranks on a node of an elastic job are not known before its rendezvous "
        "[source=PyTorchJob with an elastic policy]"
    )


@pytest.mark.parametrize("operator", NAMES)
def test_a_pod_of_an_operators_is_not_alone(operator: str) -> None:
    assert not is_alone(variables(operator)[0])
    assert is_alone({"PATH": "/bin", "SAFEDIST_NODES": "1"})
