"""Recorded pods of tasks whose call overrides something, run with the real image: they train, or one line says why not.

The pods are those that Flyte's and the operator's own code made (``tests/contracts/oracle/cases``), of tasks as they
were registered then: mounts and variables are not those of today. What they are told of the job, today's variable
tells them.
"""

from __future__ import annotations

import io
import sys
import tarfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from flyteidl.core import literals_pb2

from tests.containers.cluster import Cluster, Job, Pod, _literals, report
from tests.containers.engine import BUCKET, NOTHING, Options
from tests.harness.flyte import called, executed, pods
from tests.harness.registered import registered as told_of

ORACLE = Path(__file__).parents[1] / "contracts" / "oracle"
sys.path.insert(0, str(ORACLE))

from oracle_cases import NAMES, case  # noqa: E402
from oracle_registration import registered  # noqa: E402

TASK = """
from dataclasses import dataclass

from flytekit import task
from flytekit import Resources as R
from flytekitplugins_safedist import SafeHorovod, SafeTorch, current_rank


@dataclass(frozen=True)
class Worker:  # kfpytorch's, which the image does not have
    image: object = None
    requests: object = None
    limits: object = None
    restart_policy: object = None


Worker.__module__ = "flytekitplugins.kfpytorch"


"""
ONE_GPU = Options({"NVIDIA_VISIBLE_DEVICES": "GPU-0"})
TWO_GPUS = Options({"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-1"})
"""As NVIDIA's device plugin says which GPUs a pod has; one or two, for there is no room for more ranks here."""
MAINS = ("pytorch", "main", "primary")
Make = Callable[..., Job]


def archive(name: str, source: str) -> bytes:
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w:gz") as tar:
        info = tarfile.TarInfo(f"{name}.py")
        info.size = len(source.encode())
        tar.addfile(info, io.BytesIO(source.encode()))
    return body.getvalue()


def found(prefix: str) -> dict[str, Any]:
    """A recorded case, by the first part of its name."""
    (name,) = [each for each in NAMES if each.startswith(f"{prefix}-")]
    return case(name)


def told_as_today(pod: dict[str, Any]) -> dict[str, Any]:
    """A recorded pod, told of its job as pods are today."""
    for container in pod["spec"]["containers"]:
        told = {each["name"]: each.get("value", "") for each in container.get("env", ())}
        if "SAFEDIST_NODES" not in told:
            continue
        gpus = told.get("SAFEDIST_GPUS")
        (today,) = told_of(
            nodes=told["SAFEDIST_NODES"],
            nproc_per_node=int(told["SAFEDIST_NPROC_PER_NODE"]),
            backend=told["SAFEDIST_BACKEND"],
            gpus=None if gpus is None else int(gpus),
            nproc_is_open=gpus is not None,
        ).items()
        container["env"].append({"name": today[0], "value": today[1]})
    return pod


def recorded(one: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods that the real backend and operator made, the one of node 0 first."""
    return [told_as_today(each) for each in one.get("created") or [one["job"]] if each["kind"] == "Pod"]


def as_registered_today(one: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that they make of the same call, as this version registers it."""
    base, data = prefix_of(one), "s3://bucket/data/f0123456789abcdef"
    files = {"{{.input}}": f"{base}/inputs.pb", "{{.outputPrefix}}": f"{base}/0", "{{.rawOutputDataPrefix}}": data}
    files |= {"{{.checkpointOutputPrefix}}": f"{data}/checkpoints", "{{.prevCheckpointPrefix}}": ""}
    return pods(executed(called(*registered(one)), files))


def prefix_of(one: dict[str, Any]) -> str:
    """Where a recorded execution has its inputs and outputs."""
    return f"s3://bucket/metadata/propeller/flytesnacks-development-f0123456789abcdef/{one['node']['id']}/data"


def placed(cluster: Cluster, one: dict[str, Any], specs: Any, directory: Path, options: Options) -> Job:
    """These pods, with this test's image, store and names."""
    name = f"f{uuid.uuid4().hex[:15]}"
    code = cluster.s3.put(
        f"code/{name}.tar.gz", archive(one["template"]["id"]["name"].rpartition(".")[0], TASK + one["task"])
    )
    inputs = cluster.s3.put(f"metadata/{name}/inputs.pb", _literals({"x": 7}))
    base = prefix_of(one)
    texts = {
        f"{base}/inputs.pb": inputs,
        base: f"s3://{BUCKET}/metadata/{name}/n0/data",
        "s3://bucket/data/": f"s3://{BUCKET}/data/",
        "s3://bucket/fast1234.tar.gz": code,
        "f0123456789abcdef": name,
    }
    text = yaml.safe_dump(specs)
    for old, new in texts.items():
        text = text.replace(old, new)
    image = next(iter(cluster.templates.values())).k8s_pod.pod_spec["containers"][0]["image"]
    made = []
    for spec in yaml.safe_load(text):
        named = [each for each in spec["spec"]["containers"] if each["name"] in MAINS]
        named[0]["image"] = image
        spec["spec"]["containers"] = named  # what a sidecar does is none of the test's business
        given = Options(cluster.s3.environment) + options
        made.append(Pod(cluster.docker, spec, cluster.network, given, directory / "volumes"))
    return Job(cluster.s3, made, name, 0)


@pytest.fixture
def jobs(cluster: Cluster, tmp_path: Path) -> Iterator[Make]:
    """Make the job of a case; what its pods said is shown when the test fails, and they are removed with it."""
    made: list[Job] = []

    def make(prefix: str, options: Options = NOTHING, pods_of: Callable[..., Any] = recorded) -> Job:
        one = found(prefix)
        made.append(placed(cluster, one, pods_of(one), tmp_path, options))
        return made[-1]

    yield make
    for one in made:
        print(report(one))
        one.remove()


def output(job: Job) -> int:
    literals = literals_pb2.LiteralMap.FromString(job.s3.get(f"{job.prefix}outputs.pb"))
    return int(literals.literals["o0"].scalar.primitive.integer)


def trains(job: Job) -> list[str]:
    """Run every pod to its end, and give what each said."""
    ended = job.run()

    assert [one.codes for one in ended] == [(0,)] * len(job.pods)
    assert job.uploaded == ["outputs.pb"]
    assert output(job) == 7
    return [one.log for one in ended]


def test_a_pod_template_that_took_the_volumes_of_a_lone_pod(jobs: Make) -> None:
    (log,) = trains(jobs("c80", ONE_GPU))

    assert "this pod has no scratch volume at /var/run/safedist/scratch" in log


def test_shared_memory_that_the_backend_refused_is_there_as_it_is_registered_today(jobs: Make) -> None:
    assert "/dev/shm is already mounted" in found("c83")["backend_refuses"]

    job = jobs("c83", ONE_GPU, as_registered_today)

    for pod in job.pods:
        volumes = {each["name"]: each for each in pod.spec["spec"]["volumes"]}
        (mount,) = [each for each in pod.main["volumeMounts"] if each["mountPath"] == "/dev/shm"]
        assert volumes[mount["name"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    trains(job)


def test_a_pod_template_that_took_the_volumes_and_gpus_that_became_fewer(jobs: Make) -> None:
    job = jobs("c79", TWO_GPUS)

    for log in trains(job):
        assert "this pod has no scratch volume at /var/run/safedist/scratch" in log
        assert "2 ranks on each node, one for each GPU of this pod; the task was registered for 8 GPUs" in log


def test_a_root_that_is_read_only_leaves_the_scratch_volume(jobs: Make) -> None:
    logs = trains(jobs("c73", TWO_GPUS + Options(more={"read_only": True})))

    assert all("cannot be written: the code is in /var/run/safedist/scratch/" in log for log in logs)
