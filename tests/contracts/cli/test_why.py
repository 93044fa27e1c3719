"""``safedist why``: what it says of jobs, pods and events that a real cluster had (``tests/contracts/kubernetes``)."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.harness.api_server import REFUSED, ApiServer, Json, serving
from tests.harness.product import main

RECORDED = Path(__file__).parents[1] / "kubernetes"
GPU = "nvidia.com/gpu"

# What each recorded case must say: its lines' beginnings; ages and what is after them is not compared.
SAID = {
    "no-gpu": (
        "why-no-gpu (PyTorchJob in flytesnacks-development): waits, ",
        f"- why-no-gpu-master-0, why-no-gpu-worker-0: waits for a machine: it asks for {GPU} 8, and no machine",
        "  Fix: wait until others end, ask for less per pod, or add machines",
    ),
    "gpu-differs": (
        "why-gpu-differs (PyTorchJob in flytesnacks-development): waits, ",
        f"- the API server refuses its pods: {GPU} is requested as 2 and limited to 4, and the two must be equal",
        "  Fix: set the same number in requests and limits",
    ),
    "no-image": (
        "why-no-image (PyTorchJob in flytesnacks-development): waits, ",
        "- why-no-image-master-0: the image registry.example/team/no-such:1 cannot be pulled: failed to pull",
        "  Fix: correct the image's name, push it, or give the pod the registry's secret (imagePullSecrets)",
    ),
    "crash": (
        "why-crash (PyTorchJob in flytesnacks-development): waits, ",
        "- why-crash-master-0: container pytorch ended with exit status 137 at 23:13:29 UTC "
        "and was started again 4 time(s); the pause before the next start was 40s at last, and grows to 5 min",
        "- why-crash-master-0: its last words: error: StagingError: the store refused access",
    ),
    "over-quota": (
        "why-over-quota (PyTorchJob in why-quota): ended in order",
        "- quota team has no room: the next pod asks for pods=1,requests.cpu=80m; used pods=1,requests.cpu=80m, "
        "allowed pods=1,requests.cpu=100m (until 23:12:56 UTC)",
    ),
    "oom-2x2": (
        "a5xv4f6t8dblvk95625w-n0-0 (PyTorchJob in flytesnacks-development): ended in order",
        "- a5xv4f6t8dblvk95625w-n0-0-worker-1: out of memory: the kernel ended a process of it at the limit of 1500Mi; "
        "container pytorch ended with exit status 0 at 22:38:36 UTC",
        "  Fix: raise mem in requests and limits, or start fewer ranks and loader workers per pod",
    ),
    "oom-lone": (
        "amv5jhhhz7jw54h2p2ph-n0-0 (pod in flytesnacks-development): failed: a container ended with an error",
        "- amv5jhhhz7jw54h2p2ph-n0-0: out of memory: the kernel ended a process of it at the limit of 800Mi; "
        "container primary ended with exit status 137 at 22:36:52 UTC",
        "  Fix: raise mem in requests and limits, or start fewer ranks and loader workers per pod",
        "- amv5jhhhz7jw54h2p2ph-n0-0: its last words: [safedist] warning: memory is small for 2 rank(s)",
    ),
    "pod-replaced-2x2": (
        "azhz5jqsqfz8ttrj56jf-n0-0 (PyTorchJob in flytesnacks-development): ended in order",
        "- azhz5jqsqfz8ttrj56jf-n0-0-master-0: was stopped at 22:46:49 UTC and replaced: it was deleted",
    ),
    "succeeded-2x2": ("azzjf5cnfxb8b6v9h7fw-n0-0 (PyTorchJob in flytesnacks-development): ended in order",),
    "succeeded-lone": ("az7l49w2bpbxwg6gp789-n0-0 (pod in flytesnacks-development): ended in order",),
}
WELL = {"over-quota", "pod-replaced-2x2", "succeeded-2x2", "succeeded-lone"}
Why = Callable[..., tuple[int, list[str]]]


def recorded(case: str) -> dict[str, Any]:
    """A case's objects by kind, as the API server of :mod:`tests.harness.api_server` takes them."""
    found = json.loads((RECORDED / f"{case}.json").read_text())
    jobs = [found["pytorchjob"]] if found["pytorchjob"] else []
    return {"pytorchjobs": jobs, "pods": found["pods"], "events": found["events"], "nodes": REFUSED}


def about(objects: dict[str, Any]) -> Json:
    metadata: Json = (objects["pytorchjobs"] or objects["pods"])[0]["metadata"]
    return metadata


@pytest.fixture
def why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Why:
    """Ask ``safedist why`` of a cluster with these objects: exit status and lines."""

    def ask(
        objects: dict[str, Any], name: str, *options: str, server: ApiServer | None = None
    ) -> tuple[int, list[str]]:
        if server is None:
            with serving(objects) as server:
                return ask(objects, name, *options, server=server)
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
        status = main(["why", name, *options])
        out, err = capsys.readouterr()
        return status, [*out.splitlines(), *err.splitlines()]

    return ask


@pytest.mark.parametrize("case", SAID)
def test_each_recorded_job_is_explained(why: Why, case: str) -> None:
    objects = recorded(case)

    status, lines = why(objects, about(objects)["name"])

    assert len(lines) == len(SAID[case]), "\n".join(lines)
    for line, beginning in zip(lines, SAID[case], strict=True):
        assert line.startswith(beginning)
    assert status == (0 if case in WELL else 1)


def test_an_execution_and_a_pod_name_their_job(why: Why) -> None:
    objects = recorded("oom-2x2")
    name = about(objects)["name"]

    by_job = why(objects, name)

    assert why(objects, about(objects)["labels"]["execution-id"]) == by_job
    assert why(objects, objects["pods"][1]["metadata"]["name"], "-n", "flytesnacks-development") == by_job


def test_an_execution_of_several_tasks_is_told_in_their_order(why: Why) -> None:
    first, second = recorded("oom-2x2"), recorded("pod-replaced-2x2")
    objects = {kind: [*first[kind], *second[kind]] for kind in ("pytorchjobs", "pods", "events")}
    for each in [*objects["pytorchjobs"], *objects["pods"]]:
        each["metadata"]["labels"]["execution-id"] = "both"

    _, lines = why(objects, "both")

    assert [line.split(" ")[0] for line in lines if line[0] not in "- "] == [
        about(each)["name"] for each in (first, second)
    ]


def test_nothing_is_written_and_long_lists_are_read_to_their_end(why: Why) -> None:
    objects = recorded("crash")
    with serving(objects) as server:
        server.page = 3

        _, lines = why(objects, "why-crash", server=server)

    assert lines[1].startswith(SAID["crash"][1])
    assert {method for method, _ in server.requests} == {"GET"}


def _machine(name: str, gpus: str) -> Json:
    return {"metadata": {"name": name}, "status": {"allocatable": {GPU: gpus, "cpu": "64"}}}


@pytest.mark.parametrize(
    ("largest", "says"),
    [
        ("4", "the largest has 4 in all, so it waits until a larger one is there"),
        ("8", "the most that one has free is 6"),
    ],
)
def test_how_much_machines_have_and_have_free(why: Why, largest: str, says: str) -> None:
    objects = recorded("no-gpu")
    objects["nodes"] = [_machine("small", "2"), _machine("large", largest)]
    neighbour, done = copy.deepcopy(objects["pods"][0]), copy.deepcopy(objects["pods"][0])
    for pod, phase in ((neighbour, "Running"), (done, "Succeeded")):
        pod["metadata"] = {"name": phase, "namespace": "other"}
        pod["spec"]["nodeName"] = "large"
        pod["spec"]["containers"][0]["resources"]["requests"][GPU] = "2"
        pod["status"] = {"phase": phase}
    objects["pods"] += [neighbour, done]

    _, lines = why(objects, "why-no-gpu", "-n", "flytesnacks-development")

    assert says in lines[1]


def test_a_cordoned_machine_has_nothing_free_and_a_free_one_is_not_told_as_the_reason(why: Why) -> None:
    objects = recorded("no-gpu")
    objects["nodes"] = [_machine("small", "2"), _machine("large", "8")]
    objects["pods"] += [copy.deepcopy(objects["pods"][0])]
    objects["pods"][-1]["metadata"]["name"] = "another"

    _, (_, tainted, *_) = why(objects, "why-no-gpu", "-n", "flytesnacks-development")
    objects["nodes"][1]["spec"] = {"unschedulable": True}
    _, (_, cordoned, *_) = why(objects, "why-no-gpu", "-n", "flytesnacks-development")

    assert tainted.endswith("and no machine has that free")
    assert cordoned.endswith("the most that one has free is 2")


def test_an_elastic_job_runs_with_fewer_nodes_than_it_could_have(why: Why) -> None:
    objects = recorded("no-gpu")
    job, (one, another) = objects["pytorchjobs"][0], objects["pods"]
    job["spec"]["pytorchReplicaSpecs"] = {"Worker": {"replicas": 2}}
    one["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}

    assert ": waits, " in why(objects, "why-no-gpu", "-n", "flytesnacks-development")[1][0]
    job["spec"]["elasticPolicy"] = {"minReplicas": 1, "maxReplicas": 2}
    status, lines = why(objects, "why-no-gpu", "-n", "flytesnacks-development")

    assert ": runs, " in lines[0]
    assert lines[0].endswith(": 1 of 2 pods")
    assert lines[1].startswith(f"- {another['metadata']['name']}: waits for a machine")
    assert status == 1


def _without_last_words(objects: dict[str, Any]) -> None:
    objects["pods"][0]["status"]["containerStatuses"][0]["state"]["terminated"].pop("message")


def _started_again(container: Json) -> None:
    container.update(lastState=container["state"], state={"waiting": {"reason": "CrashLoopBackOff"}})


def _started_again_without_last_words(objects: dict[str, Any]) -> None:
    _without_last_words(objects)
    _started_again(objects["pods"][0]["status"]["containerStatuses"][0])


def test_a_container_that_ends_well_and_is_started_again_is_no_good_end(why: Why) -> None:
    objects = recorded("crash")
    container = objects["pods"][0]["status"]["containerStatuses"][0]
    container["state"]["terminated"].update(exitCode=0, message="")
    _started_again(container)

    status, lines = why(objects, about(objects)["name"])

    assert "ended with exit status 0 at 23:13:29 UTC and was started again 4 time(s)" in lines[1]
    assert status == 1


def _another_pods_pause(objects: dict[str, Any]) -> None:
    event = copy.deepcopy(next(each for each in objects["events"] if each["reason"] == "CrashLoopBackOff"))
    event["message"] = event["message"].replace("master-0", "master-01").replace("back-off 10s", "back-off 5m0s")
    event["lastTimestamp"] = "2026-11-25T23:59:00Z"
    objects["events"].append(event)


def test_a_deletion_is_told_from_its_beginning(why: Why) -> None:
    objects = recorded("oom-lone")
    ends = datetime.now(timezone.utc) + timedelta(seconds=30)
    metadata = objects["pods"][0]["metadata"]
    metadata |= {"deletionTimestamp": f"{ends:%Y-%m-%dT%H:%M:%SZ}", "deletionGracePeriodSeconds": 60}
    objects["pods"][0]["status"] = {"phase": "Pending"}

    _, lines = why(objects, about(objects)["name"])

    assert lines[1].endswith(f"is being deleted, since {ends - timedelta(seconds=60):%H:%M:%S} UTC")


def _pulled_twice(objects: dict[str, Any]) -> None:
    """While the kubelet waits, the newest event says why."""
    of_pod = next(event for event in objects["events"] if event["message"].startswith("Failed to pull image"))
    _waits("ImagePullBackOff", "Back-off pulling image")(objects)
    for second, words in ((1, "no such tag"), (2, "unauthorized")):
        message = f'Failed to pull image "registry.example/team/no-such:1": {words}'
        objects["events"].append({**of_pod, "message": message, "lastTimestamp": f"2026-11-25T23:19:0{second}Z"})


def _an_event_without_words(objects: dict[str, Any]) -> None:
    event = {**objects["events"][0], "involvedObject": {"name": about(objects)["name"]}}
    for name in ("reason", "message"):
        event.pop(name)
    objects["events"].append(event)


def _changed(case: str, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    objects = recorded(case)
    change(objects)
    return objects


def _refuse(words: str) -> Callable[[dict[str, Any]], None]:
    def change(objects: dict[str, Any]) -> None:
        objects["events"][0]["message"] = f"Error creating: {words}"

    return change


def _place(words: str) -> Callable[[dict[str, Any]], None]:
    def change(objects: dict[str, Any]) -> None:
        for pod in objects["pods"]:
            pod["status"]["conditions"][0]["message"] = words

    return change


def _a_large_init_container(objects: dict[str, Any]) -> None:
    for pod in objects["pods"]:
        pod["spec"]["containers"] *= 2
        pod["spec"]["initContainers"] = [
            {"name": name, "resources": {"requests": {GPU: gpus}}, **more}
            for name, gpus, more in (("prepares", "4", {}), ("stays", "2", {"restartPolicy": "Always"}))
        ]
        if "worker" in pod["metadata"]["name"]:
            pod["spec"]["initContainers"][0]["resources"]["requests"][GPU] = "20"


def _init_out_of_memory(objects: dict[str, Any]) -> None:
    (pod,) = objects["pods"]
    pod["spec"]["initContainers"] = [{"name": "prepares", "resources": {"limits": {"memory": "512Mi"}}}]
    status = pod["status"].pop("containerStatuses")[0]
    pod["status"]["initContainerStatuses"] = [{**status, "name": "prepares"}]


def _waits(reason: str, message: str) -> Callable[[dict[str, Any]], None]:
    def change(objects: dict[str, Any]) -> None:
        objects["events"] = []
        objects["pods"][0]["status"]["containerStatuses"][0]["state"] = {
            "waiting": {"reason": reason, "message": message}
        }

    return change


def _without_operator(objects: dict[str, Any]) -> None:
    objects.update(pods=[], events=[])
    objects["pytorchjobs"][0].pop("status", None)


def _suspended(objects: dict[str, Any]) -> None:
    _without_operator(objects)
    objects["pytorchjobs"][0]["spec"]["runPolicy"]["suspend"] = True
    objects["pytorchjobs"][0]["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "gpus"}


def _evicted(objects: dict[str, Any]) -> None:
    objects["pods"][0]["status"] = {
        "phase": "Failed",
        "reason": "Evicted",
        "message": "The node was low on resource: memory.",
    }


def _preempted(objects: dict[str, Any]) -> None:
    for event in objects["events"]:
        if event["reason"] == "Killing":
            event["reason"] = "Preempted"


def _gated(objects: dict[str, Any]) -> None:
    pod = objects["pods"][0]
    pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "gpus"
    words = "Scheduling is blocked due to non-empty scheduling gates"
    condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": words}
    pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    pod["status"] = {"phase": "Pending", "conditions": [condition]}


def _held(objects: dict[str, Any]) -> None:
    _gated(objects)
    objects["pods"][0]["metadata"]["labels"].pop("kueue.x-k8s.io/queue-name")


def _gone(objects: dict[str, Any]) -> None:
    """As the kubelet writes it of a container that it finds no more."""
    words = "The container could not be located when the pod was terminated"
    end = {"exitCode": 137, "finishedAt": None, "message": words, "reason": "ContainerStatusUnknown", "startedAt": None}
    objects["pods"][0]["status"]["containerStatuses"][0]["state"] = {"terminated": end}


def _unheard(objects: dict[str, Any]) -> None:
    """As the node lifecycle controller leaves pods of a machine that does not answer: not ready, without a word."""
    objects["pods"][0]["spec"]["nodeName"] = "gpu-7"
    objects["pods"][0]["status"] = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": [{"name": "pytorch", "image": "x", "state": {"running": {}}}],
    }


def _event(pod: Json, reason: str, message: str, when: str) -> Json:
    return {
        "metadata": {"name": reason, "namespace": pod["namespace"], "creationTimestamp": when},
        "involvedObject": {"kind": "Pod", "name": pod["name"], "uid": pod["uid"]},
        "reason": reason,
        "message": message,
    }


def _scaled(reason: str, message: str) -> Callable[[dict[str, Any]], None]:
    def change(objects: dict[str, Any]) -> None:
        for pod in objects["pods"]:
            objects["events"].append(_event(pod["metadata"], reason, message, "2026-11-25T23:59:00Z"))

    return change


def _initializing(**states: Json) -> Callable[[dict[str, Any]], None]:
    """A pod of these init containers, whose machine has begun to pull the image of the container that trains."""

    def change(objects: dict[str, Any]) -> None:
        (pod,) = objects["pods"]
        pod["status"]["initContainerStatuses"] = [
            {"name": name.replace("_", "-"), "image": "small", "state": state} for name, state in states.items()
        ]
        pod["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "PodInitializing"}}
        objects["events"] = [_event(pod["metadata"], "Pulling", "Pulling image", "2026-11-25T23:20:00Z")]

    return change


def _mounted_at_last(objects: dict[str, Any]) -> None:
    _not_mounted(objects)
    objects["events"].append(_event(objects["pods"][0]["metadata"], "Pulling", "Pulling image", "2026-11-25T23:59:00Z"))


def _not_mounted(objects: dict[str, Any]) -> None:
    _waits("ContainerCreating", "")(objects)
    pod = objects["pods"][0]["metadata"]
    words = 'MountVolume.SetUp failed for volume "data": secret "s" not found'
    objects["events"] = [_event(pod, "FailedMount", words, pod["creationTimestamp"])]


RUNS: Json = {"running": {"startedAt": "2026-11-25T23:12:00Z"}}
STUCK = "why-no-image-master-0: was to be gone at 23:30:00 UTC, and is still there"


def _to_be_gone(objects: dict[str, Any]) -> None:
    """As a pod stays that was evicted from a machine that is off: nobody there can end it."""
    metadata = objects["pods"][0]["metadata"]
    metadata |= {"deletionTimestamp": "2026-11-25T23:30:00Z", "deletionGracePeriodSeconds": 60}


def _off(objects: dict[str, Any]) -> None:
    _to_be_gone(objects)
    _unheard(objects)


def _init_waits(reason: str, message: str) -> Callable[[dict[str, Any]], None]:
    def change(objects: dict[str, Any]) -> None:
        waiting = {"waiting": {"reason": reason, "message": message}}
        _initializing(init_pytorch=waiting)(objects)

    return change


def _master_not_ready(objects: dict[str, Any]) -> None:
    """A worker whose init container looks for the name of a master that runs, beside a sidecar that is not ready."""
    worker = objects["pods"][0]
    master = copy.deepcopy(worker)
    _initializing(init_pytorch=RUNS)(objects)
    worker["metadata"] |= {"name": "why-no-image-worker-0"}
    ready = {"type": "Ready", "status": "False", "message": "containers with unready status: [proxy]"}
    statuses = [
        {"name": name, "image": "x", "ready": name == "pytorch", "state": RUNS} for name in ("pytorch", "proxy")
    ]
    master["status"] = {"phase": "Running", "conditions": [ready], "containerStatuses": statuses}
    objects["pods"] = [master, worker]


DONE: Json = {"terminated": {"exitCode": 0, "finishedAt": "2026-11-25T23:13:00Z"}}

# Texts of the API server's and scheduler's own sources (Kubernetes 1.30), on recorded jobs.
CHANGED = [
    ("crash", _without_last_words, "  Fix: kubectl logs shows its output"),
    ("crash", _started_again_without_last_words, "  Fix: kubectl logs --previous shows its output"),
    ("crash", _another_pods_pause, "the pause before the next start was 40s at last"),
    ("no-image", _pulled_twice, "cannot be pulled: unauthorized"),
    ("no-image", _an_event_without_words, SAID["no-image"][1]),
    (
        "gpu-differs",
        _refuse('admission webhook "policy.example" denied the request: no owner label'),
        "policy.example refuses",
    ),
    (
        "gpu-differs",
        _refuse('pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot'),
        "pod security",
    ),
    (
        "gpu-differs",
        _refuse('pods "x" is forbidden: error looking up service account ns/robot: serviceaccount "robot" not found'),
        "the service account robot is not there",
    ),
    ("gpu-differs", _refuse("something that nobody has seen"), "cannot be made: something that nobody has seen"),
    ("gpu-differs", _without_operator, "no operator has taken it up"),
    ("gpu-differs", _suspended, "Kueue's queue gpus has not admitted it"),
    (
        "no-gpu",
        _place("0/3 nodes are available: 3 node(s) had untolerated taint {team: a}."),
        "kept for others by the taint team: a",
    ),
    (
        "no-gpu",
        _place("0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."),
        "node selector or affinity",
    ),
    ("no-gpu", _place('persistentvolumeclaim "data" not found'), "the volume claim data is not there"),
    ("no-gpu", _place("0/3 nodes are available: 3 of an unheard kind."), "3 of an unheard kind"),
    ("no-gpu", _place("0/3 nodes are available: 3 Insufficient memory."), "it asks for memory 10.0 MiB"),
    ("no-gpu", _a_large_init_container, f"why-no-gpu-master-0: waits for a machine: it asks for {GPU} 18,"),
    ("no-gpu", _a_large_init_container, f"why-no-gpu-worker-0: waits for a machine: it asks for {GPU} 20,"),
    ("oom-lone", _init_out_of_memory, "at the limit of 512Mi; container prepares ended with exit status 137"),
    (
        "no-image",
        _waits("CreateContainerConfigError", 'secret "s" not found'),
        'CreateContainerConfigError: secret "s" not found',
    ),
    (
        "no-image",
        _waits("RunContainerError", 'exec: "safedist-execute": not found'),
        'exec: "safedist-execute": not found',
    ),
    ("no-image", _not_mounted, 'FailedMount: MountVolume.SetUp failed for volume "data": secret "s" not found'),
    ("no-image", _mounted_at_last, "its machine pulls the image"),
    ("no-image", _initializing(init_pytorch=RUNS), "waits until the master's pod has an address"),
    ("no-image", _initializing(init_pytorch=DONE), "its machine pulls the image"),
    ("no-image", _initializing(init_pytorch=DONE, fetch=RUNS), "its init container fetch runs"),
    ("oom-lone", _gated, "Kueue's queue gpus has not admitted it"),
    ("oom-lone", _held, "is held back by its scheduling gates: kueue.x-k8s.io/admission"),
    ("oom-lone", _gone, "container primary was lost: The container could not be located"),
    ("oom-lone", _unheard, "its machine gpu-7 does not answer"),
    (
        "no-gpu",
        _place("0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 node(s) were unschedulable."),
        "machines are cordoned",
    ),
    (
        "no-gpu",
        _scaled("TriggeredScaleUp", "pod triggered scale-up: [{gpus 0->2 (max: 4)}]"),
        "a machine is being added: pod triggered scale-up: [{gpus 0->2 (max: 4)}]",
    ),
    (
        "no-gpu",
        _scaled("Nominated", "Pod should schedule on: nodeclaim/gpus-x"),
        "a machine is being added: Pod should",
    ),
    (
        "no-gpu",
        _scaled("NotTriggerScaleUp", "pod didn't trigger scale-up: 1 max node group size reached"),
        "no machine is added: pod didn't trigger scale-up: 1 max node group size reached",
    ),
    (
        "no-gpu",
        _place(
            "0/9 nodes are available: 1 Insufficient nvidia.com/gpu, 3 node(s) had untolerated taint "
            "{node-role.kubernetes.io/control-plane: }, 4 node(s) had untolerated taint {team: a}, "
            "1 node(s) had untolerated taint {pool: b}."
        ),
        "kept for others by the taints team: a, pool: b",
    ),
    (
        "no-gpu",
        _place("0/3 nodes are available: 3 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }."),
        "kept for others by the taint node-role.kubernetes.io/control-plane",
    ),
    ("no-gpu", _place("0/3 nodes are available: 3 node(s) had untolerated taint(s)."), "kept for others by taints"),
    (
        "no-gpu",
        _place("0/2 nodes are available: 2 node(s) had untolerated taint {node.kubernetes.io/disk-pressure: }."),
        "machines are not ready, or about to go: node.kubernetes.io/disk-pressure",
    ),
    (
        "no-gpu",
        _place("0/2 nodes are available: 2 node(s) didn't have free ports for the requested pod ports."),
        "its ports are taken on them",
    ),
    ("no-image", _to_be_gone, STUCK),
    ("no-image", _off, "--force"),
    ("no-image", _init_waits("ImagePullBackOff", "toomanyrequests"), "--pytorch-init-container-image"),
    (
        "no-image",
        _init_waits("CreateContainerConfigError", "container has runAsNonRoot and image will run as root"),
        "Fix: set run_as_user in the pod template's security context",
    ),
    (
        "gpu-differs",
        _refuse(
            'pods "x" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false '
            '(container "init-pytorch" must set securityContext.allowPrivilegeEscalation=false)'
        ),
        "--pytorch-init-container-template-file",
    ),
    ("no-image", _master_not_ready, "worker-0: waits until the master is ready, which its container proxy is not"),
    ("oom-lone", _evicted, "Evicted: The node was low on resource: memory."),
    ("pod-replaced-2x2", _preempted, "replaced: the scheduler preempted it for a pod of higher priority"),
]


@pytest.mark.parametrize(("case", "change", "says"), CHANGED, ids=[says for *_, says in CHANGED])
def test_each_other_cause_is_named(why: Why, case: str, change: Callable[[dict[str, Any]], None], says: str) -> None:
    objects = _changed(case, change)

    _, lines = why(objects, about(objects)["name"])

    assert any(says in line for line in lines), "\n".join(lines)


def test_a_control_planes_taint_is_no_reason_beside_others(why: Why) -> None:
    taint = "3 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }"
    objects = _changed("no-gpu", _place(f"0/4 nodes are available: 1 Insufficient nvidia.com/gpu, {taint}."))

    _, lines = why(objects, about(objects)["name"])

    assert not any("taint" in line for line in lines), "\n".join(lines)


def test_a_large_job_takes_ten_lines(why: Why) -> None:
    objects = recorded("no-image")
    (pod,) = objects["pods"]
    objects["pytorchjobs"][0]["spec"]["pytorchReplicaSpecs"]["Master"]["replicas"] = 40
    for number in range(1, 40):
        other = copy.deepcopy(pod)
        other["metadata"]["name"] = f"why-no-image-worker-{number}"
        other["status"]["containerStatuses"][0]["image"] = f"image:{number}"
        objects["pods"].append(other)

    _, lines = why(objects, "why-no-image")

    assert len(lines) == 10
    assert lines[-1].startswith("- and ")


def test_who_is_not_there_or_may_not_be_seen_is_an_error(why: Why, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = recorded("no-gpu")

    status, (line,) = why(objects, "why-nothing")
    assert status == 2
    assert "no execution, PyTorchJob or pod is called why-nothing [namespace=default and all]" in line

    status, (line,) = why({"pods": REFUSED}, "why-no-gpu")
    assert status == 2
    assert "the API server refuses to list pods" in line
    assert '403 pods is forbidden: User "me" cannot list' in line

    monkeypatch.setenv("KUBECONFIG", "/nowhere/config")
    assert main(["why", "x"]) == 2


@pytest.mark.parametrize(
    "text", ["a: [b", "no mapping", "contexts: nobody", "{current-context: x, contexts: [{name: x}]}"]
)
def test_a_kubeconfig_that_is_none_is_an_error(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kubeconfig").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))

    assert main(["why", "x"]) == 2
    assert "no cluster can be asked" in capsys.readouterr().err


def test_a_context_that_is_named_needs_no_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = recorded("succeeded-lone")
    with serving(objects) as server:
        file = server.kubeconfig(tmp_path / "kubeconfig", namespace=about(objects)["namespace"])
        file.write_text(file.read_text().replace("current-context: test\n", ""))
        monkeypatch.setenv("KUBECONFIG", str(file))

        assert main(["why", about(objects)["name"], "--context", "test"]) == 0
        assert not any("/api/v1/pods" in path for _, path in server.requests)


def test_a_lone_pod_needs_no_training_operator(why: Why) -> None:
    objects = recorded("succeeded-lone")
    del objects["pytorchjobs"]

    assert why({**objects}, objects["pods"][0]["metadata"]["name"])[0] == 0


def test_it_imports_no_torch_and_no_flytekit(tmp_path: Path) -> None:
    code = "import sys; from flytekitplugins_safedist.tools.cli import main; main(['why', 'x']); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env={"KUBECONFIG": "/nowhere"}, capture_output=True, text=True
    )

    assert "no cluster can be asked" in done.stderr
    assert not {"torch", "flytekit"} & set(done.stdout.split())
