"""The preview: what the pods see, what people are told."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from flytekit import Resources
from flytekit.core.pod_template import PodTemplate
from flytekit.extras.accelerators import A100
from flytekitplugins import kfpytorch
from golden_cases import BAKED, CASES, FAST, GPU8, make, sidecar_template, template_of
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes.client import V1Container, V1PodSpec, V1Toleration

from flytekitplugins_safedist import SafeHorovod, Timeouts
from flytekitplugins_safedist.errors import RenderError
from tests.harness.product import Execution, from_env, job_manifest, pods, summarise


def manifest_of(name: str) -> dict[str, Any]:
    make_task, settings = CASES[name]
    return job_manifest(template_of(make_task(), settings))


def environment(pod: dict[str, Any], container: int = 0) -> dict[str, str]:
    """As Kubernetes gives it: of two values of one name, the last."""
    return {one["name"]: one.get("value", "") for one in pod["spec"]["containers"][container]["env"]}


def told(pod: dict[str, Any]) -> Any:
    """The job, as the pod is told of it."""
    return json.loads(environment(pod)["SAFEDIST_JOB"])


FIXED = ("two-nodes-fast", "four-nodes-8-gpu", "per-role-resources", "sidecars-two-nodes")


@pytest.mark.parametrize("name", FIXED)
def test_topology_reads_from_the_shown_pods_what_the_task_asked_for(name: str) -> None:
    make_task, settings = CASES[name]
    task = make_task()
    shown = pods(job_manifest(template_of(task, settings)))

    found = [from_env(environment(pod), task.plan) for pod in shown]

    asked = task.plan
    assert [one.node_rank for one in found] == list(range(asked.max_nodes))
    assert sorted(rank for one in found for rank in one.ranks()) == list(range(asked.world_size))
    assert {str(one.endpoint) for one in found} == {f"{shown[0]['metadata']['name']}:23456"}


def test_topology_reads_the_shown_pods_of_an_elastic_job() -> None:
    make_task, settings = CASES["elastic"]
    task = make_task()

    found = {from_env(environment(pod), task.plan) for pod in pods(job_manifest(template_of(task, settings)))}

    assert len(found) == 1
    assert found.pop().nnodes == "2:4"


@settings(max_examples=25, deadline=None)
@given(nodes=st.integers(2, 6), nproc=st.integers(1, 8), gpus=st.booleans())
def test_ranks_over_all_shown_pods_are_a_permutation(nodes: int, nproc: int, gpus: bool) -> None:
    asks = {"requests": Resources(gpu=str(nproc))} if gpus else {}
    task = make(SafeHorovod(nnodes=nodes, nproc_per_node=None if gpus else nproc), **asks)

    found = [from_env(environment(pod), task.plan) for pod in pods(job_manifest(template_of(task, FAST)))]

    assert sorted(rank for one in found for rank in one.ranks()) == list(range(nodes * nproc))
    assert len({one.endpoint for one in found}) == 1


def test_the_one_pod_of_one_node_needs_nothing_from_an_operator() -> None:
    make_task, settings = CASES["one-node-8-gpu"]
    task = make_task()
    (pod,) = pods(job_manifest(template_of(task, settings)))

    assert from_env(environment(pod), task.plan).source == "single pod"


def test_the_primary_container_comes_first_where_the_backend_writes() -> None:
    shown = pods(manifest_of("sidecars-two-nodes"))

    worker = environment(shown[1])
    assert shown[1]["spec"]["containers"][0]["name"] == "pytorch"
    assert "_F_WN" in worker
    assert "_F_WN" not in environment(shown[1], container=1)
    assert "SAFEDIST_JOB" in worker
    assert "SAFEDIST_JOB" not in environment(shown[1], container=1)


NEVER, ON_FAILURE = "Never", "OnFailure"
RESTARTS: dict[str, tuple[dict[str, str], int | None]] = {
    "two-nodes-fast": ({"Master": ON_FAILURE, "Worker": ON_FAILURE}, 10 * 2 + 1),
    "elastic": ({"Worker": ON_FAILURE}, 10 * 4 + 1),
    "every-policy": ({"Master": ON_FAILURE, "Worker": ON_FAILURE}, 3),
    "restart-always": ({"Master": "Always", "Worker": NEVER}, 10 * 2 + 1),
}


@pytest.mark.parametrize("name", RESTARTS)
def test_every_lost_pod_comes_back_and_the_operators_limit_is_above_our_own(name: str) -> None:
    manifest = manifest_of(name)
    spec = manifest["spec"]
    roles = spec["pytorchReplicaSpecs"]

    found = {role: roles[role]["restartPolicy"] for role in roles if roles[role]["replicas"]}

    # A failure that repeats must end: without a limit, Kubernetes restarts for ever.
    assert (found, spec["runPolicy"].get("backoffLimit")) == RESTARTS[name]
    assert {pod["spec"]["restartPolicy"] for pod in pods(manifest)} == set(found.values())


@pytest.mark.parametrize(("said", "limit"), [(0, 1), (3, 7), (25, 51)])
def test_the_operators_limit_follows_the_budget_for_lost_nodes(said: int, limit: int) -> None:
    task = make(SafeHorovod(nnodes=2, max_replacements=said))
    manifest = job_manifest(template_of(task, FAST))

    assert manifest["spec"]["runPolicy"]["backoffLimit"] == limit
    for pod in pods(manifest):
        assert told(pod)["max_replacements"] == said


def test_a_limit_of_the_users_lowers_the_budget_below_it() -> None:
    task = make(SafeHorovod(nnodes=2, run_policy=kfpytorch.RunPolicy(backoff_limit=3)))
    manifest = job_manifest(template_of(task, FAST))

    assert manifest["spec"]["runPolicy"]["backoffLimit"] == 3
    assert told(pods(manifest)[0])["max_replacements"] == 2


LOST = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def stays(pod: dict[str, Any]) -> dict[str, object]:
    """How long a pod stays on a machine that the cluster has lost, by taint."""
    return {one.get("key"): one.get("tolerationSeconds") for one in pod["spec"].get("tolerations", ())}


def test_pods_of_several_nodes_leave_a_lost_machine_after_30_s_and_one_alone_after_kubernetes_300() -> None:
    for config in (SafeHorovod(nnodes=2), SafeHorovod(nnodes="2:3")):
        for pod in pods(job_manifest(template_of(make(config), FAST))):
            assert {key: stays(pod).get(key) for key in LOST} == dict.fromkeys(LOST, 30)
    assert stays(job_manifest(template_of(make(SafeHorovod()), FAST))) == {}


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (V1Toleration(key=LOST[0], effect="NoExecute", toleration_seconds=5), {LOST[0]: 5, LOST[1]: 30}),
        (V1Toleration(operator="Exists"), {None: None}),
        (V1Toleration(key=LOST[0], effect="NoSchedule"), {LOST[0]: 30, LOST[1]: 30}),
    ],
    ids=["one", "everything", "another effect"],
)
def test_a_toleration_of_the_users_wins(said: V1Toleration, found: dict[str | None, int | None]) -> None:
    template = PodTemplate(pod_spec=V1PodSpec(containers=[], tolerations=[said]))
    (pod, *_) = pods(job_manifest(template_of(make(SafeHorovod(nnodes=2), pod_template=template), FAST)))

    assert stays(pod) == found


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_grace_period_is_as_long_as_our_own_waits_and_the_pod_is_told(nodes: int) -> None:
    timeouts = Timeouts(preemption=90, stop=7.5)
    manifest = job_manifest(template_of(make(SafeHorovod(nnodes=nodes, timeouts=timeouts)), FAST))

    for pod in pods(manifest) if nodes > 1 else [manifest]:
        assert pod["spec"]["terminationGracePeriodSeconds"] == 133  # 90 + 7.5 + 10 + 25
        assert environment(pod)["SAFEDIST_GRACE_SECONDS"] == "133"


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is warned of by flytekit's log."""
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("flytekit"), "warning", lambda text, *more: said.append(text % more))
    return said


def test_a_grace_period_of_the_users_wins_and_is_warned_of_where_it_is_too_short(warnings: list[str]) -> None:
    for grace, warned in ((45, True), (60, False)):
        warnings.clear()
        template = PodTemplate(pod_spec=V1PodSpec(containers=[], termination_grace_period_seconds=grace))
        manifest = job_manifest(template_of(make(SafeHorovod(), pod_template=template), FAST))
        assert manifest["spec"]["terminationGracePeriodSeconds"] == grace
        assert environment(manifest)["SAFEDIST_GRACE_SECONDS"] == str(grace)
        assert ["terminationGracePeriodSeconds=45 is less than the 60 s" in one for one in warnings] == [True] * warned


@pytest.mark.parametrize(("policy", "lost"), [("NEVER", "fails the whole job"), ("ALWAYS", "never sees it succeed")])
def test_a_policy_of_the_users_wins_with_a_warning_of_what_is_lost(warnings: list[str], policy: str, lost: str) -> None:
    master = kfpytorch.Master(restart_policy=kfpytorch.RestartPolicy[policy])
    manifest = job_manifest(template_of(make(SafeHorovod(nnodes=2, master=master)), FAST))

    assert manifest["spec"]["pytorchReplicaSpecs"]["Master"]["restartPolicy"] == policy.capitalize()
    assert len(warnings) == 1, "once, however often flytekit asks"
    assert "master.restart_policy" in warnings[0]
    assert lost in warnings[0]


def test_pods_that_may_not_restart_need_no_limit() -> None:
    never = kfpytorch.RestartPolicy.NEVER
    roles = {"worker": kfpytorch.Worker(restart_policy=never), "master": kfpytorch.Master(restart_policy=never)}
    spec = job_manifest(template_of(make(SafeHorovod(nnodes=2, **roles)), FAST))["spec"]

    assert spec["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == NEVER
    assert "backoffLimit" not in spec["runPolicy"]


def test_a_role_gives_init_containers_its_resources() -> None:
    init = V1Container(name="fetch", image="f:1", resources={"requests": {"cpu": "1"}, "limits": {"cpu": "1"}})
    template = PodTemplate(pod_spec=V1PodSpec(containers=[], init_containers=[init]))
    worker = kfpytorch.Worker(requests=Resources(cpu="8"), limits=Resources(cpu="8"))
    task = make(SafeHorovod(nnodes=2, worker=worker), pod_template=template)

    job = job_manifest(template_of(task, FAST))

    (found,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["initContainers"]
    assert found["resources"]["limits"] == {"cpu": "8", "memory": "1Gi"}


def test_the_resources_of_the_clusters_pod_template_count_before_the_defaults() -> None:
    base = {"template": {"spec": {"containers": [{"name": "primary", "resources": {"requests": {"cpu": "4"}}}]}}}
    task = make(SafeHorovod(), pod_template_name="base")

    pod = job_manifest(template_of(task, FAST), pod_templates={"base": base})

    assert pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "4"


def test_an_accelerator_becomes_placement() -> None:
    spec = manifest_of("one-node-mig-slice")["spec"]

    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert required["nodeSelectorTerms"][0]["matchExpressions"] == [
        {"key": "k8s.amazonaws.com/accelerator", "operator": "In", "values": ["nvidia-tesla-a100"]},
        {"key": "k8s.amazonaws.com/gpu-partition-size", "operator": "In", "values": ["2g.10gb"]},
    ]
    assert [one["value"] for one in spec["tolerations"]] == ["nvidia-tesla-a100", "2g.10gb"]


def test_template_variables_are_filled_for_an_execution() -> None:
    make_task, settings = CASES["two-nodes-fast"]
    execution = Execution(
        name="run7", attempt=2, files={"{{.input}}": "s3://b/in.pb", "{{.outputPrefix}}": "s3://b/out"}
    )

    job = job_manifest(template_of(make_task(), settings), execution)

    container = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    assert container["args"][container["args"].index("--inputs") + 1] == "s3://b/in.pb"
    assert job["metadata"]["name"] == "run7-n0-2"
    assert {"name": "FLYTE_ATTEMPT_NUMBER", "value": "2"} in container["env"]


@pytest.mark.parametrize(("own", "found"), [(None, "trainer"), ("mine", "mine")])
def test_an_executions_service_account_is_that_of_pods_whose_template_names_none(own: str | None, found: str) -> None:
    template = PodTemplate(pod_spec=V1PodSpec(containers=[], service_account_name=own))
    task = make(SafeHorovod(nnodes=2), pod_template=template)

    job = job_manifest(template_of(task, FAST), Execution(service_account="trainer"))

    assert [pod["spec"]["serviceAccountName"] for pod in pods(job)] == [found, found]


def test_other_task_types_are_not_guessed_at() -> None:
    from flytekit import task
    from golden_cases import train

    with pytest.raises(RenderError, match="cannot be shown"):
        job_manifest(template_of(task(train), BAKED))


def test_pods_of_other_kinds_are_not_guessed_at() -> None:
    with pytest.raises(RenderError, match="cannot be shown"):
        pods({"kind": "JobSet"})


def summary_of(task: Any, **kwargs: Any) -> Any:
    return summarise(job_manifest(template_of(task, FAST)), task="t", **kwargs)


def test_the_summary_counts_what_the_job_takes() -> None:
    summary = summary_of(make(SafeHorovod(nnodes=4), **GPU8), retries=2, max_restarts=3)

    assert dict(summary.facts) == {
        "task": "t",
        "job": "PyTorchJob f0123456789abcdef-n0-0: 1 Master, 3 Worker",
        "nodes": "4",
        "ranks": "32 (8 per node, horovod)",
        "GPUs": "32 in total",
        "images": "registry.example/train:1",
        "restarts": "3 of all ranks together in each attempt, 2 retries of the attempt by Flyte",
        "platform": "Flyte's own defaults; what yours adds or bounds is not shown",
    }
    assert summary.warnings == ()
    assert summary.lines()[0] == "# task      t"


def test_the_summary_of_a_range_has_a_range_of_ranks() -> None:
    assert (
        dict(summary_of(make(SafeHorovod(nnodes="2:4", nproc_per_node=2))).facts)["ranks"]
        == "4 to 8 (2 per node, horovod)"
    )


def host_network() -> PodTemplate:
    return PodTemplate(pod_spec=V1PodSpec(containers=[], host_network=True))


WARNED = {
    "idle GPUs": (
        lambda: make(SafeHorovod(nnodes=2, nproc_per_node=4), **GPU8),
        "8 GPUs per master, but 4 ranks: 4 GPUs",
    ),
    "slices": (
        lambda: make(SafeHorovod(nproc_per_node=2), accelerator=A100.partition_2g_10gb, limits=Resources(gpu="2")),
        "NCCL joins no two slices of one GPU",
    ),
    "sidecars": (lambda: make(SafeHorovod(), pod_template=sidecar_template()), "metrics must end by themselves"),
    "workers that stay away": (
        lambda: make(SafeHorovod(nnodes="1:2", worker=kfpytorch.Worker(restart_policy=kfpytorch.RestartPolicy.NEVER))),
        "a lost worker fails the job",
    ),
    "host network": (lambda: make(SafeHorovod(nnodes=2), pod_template=host_network()), "meet at the same port 23456"),
    "queue": (
        lambda: make(SafeHorovod(nnodes=2), pod_template=sidecar_template()),
        "kueue.x-k8s.io/queue-name is put on the pods, not on the PyTorchJob",
    ),
}


@pytest.mark.parametrize("case", WARNED)
def test_what_people_may_not_have_meant_is_said(case: str) -> None:
    make_task, text = WARNED[case]

    assert any(text in warning for warning in summary_of(make_task()).warnings)


@pytest.mark.parametrize("nnodes", [1, 2, "2:3"])
def test_a_queue_is_a_label_of_the_job_beside_the_tasks_own(nnodes: Any) -> None:
    task = make(SafeHorovod(nnodes=nnodes, queue="gpu"), labels={"team": "vision"})

    assert dict(template_of(task, FAST).metadata.metadata.labels) == {
        "team": "vision",
        "kueue.x-k8s.io/queue-name": "gpu",
    }
    assert dict(template_of(make(SafeHorovod(nnodes=nnodes)), FAST).metadata.metadata.labels) == {}


def test_per_role_images_are_all_named() -> None:
    make_task, _ = CASES["per-role-images"]

    images = dict(summary_of(make_task()).facts)["images"]

    assert images == "registry.example/master:1 (Master), registry.example/worker:1 (Worker)"


def test_limits_above_requests_are_kept_and_requests_above_limits_lowered() -> None:
    # The decorator refuses such a task; a call's own resources may lie so over what it was registered with.
    template = template_of(make(SafeHorovod(), limits=Resources(cpu="4", mem="2Gi")), FAST)
    requests, limits = {"CPU": "8", "MEMORY": "1Gi"}, {"CPU": "4", "MEMORY": "2Gi"}
    lists = {
        part: [{"name": name, "value": value} for name, value in amounts.items()]
        for part, amounts in (("requests", requests), ("limits", limits))
    }
    node = {"taskNode": {"overrides": {"resources": lists}}}

    resources = job_manifest(template, Execution(node=node))["spec"]["containers"][0]["resources"]

    assert resources == {"requests": {"cpu": "4", "memory": "1Gi"}, "limits": {"cpu": "4", "memory": "2Gi"}}


def test_a_settings_environment_may_not_say_who_a_rank_is() -> None:
    from dataclasses import replace

    from flytekitplugins_safedist.errors import ConfigError

    with pytest.raises(ConfigError, match="--env='RANK' says who a node or rank is"):
        template_of(make(SafeHorovod(nnodes=2)), replace(BAKED, env={"RANK": "0"}))


def test_flytekits_own_prefix_is_replaced_and_not_wrapped() -> None:
    from tests.harness.product import command

    stock = [
        "pyflyte-fast-execute",
        "--additional-distribution",
        "{{ .x }}",
        "--dest-dir",
        ".",
        "--",
        "pyflyte-execute",
    ]

    assert command(stock) == ["safedist-execute", *stock[1:]]
    assert command(["pyflyte-execute"]) == ["safedist-execute", "--", "pyflyte-execute"]


def test_a_map_task_over_ours_keeps_the_entrypoint_and_its_own_command() -> None:
    from collections import OrderedDict

    from flytekit import map_task
    from flytekit.tools.translator import get_serializable
    from google.protobuf.json_format import MessageToDict

    mapped = map_task(make(SafeHorovod(nproc_per_node=2)), bound_inputs={"lr": 0.1})

    template = get_serializable(OrderedDict(), FAST, mapped).template.to_flyte_idl()

    args = MessageToDict(template.k8s_pod)["podSpec"]["containers"][0]["args"]
    assert args[:2] == ["safedist-execute", "--additional-distribution"]
    assert args[5:7] == ["--", "pyflyte-map-execute"]
