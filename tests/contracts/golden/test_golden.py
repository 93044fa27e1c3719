"""Every kind of job, whole: what is registered, what the backend makes of it, and the operator's pods.

After an intended change: ``SAFEDIST_UPDATE_GOLDEN=1 pytest tests/contracts/golden``, then read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from golden_cases import BAKED, CASES, SafeHorovod, make, sidecar_template, template_of
from google.protobuf.json_format import MessageToDict

from tests.harness.flyte import pods
from tests.harness.product import job_manifest

EXPECTED = Path(__file__).parent / "expected"
WITH_PODS = ("two-nodes-fast", "sidecars-two-nodes", "elastic-cpu-policies")
"""One of each way in which the operator makes pods; for the others they would repeat the job's templates."""


class Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def documents(name: str) -> str:
    make_task, settings = CASES[name]
    template = template_of(make_task(), settings)
    sent = MessageToDict(template)
    del sent["interface"], sent["metadata"]
    manifest = job_manifest(template)
    shown = pods(manifest) if name in WITH_PODS else []
    return yaml.dump_all([sent, manifest, *shown], Dumper=Dumper, sort_keys=True, width=120)


@pytest.mark.parametrize("name", CASES)
def test_specs_are_what_they_were(name: str) -> None:
    path = EXPECTED / f"{name}.yaml"
    found = documents(name)
    if os.environ.get("SAFEDIST_UPDATE_GOLDEN"):
        path.write_text(found)
    assert found == path.read_text()


def test_every_file_belongs_to_a_case() -> None:
    assert {path.stem for path in EXPECTED.glob("*.yaml")} == set(CASES)


def test_serializing_twice_gives_identical_bytes() -> None:
    make_task, settings = CASES["sidecars-two-nodes"]
    task = make_task()

    first, second = template_of(task, settings), template_of(task, settings)

    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)
    assert first.SerializeToString(deterministic=True) == template_of(make_task(), settings).SerializeToString(
        deterministic=True
    )


def test_tasks_that_share_a_pod_template_do_not_affect_each_other() -> None:
    shared = sidecar_template()
    alone = template_of(make(SafeHorovod(nnodes=2, nproc_per_node=2), pod_template=sidecar_template()), BAKED)

    make(SafeHorovod(nproc_per_node=2), shared_memory="1Gi", pod_template=shared)
    second = template_of(make(SafeHorovod(nnodes=2, nproc_per_node=2), pod_template=shared), BAKED)

    assert second == alone
    assert shared == sidecar_template()
