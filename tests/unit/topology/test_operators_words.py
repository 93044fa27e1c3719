"""Which operator an error names, and what it says was missing, unreadable or contradicted: by these words a platform
team finds the fault."""

from __future__ import annotations

import re

from flytekitplugins_safedist.config.registered import Registered
from flytekitplugins_safedist.errors import TopologyError
from flytekitplugins_safedist.topology import from_env
from flytekitplugins_safedist.topology.adapters import is_alone
from tests.unit.topology.test_topology import asked, elastic, leaves_open, pinned, pytorchjob

NAMES = {"pytorchjob": "PyTorchJob", "elastic": "PyTorchJob with an elastic policy"}
NUMBERS = [("pytorchjob", name) for name in ("PET_NODE_RANK", "PET_NNODES", "RANK", "MASTER_PORT")]
OTHERS = [("pytorchjob", "MASTER_ADDR"), ("elastic", "PET_NNODES"), ("elastic", "PET_RDZV_ENDPOINT")]


def variables(operator: str) -> tuple[dict[str, str], Registered]:
    return (elastic("2:4", 8), asked(2, 4, 8)) if operator == "elastic" else (pytorchjob(1, 3, 8), asked(3, 3, 8))


def told(env: dict[str, str], wanted: Registered) -> str:
    """The error; "" where there is none."""
    try:
        from_env(env, wanted)
    except TopologyError as error:
        return str(error)
    return ""


def told_of(operator: str, **change: str) -> str:
    env, wanted = variables(operator)
    return told(env | change, wanted)


def like(*parts: str) -> str:
    return ".*".join(map(re.escape, parts))


def test_a_node_knows_who_has_placed_it_and_is_not_alone() -> None:
    assert {operator: from_env(*variables(operator)).source for operator in NAMES} == NAMES
    assert [operator for operator in NAMES if is_alone(variables(operator)[0])] == []
    assert is_alone({"PATH": "/bin", **pinned(1, 1)})


UNREADABLE = [
    *(
        (operator, name, text, "a whole number, 0 or more")
        for operator, name in NUMBERS
        for text in ("x", "-1", "1.0", "²", "\u0661", "+1", " 1", "1_0")
    ),
    *(("elastic", "PET_NNODES", text, "MIN:MAX") for text in ("2:", ":4", "a:4", "2:b", "2-4")),
    *(("elastic", "PET_RDZV_ENDPOINT", text, "HOST:PORT") for text in ("h", ":1", "h:0", "h:65536", "h:x")),
    *(("pytorchjob", "MASTER_PORT", text, "a TCP port, 1 to 65535") for text in ("0", "65536")),
]


def test_what_cannot_be_read_is_told_with_its_variable_its_operator_and_what_was_expected() -> None:
    for operator, name, text, expected in UNREADABLE:
        begin, end = f"{name} of {NAMES[operator]} cannot be read [", f"(seen: {text!r}; expected: {expected})"
        assert re.fullmatch(like(begin, f"{name}={text}", end), told_of(operator, **{name: text}))


def test_an_empty_variable_is_told_with_its_operator() -> None:
    for operator, name in NUMBERS + OTHERS:
        begin = f"{NAMES[operator]} does not say {name} ["
        expected = f"expected: {name} beside the other variables of {NAMES[operator]}"
        end = "a guessed identity would make two nodes believe they are the same one"
        assert re.fullmatch(like(begin, expected, end), told_of(operator, **{name: ""}))


CONTRADICTED = [
    ("pytorchjob", "PET_NNODES", "5", "nnodes=5; expected: nnodes=3"),
    ("elastic", "PET_NNODES", "2:5", "nnodes=2:5; expected: nnodes=2:4"),
    ("pytorchjob", "PET_NPROC_PER_NODE", "7", "PET_NPROC_PER_NODE=7; expected: 8, as the task is configured"),
    ("elastic", "PET_NPROC_PER_NODE", "7", "PET_NPROC_PER_NODE=7; expected: 8, as the task is configured"),
]


def test_another_number_of_nodes_or_ranks_is_told_with_both() -> None:
    for operator, name, text, seen in CONTRADICTED:
        begin = f"{NAMES[operator]} contradicts the task's configuration ["
        end = "register the task again; if it stays, something sets the operator's variables a second time"
        assert re.fullmatch(like(begin, f"(seen: {seen})", end), told_of(operator, **{name: text}))


AGAIN = "Fix: register the task again; if it stays, something sets the operator's variables a second time"
REFUSED = {
    "two operators speak": (
        pytorchjob(0, 2, 4) | {"PET_RDZV_ENDPOINT": "f1-n0-0-worker-0:23456"},
        asked(2, 2, 4),
        "more than one operator says which node this is [MASTER_ADDR=f1-n0-0-master-0, MASTER_PORT=23456, "
        "PET_MASTER_ADDR=f1-n0-0-master-0, PET_MASTER_PORT=23456, PET_NNODES=2, PET_NODE_RANK=0, "
        "PET_NPROC_PER_NODE=auto, PET_RDZV_ENDPOINT=f1-n0-0-worker-0:23456, RANK=0, WORLD_SIZE=2, registered nnodes=2] "
        "(seen: PyTorchJob and PyTorchJob with an elastic policy; expected: the variables of one operator). Fix: "
        "remove those that the task's environment, pod template or image sets itself",
    ),
    "nobody speaks": (
        pinned(2, 4),
        asked(2, 2, 4),
        "nothing says which node of the job this pod is [registered nnodes=2] (expected: the variables of one of: "
        "PyTorchJob, PyTorchJob with an elastic policy). Fix: check that the cluster's training operator "
        "handled this job (the pod has none of its variables)",
    ),
    "an endpoint for one": (
        {"SAFEDIST_ENDPOINT": "a:1"},
        asked(1, 1, 4),
        "SAFEDIST_ENDPOINT is set, but there is no other node to meet [SAFEDIST_ENDPOINT=a:1] (seen: local run). Fix: "
        "remove it; it has a meaning for jobs of two or more nodes only",
    ),
    "a TrainJob of Kubeflow Trainer's, v2": (
        pinned(2, 4) | {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "f1-node-0-0.f1"},
        asked(2, 2, 4),
        "PyTorchJob does not say MASTER_ADDR [PET_MASTER_ADDR=f1-node-0-0.f1, PET_NNODES=2, PET_NODE_RANK=1, "
        "registered nnodes=2] (expected: MASTER_ADDR beside the other variables of PyTorchJob). Fix: it has no "
        "default: a guessed identity would make two nodes believe they are the same one",
    ),
    "another RANK": (
        pytorchjob(1, 2, 4) | {"RANK": "0"},
        asked(2, 2, 4),
        "PyTorchJob contradicts the task's configuration [MASTER_ADDR=f1-n0-0-master-0, ... registered nnodes=2] "
        f"(seen: RANK=0; expected: RANK=1, as PET_NODE_RANK says). {AGAIN}",
    ),
    "fixed said, range asked": (
        pytorchjob(0, 2, 4) | pinned("2:4", 4),
        asked(2, 4, 4),
        "PyTorchJob contradicts the task's configuration [... (seen: nnodes=2; expected: nnodes=2:4). " + AGAIN,
    ),
    "range said, fixed asked": (
        elastic("2:4", 4) | pinned(4, 4),
        asked(4, 4, 4),
        "PyTorchJob with an elastic policy contradicts ... (seen: nnodes=2:4; expected: nnodes=4). " + AGAIN,
    ),
    "the user's own endpoint": (
        pytorchjob(0, 2, 4) | {"SAFEDIST_ENDPOINT": "a:0"},
        asked(2, 2, 4),
        "SAFEDIST_ENDPOINT of the user cannot be read [... (seen: 'a:0'; expected: HOST:PORT)",
    ),
    "a rank that is too high": (
        pytorchjob(2, 2, 4),
        asked(2, 2, 4),
        "PyTorchJob contradicts the task's configuration [MASTER_ADDR=f1-n0-0-master-0, ... registered nnodes=2] "
        f"(seen: node rank 2; expected: 0 to 1). {AGAIN}",
    ),
    "fewer GPUs": (
        {**pinned(1, 8, gpus=8), "CUDA_VISIBLE_DEVICES": "0"},
        asked(1, 1, 8),
        "this pod has fewer GPUs than its 8 ranks were registered for [registered GPUs=8, this pod=1] (seen: 1 GPUs; "
        "expected: 8). Fix: leave nproc_per_node out, so that ranks follow the GPUs that a pod has; or give the pod as "
        "many (with_overrides on the task changes GPUs, and a platform's limit makes them fewer)",
    ),
}
"""What is refused, and what is said about it; where "..." is, further variables."""

OPEN = "and leaves nproc_per_node open (with_overrides, or a limit of the platform, changed the GPUs)"
NOTED = {
    "a local run of many nodes": ({}, asked(3, 3, 4), "a local run is one node: 4 ranks instead of 12 on 3 nodes"),
    "more GPUs than one": (
        {**pinned(1, 1, gpus=1), "CUDA_VISIBLE_DEVICES": "0,1"},
        leaves_open(1, 1, 1),
        f"2 ranks on each node, one for each GPU of this pod; the task was registered for 1 GPU, {OPEN}",
    ),
    "fewer GPUs than eight": (
        {**pinned(1, 8, gpus=8), "CUDA_VISIBLE_DEVICES": "3"},
        leaves_open(1, 1, 8),
        f"1 rank on each node, one for each GPU of this pod; the task was registered for 8 GPUs, {OPEN}",
    ),
    "GPUs where none were asked for": (
        {**pinned(1, 4), "CUDA_VISIBLE_DEVICES": "3"},
        leaves_open(1, 1, 4),
        f"1 rank on each node, one for each GPU of this pod; the task was registered for no GPUs, {OPEN}",
    ),
}
"""What is decided in another way than a user would think, and how it is told."""


def test_a_refusal_says_what_was_seen_what_was_expected_and_the_next_step() -> None:
    found = {text: told(env, wanted) for env, wanted, text in REFUSED.values()}
    assert {text: said for text, said in found.items() if not re.fullmatch(like(*text.split("...")), said)} == {}


def test_what_a_user_would_not_think_is_told_in_one_sentence() -> None:
    found = {case: from_env(env, wanted) for case, (env, wanted, _) in NOTED.items()}
    assert {case: topology.notes for case, topology in found.items()} == {
        case: (text,) for case, (*_, text) in NOTED.items()
    }
    for topology in found.values():
        assert f"{topology.nproc_per_node} rank" in topology.notes[0]


def test_the_first_and_the_last_port_are_ports() -> None:
    for port in (1, 65535):
        said = {"pytorchjob": {"MASTER_PORT": str(port)}, "elastic": {"PET_RDZV_ENDPOINT": f"node-0:{port}"}}
        for operator, change in said.items():
            env, wanted = variables(operator)
            assert str(from_env(env | change, wanted).endpoint).endswith(f":{port}")
