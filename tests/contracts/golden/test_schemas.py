"""Every job in the table is one that the published schemas accept.

``crds`` has the CustomResourceDefinition of training-operator v1.9.0 (``manifests/base/crds``, Apache License 2.0)
as JSON, without its descriptions: 5 kB instead of 600.
"""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from golden_cases import CASES, template_of

from tests.harness.product import job_manifest

CRDS = sorted((Path(__file__).parent / "crds").glob("*.json.gz"))


@pytest.fixture(scope="session")
def manifests() -> dict[str, dict[str, Any]]:
    made = {name: job_manifest(template_of(make_task(), settings)) for name, (make_task, settings) in CASES.items()}
    return {name: one for name, one in made.items() if one["kind"] != "Pod"}


@pytest.fixture(scope="session")
def findings_of() -> Callable[[dict[str, Any]], list[str]]:
    """Says what the schema of its kind refuses of a job; what it does not know, an API server drops in silence."""
    schemas = {}
    for path in CRDS:
        definition = json.loads(gzip.decompress(path.read_bytes()))
        for version in definition["spec"]["versions"]:
            key = f"{definition['spec']['group']}/{version['name']}", definition["spec"]["names"]["kind"]
            schemas[key] = jsonschema.Draft202012Validator(closed(version["schema"]["openAPIV3Schema"]))

    def found(job: dict[str, Any]) -> list[str]:
        errors = schemas[job["apiVersion"], job["kind"]].iter_errors(job)
        return [f"{error.json_path}: {error.message}" for error in errors]

    return found


def closed(schema: Any) -> Any:
    """The schema, with fields that it does not name refused, and Kubernetes' own words in JSON schema's."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(one) for name, one in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"], **({"pattern": schema["pattern"]} if "pattern" in schema else {})}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        made["properties"] = {name: closed(one) for name, one in schema["properties"].items()}
        made.setdefault("additionalProperties", False)
    return made


def test_every_job_is_valid_by_the_published_schemas_and_a_mistake_would_be_seen(
    findings_of: Callable[[dict[str, Any]], list[str]], manifests: dict[str, dict[str, Any]]
) -> None:
    found = {name: findings_of(one) for name, one in manifests.items()}

    assert {name: one for name, one in found.items() if one} == {}
    assert {one["kind"] for one in manifests.values()} == {"PyTorchJob"}

    job = copy.deepcopy(manifests["four-nodes-8-gpu"])
    job["spec"]["workers"] = 2
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    container["resources"]["limits"]["cpu"] = "many"
    nonsense, unknown = sorted(findings_of(job))
    assert "('workers' was unexpected)" in unknown
    assert ".limits.cpu: 'many' does not match" in nonsense
