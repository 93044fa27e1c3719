"""What registration pins, as the pod reads it."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from flytekit import Resources

from flytekitplugins_safedist import (
    Hangs,
    Logs,
    Metrics,
    Preflight,
    Profile,
    SafeHorovod,
    SafeTorch,
    Scratch,
    Timeouts,
)
from flytekitplugins_safedist.config.registered import Registered, grace_pinned
from flytekitplugins_safedist.errors import TopologyError
from tests.harness.registered import registered
from tests.unit.config.plans import planned

CONFIGS = {
    "nothing": SafeTorch(),
    "a range": SafeTorch(nnodes="2:4", nproc_per_node=2, profile=Profile(steps=(2, 3), ranks=None)),
    "everything": SafeHorovod(
        nnodes=4,
        max_restarts=2,
        max_replacements=3,
        start_method="spawn",
        timeouts=Timeouts(rendezvous=7.5, heartbeat=30, upload=86400),
        scratch=Scratch(path="/s", keep="always", size_limit="2Gi", shared_caches=("triton", "numba"), volume=None),
        logs=Logs(show=(0, 2), tail_lines=0, prefix="{node_rank} "),
        hangs=Hangs(action="report", floor=5, ceiling=60.5),
        metrics=Metrics(prometheus=9400, otlp=True),
        preflight=Preflight(action="report", slow=0.25),
        profile=Profile(steps=(10, 12), ranks=(0, 3)),
    ),
}


@pytest.mark.parametrize("config", CONFIGS)
def test_the_job_comes_back_as_it_was_pinned(config: str) -> None:
    made = planned(CONFIGS[config], requests=Resources(gpu="8"), environment={"B": "a secret", "A": "1"})
    pinned = made.pinned()
    assert "secret" not in pinned["SAFEDIST_JOB"]
    found = Registered.from_env(pinned)
    assert found is not None
    assert found == Registered(**{field.name: getattr(made, field.name) for field in dataclasses.fields(Registered)})
    assert (found.variables, found.nnodes) == (("A", "B"), str(CONFIGS[config].nnodes))


def test_ranks_of_a_range_and_sets_of_names_are_pinned_as_what_they_mean() -> None:
    config = SafeTorch(
        nproc_per_node=4, logs=Logs(show=range(2, 4)), scratch=Scratch(shared_caches={"triton", "numba"})
    )  # type: ignore[arg-type]
    found = Registered.from_env(planned(config).pinned())
    assert found is not None
    assert (found.logs.show, found.scratch.shared_caches) == ((2, 3), ("numba", "triton"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patient(Timeouts):
    """A team's own preset."""

    stop: float = 60.0
    reason: str = "a slow file system"


def test_of_a_users_own_class_a_pod_is_told_what_it_knows() -> None:
    found = Registered.from_env(planned(SafeTorch(timeouts=Patient(exit=5))).pinned())
    assert found is not None
    assert found.timeouts == Timeouts(stop=60.0, exit=5)


def test_kubernetes_finds_no_variable_to_fill_in() -> None:
    config = SafeTorch(scratch=Scratch(path="/data/$(HOME)"), logs=Logs(prefix="$$ "))
    pinned = planned(config).pinned()
    assert "$" not in pinned["SAFEDIST_JOB"]  # $(HOME) would be the value of a variable of the pod, $$ one $
    found = Registered.from_env(pinned)
    assert found is not None
    assert (found.scratch.path, found.logs.prefix) == ("/data/$(HOME)", "$$ ")


def test_tests_pin_what_registration_pins() -> None:
    config = SafeTorch(nnodes="2:3", nproc_per_node=2, timeouts=Timeouts(stop=1))
    told = registered(nodes="2:3", nproc_per_node=2, timeouts={"stop": 1})
    assert json.loads(planned(config).pinned()["SAFEDIST_JOB"]) == json.loads(told["SAFEDIST_JOB"])


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(registered()["SAFEDIST_JOB"]), **fields})


def without(name: str) -> str:
    job = json.loads(registered()["SAFEDIST_JOB"])
    del job[name]
    return json.dumps(job)


def refusal(job: str) -> str:
    try:
        return f"none: {Registered.from_env({'SAFEDIST_JOB': job})}"
    except TopologyError as error:
        return str(error)


def test_nothing_has_a_default() -> None:
    for name in json.loads(registered()["SAFEDIST_JOB"]):
        assert re.match(f"SAFEDIST_JOB cannot be read: .*{name}", refusal(without(name)))


def test_what_cannot_be_read_is_refused_and_nothing_else_is_raised() -> None:
    texts = [
        *("", "2", "[]", "{", "null", changed(more=1)),
        *(changed(timeouts={"nap": 1}), changed(logs={"shown": 1})),
    ]
    assert [text for text in texts if not refusal(text).startswith("SAFEDIST_JOB cannot be read: ")] == []


def test_another_version_is_told_from_nonsense() -> None:
    assert refusal('{"version": 1, "nodes": "of another kind"}') == (
        "this pod was registered by another version of flytekitplugins-safedist than its image has [version in "
        "SAFEDIST_JOB=1] (expected: 2). Fix: register the task with the version that is in its image, or build "
        "the image with this one"
    )


@pytest.mark.parametrize(("said", "seconds"), [("0.5", 0.5), ("90", 90.0), ("0", 30.0), ("", 30.0)])
def test_where_no_time_is_named_it_is_kubernetes_usual_one(said: str, seconds: float) -> None:
    assert grace_pinned({"SAFEDIST_GRACE_SECONDS": said}) == seconds
