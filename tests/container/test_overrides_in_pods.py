"""Recorded pods of tasks whose call overrides something, run with the real image: they train, or one line says why not.

The pods are those that Flyte's and the operator's own code made (``tests/oracle/cases``), of tasks that an older
version of this package registered: their variables and mounts are not those of today.
"""

from __future__ import annotations

import io
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from flyteidl.core import literals_pb2

from tests.container.cluster import Cluster, Job, Pod, _literals, report
from tests.container.engine import BUCKET, NOTHING, Options

CASES = Path(__file__).parents[1] / "oracle" / "cases"
TASK = """
from flytekit import task
from flytekit import Resources as R
from flytekitplugins_safedist import SafeHorovod, SafeTorch, current_rank

"""
TWO_GPUS = {"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-1"}
"""As NVIDIA's device plugin says which GPUs a pod has; two, for there is no room for more ranks here."""


def archive(name: str, source: str) -> bytes:
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w:gz") as tar:
        info = tarfile.TarInfo(f"{name}.py")
        info.size = len(source.encode())
        tar.addfile(info, io.BytesIO(source.encode()))
    return body.getvalue()


def recorded(cluster: Cluster, case: str, directory: Path, options: Options = NOTHING) -> Job:
    """The recorded pods of a case, with this test's image, store and names."""
    (path,) = CASES.glob(f"{case}-*.yaml")
    one: dict[str, Any] = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    name = f"f{uuid.uuid4().hex[:15]}"
    code = cluster.s3.put(
        f"code/{name}.tar.gz", archive(one["template"]["id"]["name"].rpartition(".")[0], TASK + one["task"])
    )
    inputs = cluster.s3.put(f"metadata/{name}/inputs.pb", _literals({"x": 7}))
    base = "s3://bucket/metadata/propeller/flytesnacks-development-f0123456789abcdef/n0/data"
    texts = {
        f"{base}/inputs.pb": inputs,
        base: f"s3://{BUCKET}/metadata/{name}/n0/data",
        "s3://bucket/data/": f"s3://{BUCKET}/data/",
        "s3://bucket/fast1234.tar.gz": code,
        "f0123456789abcdef": name,
    }
    text = yaml.safe_dump(
        [each for each in one.get("created") or [one["job"]] if each["kind"] == "Pod"] or [one["job"]]
    )
    for old, new in texts.items():
        text = text.replace(old, new)
    image = next(iter(cluster.templates.values())).k8s_pod.pod_spec["containers"][0]["image"]
    given = Options({**cluster.s3.environment, **TWO_GPUS}) + options
    pods = []
    for spec in yaml.safe_load(text):
        named = [each for each in spec["spec"]["containers"] if each["name"] in ("pytorch", "mpi", "main", "primary")]
        named[0]["image"] = image
        spec["spec"]["containers"] = named  # what a sidecar does is none of the test's business
        pods.append(Pod(cluster.docker, spec, cluster.network, given, directory / "volumes"))
    return Job(cluster.s3, pods, f"metadata/{name}/n0/data/0/")


@pytest.fixture
def jobs(cluster: Cluster, tmp_path: Path) -> Iterator[Any]:
    made: list[Job] = []

    def make(case: str, options: Options = NOTHING) -> Job:
        made.append(recorded(cluster, case, tmp_path, options))
        return made[-1]

    yield make
    for one in made:
        print(report(one))
        one.remove()


def output(job: Job) -> int:
    literals = literals_pb2.LiteralMap.FromString(job.s3.get(f"{job.prefix}outputs.pb"))
    return int(literals.literals["o0"].scalar.primitive.integer)


def test_a_pod_template_that_took_the_volumes_and_gpus_that_became_fewer(jobs: Any) -> None:
    job = jobs("c79")

    ended = job.run()

    assert [one.codes for one in ended] == [(0,), (0,)]
    assert output(job) == 7
    for one in ended:
        assert "this pod has no scratch volume at /var/run/safedist/scratch" in one.log
        assert "2 ranks on each node, one for each GPU of this pod; the task was registered for 8 GPUs" in one.log


def test_an_mpi_jobs_containers_that_the_operator_did_not_prepare_say_so_in_one_line(jobs: Any) -> None:
    for pod in jobs("c88").start():
        ended = pod.wait()

        assert ended.codes[0] == 1
        assert "put the primary container first in the pod template" in ended.log
        assert "Traceback" not in ended.log


def test_a_root_that_is_read_only_leaves_the_scratch_volume(jobs: Any) -> None:
    job = jobs("c73", Options(more={"read_only": True}))

    ended = job.run()

    assert [one.codes for one in ended] == [(0,), (0,)]
    assert output(job) == 7
    assert all("cannot be written: the code is in /var/run/safedist/scratch/" in one.log for one in ended)
