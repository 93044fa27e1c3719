"""The preview: what the pods see, what people are told."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from flytekit import Resources
from flytekit.core.pod_template import PodTemplate
from flytekitplugins import kfpytorch
from golden_cases import BAKED, CASES, FAST, make, template_of
from kubernetes.client import V1Container, V1PodSpec, V1Toleration

from flytekitplugins_safedist import SafeHorovod, Timeouts
from flytekitplugins_safedist.errors import ConfigError
from tests.harness.flyte import pods
from tests.harness.product import from_env, job_manifest


def environment(pod: dict[str, Any]) -> dict[str, str]:
    """As Kubernetes gives it: of two values of one name, the last."""
    return {one["name"]: one.get("value", "") for one in pod["spec"]["containers"][0]["env"]}


def told(pod: dict[str, Any]) -> Any:
    """The job, as the pod is told of it."""
    return json.loads(environment(pod)["SAFEDIST_JOB"])


@pytest.mark.parametrize("name", ["per-role-resources", "sidecars-two-nodes", "elastic", "one-node-8-gpu"])
def test_topology_reads_from_the_shown_pods_what_the_task_asked_for(name: str) -> None:
    make_task, settings = CASES[name]
    task = make_task()
    shown = pods(job_manifest(template_of(task, settings)))

    found = [from_env(environment(pod), task.plan) for pod in shown]

    asked = task.plan
    assert {one.nproc_per_node for one in found} == {asked.nproc_per_node}
    if name == "one-node-8-gpu":
        assert [one.source for one in found] == ["single pod"]
    elif name == "elastic":
        assert {one.nnodes for one in found} == {"2:4"}
        assert len(set(found)) == 1
    else:
        assert [one.node_rank for one in found] == list(range(asked.max_nodes))
        assert {str(one.endpoint) for one in found} == {f"{shown[0]['metadata']['name']}:23456"}


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

    assert spec["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == "Never"
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


def test_a_settings_environment_may_not_say_who_a_rank_is_nor_where_one_node_meets() -> None:
    meets = replace(BAKED, env={"SAFEDIST_ENDPOINT": "gateway:4000"})
    assert template_of(make(SafeHorovod(nnodes=2)), meets)
    with pytest.raises(ConfigError, match="--env='SAFEDIST_ENDPOINT' says where nodes meet, and one node meets none"):
        template_of(make(SafeHorovod()), meets)
    with pytest.raises(ConfigError, match="--env='RANK' says who a node or rank is"):
        template_of(make(SafeHorovod(nnodes=2)), replace(BAKED, env={"RANK": "0"}))
