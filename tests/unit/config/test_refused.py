"""Every job that cannot work is refused when the decorator runs, all at once: field, value, reason and repair."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import pytest
from flytekit import ImageSpec, Resources, Secret, task
from flytekit.core.pod_template import PodTemplate
from flytekit.core.python_function_task import PythonFunctionTask
from flytekit.extras.accelerators import A100, T4, V5E
from flytekitplugins import kfmpi
from flytekitplugins import kfpytorch as kf
from kubernetes.client import V1Container, V1EnvVar, V1PodSpec, V1ResourceRequirements, V1Volume, V1VolumeMount

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
from flytekitplugins_safedist.compat import flytekit as flytekit_inside
from flytekitplugins_safedist.errors import ConfigError
from flytekitplugins_safedist.plugin.task import SafeTask
from tests.unit.config.plans import Hidden


def train(x: int) -> int:
    return x


def declare(config: Any, **kwargs: Any) -> Any:
    return task(task_config=config, **kwargs)(train)


def template(**container: Any) -> PodTemplate:
    volumes = [V1Volume(name="v")]
    return PodTemplate(pod_spec=V1PodSpec(containers=[V1Container(name="primary", **container)], volumes=volumes))


def with_containers(*names: str, **spec: Any) -> PodTemplate:
    return PodTemplate(pod_spec=V1PodSpec(containers=[V1Container(name=name, image="i:1") for name in names], **spec))


def asks(**resources: dict[str, str]) -> PodTemplate:
    return template(resources=V1ResourceRequirements(**resources))


def mount(path: str) -> list[V1VolumeMount]:
    return [V1VolumeMount(name="v", mount_path=path)]


def refused(config: Any, **kwargs: Any) -> ConfigError:
    """The error; one of 0 problems where there is none."""
    try:
        declare(config, **kwargs)
    except ConfigError as error:
        return error
    return ConfigError([])


# --- one field --------------------------------------------------------------------------------------------------------
NODES = 'is not a number of nodes (use 1, a number N of up to 999999, or a range such as "2:4")'
WORDS = "is unknown (use one of: "
SECONDS = "is not a time to wait (use seconds, more than 0)"
PREFIX = "cannot be filled in (use {rank}, {local_rank}, {node_rank})"
FIELDS: list[tuple[str, tuple[Any, ...], str]] = [
    ("nproc_per_node", (0, "8", 2.0, True, [1], Hidden()), "is not a number of ranks (use 1 or more, or None for one"),
    ("nnodes", (0, -2, "4:2", "2:", ":2", "1:2:3", "", " 1", 1.0, True, None, (1, 2), "٣", 10**5000, Hidden()), NODES),
    ("max_restarts", (-1, "3", None, False, 10**5000), "is not a number of restarts (use 0 or more)"),
    ("start_method", ("fork", "", None, ["spawn"]), f"{WORDS}'preload', 'spawn')"),
    ("queue", ("team a/gpu", "q" * 64, "Q", 5), "is not the name of a LocalQueue (use up to 63 small letters"),
    ("scratch", ("/tmp", Hidden(), Scratch), "is not a Scratch (use Scratch(path=..., keep=..., size_limit=...))"),
    (
        "scratch.path",
        ("x", "", "~/x", 3, b"/x", "/a\0", "/\ud800", Path("/data")),
        "is not an absolute path (use a str,",
    ),
    ("scratch.keep", ("sometimes", True, None), f"{WORDS}'never', 'on_failure', 'always')"),
    ("scratch.volume", ("tape", 1), f"{WORDS}'disk', 'memory')"),
    (
        "scratch.claim",
        ("", 5, "My_Claim", "a/b", "-a", "c" * 254),
        "is not the name of a PersistentVolumeClaim (use small letters",
    ),
    (
        "scratch.size_limit",
        (0, -1, "20 GB", "lots", "-1Gi", "1e400", "", 1.5, True, "9" * 5000, "0Gi", 10**5000),
        'is not a size (use bytes or a quantity such as "20Gi")',
    ),
    ("scratch.shared_caches", ("triton", 7, {"triton": 1}), 'is not a list of names (use ("triton",))'),
    (
        "scratch.shared_caches",
        (("triton", "tritn"), (None,), [["triton"]]),
        "has a name that is unknown (known are cuda, ",
    ),
    ("timeouts", (60, None), "is not a Timeouts (use Timeouts(code=..., start=..., rendezvous=...))"),
    *(
        (f"timeouts.{name}", (0, float("inf"), float("nan"), "60", True), SECONDS)
        for name in ("start", "stop", "upload")
    ),
    (
        "timeouts.rendezvous",
        (1e10,),
        "is longer than the kernel can wait at once (use at most 2147483 s, about 24 days)",
    ),
    ("logs", ("all", Hidden()), "is not a Logs (use Logs(show=..., tail_lines=..., prefix=...))"),
    (
        "logs.show",
        (0, "0", (-1,), (True,), {0: 1}, range(-1, 2), range(10**12)),
        "is not a list of ranks (use ranks such as (0,), or None for all)",
    ),
    ("logs.tail_lines", (-1, "20", None, 2.0), "is not a number of lines (use 0 or more)"),
    (
        "logs.prefix",
        ("{host}", "{0}", "{", "{rank:zz}", "{rank.x}", "{rank:>1000000000}", "{rank:{rank}}", None),
        PREFIX,
    ),
    ("hangs.action", ("stop",), f"{WORDS}'restart', 'fail', 'report')"),
    ("metrics.prometheus", (0, 1 << 16, "9400"), "is not a port (use 1 to 65535, e.g. 9400)"),
    ("preflight.slow", (0, 1, "half", None, Fraction(1, 2)), "is no part of the median (use 0.5, or less)"),
    (
        "profile.steps",
        (10, (5, 4), (0, 1), [1, 2], (1,)),
        "is not a first and a last step (use (10, 12), the first >= 1)",
    ),
    (
        "run_policy",
        ({},),
        "is not a RunPolicy of flytekitplugins.kfpytorch (import RunPolicy from flytekitplugins.kfpy",
    ),
]
PARTS = {"scratch": Scratch, "timeouts": Timeouts, "logs": Logs, "hangs": Hangs, "metrics": Metrics}
PARTS |= {"preflight": Preflight, "profile": Profile}


def with_field(field: str, value: Any) -> SafeTorch:
    part, _, name = field.rpartition(".")
    return SafeTorch(**{part: PARTS[part](**{name: value})} if part else {name: value})


def test_a_value_that_cannot_stand_in_a_field_is_refused_with_reason_and_repair() -> None:
    for field, values, text in FIELDS:
        for value in values:
            error = refused(with_field(field, value))
            assert [problem.field for problem in error.problems] == [field], value
            assert text in str(error)
            assert len(str(error)) < 1000


# --- what must agree --------------------------------------------------------------------------------------------------
def case(text: str, config: Any, **kwargs: Any) -> tuple[str, Any, dict[str, Any]]:
    return text, config, kwargs


REFUSED = [
    case(
        "master='set' has no effect: this 1-node job has no roles: it is an ordinary pod (drop master)",
        SafeTorch(master=kf.Master()),
    ),
    case(
        "master='set' has no effect: this elastic job has worker (drop master or use worker)",
        SafeTorch(nnodes="2:3", master=kf.Master()),
    ),
    case(
        "worker={'image': 'x'} is not a Worker of flytekitplugins.kfpytorch (import Worker from ",
        SafeTorch(nnodes=2, worker={"image": "x"}),
    ),
    case(
        "is not a Worker of flytekitplugins.kfpytorch (import Worker from flytekitplugins.kfpytorch)",
        SafeTorch(nnodes=2, worker=kfmpi.Worker()),
    ),
    case(
        "is not a RestartPolicy of flytekitplugins.kfpytorch (import RestartPolicy from flytekitplugins.kfpytorch)",
        SafeTorch(nnodes=2, worker=kf.Worker(restart_policy=kfmpi.RestartPolicy.NEVER)),
    ),
    case(
        "worker.replicas=4 contradicts nnodes, which makes 3 (leave replicas out; nnodes decides)",
        SafeTorch(nnodes=4, worker=kf.Worker(replicas=4)),
    ),
    case(
        "queue='gpu' is another than @task's label kueue.x-k8s.io/queue-name=cpu (give one of the two)",
        SafeTorch(nnodes=2, queue="gpu"),
        labels={"kueue.x-k8s.io/queue-name": "cpu"},
    ),
    case(
        "worker.image=5 is not text (use a str without NUL and lone surrogates)",
        SafeTorch(nnodes=2, worker=kf.Worker(image=5)),
    ),
    case("worker.replicas='1' is not a whole number", SafeTorch(nnodes=2, worker=kf.Worker(replicas="1"))),
    case(
        "run_policy='set' has no effect: nnodes=1 is an ordinary pod, not a job", SafeTorch(run_policy=kf.RunPolicy())
    ),
    case(
        "='All' is not a CleanPodPolicy of flytekitplugins",
        SafeTorch(nnodes=2, run_policy=kf.RunPolicy(clean_pod_policy="All")),
    ),
    case(
        "run_policy.backoff_limit=0 must be a whole number, 1 or more",
        SafeTorch(nnodes=2, run_policy=kf.RunPolicy(backoff_limit=0)),
    ),
    case(
        "run_policy.ttl_seconds_after_finished=-1 must be",
        SafeTorch(nnodes=2, run_policy=kf.RunPolicy(ttl_seconds_after_finished=-1)),
    ),
    case(
        "shared_memory=True and the pod template both mount /dev/shm, which the backend refuses",
        SafeTorch(),
        shared_memory=True,
        pod_template=template(volume_mounts=mount("/dev/shm/")),
    ),
    case(
        "profile.ranks=(0, 99) names a rank that is not there: 2 in all (use 0 to 1)",
        SafeTorch(nproc_per_node=2, profile=Profile(steps=(10, 12), ranks=(0, 99))),
    ),
    case(
        "pod_template='/var/run/safedist/scratch' mounts something where the scratch volume goes (set Scratch(path=",
        SafeTorch(),
        pod_template=template(volume_mounts=mount("/var/run/safedist/scratch")),
    ),
    case(
        "@task environment='RANK' says who a node or rank is, which differs in each",
        SafeTorch(nnodes=2),
        environment={"RANK": "0"},
    ),
    case(
        "@task environment='PET_NNODES' says who a node or rank is",
        SafeTorch(nnodes=2),
        environment={"PET_NNODES": "4"},
    ),
    case(
        "@task environment='SAFEDIST_JOB' is decided by the task config (set what you want in the task config)",
        SafeTorch(nnodes=2),
        environment={"SAFEDIST_JOB": "{}"},
    ),
    case(
        "pod_template env='WORLD_SIZE' says who a node or rank is",
        SafeTorch(nnodes=2),
        pod_template=template(env=[V1EnvVar(name="WORLD_SIZE", value="2")]),
    ),
    case(
        "pod_template container='pytorch' is the name that the backend gives to the primary container 'primary'",
        SafeTorch(nnodes=2),
        pod_template=with_containers("primary", "pytorch"),
    ),
    case(
        "pod_template command=['sh'] is replaced by the task's command (use an init container)",
        SafeTorch(),
        pod_template=template(command=["sh"]),
    ),
    case(
        "pod_template restartPolicy='Always' has a pod that is done started again, for ever",
        SafeTorch(),
        pod_template=with_containers("primary", restart_policy="Always"),
    ),
    case(
        "pod_template init container='warm' has an image that is no text: flytekit builds an ImageSpec for containers",
        SafeTorch(),
        pod_template=with_containers("primary", init_containers=[V1Container(name="warm", image=ImageSpec(name="w"))]),
    ),
    case(
        "pod_template volume='safedist-scratch' is the name of a volume that safedist adds",
        SafeTorch(),
        pod_template=with_containers("primary", volumes=[V1Volume(name="safedist-scratch")]),
    ),
    case(
        "nproc_per_node=8 exceeds pod_template primary limits.nvidia.com/gpu=4",
        SafeTorch(nproc_per_node=8),
        pod_template=asks(limits={"nvidia.com/gpu": "4"}),
    ),
    case(
        "nproc_per_node=8 exceeds worker.limits.gpu=4",
        SafeTorch(nnodes=2, nproc_per_node=8, worker=kf.Worker(limits=Resources(gpu="4"))),
        requests=Resources(gpu="8"),
    ),
    case("requests.gpu='0.5' is not a whole number of GPUs", SafeTorch(), requests=Resources(gpu="0.5")),
    case("requests.gpu='99999999999' is not a whole number", SafeTorch(nnodes="1:2"), requests=Resources(gpu="9" * 11)),
    case("is not an accelerator", SafeTorch(), accelerator=Secret(group="g", key="k")),
    case(
        "requests.gpu='4' differs from limits.gpu='8' (Kubernetes wants the same number in both; give one of them)",
        SafeTorch(),
        requests=Resources(gpu="4"),
        limits=Resources(gpu="8"),
    ),
    case(
        "pod_template primary limits.amd.com/gpu='4' is another kind of GPU than the task's own gpu=",
        SafeTorch(),
        requests=Resources(gpu="4"),
        pod_template=asks(limits={"amd.com/gpu": "4"}),
    ),
    case(
        "nproc_per_node=None is not decided by requests.gpu=8 and worker.requests.gpu=4",
        SafeTorch(nnodes=2, worker=kf.Worker(requests=Resources(gpu="4"))),
        requests=Resources(gpu="8"),
    ),
    case(
        "master.requests.gpu='0' does not take away requests.gpu=8: the backend drops a zero",
        SafeTorch(nnodes=2, nproc_per_node=1, master=kf.Master(requests=Resources(gpu="0"))),
        requests=Resources(gpu="8"),
    ),
    case(
        "nproc_per_node=None is not decided by master, which gets none and worker.requests.gpu=4: every node runs the "
        "same number of ranks",
        SafeTorch(nnodes=2, worker=kf.Worker(requests=Resources(gpu="4"))),
    ),
    case(
        "nproc_per_node=1 exceeds worker's GPUs=0 (request GPUs for every role)",
        SafeTorch(nnodes=2, nproc_per_node=1, master=kf.Master(requests=Resources(gpu="4"))),
    ),
    case(
        "pod_template primary limits.nvidia.com/mig-1g.5gb='1' is a second kind of GPU, and every rank has one",
        SafeTorch(nproc_per_node=1),
        pod_template=asks(limits={"nvidia.com/gpu": "1", "nvidia.com/mig-1g.5gb": "1"}),
    ),
    case(
        "pod_template primary requests.rdma/ib='4' has no limit, without which the API server refuses the pod",
        SafeTorch(),
        pod_template=asks(requests={"rdma/ib": "4"}),
    ),
    case(
        "requests.hugepages-2Mi='1Gi' differs from pod_template primary limits.hugepages-2Mi='2Gi'",
        SafeTorch(),
        pod_template=asks(requests={"hugepages-2Mi": "1Gi"}, limits={"hugepages-2Mi": "2Gi"}),
    ),
    case(
        "pod_template env='A' is there twice in the container primary",
        SafeTorch(),
        pod_template=template(env=[V1EnvVar(name="A", value="1"), V1EnvVar(name="A", value="2")]),
    ),
    case(
        "requests.gpu='0' does not take away pod_template primary limits.nvidia.com/gpu=4",
        SafeTorch(),
        requests=Resources(gpu="0"),
        pod_template=asks(limits={"nvidia.com/gpu": "4"}),
    ),
    case("accelerator='nvidia-tesla-t4' names a kind of GPU, but no GPU is requested", SafeTorch(), accelerator=T4),
    case(
        "is a TPU, which neither Horovod nor torch ranks here can use",
        SafeTorch(),
        accelerator=V5E,
        limits=Resources(gpu="1"),
    ),
    case(
        "nproc_per_node=None cannot be derived from 3 slices: a process sees one MIG slice",
        SafeTorch(),
        accelerator=A100.partition_2g_10gb,
        limits=Resources(gpu="3"),
    ),
    case(
        "pod_template={} is not a PodTemplate of flytekit (use PodTemplate(pod_spec=V1PodSpec(...)))",
        SafeTorch(),
        pod_template={},
    ),
    case(
        "requests.mem='lots' is not an amount that Kubernetes can read (write e.g. '2', '500m' or '64Gi')",
        SafeTorch(),
        requests=Resources(mem="lots"),
    ),
    case(
        "worker.limits.mem='64 GB' is not an amount that Kubernetes can read",
        SafeTorch(nnodes=2, worker=kf.Worker(limits=Resources(mem="64 GB"))),
    ),
    case(
        "requests.mem='8Gi' is above limits.mem='4096Mi' (raise the limit, or lower the request)",
        SafeTorch(),
        requests=Resources(mem="8Gi"),
        limits=Resources(mem="4096Mi"),
    ),
    case("resources.cpu[0]='2' is above resources.cpu[1]='500m'", SafeTorch(), resources=Resources(cpu=("2", "500m"))),
    case(
        "worker.requests.cpu='16' is above limits.cpu='8'",
        SafeTorch(nnodes=2, worker=kf.Worker(requests=Resources(cpu="16"))),
        limits=Resources(cpu="8"),
    ),
    case(
        "holds a pair of request and limit, which only resources= takes",
        SafeTorch(),
        requests=Resources(cpu=("1", "2")),
    ),
    case(
        "is given beside requests or limits, which say the same",
        SafeTorch(),
        requests=Resources(cpu="1"),
        resources=Resources(cpu="1"),
    ),
    case("worker.requests=5 is not a Resources", SafeTorch(nnodes=2, worker=kf.Worker(requests=5))),
    case(
        "accelerator='T4' is not an accelerator (use one of flytekit.extras.accelerators)",
        SafeTorch(),
        accelerator="T4",
    ),
    case("shared_memory=5 is not True, False or a quantity", SafeTorch(), shared_memory=5),
    case(
        "@task environment='SAFEDIST_ENDPOINT' is not where nodes can meet (write HOST:PORT)",
        SafeTorch(nnodes=2),
        environment={"SAFEDIST_ENDPOINT": "garbage"},
    ),
    case(
        "@task environment='SAFEDIST_ENDPOINT' says where nodes meet, and one node meets none (remove it)",
        SafeTorch(),
        environment={"SAFEDIST_ENDPOINT": "h:1"},
    ),
    case(
        "@task environment='SAFEDIST_GRACE_SECONDS' only says what the pod has (set "
        "terminationGracePeriodSeconds in the pod template)",
        SafeTorch(),
        environment={"SAFEDIST_GRACE_SECONDS": "300"},
    ),
    case(
        "logs.show=(0, 5) names a rank that is not there: 2 in all", SafeTorch(nproc_per_node=2, logs=Logs(show=(0, 5)))
    ),
    case(
        "logs.show=range(0, 3) names a rank that is not there: 2 in all (use 0 to 1)",
        SafeTorch(nproc_per_node=1, nnodes="1:2", logs=Logs(show=range(3))),
    ),
    case("hangs.floor=20 is more than hangs.ceiling (use at most 10)", SafeTorch(hangs=Hangs(floor=20, ceiling=10))),
    case(
        "=23456 is the port at which nodes meet (use another)", SafeTorch(nnodes=2, metrics=Metrics(prometheus=23456))
    ),
    *(
        case(f"scratch='{places}' name more than one place for it (keep one)", SafeTorch(scratch=scratch))
        for scratch, places in (
            (Scratch(claim="c", volume="memory"), "claim and volume"),
            (Scratch(path="/data", claim="c"), "path and claim"),
            (Scratch(path="/data", volume="memory"), "path and volume"),
        )
    ),
    case("labels={'a': 1} are not names and values", SafeTorch(), labels={"a": 1}),
    case("environment='list' is not a mapping", SafeTorch(), environment=["A=1"]),
    case("@task environment['A']='int' is not text (use a str", SafeTorch(), environment={"A": 1}),
    case("@task environment='A=B' is not a name of a variable", SafeTorch(), environment={"A=B": "1"}),
    case(
        "pod_template='PodTemplate' cannot be read: AttributeError: 'dict' object has no attribute 'containers'",
        SafeTorch(),
        pod_template=PodTemplate(pod_spec={"containers": []}),
    ),
    case(
        "pod_template='PodTemplate' cannot be read (make it of kubernetes.client's classes)",
        SafeTorch(),
        pod_template=with_containers("primary", termination_grace_period_seconds="x"),
    ),
    case(
        "pod_template='PodTemplate' cannot be read (make it of kubernetes.client's",
        SafeTorch(),
        pod_template=with_containers("primary", termination_grace_period_seconds=True),
    ),
]


def test_a_job_that_cannot_work_is_refused_with_its_reason() -> None:
    errors = {text: refused(config, **kwargs) for text, config, kwargs in REFUSED}

    assert {text: str(error) for text, error in errors.items() if text not in str(error)} == {}
    assert [str(error) for error in errors.values() if len(error.problems) != 1] == []
    assert [str(error) for error in errors.values() if not error.problems[0].repair] == []
    assert len(errors) == len(REFUSED)


def test_a_name_that_no_resolver_can_be_asked_for_is_not_where_nodes_meet() -> None:
    for host in ("node-0..svc", ".svc", "x" * 64):
        error = refused(SafeTorch(nnodes=2), environment={"SAFEDIST_ENDPOINT": f"{host}:1"})
        assert "is not where nodes can meet" in str(error)


def yields(x: int) -> Iterator[int]:
    yield x


def test_a_generator_function_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="function='yields' is a generator: a call of it runs nothing, and what it yie"
    ):
        task(task_config=SafeTorch())(yields)


def test_values_of_variables_stay_out_of_messages() -> None:
    assert "hunter2" not in str(refused(SafeTorch(), environment={"MASTER_ADDR": "hunter2"}))


def test_what_the_user_wrote_stays_as_it_is() -> None:
    worker, policy = kf.Worker(image=5, requests=Resources(cpu=("1", "2"))), kf.RunPolicy(backoff_limit="x")
    assert len(refused(SafeTorch(nnodes=2, worker=worker, run_policy=policy)).problems) == 3
    assert (worker.image, worker.requests.cpu, policy.backoff_limit) == (5, ("1", "2"), "x")


# --- all at once ------------------------------------------------------------------------------------------------------
def test_everything_wrong_is_reported_at_once_with_the_task() -> None:
    config = SafeHorovod(
        nnodes="x",
        nproc_per_node=8,
        start_method="fork",  # type: ignore[arg-type]
        scratch=Scratch(path="a", size_limit="c"),
        run_policy={},  # type: ignore[arg-type]
        worker=kf.Worker(replicas=7, restart_policy="no", requests=Resources(mem="x")),
        logs=Logs(show=(-1,)),
    )

    error = refused(config, shared_memory="x", requests=Resources(gpu="0.5"), pod_template=5)

    assert {problem.field for problem in error.problems} == {
        *("nnodes", "start_method", "scratch.path", "scratch.size_limit", "run_policy", "worker.restart_policy"),
        *("worker.requests.mem", "logs.show", "shared_memory", "requests.gpu", "pod_template"),
    }
    assert str(error).startswith("11 problems: nnodes='x' is not a number of nodes")
    assert str(error).endswith("[task=test_refused.train]")


def test_requests_that_are_not_their_limits_are_told_in_the_order_in_which_they_were_written() -> None:
    names = [f"example.com/{letter}" for letter in "hcagfbed"]
    template = asks(requests=dict.fromkeys(names, "2"), limits=dict.fromkeys(names, "1"))
    error = refused(SafeTorch(), pod_template=template)
    assert [each.field.rpartition("/")[2] for each in error.problems if "differs from" in str(each)] == list("hcagfbed")


# --- arguments of Flyte's own classes ---------------------------------------------------------------------------------
THEIRS = [
    *("operator", "launcher", "slots", "replicas", "num_workers", "num_launcher_replicas", "rdzv_configs"),
    *("elastic_timeout", "monitor_interval", "increase_shared_mem", "discovery_script_path", "verbose", "log_level"),
]


def test_every_argument_of_flytes_own_classes_is_taken_or_refused_with_what_to_write_instead() -> None:
    classes = (kf.Elastic, kf.PyTorch, kfmpi.MPIJob, kfmpi.HorovodJob, kfmpi.Worker)
    theirs = {field.name for cls in classes for field in dataclasses.fields(cls)} | {"operator"}
    ours = {field.name for field in dataclasses.fields(SafeTorch)}
    assert theirs - ours - {"command", "image", "requests", "limits", "restart_policy"} == set(THEIRS)

    with pytest.raises(ConfigError) as caught:
        SafeTorch(nnodes=2, **dict.fromkeys(THEIRS, 1))

    assert {problem.field for problem in caught.value.problems} == set(THEIRS)
    for problem in caught.value.problems:
        assert problem.reason == "is no field of SafeTorch"
        assert problem.repair.startswith(("write ", "leave it out: "))


def test_workers_of_mpi_are_no_fewer_nodes_than_they_were() -> None:
    with pytest.raises(ConfigError, match=r"write nnodes=, the number of pods that train, node 0 among them"):
        SafeHorovod(num_workers=4)


def test_a_field_that_is_misspelled_is_refused_with_the_one_that_is_near() -> None:
    with pytest.raises(
        ConfigError, match=r"nproc_pernode=2 is no field of SafeHorovod \(did you mean nproc_per_node\?\)"
    ):
        SafeHorovod(nproc_pernode=2)
    with pytest.raises(ConfigError, match=r"np=2 is no field of SafeTorch \(did you mean nproc_per_node\?\)"):
        SafeTorch(np=2)
    with pytest.raises(ConfigError, match=r"gpus=2 is no field of SafeTorch \(leave it out; there are nnodes, nproc_"):
        SafeTorch(gpus=2)
    with pytest.raises(ConfigError, match=r"begin=1 is no field of Timeouts \(leave it out; there are code, start, "):
        Timeouts(begin=1)


def test_a_misspelled_field_hides_no_other_that_is_wrong() -> None:
    with pytest.raises(ConfigError) as caught:
        SafeTorch(max_restart=1, nproc_per_node="auto", timeouts=Timeouts(rendezvous="5m"))
    assert [each.field for each in caught.value.problems] == ["max_restart", "nproc_per_node", "timeouts.rendezvous"]
    with pytest.raises(ConfigError) as caught:
        Profile(step=(10, 12))  # without the field that it must have
    assert [each.field for each in caught.value.problems] == ["step"]


@pytest.mark.parametrize("cls", [SafeTorch, SafeHorovod, Hangs, Logs, Metrics, Preflight, Profile, Scratch, Timeouts])
def test_a_value_without_a_name_is_refused_with_the_names_that_there_are(cls) -> None:
    first, *_ = dataclasses.fields(cls)
    repair = rf"\(write {cls.__name__}\(NAME=\.\.\.\), with one of: {first.name}"
    with pytest.raises(ConfigError, match=rf"argument 1='ab' has no name {repair}"):
        cls("ab")


# --- classes of the user's own ----------------------------------------------------------------------------------------
T = TypeVar("T")


class Team:
    """What a team puts into its configs, and has made of each."""

    configs: ClassVar[list[str]] = []

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Team.configs.append(cls.__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixed(Team, Generic[T], SafeHorovod):
    operator: str = "Ada"
    team: NobodyKnows = None  # type: ignore[name-defined]  # noqa: F821


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Slotted(SafeTorch):
    nnodes: int | str = 2


class Computed(SafeTorch):
    def __init__(self, size: int) -> None:
        super().__init__(nnodes=size)


class BigWorker(kf.Worker):
    """A team's own preset."""


def test_a_config_of_a_users_own_class_is_a_task_with_ranks() -> None:
    assert "Mixed" in Team.configs
    for config, backend, nodes in (
        (Mixed(operator="Grace"), "horovod", 1),
        (Slotted(), "torch", 2),
        (Computed(3), "torch", 3),
    ):
        made = declare(config)
        assert isinstance(made, SafeTask)
        assert (made.plan.backend, made.plan.max_nodes) == (backend, nodes)
    assert [problem.field for problem in refused(Mixed(scratch="x")).problems] == ["scratch"]  # type: ignore[arg-type]
    config = SafeTorch(nnodes="1:2", nproc_per_node=8, worker=BigWorker(limits=Resources(gpu="4")))
    assert "exceeds worker.limits.gpu=4" in str(refused(config))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset(SafeTorch):
    """Fields of ours with types and defaults of the user's, and fields that are none of ours."""

    nnodes: int = 0
    nproc_per_node: int = 8
    max_restarts: int = -3
    start_method: str = "fork"
    lr: float = 0.1
    kind: Literal[1, 2] = 1
    seed: int = 0
    model: Team = dataclasses.field(default_factory=Team)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patient(Timeouts):
    stop: float = float("nan")


def test_defaults_of_a_users_own_class_are_checked_as_ours_are() -> None:
    fields = [problem.field for problem in refused(Preset(nproc_per_node=0, timeouts=Patient())).problems]
    assert fields == ["nnodes", "nproc_per_node", "max_restarts", "start_method", "timeouts.stop"]


def test_a_users_own_class_may_name_other_types() -> None:
    config = Preset(nnodes="2:4", max_restarts=0, start_method="spawn", lr=1, kind=2, seed=1 << 40, model=None)  # type: ignore[arg-type]
    assert declare(config).plan.nnodes == "2:4"


def test_a_class_in_the_place_of_a_config_is_refused() -> None:
    for cls in (SafeTorch, SafeHorovod, Preset):
        assert f"task_config={cls.__name__!r} is a class, of which flytekit makes a task without ranks (write" in str(
            refused(cls)
        )
    assert type(declare(Team)) is PythonFunctionTask


def test_a_value_in_a_class_that_is_no_dataclass_is_refused() -> None:
    class Plain(SafeTorch):
        nnodes = 4

    class Settings:
        nnodes = 4

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Inherits(Settings, SafeTorch):
        """The field's own default would win."""

    for cls in (Plain, Inherits):
        assert f"nnodes=4 stands in {cls.__name__}, and is no default of a field there (write NAME" in str(
            refused(cls())
        )


def test_a_class_without_fields_of_its_own_beside_another_dataclass_is_refused() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Owner:
        owner: str = "ml"

    class Bare(Owner, SafeTorch):
        """``@dataclass`` would give it the fields of both."""

    with pytest.raises(ConfigError, match="write @dataclass above class Bare"):
        Bare()


def test_a_queue_alone_needs_a_flytekit_that_has_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flytekit_inside, "knows_labels", lambda: False)
    declare(SafeTorch(nnodes=2))
    with pytest.raises(
        ConfigError, match=r"queue='gpu' is a label, which this flytekit has none of \(upgrade flytekit"
    ):
        declare(SafeTorch(nnodes=2, queue="gpu"))
