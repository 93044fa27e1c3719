"""What ``render`` shows is what Flyte's and the operator's own code make of a task, proven by recordings of them.

``cases/*.yaml`` are recordings; a file that is added there is a case of these tests. README.md says how they are made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from flyteidl.core import tasks_pb2
from google.protobuf.json_format import ParseDict
from oracle_allowed import MEANT, NOT_SENT_TODAY, NOT_SHOWN, REFUSED_TODAY
from oracle_cases import HERE, NAMES, case, recorded_template
from oracle_comparison import Allowed, Difference, differences
from oracle_registration import registered

from flytekitplugins_safedist.errors import ConfigError
from tests.harness.flyte import called, overrides_of
from tests.harness.operator import pods_and_services
from tests.harness.product import job_manifest, parse
from tests.harness.registered import told_as_recorded


def faults(one: dict[str, Any], manifest: dict[str, Any], allowed: tuple[Allowed, ...]) -> list[str]:
    """The differences between what was recorded and *manifest* with all that is created of it, but the allowed ones."""
    overrides = overrides_of(one["node"])
    found = all_differences(one, manifest)
    return [str(each) for each in found if not any(rule.covers(each, overrides) for rule in allowed)]


def all_differences(one: dict[str, Any], manifest: dict[str, Any]) -> Iterator[Difference]:
    """Those of the job, and those of everything that the operator creates."""
    name, shown = one["job"]["metadata"]["name"], manifest["metadata"]["name"]
    recorded = json.loads(json.dumps([one["job"], one.get("created")], default=str).replace(name, shown))
    yield from differences(recorded[0], manifest)
    if one["job"]["kind"] != "Pod":
        yield from of_created(recorded[1], pods_and_services(manifest))


def of_created(recorded: list[Any], rendered: list[Any]) -> Iterator[Difference]:
    """By kind and name: the order in which an operator creates them is not fixed."""
    ours = {(one["kind"], one["metadata"]["name"]): one for one in rendered}
    theirs = {(one["kind"], one["metadata"]["name"]): one for one in recorded}
    assert len(ours) == len(rendered), "two objects of one name"
    for key in sorted({*ours, *theirs}):
        if key in ours and key in theirs:
            yield from differences(theirs[key], ours[key])
        else:
            yield Difference(" ".join(key), key in theirs, key in ours)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_shown_of_a_recorded_template_is_what_go_made_of_it(name: str) -> None:
    one = case(name)
    if "job" in one:
        assert faults(one, called(recorded_template(one), one["node"]), (*NOT_SHOWN, *NOT_SENT_TODAY)) == []


def registered_or_refused(one: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """What the task is registered as today; None where that is refused for a listed reason."""
    try:
        return registered(one)
    except ConfigError as error:
        if not any(re.search(pattern, str(error)) for pattern in REFUSED_TODAY):
            raise
    return None


@pytest.mark.parametrize("name", NAMES)
def test_what_is_shown_of_the_task_is_what_go_made_of_it(name: str) -> None:
    one = case(name)
    today = registered_or_refused(one)
    if today is None:
        return
    manifest = told_as_recorded(called(*today))
    if "job" in one:
        assert faults(one, manifest, (*NOT_SHOWN, *MEANT)) == []


def test_the_recorder_asks_for_the_versions_that_are_named() -> None:
    versions = yaml.safe_load((HERE / "versions.yaml").read_text(encoding="utf-8"))
    flyte = (HERE / "recorder" / "flyte" / "go.mod").read_text(encoding="utf-8")
    operator = (HERE / "recorder" / "operator" / "go.mod").read_text(encoding="utf-8")

    assert set(re.findall(r"github.com/flyteorg/flyte/\w+ (v\S+)", flyte)) == {versions["flyte"]}
    assert re.findall(r"github.com/kubeflow/training-operator (\S+)", operator) == [versions["training-operator"]]


def test_every_allowed_difference_is_still_there() -> None:
    rules = (*NOT_SHOWN, *NOT_SENT_TODAY, *MEANT)
    unused = {rule.reason for rule in rules}
    for name in NAMES:
        one = case(name)
        if "job" not in one or not unused:
            continue
        today, overrides = registered_or_refused(one), overrides_of(one["node"])
        found = [*all_differences(one, called(recorded_template(one), one["node"]))]
        found += [] if today is None else all_differences(one, told_as_recorded(called(*today)))
        unused -= {rule.reason for rule in rules if any(rule.covers(each, overrides) for each in found)}
    assert unused == set()


def drop(found: dict[str, Any], path: str) -> None:
    *parents, last = path.split(".")
    for name in parents:
        found = found[int(name)] if name.isdecimal() else found[name]
    del found[int(last) if last.isdecimal() else last]


@pytest.mark.parametrize(
    "path",
    [
        "spec.runPolicy.backoffLimit",
        "spec.pytorchReplicaSpecs.Worker.template.spec.containers.0.env.3",
    ],
)
def test_a_field_that_is_not_shown_is_a_difference(path: str) -> None:
    one = case("c06-torch-n2-gpu8")
    manifest = called(recorded_template(one), None)
    assert faults(one, manifest, NOT_SHOWN) == []

    drop(manifest, path)

    assert faults(one, manifest, NOT_SHOWN) != []


@pytest.mark.parametrize("path", sorted((HERE / "flytectl").glob("*.yaml")), ids=lambda path: path.stem)
def test_tasks_as_flytectl_registers_them_can_be_shown_and_started(path: Path) -> None:
    template = ParseDict(yaml.safe_load(path.read_text(encoding="utf-8"))["template"], tasks_pb2.TaskTemplate())
    manifest = job_manifest(template)
    roles = manifest["spec"].get("pytorchReplicaSpecs")
    spec = next(iter(roles.values()))["template"]["spec"] if roles else manifest["spec"]

    invocation = parse(spec["containers"][0]["args"][1:])

    assert (invocation.distribution or "").startswith("s3://")
