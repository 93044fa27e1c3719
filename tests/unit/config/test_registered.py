"""What registration pins, as the pod reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flytekit import Resources

from flytekitplugins_safedist import SafeHorovod, SafeTorch, Timeouts
from flytekitplugins_safedist.config.registered import Registered
from flytekitplugins_safedist.errors import TopologyError
from tests.harness.registered import registered
from tests.unit.config.plans import planned


@pytest.mark.parametrize(("nodes", "low", "high"), [("1", 1, 1), ("4", 4, 4), ("2:4", 2, 4)])
def test_the_job_comes_back_as_it_was_pinned(nodes: str, low: int, high: int) -> None:
    timeouts = Timeouts(rendezvous=7.5, heartbeat=30, upload=86400)
    config = SafeHorovod(nnodes=nodes, max_replacements=3, start_method="spawn", timeouts=timeouts)

    found = Registered.from_env(planned(config, requests=Resources(gpu="8")).variables())

    assert found == Registered(
        backend="horovod",
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=8,
        nproc_is_open=True,
        gpus=8,
        start_method="spawn",
        max_replacements=3,
        shared_caches=(),
        timeouts=timeouts,
    )
    assert found.nnodes == nodes


def test_tests_pin_what_registration_pins() -> None:
    config = SafeTorch(nnodes="2:3", nproc_per_node=2, timeouts=Timeouts(stop=1))
    told = registered(nodes="2:3", nproc_per_node=2, timeouts={"stop": 1})
    assert json.loads(planned(config).variables()["SAFEDIST_JOB"]) == json.loads(told["SAFEDIST_JOB"])


def test_a_pod_that_nothing_was_pinned_into_is_not_ours() -> None:
    assert Registered.from_env({"PET_NNODES": "2"}) is None


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(registered()["SAFEDIST_JOB"]), **fields})


def without(name: str) -> str:
    job = json.loads(registered()["SAFEDIST_JOB"])
    del job[name]
    return json.dumps(job)


@pytest.mark.parametrize("name", json.loads(registered()["SAFEDIST_JOB"]))
def test_nothing_has_a_default(name: str) -> None:
    with pytest.raises(TopologyError, match=f"SAFEDIST_JOB cannot be read: .*{name}"):
        Registered.from_env({"SAFEDIST_JOB": without(name)})


@pytest.mark.parametrize(
    "text",
    [
        *("", "2", "[]", "{", "null", changed(more=1), changed(nproc_per_node="2"), changed(backend="jax")),
        *(changed(timeouts=None), changed(timeouts={"stop": -1}), changed(timeouts={"nap": 1}), changed(gpus=True)),
    ],
)
def test_what_cannot_be_read_is_refused_and_nothing_else_is_raised(text: str) -> None:
    with pytest.raises(TopologyError, match="SAFEDIST_JOB cannot be read: "):
        Registered.from_env({"SAFEDIST_JOB": text})


def test_another_version_is_told_from_nonsense() -> None:
    with pytest.raises(TopologyError) as caught:
        Registered.from_env({"SAFEDIST_JOB": '{"version": 2, "nodes": "of another kind"}'})
    assert str(caught.value) == (
        "this pod was registered by another version of flytekitplugins-safedist than its image has [version in "
        "SAFEDIST_JOB=2] (expected: 1). Fix: register the task with the version that is in its image, or build "
        "the image with this one"
    )
