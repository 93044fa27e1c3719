"""Every job in the table is one that the published schemas and the typed client models accept.

The CustomResourceDefinitions of training-operator v1.9.0 are data, 1.2 MB, and not part of the package: they are found
through ``SAFEDIST_CRDS``, or in ``shared/crds`` in, beside or above the checkout. ``SAFEDIST_REQUIRE_CRDS=1`` (CI)
makes their absence a failure.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
from golden_cases import CASES, template_of

from tests.harness import needs
from tests.harness.product import BACKENDS, Cluster, check_models, check_schema, job_manifest, pods

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def crds() -> Path:
    named = os.environ.get("SAFEDIST_CRDS")
    places = [Path(named)] if named else [above / "shared" / "crds" for above in (ROOT, *ROOT.parents)]
    found = next((place for place in places if list(place.glob("*.yaml"))), None)
    if found is None:
        sought = named or "shared/crds in or above the checkout"
        needs.missing(f"no CustomResourceDefinitions in {sought} (set SAFEDIST_CRDS)", required="SAFEDIST_REQUIRE_CRDS")
    return found


@pytest.fixture(scope="session")
def manifests() -> dict[str, dict[str, Any]]:
    found = {}
    for name, (make_task, settings) in CASES.items():
        template = template_of(make_task(), settings)
        for backend in BACKENDS:
            if name == "one-node-as-job" and backend == "v2":
                continue  # refused there, see test_render
            found[f"{name} on {backend}"] = job_manifest(template, cluster=Cluster(backend=backend))
    return found


def test_every_job_is_valid_by_the_published_schemas(crds: Path, manifests: dict[str, dict[str, Any]]) -> None:
    jobs = {name: one for name, one in manifests.items() if one["kind"] != "Pod"}
    findings = {name: check_schema(one, crds) for name, one in jobs.items()}

    assert {name: one for name, one in findings.items() if one} == {}
    assert {one["kind"] for one in jobs.values()} == {"PyTorchJob", "MPIJob"}


def test_every_job_and_pod_is_valid_by_the_typed_models(manifests: dict[str, dict[str, Any]]) -> None:
    findings = {}
    for name, manifest in manifests.items():
        for one in (manifest, *pods(manifest)):
            if found := check_models(one):
                findings[f"{name}: {one['metadata']['name']}"] = found

    assert findings == {}


BROKEN = {
    "a field that does not exist": (lambda job: job["spec"].update(workers=2), ".spec.workers: is not a field"),
    "a string for a number": (lambda job: master(job).update(replicas="1"), ".replicas: '1' is not of type integer"),
    "a missing name": (lambda job: container(job).pop("name"), ".name: is required"),
    "a nonsense quantity": (lambda job: limits(job).update(cpu="many"), ".limits.cpu: 'many' does not match"),
    "a boolean for a number": (lambda job: master(job).update(replicas=True), "True is not of type integer"),
}


def master(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["pytorchReplicaSpecs"]["Master"]


def container(job: dict[str, Any]) -> dict[str, Any]:
    return master(job)["template"]["spec"]["containers"][0]


def limits(job: dict[str, Any]) -> dict[str, Any]:
    return container(job)["resources"]["limits"]


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_job_is_found_by_its_schema(fault: str, crds: Path, manifests: dict[str, dict[str, Any]]) -> None:
    damage, expected = BROKEN[fault]
    job = copy.deepcopy(manifests["four-nodes-8-gpu on v1.16"])
    damage(job)

    findings = check_schema(job, crds)

    assert len(findings) == 1
    assert expected in findings[0]


def test_a_broken_job_is_found_by_the_models(manifests: dict[str, dict[str, Any]]) -> None:
    job = copy.deepcopy(manifests["four-nodes-8-gpu on v1.16"])
    job["spec"]["workers"] = 2
    container(job)["args"] = "train"

    assert check_models(job) == [
        ".spec.pytorchReplicaSpecs.Master.template.spec.containers[0].args: 'train' is not a list of str",
        ".spec.workers: is not a field of KubeflowOrgV1PyTorchJobSpec",
    ]
