"""Every job that cannot work is refused when the decorator runs, with field, value and repair."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flytekit import Resources, task
from flytekit.core.pod_template import PodTemplate
from flytekit.extras.accelerators import A100, T4, V5E
from flytekitplugins import kfmpi
from flytekitplugins import kfpytorch as kf
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes.client import V1Container, V1EnvVar, V1PodSpec, V1ResourceRequirements, V1Volume, V1VolumeMount

from flytekitplugins_safedist import Logs, Profile, SafeHorovod, SafeTorch, Scratch
from flytekitplugins_safedist.config.arguments import TaskArguments
from flytekitplugins_safedist.errors import ConfigError
from flytekitplugins_safedist.plugin.serialization import plan_task


def train(x: int) -> int:
    return x


def declare(config: Any, **kwargs: Any) -> Any:
    return task(task_config=config, **kwargs)(train)


def template(**container: Any) -> PodTemplate:
    volumes = [V1Volume(name="v")]
    return PodTemplate(pod_spec=V1PodSpec(containers=[V1Container(name="primary", **container)], volumes=volumes))


def with_containers(*names: str, **spec: Any) -> PodTemplate:
    return PodTemplate(pod_spec=V1PodSpec(containers=[V1Container(name=name, image="i:1") for name in names], **spec))


def gpus(value: str) -> V1ResourceRequirements:
    return V1ResourceRequirements(limits={"nvidia.com/gpu": value})


def run_policy(**kwargs: Any) -> Callable[[], Any]:
    return lambda: declare(SafeTorch(nnodes=2, run_policy=kf.RunPolicy(**kwargs)))


def mount(path: str) -> list[V1VolumeMount]:
    return [V1VolumeMount(name="v", mount_path=path)]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "role of a pod": (
        lambda: declare(SafeTorch(master=kf.Master())),
        "master='set' has no effect: this 1-node job has no roles: it is an ordinary pod (drop master)",
    ),
    "master of an elastic job": (
        lambda: declare(SafeTorch(nnodes="2:3", master=kf.Master())),
        "master='set' has no effect: this elastic job has worker (drop master or use worker)",
    ),
    "role of another class": (
        lambda: declare(SafeTorch(nnodes=2, worker={"image": "x"})),
        "worker={'image': 'x'} is not the Worker of flytekitplugins.kfpytorch (import Worker from "
        "flytekitplugins.kfpytorch)",
    ),
    "role of the plugin for MPI": (
        lambda: declare(SafeTorch(nnodes=2, worker=kfmpi.Worker())),
        "is not the Worker of flytekitplugins.kfpytorch (import Worker from flytekitplugins.kfpytorch)",
    ),
    "restart policy of the plugin for MPI": (
        lambda: declare(SafeTorch(nnodes=2, worker=kf.Worker(restart_policy=kfmpi.RestartPolicy.NEVER))),
        "is not the RestartPolicy of flytekitplugins.kfpytorch (import RestartPolicy from flytekitplugins.kfpytorch)",
    ),
    "replicas against nodes": (
        lambda: declare(SafeTorch(nnodes=4, worker=kf.Worker(replicas=4))),
        "worker.replicas=4 contradicts nnodes, which makes 3 (leave replicas out; nnodes decides)",
    ),
    "queue of another name than any has": (
        lambda: declare(SafeTorch(nnodes=2, queue="team a/gpu")),
        "queue='team a/gpu' is not the name of a LocalQueue (use small letters, digits, '-' and '.')",
    ),
    "queue against a label": (
        lambda: declare(SafeTorch(nnodes=2, queue="gpu"), labels={"kueue.x-k8s.io/queue-name": "cpu"}),
        "queue='gpu' is another than @task's label kueue.x-k8s.io/queue-name=cpu (give one of the two)",
    ),
    "image of a role as number": (
        lambda: declare(SafeTorch(nnodes=2, worker=kf.Worker(image=5))),
        "worker.image=5 is not text (use a str without NUL and lone surrogates)",
    ),
    "replicas as text": (
        lambda: declare(SafeTorch(nnodes=2, worker=kf.Worker(replicas="1"))),
        "worker.replicas='1' is not a whole number",
    ),
    "restart policy as text": (
        lambda: declare(SafeTorch(nnodes=2, worker=kf.Worker(restart_policy="OnFailure"))),
        "worker.restart_policy='OnFailure' is not the RestartPolicy of flytekitplugins.kfpytorch",
    ),
    "run policy as dict": (
        lambda: declare(SafeTorch(nnodes=2, run_policy={})),
        "run_policy={} is not the RunPolicy of flytekitplugins.kfpytorch",
    ),
    "run policy of a pod": (
        lambda: declare(SafeTorch(run_policy=kf.RunPolicy())),
        "run_policy='set' has no effect: nnodes=1 is an ordinary pod, not a job",
    ),
    "clean pod policy as text": (
        run_policy(clean_pod_policy="All"),
        "='All' is not the CleanPodPolicy of flytekitplugins",
    ),
    "no backoff": (run_policy(backoff_limit=0), "run_policy.backoff_limit=0 must be a whole number, 1 or more"),
    "no deadline": (run_policy(active_deadline_seconds=0), "run_policy.active_deadline_seconds=0 must be"),
    "negative ttl": (
        run_policy(ttl_seconds_after_finished=-1),
        "run_policy.ttl_seconds_after_finished=-1 must be",
    ),
    "shm nonsense": (
        lambda: declare(SafeTorch(), shared_memory="a lot"),
        "shared_memory='a lot' is not True, False or a quantity",
    ),
    "shm mounted twice": (
        lambda: declare(SafeTorch(), shared_memory=True, pod_template=template(volume_mounts=mount("/dev/shm/"))),
        "shared_memory=True and the pod template both mount /dev/shm, which the backend refuses",
    ),
    "scratch medium": (
        lambda: declare(SafeTorch(scratch=Scratch(volume="tape"))),  # type: ignore[arg-type]
        "scratch.volume='tape' is unknown (use one of: 'disk', 'memory')",
    ),
    "profile of one step": (
        lambda: declare(SafeTorch(profile=Profile(steps=10))),  # type: ignore[arg-type]
        "profile.steps=10 is not a first and a last step",
    ),
    "profile backwards": (
        lambda: declare(SafeTorch(profile=Profile(steps=(5, 4)))),
        "profile.steps=(5, 4) is not a first and a last step (use (10, 12), the first >= 1)",
    ),
    "profile of a rank too many": (
        lambda: declare(SafeTorch(nproc_per_node=2, profile=Profile(steps=(10, 12), ranks=(0, 99)))),
        "profile.ranks=(0, 99) names a rank that is not there: 2 in all (use 0 to 1)",
    ),
    "claim beside memory": (
        lambda: declare(SafeTorch(scratch=Scratch(claim="c", volume="memory"))),
        "scratch.claim='c' is mounted in the place of a volume (drop it, or volume='memory')",
    ),
    "claim without a name": (
        lambda: declare(SafeTorch(scratch=Scratch(claim=""))),
        "scratch.claim='' is not a name (name a PersistentVolumeClaim)",
    ),
    "path beside a claim": (
        lambda: declare(SafeTorch(scratch=Scratch(path="/data", claim="c"))),
        "scratch.path='/data' is where scratch goes, so that no volume is mounted for it (drop it, or claim)",
    ),
    "path beside memory": (
        lambda: declare(SafeTorch(scratch=Scratch(path="/data", volume="memory"))),
        "scratch.path='/data' is where scratch goes, so that no volume is mounted for it (drop it, or volume)",
    ),
    "scratch over a mount": (
        lambda: declare(SafeTorch(), pod_template=template(volume_mounts=mount("/var/run/safedist/scratch"))),
        "pod_template='/var/run/safedist/scratch' mounts something where the scratch volume goes (set Scratch(path=",
    ),
    "identity in the environment": (
        lambda: declare(SafeTorch(nnodes=2), environment={"RANK": "0"}),
        "@task environment='RANK' says who a node or rank is, which differs in each",
    ),
    "operator's variables": (
        lambda: declare(SafeTorch(nnodes=2), environment={"PET_NNODES": "4"}),
        "@task environment='PET_NNODES' says who a node or rank is",
    ),
    "pinned in the environment": (
        lambda: declare(SafeTorch(nnodes=2), environment={"SAFEDIST_JOB": "{}"}),
        "@task environment='SAFEDIST_JOB' is decided by the task config (set what you want in the task config)",
    ),
    "identity in the template": (
        lambda: declare(SafeTorch(nnodes=2), pod_template=template(env=[V1EnvVar(name="WORLD_SIZE", value="2")])),
        "pod_template env='WORLD_SIZE' says who a node or rank is",
    ),
    "sidecar with the operator's name": (
        lambda: declare(SafeTorch(nnodes=2), pod_template=with_containers("primary", "pytorch")),
        "pod_template container='pytorch' is the name that the backend gives to the primary container 'primary'",
    ),
    "command in the template": (
        lambda: declare(SafeTorch(), pod_template=template(command=["sh"])),
        "pod_template command=['sh'] is replaced by the task's command (use an init container)",
    ),
    "volume of ours": (
        lambda: declare(
            SafeTorch(), pod_template=with_containers("primary", volumes=[V1Volume(name="safedist-scratch")])
        ),
        "pod_template volume='safedist-scratch' is the name of a volume that safedist adds",
    ),
    "ranks above requests": (
        lambda: declare(SafeTorch(nproc_per_node=8), requests=Resources(gpu="4")),
        "nproc_per_node=8 exceeds requests.gpu=4 (lower it to 4 or request 8 GPUs)",
    ),
    "ranks above limits": (
        lambda: declare(SafeTorch(nproc_per_node=8), limits=Resources(gpu="4")),
        "nproc_per_node=8 exceeds limits.gpu=4",
    ),
    "ranks above resources": (
        lambda: declare(SafeTorch(nproc_per_node=8), resources=Resources(gpu=4)),
        "nproc_per_node=8 exceeds resources.gpu=4",
    ),
    "ranks above the template": (
        lambda: declare(SafeTorch(nproc_per_node=8), pod_template=template(resources=gpus("4"))),
        "nproc_per_node=8 exceeds pod_template primary limits.nvidia.com/gpu=4",
    ),
    "ranks above a role": (
        lambda: declare(
            SafeTorch(nnodes=2, nproc_per_node=8, worker=kf.Worker(limits=Resources(gpu="4"))),
            requests=Resources(gpu="8"),
        ),
        "nproc_per_node=8 exceeds worker.limits.gpu=4",
    ),
    "part of a GPU": (
        lambda: declare(SafeTorch(), requests=Resources(gpu="0.5")),
        "requests.gpu='0.5' is not a whole number of GPUs",
    ),
    "request against limit": (
        lambda: declare(SafeTorch(), requests=Resources(gpu="4"), limits=Resources(gpu="8")),
        "requests.gpu='4' differs from limits.gpu='8' (Kubernetes wants the same number in both; give one of them)",
    ),
    "pair against itself": (
        lambda: declare(SafeTorch(), resources=Resources(gpu=("4", "8"))),
        "resources.gpu[0]='4' differs from resources.gpu[1]='8'",
    ),
    "two kinds of GPUs": (
        lambda: declare(
            SafeTorch(),
            requests=Resources(gpu="4"),
            pod_template=template(resources=V1ResourceRequirements(limits={"amd.com/gpu": "4"})),
        ),
        "pod_template primary limits.amd.com/gpu='4' is another kind of GPU than the task's own gpu=",
    ),
    "roles differ": (
        lambda: declare(
            SafeTorch(nnodes=2, worker=kf.Worker(requests=Resources(gpu="4"))),
            requests=Resources(gpu="8"),
        ),
        "nproc_per_node=None is not decided by requests.gpu=8 and worker.requests.gpu=4",
    ),
    "role without GPUs": (
        lambda: declare(
            SafeTorch(nnodes=2, nproc_per_node=1, master=kf.Master(requests=Resources(gpu="0"))),
            requests=Resources(gpu="8"),
        ),
        "master.requests.gpu='0' does not take away requests.gpu=8: the backend drops a zero",
    ),
    "GPUs of one role only": (
        lambda: declare(SafeTorch(nnodes=2, worker=kf.Worker(requests=Resources(gpu="4")))),
        "nproc_per_node=None is not decided by master, which gets none and worker.requests.gpu=4: every node runs the "
        "same number of ranks",
    ),
    "a rank without a GPU": (
        lambda: declare(SafeTorch(nnodes=2, nproc_per_node=1, master=kf.Master(requests=Resources(gpu="4")))),
        "nproc_per_node=1 exceeds worker's GPUs=0 (request GPUs for every role)",
    ),
    "two kinds of GPUs in the template": (
        lambda: declare(
            SafeTorch(nproc_per_node=1),
            pod_template=template(
                resources=V1ResourceRequirements(limits={"nvidia.com/gpu": "1", "nvidia.com/mig-1g.5gb": "1"})
            ),
        ),
        "pod_template primary limits.nvidia.com/mig-1g.5gb='1' is a second kind of GPU, and every rank has one",
    ),
    "RDMA without a limit": (
        lambda: declare(
            SafeTorch(), pod_template=template(resources=V1ResourceRequirements(requests={"rdma/ib": "4"}))
        ),
        "pod_template primary requests.rdma/ib='4' has no limit, without which the API server refuses the pod",
    ),
    "hugepages that differ": (
        lambda: declare(
            SafeTorch(),
            pod_template=template(
                resources=V1ResourceRequirements(requests={"hugepages-2Mi": "1Gi"}, limits={"hugepages-2Mi": "2Gi"})
            ),
        ),
        "requests.hugepages-2Mi='1Gi' differs from pod_template primary limits.hugepages-2Mi='2Gi'",
    ),
    "a variable twice in the template": (
        lambda: declare(
            SafeTorch(), pod_template=template(env=[V1EnvVar(name="A", value="1"), V1EnvVar(name="A", value="2")])
        ),
        "pod_template env='A' is there twice in the container primary",
    ),
    "a zero over the template's GPUs": (
        lambda: declare(SafeTorch(), requests=Resources(gpu="0"), pod_template=template(resources=gpus("4"))),
        "requests.gpu='0' does not take away pod_template primary limits.nvidia.com/gpu=4",
    ),
    "accelerator without a GPU": (
        lambda: declare(SafeTorch(), accelerator=T4),
        "accelerator='nvidia-tesla-t4' names a kind of GPU, but no GPU is requested",
    ),
    "not a GPU": (
        lambda: declare(SafeTorch(), accelerator=V5E, limits=Resources(gpu="1")),
        "is a TPU, which neither Horovod nor torch ranks here can use",
    ),
    "slices undecided": (
        lambda: declare(SafeTorch(), accelerator=A100.partition_2g_10gb, limits=Resources(gpu="3")),
        "nproc_per_node=None cannot be derived from 3 slices: a process sees one MIG slice",
    ),
}

REFUSED |= {
    "scratch as text": (
        lambda: declare(SafeTorch(scratch="200Gi")),  # type: ignore[arg-type]
        "scratch='200Gi' is not a Scratch",
    ),
    "pod template as dict": (
        lambda: declare(SafeTorch(), pod_template={}),
        "pod_template={} is not a PodTemplate (use PodTemplate(pod_spec=V1PodSpec(...)))",
    ),
    "pod spec as dict": (
        lambda: declare(SafeTorch(), pod_template=PodTemplate(pod_spec={"containers": []})),
        "pod_template.pod_spec='dict' cannot be read: AttributeError",
    ),
    "two containers of one name": (
        lambda: declare(SafeTorch(), pod_template=with_containers("primary", "side", "side")),
        "pod_template container='side' is the name of 2 containers (give each its own)",
    ),
    "an init container of the same name": (
        lambda: declare(
            SafeTorch(), pod_template=with_containers("a", init_containers=[V1Container(name="a", image="i:1")])
        ),
        "pod_template container='a' is the name of 2 containers",
    ),
    "backoff beyond counting": (
        run_policy(backoff_limit=2**40),
        "run_policy.backoff_limit=1099511627776 is not a whole number (use an int of 32 bits)",
    ),
    "memory that is no amount": (
        lambda: declare(SafeTorch(), requests=Resources(mem="lots")),
        "requests.mem='lots' is not an amount that Kubernetes can read (write e.g. '2', '500m' or '64Gi')",
    ),
    "memory of a role": (
        lambda: declare(SafeTorch(nnodes=2, worker=kf.Worker(limits=Resources(mem="64 GB")))),
        "worker.limits.mem='64 GB' is not an amount that Kubernetes can read",
    ),
    "memory of the template": (
        lambda: declare(
            SafeTorch(), pod_template=template(resources=V1ResourceRequirements(requests={"memory": "lots"}))
        ),
        "pod_template primary requests.memory='lots' is not an amount that Kubernetes can read",
    ),
    "request above its limit": (
        lambda: declare(SafeTorch(), requests=Resources(mem="8Gi"), limits=Resources(mem="4096Mi")),
        "requests.mem='8Gi' is above limits.mem='4096Mi' (raise the limit, or lower the request)",
    ),
    "pair above itself": (
        lambda: declare(SafeTorch(), resources=Resources(cpu=("2", "500m"))),
        "resources.cpu[0]='2' is above resources.cpu[1]='500m'",
    ),
    "role's request above the task's limit": (
        lambda: declare(
            SafeTorch(nnodes=2, worker=kf.Worker(requests=Resources(cpu="16"))),
            limits=Resources(cpu="8"),
        ),
        "worker.requests.cpu='16' is above limits.cpu='8'",
    ),
    "a pair as request": (
        lambda: declare(SafeTorch(), requests=Resources(cpu=("1", "2"))),
        "holds a pair of request and limit, which only resources= takes",
    ),
    "resources twice": (
        lambda: declare(SafeTorch(), requests=Resources(cpu="1"), resources=Resources(cpu="1")),
        "is given beside requests or limits, which say the same",
    ),
    "requests as text": (
        lambda: declare(SafeTorch(), requests="4 GPUs"),
        'requests=\'4 GPUs\' is not a Resources (use Resources(cpu="8", mem="32Gi"))',
    ),
    "requests of a role as number": (
        lambda: declare(SafeTorch(nnodes=2, worker=kf.Worker(requests=5))),
        "worker.requests=5 is not a Resources",
    ),
    "accelerator as text": (
        lambda: declare(SafeTorch(), accelerator="T4"),
        "accelerator='T4' is not an accelerator (use one of flytekit.extras.accelerators)",
    ),
    "the task's shared memory as number": (
        lambda: declare(SafeTorch(), shared_memory=5),
        "shared_memory=5 is not True, False or a quantity",
    ),
    "the task's environment as list": (
        lambda: declare(SafeTorch(), environment=["A=1"]),
        "environment='list' is not a mapping",
    ),
    "a number as variable": (
        lambda: declare(SafeTorch(), environment={"A": 1}),
        "@task environment['A']='int' is not text (use a str)",
    ),
    "an endpoint without a port": (
        lambda: declare(SafeTorch(nnodes=2), environment={"SAFEDIST_ENDPOINT": "garbage"}),
        "@task environment='SAFEDIST_ENDPOINT' is not where nodes can meet (write HOST:PORT)",
    ),
    "an endpoint in the template": (
        lambda: declare(
            SafeTorch(nnodes=2), pod_template=template(env=[V1EnvVar(name="SAFEDIST_ENDPOINT", value="h:99999")])
        ),
        "pod_template env='SAFEDIST_ENDPOINT' is not where nodes can meet (write HOST:PORT)",
    ),
    "an endpoint for one node": (
        lambda: declare(SafeTorch(), environment={"SAFEDIST_ENDPOINT": "h:1"}),
        "@task environment='SAFEDIST_ENDPOINT' says where nodes meet, and one node meets none (remove it)",
    ),
    "the grace period as variable": (
        lambda: declare(SafeTorch(), environment={"SAFEDIST_GRACE_SECONDS": "300"}),
        "@task environment='SAFEDIST_GRACE_SECONDS' only says what the pod has (set terminationGracePeriodSeconds in "
        "the pod template)",
    ),
    "a generator function": (
        lambda: task(task_config=SafeTorch())(yields),
        "function='yields' is a generator: a call of it runs nothing, and what it yields is no output",
    ),
}


def yields(x: int) -> Iterator[int]:
    yield x


def test_a_size_that_cannot_be_read_hides_nothing_else() -> None:
    worker = kf.Worker(replicas=7, restart_policy="no", requests=Resources(mem="x"))
    config = SafeHorovod(nnodes=0, run_policy={}, worker=worker)  # type: ignore[arg-type]

    with pytest.raises(ConfigError) as caught:
        declare(config, shared_memory="x", requests=Resources(gpu="0.5"), pod_template=5)

    assert {problem.field for problem in caught.value.problems} == {
        *("nnodes", "shared_memory", "run_policy", "worker.restart_policy"),
        *("worker.requests.mem", "requests.gpu", "pod_template"),
    }


ANYTHING: Any = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from(
        [10**5000, 1e400, float("nan"), "", "\0", "9" * 5000, "1Gi", "2:4", (), [], {}, {"A": 1}, {1}, b"x"]
    ),
    st.sampled_from([Resources(cpu="1"), kf.Worker(), kf.RunPolicy(), Logs(), SafeTorch, len, object(), template()]),
)
FIELDS = [*(f"config.{field.name}" for field in dataclasses.fields(SafeTorch))]
FIELDS += [f"scratch.{field.name}" for field in dataclasses.fields(Scratch)]
FIELDS += [f"worker.{field.name}" for field in dataclasses.fields(kf.Worker)]
FIELDS += [f"policy.{field.name}" for field in dataclasses.fields(kf.RunPolicy)]
FIELDS += [f"task.{name}" for name in TaskArguments.__dataclass_fields__]


@settings(max_examples=400)
@given(st.dictionaries(st.sampled_from(FIELDS), ANYTHING, min_size=1, max_size=3))
def test_whatever_stands_in_a_field_it_is_taken_or_refused_and_nothing_else_is_raised(fields: dict[str, Any]) -> None:
    given: dict[str, dict[str, Any]] = {part: {} for part in ("config", "scratch", "worker", "policy", "task")}
    for name, value in fields.items():
        part, _, field = name.partition(".")
        given[part][field] = value
    config: dict[str, Any] = {"nnodes": 2, "scratch": Scratch(**given["scratch"])}
    if given["worker"]:
        config["worker"] = kf.Worker(**given["worker"])
    if given["policy"]:
        config["run_policy"] = kf.RunPolicy(**given["policy"])
    config |= given["config"]
    with contextlib.suppress(ConfigError):
        plan_task(SafeTorch(**config), given["task"], where={}, function=train)


def test_an_operator_and_a_launcher_are_refused_together_with_what_to_write_instead() -> None:
    with pytest.raises(ConfigError) as caught:
        SafeHorovod(nnodes=2, operator="mpi", launcher=kfmpi.Launcher())

    assert str(caught.value).startswith("2 problems:")
    assert (
        "operator='mpi' is gone: a job of several nodes is a PyTorchJob, for Horovod too, which needs no MPI "
        "(leave it out; the training operator that runs MPIJobs runs PyTorchJobs as well)"
    ) in str(caught.value)
    assert "is gone: a job has no pod that launches the others (leave it out; " in str(caught.value)


def test_a_subclass_may_have_an_operator_of_its_own() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class OfTheTeam(SafeTorch):
        operator: str = "Ada"

    assert OfTheTeam(operator="Grace", nnodes=2).operator == "Grace"


def test_what_depends_on_a_number_of_nodes_that_cannot_be_read_is_left_out() -> None:
    with pytest.raises(ConfigError, match=r"^1 problem: nnodes='x' is not a number of nodes"):
        declare(SafeTorch(nnodes="x", master=kf.Master(), worker=kf.Worker(replicas=7)))


@pytest.mark.parametrize("case", REFUSED)
def test_a_job_that_cannot_work_is_refused_with_its_reason(case: str) -> None:
    make, text = REFUSED[case]

    with pytest.raises(ConfigError) as caught:
        make()

    assert text in str(caught.value)
    assert len(caught.value.problems) == 1
    assert all(problem.repair for problem in caught.value.problems)


def test_a_role_of_a_subclass_is_taken_with_what_it_asks_for() -> None:
    class BigWorker(kf.Worker):
        """A team's own preset."""

    def config(gpu: str) -> SafeTorch:
        return SafeTorch(nnodes="1:2", nproc_per_node=8, worker=BigWorker(limits=Resources(gpu=gpu)))

    declare(config("8"))
    with pytest.raises(ConfigError, match=r"exceeds worker\.limits\.gpu=4"):
        declare(config("4"))


def test_a_config_class_of_a_users_own_whose_annotations_cannot_be_read_is_looked_at_all_the_same() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Preset(SafeTorch):
        team: NobodyKnows = None  # type: ignore[name-defined]  # noqa: F821

    assert declare(Preset(nnodes=2)).plan.max_nodes == 2
    with pytest.raises(ConfigError, match="scratch='x' is not a Scratch"):
        declare(Preset(scratch="x"))  # type: ignore[arg-type]


def test_what_the_user_wrote_stays_as_it_is() -> None:
    worker, policy = kf.Worker(image=5, requests=Resources(cpu=("1", "2"))), kf.RunPolicy(backoff_limit="x")
    with pytest.raises(ConfigError, match="3 problems"):
        declare(SafeTorch(nnodes=2, worker=worker, run_policy=policy))
    assert (worker.image, worker.requests.cpu, policy.backoff_limit) == (5, ("1", "2"), "x")


def test_problems_of_size_and_shape_are_reported_together() -> None:
    with pytest.raises(ConfigError, match="4 problems") as caught:
        declare(
            SafeHorovod(
                nnodes=2,
                nproc_per_node=8,
                max_restarts=-1,
                worker=kf.Worker(replicas=3),
            ),
            shared_memory="x",
            requests=Resources(gpu="4"),
        )

    fields = {problem.field for problem in caught.value.problems}
    assert fields == {"nproc_per_node", "max_restarts", "shared_memory", "worker.replicas"}


def test_values_of_variables_stay_out_of_messages() -> None:
    with pytest.raises(ConfigError) as caught:
        declare(SafeTorch(), environment={"MASTER_ADDR": "hunter2"})

    assert "hunter2" not in str(caught.value)


ACCEPTED: dict[str, tuple[Callable[[], Any], int]] = {
    "no GPUs": (lambda: declare(SafeTorch()), 1),
    "requests": (lambda: declare(SafeTorch(), requests=Resources(gpu="8")), 8),
    "limits": (lambda: declare(SafeTorch(), limits=Resources(gpu=4)), 4),
    "resources": (lambda: declare(SafeTorch(), resources=Resources(gpu=("2", "2"))), 2),
    "template": (lambda: declare(SafeTorch(), pod_template=template(resources=gpus("4"))), 4),
    "template beside the task's cpu": (
        lambda: declare(SafeTorch(), requests=Resources(cpu="4"), pod_template=template(resources=gpus("4"))),
        4,
    ),
    "explicit": (lambda: declare(SafeTorch(nproc_per_node=2), requests=Resources(gpu="8")), 2),
    "roles": (
        lambda: declare(
            SafeTorch(
                nnodes=2,
                master=kf.Master(requests=Resources(gpu="2")),
                worker=kf.Worker(requests=Resources(gpu="2")),
            )
        ),
        2,
    ),
    "worker of an elastic job": (
        lambda: declare(SafeTorch(nnodes="1:2", worker=kf.Worker(requests=Resources(gpu="2")))),
        2,
    ),
    "an elastic job has no master to differ": (
        lambda: declare(
            SafeTorch(nnodes="1:2", worker=kf.Worker(requests=Resources(gpu="2"))),
            requests=Resources(gpu="8"),
        ),
        2,
    ),
    "one slice": (lambda: declare(SafeTorch(), accelerator=A100.partition_2g_10gb, limits=Resources(gpu="1")), 1),
    "explicit slices": (
        lambda: declare(SafeTorch(nproc_per_node=2), accelerator=A100.partition_2g_10gb, limits=Resources(gpu="2")),
        2,
    ),
    "a sidecar's environment is its own": (
        lambda: declare(
            SafeTorch(nnodes=2),
            pod_template=PodTemplate(
                pod_spec=V1PodSpec(
                    containers=[V1Container(name="side", image="i:1", env=[V1EnvVar(name="RANK", value="0")])]
                )
            ),
        ),
        1,
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_ranks_per_node_follow_the_gpus_of_a_pod(case: str) -> None:
    make, nproc = ACCEPTED[case]

    assert make().plan.nproc_per_node == nproc


def test_requests_that_are_not_their_limits_are_told_in_the_order_in_which_they_were_written() -> None:
    names = [f"example.com/{letter}" for letter in "hcagfbed"]
    resources = V1ResourceRequirements(requests=dict.fromkeys(names, "2"), limits=dict.fromkeys(names, "1"))
    with pytest.raises(ConfigError) as caught:
        declare(SafeTorch(), pod_template=template(resources=resources))
    assert [each.field.rpartition("/")[2] for each in caught.value.problems if "differs from" in str(each)] == list(
        "hcagfbed"
    )
