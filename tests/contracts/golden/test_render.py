"""The preview: what the pods see, what people are told."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
from flytekit import Resources, map_task
from flytekit.core.pod_template import PodTemplate
from flytekit.tools.translator import get_serializable
from flytekitplugins import kfpytorch
from golden_cases import BAKED, CASES, FAST, make, template_of
from google.protobuf.json_format import MessageToDict
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes.client import V1Container, V1PodSpec, V1Toleration

from flytekitplugins_safedist import SafeHorovod, Timeouts
from flytekitplugins_safedist.errors import ConfigError
from tests.harness.flyte import pods
from tests.harness.product import command, from_env, job_manifest


def manifest_of(name: str) -> dict[str, Any]:
    make_task, settings = CASES[name]
    return job_manifest(template_of(make_task(), settings))


def environment(pod: dict[str, Any], container: int = 0) -> dict[str, str]:
    """As Kubernetes gives it: of two values of one name, the last."""
    return {one["name"]: one.get("value", "") for one in pod["spec"]["containers"][container]["env"]}


def told(pod: dict[str, Any]) -> Any:
    """The job, as the pod is told of it."""
    return json.loads(environment(pod)["SAFEDIST_JOB"])


FIXED = ("per-role-resources", "sidecars-two-nodes")


@pytest.mark.parametrize("name", FIXED)
def test_topology_reads_from_the_shown_pods_what_the_task_asked_for(name: str) -> None:
    make_task, settings = CASES[name]
    task = make_task()
    shown = pods(job_manifest(template_of(task, settings)))

    found = [from_env(environment(pod), task.plan) for pod in shown]

    asked = task.plan
    assert [one.node_rank for one in found] == list(range(asked.max_nodes))
    assert {one.nproc_per_node for one in found} == {asked.nproc_per_node}
    assert {str(one.endpoint) for one in found} == {f"{shown[0]['metadata']['name']}:23456"}


def test_topology_reads_the_shown_pods_of_an_elastic_job() -> None:
    make_task, settings = CASES["elastic"]
    task = make_task()

    found = {from_env(environment(pod), task.plan) for pod in pods(job_manifest(template_of(task, settings)))}

    assert len(found) == 1
    assert found.pop().nnodes == "2:4"


@settings(max_examples=25, deadline=None)
@given(nodes=st.integers(2, 6), nproc=st.integers(1, 8), gpus=st.booleans())
def test_each_shown_pod_is_a_node_of_its_own_with_all_of_its_ranks(nodes: int, nproc: int, gpus: bool) -> None:
    asks = {"requests": Resources(gpu=str(nproc))} if gpus else {}
    task = make(SafeHorovod(nnodes=nodes, nproc_per_node=None if gpus else nproc), **asks)

    found = [from_env(environment(pod), task.plan) for pod in pods(job_manifest(template_of(task, FAST)))]

    assert [(one.node_rank, one.nproc_per_node) for one in found] == [(node, nproc) for node in range(nodes)]
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


@pytest.mark.parametrize(("said", "limit"), [(0, 1), (3, 7), (25, 51), (1 << 30, (1 << 31) - 1)])
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


def test_a_grace_period_of_the_users_wins() -> None:
    template = PodTemplate(pod_spec=V1PodSpec(containers=[], termination_grace_period_seconds=45))
    manifest = job_manifest(template_of(make(SafeHorovod(), pod_template=template), FAST))

    assert manifest["spec"]["terminationGracePeriodSeconds"] == 45
    assert environment(manifest)["SAFEDIST_GRACE_SECONDS"] == "45"


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


@pytest.mark.parametrize("nnodes", [1, 2, "2:3"])
def test_a_queue_is_a_label_of_the_job_beside_the_tasks_own(nnodes: Any) -> None:
    task = make(SafeHorovod(nnodes=nnodes, queue="gpu"), labels={"team": "vision"})

    assert dict(template_of(task, FAST).metadata.metadata.labels) == {
        "team": "vision",
        "kueue.x-k8s.io/queue-name": "gpu",
    }
    assert dict(template_of(make(SafeHorovod(nnodes=nnodes)), FAST).metadata.metadata.labels) == {}


def test_a_settings_environment_may_not_name_a_meeting_point_for_one_node() -> None:
    meets = replace(BAKED, env={"SAFEDIST_ENDPOINT": "gateway:4000"})
    assert template_of(make(SafeHorovod(nnodes=2)), meets)
    with pytest.raises(ConfigError, match="--env='SAFEDIST_ENDPOINT' says where nodes meet, and one node meets none"):
        template_of(make(SafeHorovod()), meets)


def test_a_settings_environment_may_not_say_who_a_rank_is() -> None:
    with pytest.raises(ConfigError, match="--env='RANK' says who a node or rank is"):
        template_of(make(SafeHorovod(nnodes=2)), replace(BAKED, env={"RANK": "0"}))


def test_flytekits_own_prefix_is_replaced_and_not_wrapped() -> None:
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
    mapped = map_task(make(SafeHorovod(nproc_per_node=2)), bound_inputs={"lr": 0.1})

    template = get_serializable(OrderedDict(), FAST, mapped).template.to_flyte_idl()

    args = MessageToDict(template.k8s_pod)["podSpec"]["containers"][0]["args"]
    assert args[:2] == ["safedist-execute", "--additional-distribution"]
    assert args[5:7] == ["--", "pyflyte-map-execute"]
