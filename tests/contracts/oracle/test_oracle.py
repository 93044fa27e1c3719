"""What ``render`` shows is what Flyte's and the operator's own code make of a task, proven by recordings of them.

``cases/*.yaml`` are recordings; a file that is added there is a case of these tests. README.md says how they are made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml
from oracle_allowed import MEANT, NOT_SENT_TODAY, NOT_SHOWN, REFUSED_TODAY
from oracle_cases import HERE, NAMES, case, recorded_template
from oracle_comparison import Difference, differences
from oracle_registration import registered

from flytekitplugins_safedist.errors import ConfigError
from tests.harness.flyte import called, overrides_of
from tests.harness.operator import pods_and_services
from tests.harness.registered import told_as_recorded


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


def registered_or_refused(one: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """What the task is registered as today; None where that is refused for a listed reason."""
    try:
        return registered(one)
    except ConfigError as error:
        if not any(re.search(pattern, str(error)) for pattern in REFUSED_TODAY):
            raise
    return None


def test_the_recorder_asks_for_the_versions_that_are_named() -> None:
    versions = yaml.safe_load((HERE / "versions.yaml").read_text(encoding="utf-8"))
    flyte = (HERE / "recorder" / "flyte" / "go.mod").read_text(encoding="utf-8")
    operator = (HERE / "recorder" / "operator" / "go.mod").read_text(encoding="utf-8")

    assert set(re.findall(r"github.com/flyteorg/flyte/\w+ (v\S+)", flyte)) == {versions["flyte"]}
    assert re.findall(r"github.com/kubeflow/training-operator (\S+)", operator) == [versions["training-operator"]]


def test_what_is_shown_is_what_go_made_of_it_and_every_allowed_difference_is_still_there() -> None:
    """Of each recorded template, and of its task as it is registered today."""
    then, now = (*NOT_SHOWN, *NOT_SENT_TODAY), (*NOT_SHOWN, *MEANT)
    faults: dict[str, list[str]] = {}
    unused = {rule.reason for rule in (*then, *now)}
    for name in NAMES:
        one = case(name)
        today, overrides = registered_or_refused(one), overrides_of(one["node"])
        if "job" not in one:
            continue
        shown = [(called(recorded_template(one), one["node"]), then)]
        shown += [] if today is None else [(told_as_recorded(called(*today)), now)]
        for manifest, allowed in shown:
            for each in all_differences(one, manifest):
                rules = [rule.reason for rule in allowed if rule.covers(each, overrides)]
                unused -= {*rules}
                if not rules:
                    faults.setdefault(name, []).append(str(each))
    assert faults == {}
    assert unused == set()
