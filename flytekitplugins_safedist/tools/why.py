"""Why a job waits, or why it ended: from what Kubernetes holds of it, in at most ten lines.

Pure: :class:`Picture` holds the objects as the API server gives them (JSON), :func:`explain` says what they mean.
``cluster.py`` reads them. Texts of the scheduler, the kubelet, the API server and the training-operator are matched as
a real cluster had them (Kubernetes 1.30, training-operator 1.9); a text that no row matches is shown as it stands.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from fractions import Fraction
from typing import Any, NamedTuple

from ..config.quantities import value_of
from ..config.validate import QUEUE_LABEL
from ..texts import human

Json = dict[str, Any]

MOST_LINES = 10
_TEXT = 400
_PATIENCE = 30.0
"""Seconds after which a job that no operator has touched is one that none will touch."""
JOB_NAME = "training.kubeflow.org/job-name"
_ROLE = "training.kubeflow.org/replica-type"
_OPERATORS_CONTAINER = "init-pytorch"
"""What the training-operator calls the init container that it adds to workers."""


@dataclass(frozen=True)
class Picture:
    """One task's job as the API server shows it at ``now`` (seconds since 1970)."""

    job: Json | None
    """The PyTorchJob; None: a lone pod."""
    pods: list[Json]
    events: list[Json]
    now: float
    nodes: list[Json] | None = None
    """The cluster's machines; None: the caller may not list them."""
    neighbours: list[Json] = field(default_factory=list)
    """All pods of the cluster, for what is free; empty: the caller may not list them."""

    @property
    def about(self) -> Json:
        """The metadata of the job, or of the lone pod."""
        metadata: Json = (self.job or self.pods[0])["metadata"]
        return metadata

    @property
    def since(self) -> float:
        """When it was made."""
        return _time(self.about["creationTimestamp"])


class Reason(NamedTuple):
    """One thing that the user should know, and what mends it."""

    text: str
    fix: str = ""
    who: str = ""
    """The pod that it is about: reasons that differ in this alone are told as one."""
    weight: int = 2
    """0: nothing is wrong with it, and it is worth a line where nothing else is said; 1: explained by the others."""
    current: bool = True
    """False: it is over."""


class Explanation(NamedTuple):
    """What to print; ``is_well``: nothing is wrong."""

    lines: list[str]
    is_well: bool


def explain(picture: Picture) -> Explanation:
    """What the job waits for, or why it ended, and what mends it; at most ten lines."""
    state, is_over = _state(picture)
    reasons = list(_reasons(picture, is_over=is_over))
    wrong = [reason for reason in reasons if reason.current and reason.weight]
    if wrong:
        reasons = [reason for reason in reasons if reason.weight or not reason.current]
    about = picture.about
    lines = [f"{about['name']} ({'PyTorchJob' if picture.job else 'pod'} in {about['namespace']}): {state}"]
    for reason, pods in _together(reasons):
        lines.append(f"- {_of(pods)}{reason.text}")
        if reason.fix and reason.current:
            lines.append(f"  Fix: {reason.fix}")
    if len(lines) > MOST_LINES:
        more = len(lines) - MOST_LINES + 1
        lines[MOST_LINES - 1 :] = [f"- and {more} more line(s): kubectl describe pod, kubectl get events"]
    return Explanation(lines, not state.startswith("failed") and not wrong)


def _together(reasons: list[Reason]) -> list[tuple[Reason, list[str]]]:
    """What is alike but for its pod told once, the weightiest first."""
    pods: dict[Reason, list[str]] = {}
    for reason in sorted(reasons, key=lambda reason: (-reason.current, -reason.weight)):
        pods.setdefault(reason._replace(who=""), []).append(reason.who)
    return list(pods.items())


def _of(pods: list[str]) -> str:
    names = sorted(filter(None, set(pods)))
    if len(names) > 3:
        return f"{len(names)} pods ({names[0]}, {names[1]}, …): "
    return f"{', '.join(names)}: " if names else ""


def _state(picture: Picture) -> tuple[str, bool]:
    """The headline, and whether the job is over."""
    end, words = _result(picture)
    if end == "Succeeded":
        return "ended in order (what the task returned or raised is in Flyte)", True
    if end == "Failed":
        return f"failed: {_cut(words)}", True
    phases = Counter(pod["status"].get("phase", "Unknown") for pod in picture.pods)
    total = _replicas(picture)
    age = _age(picture.now - picture.since)
    elastic = picture.job["spec"].get("elasticPolicy", {}) if picture.job is not None else {}
    ready = sum(map(_is_ready, picture.pods))
    if ready and ready + phases["Succeeded"] >= elastic.get("minReplicas", total):
        return f"runs, {age} after it was made: {ready} of {total} pods", False
    counts = ", ".join(f"{count} {phase.lower()}" for phase, count in sorted(phases.items()))
    return f"waits, {age} after it was made: of {total} pod(s) {counts or 'none is there'}", False


def _result(picture: Picture) -> tuple[str, str]:
    """How it ended, and what is said of that; another word, or none, while it has not."""
    if picture.job is None:
        status = picture.pods[0]["status"]
        return status.get("phase", ""), status.get("message") or "a container ended with an error"
    for condition in reversed(picture.job.get("status", {}).get("conditions", [])):
        if condition["status"] == "True" and condition["type"] in ("Succeeded", "Failed"):
            return condition["type"], condition.get("message") or condition.get("reason", "")
    return "", ""


def _is_ready(pod: Json) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", []))


def _replicas(picture: Picture) -> int:
    if picture.job is None:
        return 1
    return sum(role.get("replicas", 1) for role in picture.job["spec"]["pytorchReplicaSpecs"].values())


def _reasons(picture: Picture, *, is_over: bool) -> Iterator[Reason]:
    yield from _of_the_job(picture)
    yield from _refusals(picture, is_over=is_over)
    for pod in picture.pods:
        yield from (reason._replace(who=pod["metadata"]["name"]) for reason in _of_the_pod(pod, picture))
    yield from _replacements(picture)


# --- the job ----------------------------------------------------------------------------------------------------------


def _of_the_job(picture: Picture) -> Iterator[Reason]:
    job = picture.job
    if job is None:
        return
    age = picture.now - picture.since
    if job["spec"].get("runPolicy", {}).get("suspend"):
        yield Reason(f"the job is suspended: {_queue(job) or 'spec.runPolicy.suspend is true'}", _WORKLOADS)
    elif not (job.get("status", {}).get("conditions") or picture.pods or picture.events) and age > _PATIENCE:
        fix = "start the training-operator: kubectl get pods -A | grep training-operator"
        yield Reason(f"no operator has taken it up, {_age(age)} after it was made", fix)


_WORKLOADS = "kubectl get workloads says what the queue waits for"


def _queue(held: Json) -> str:
    """Of a job or pod that is held back; "" where it is in no queue of Kueue's."""
    queue = held["metadata"].get("labels", {}).get(QUEUE_LABEL)
    return f"Kueue's queue {queue} has not admitted it" if queue else ""


_Row = tuple[str, str, str]
"""A text that is known: its pattern, what it means and what mends it; ``{1}`` is the pattern's first group."""
_REFUSALS = (
    (
        r"resources\.requests: Invalid value: \"?(.+?)\"?: must be equal to (\S+) limit of (\S+)",
        "the API server refuses its pods: {2} is requested as {1} and limited to {3}, and the two must be equal",
        "set the same number in requests and limits",
    ),
    (
        r"exceeded quota: (\S+), requested: (.+), used: (.+), limited: (.+)",
        "quota {1} has no room: the next pod asks for {2}; used {3}, allowed {4}",
        "wait until others end, ask for less, or have the quota raised",
    ),
    (
        r"admission webhook \"(.+?)\" denied the request: (.+)",
        "the admission webhook {1} refuses its pods: {2}",
        "change what it names, or ask who runs that webhook",
    ),
    (
        r"violates PodSecurity \"(.+?)\": (.*\"init-pytorch\".*)",
        "the namespace's pod security {1} refuses its workers, for the operator's own init container: {2}",
        "have the training-operator set what it names there: --pytorch-init-container-template-file (docs/platform.md)",
    ),
    (
        r"violates PodSecurity \"(.+?)\": (?!.*\"init-pytorch\")(.+)",
        "the namespace's pod security {1} refuses its pods: {2}",
        "set what it names in the pod template's security context, or run in another namespace",
    ),
    (
        r"error looking up service account \S+: serviceaccount \"(.+?)\" not found",
        "the service account {1} is not there",
        "make it, or name another one in the execution's security context",
    ),
)
_NO_PLACE = (
    (
        r"didn't match Pod's node affinity/selector",
        "machines do not match its node selector or affinity",
        "compare the pod template's selector with kubectl get nodes --show-labels",
    ),
    (
        r"had volume node affinity conflict",
        "its volume is bound to machines that cannot take it",
        "move the volume, or do without it",
    ),
    (r"persistentvolumeclaim \"(.+?)\" not found", "the volume claim {1} is not there", "make it, or correct its name"),
    (
        r"were unschedulable",
        "machines are cordoned",
        "have them uncordoned (kubectl get nodes shows which), or add machines",
    ),
    (r"Too many pods", "machines are full of pods", "wait until others end, or add machines"),
    (
        r"didn't have free ports",
        "its ports are taken on them: with hostNetwork, a machine takes one pod that listens at a port",
        "add machines, or leave hostNetwork out",
    ),
)
_CONTROL_PLANE = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")
"""Kept for no task of anybody's: no reason where there is another one."""
_OF_A_MACHINES_STATE = (
    "node.kubernetes.io/",
    "node.cloudprovider.kubernetes.io/",
    "karpenter.sh/",
    "ToBeDeletedByClusterAutoscaler",
    "DeletionCandidateOfClusterAutoscaler",
)
"""How taints begin that come and go with what a machine is at."""
_STOPS = {
    "Preempting": "the scheduler preempted it for a pod of higher priority",
    "Preempted": "the scheduler preempted it for a pod of higher priority",
    "Evicted": "the kubelet evicted it",
    "EvictedByVPA": "the vertical pod autoscaler evicted it",
    "TaintManagerEviction": "its machine was lost or tainted",
    "NodeNotReady": "its machine did not answer",
    "NodeControllerEviction": "its machine did not answer",
}


def _match(rows: Iterable[_Row], text: str) -> Iterator[tuple[str, str]]:
    for pattern, means, fix in rows:
        match = re.search(pattern, text, re.DOTALL)
        if match is not None:
            groups = (match[0], *map(_cut, match.groups()))
            yield means.format(*groups), fix.format(*groups)


def _refusals(picture: Picture, *, is_over: bool) -> Iterator[Reason]:
    """Pods that could not be made: only events tell of them."""
    failures = [event for event in picture.events if event["reason"] in ("FailedCreatePod", "FailedCreate")]
    if not failures:
        return
    last = max(failures, key=_when)
    times = sum(event.get("count") or 1 for event in failures)
    is_past = is_over or len(picture.pods) >= _replicas(picture)
    words = re.sub(r"^Error creating: ", "", last["message"])
    rows = list(_match(_REFUSALS, words)) or [
        (f"its pods cannot be made: {_cut(words)}", "correct what the text names")
    ]
    when = f"{'until' if is_past else f'{times} tries, the last at'} {_clock(_when(last))}"
    yield from (Reason(f"{text} ({when})", fix, current=not is_past) for text, fix in rows)


# --- a pod ------------------------------------------------------------------------------------------------------------


def _of_the_pod(pod: Json, picture: Picture) -> Iterator[Reason]:
    status, spec, metadata = pod["status"], pod["spec"], pod["metadata"]
    ends = _time(metadata["deletionTimestamp"]) if metadata.get("deletionTimestamp") else None
    is_stuck = ends is not None and picture.now > ends + _PATIENCE
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            if condition.get("reason") == "SchedulingGated":
                gates = ", ".join(gate["name"] for gate in spec.get("schedulingGates", []))
                yield Reason(_queue(pod) or f"is held back by its scheduling gates: {gates}", _WORKLOADS)
            else:
                yield from _no_place(pod, condition.get("message", ""), picture)
        # The kubelet says which containers are not ready; who gives its machine up says nothing.
        is_silent = condition["type"] == "Ready" and condition["status"] != "True" and not condition.get("message")
        if is_silent and status.get("phase") == "Running":
            fix = "wait until it is back, or for the pod's replacement; kubectl describe node says more"
            yield Reason(f"its machine {spec.get('nodeName')} does not answer", "" if is_stuck else fix)
    if status.get("reason"):  # Evicted, DeadlineExceeded, NodeLost, Shutdown, UnexpectedAdmissionError
        fix = "if this is the machine's doing, Flyte or max_replacements starts it again; else ask for what it lacked"
        yield Reason(f"{status['reason']}: {_cut(status.get('message', ''))}", fix)
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        yield from _of_the_container(container, pod, picture)
    if ends is not None and is_stuck:
        holds = f" (finalizers: {', '.join(held)})" if (held := metadata.get("finalizers")) else ""
        fix = f"if its machine is off: kubectl delete pod {metadata['name']} --force; kubectl describe pod says more"
        text = f"was to be gone at {_clock(ends)}, and is still there{holds}: until then no other takes its place"
        yield Reason(text, fix)
    elif ends is not None:  # when its time to stop is over
        yield Reason(
            f"is being deleted, since {_clock(ends - metadata.get('deletionGracePeriodSeconds', 0))}", weight=0
        )


_SCALES = ("TriggeredScaleUp", "NotTriggerScaleUp", "Nominated")
"""What the cluster autoscaler, and Karpenter, say of a pod that has no machine."""


def _no_place(pod: Json, words: str, picture: Picture) -> Iterator[Reason]:
    more = [event for event in _about(pod, picture) if event["reason"] in _SCALES][-1:]
    is_coming = any(event["reason"] != "NotTriggerScaleUp" for event in more)
    for lacking in sorted(set(re.findall(r"Insufficient (\S+?)[,.]?(?=\s|$)", words))):
        request = _needed(pod, lacking)
        largest, free = _room(picture, lacking)
        text = f"waits for a machine: it asks for {lacking} {_amount(request, lacking)}, and no machine has that free"
        fix = "wait until others end, ask for less per pod, or add machines"
        if largest is not None and largest < request:
            text += f"; the largest has {_amount(largest, lacking)} in all, so it waits until a larger one is there"
            fix = "ask for less per pod (fewer ranks per node, more nodes), or add such a machine"
        elif free is not None and free < request:  # else that machine does not take it for another reason
            text += f"; the most that one has free is {_amount(free, lacking)}"
        yield Reason(text, "" if is_coming else fix)
    rows = list(_match(_NO_PLACE, words))
    rows += _taints(words, is_alone=not rows and "Insufficient" not in words)
    if not rows and "Insufficient" not in words:
        rows = [(_cut(words), "change what the scheduler names")]
    yield from (Reason(f"waits for a machine: {text}", fix) for text, fix in rows)
    for event in more:
        what = "a machine is being added" if is_coming else "no machine is added"
        yield Reason(f"{what}: {_cut(event['message'])}")


def _taints(words: str, *, is_alone: bool) -> list[tuple[str, str]]:
    """What they mean, and what mends it; newer schedulers name none."""
    found = dict.fromkeys(re.findall(r"had (?:untolerated )?taint(?:\(s\))?(?: {([^}]*)})?", words))
    named = [taint.removesuffix(": ") for taint in found if taint]
    of_state = [taint for taint in named if taint.startswith(_OF_A_MACHINES_STATE)]
    others = [taint for taint in named if taint not in of_state]
    of_owners = [taint for taint in others if not taint.startswith(_CONTROL_PLANE)]
    if not of_owners and not of_state and is_alone:
        of_owners = others
    rows = []
    if of_owners or "" in found:
        which = (
            f"the taint{'s' if len(of_owners) > 1 else ''} {', '.join(of_owners)}"
            if of_owners
            else "taints (kubectl get nodes -o json)"
        )
        rows.append((f"machines are kept for others by {which}", "tolerate it in the pod template"))
    if of_state:
        text = f"machines are not ready, or about to go: {', '.join(of_state)}"
        rows.append((text, "wait until they are ready, or add machines"))
    return rows


def _number(amounts: Json, resource: str) -> Fraction:
    return value_of(amounts.get(resource)) or Fraction(0)


def _request(container: Json, resource: str) -> Fraction:
    resources = container.get("resources", {})
    return _number({**resources.get("limits", {}), **resources.get("requests", {})}, resource)


def _needed(pod: Json, resource: str) -> Fraction:
    """What a machine must have free: for all containers at once, those among the init containers that go on beside the
    others too, or for an init container beside those before it that go on."""
    beside = most = Fraction(0)
    for one in pod["spec"].get("initContainers", []):
        most = max(most, beside + _request(one, resource))
        beside += _request(one, resource) if one.get("restartPolicy") == "Always" else 0
    return max(most, sum((_request(one, resource) for one in pod["spec"]["containers"]), beside))


def _amount(value: Fraction, resource: str) -> str:
    if resource in ("memory", "ephemeral-storage"):
        return human(int(value))
    return f"{float(value):g}"


def _room(picture: Picture, resource: str) -> tuple[Fraction | None, Fraction | None]:
    """Of the machine with the most of it: what it has in all, and what one has free; None: not known."""
    if picture.nodes is None:
        return None, None
    machines = {node["metadata"]["name"]: node for node in picture.nodes}
    in_all = {name: _number(node["status"].get("allocatable", {}), resource) for name, node in machines.items()}
    largest = max(in_all.values(), default=Fraction(0))
    if not picture.neighbours:
        return largest, None
    cordoned = {name for name, node in machines.items() if node.get("spec", {}).get("unschedulable")}
    free = {name: amount for name, amount in in_all.items() if name not in cordoned}
    for pod in picture.neighbours:
        machine = pod["spec"].get("nodeName")
        if machine in free and pod["status"].get("phase") not in ("Succeeded", "Failed"):
            free[machine] -= _needed(pod, resource)
    return largest, max(free.values(), default=Fraction(0))


def _of_the_container(container: Json, pod: Json, picture: Picture) -> Iterator[Reason]:
    state = container.get("state", {})
    waiting = state.get("waiting", {})
    if waiting.get("reason") in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"):
        fix = "correct the image's name, push it, or give the pod the registry's secret (imagePullSecrets)"
        if container["name"] == _OPERATORS_CONTAINER:
            fix = "have the training-operator name one that can be: --pytorch-init-container-image"
        yield Reason(f"the image {container['image']} cannot be pulled: {_pull_error(pod, waiting, picture)}", fix)
    elif waiting.get("reason") in ("ContainerCreating", "PodInitializing"):
        # Those before it run one after the other; it is prepared when all of them are done.
        first = next((one for one in pod["status"].get("initContainerStatuses", []) if not _is_done(one)), container)
        if "running" in first.get("state", {}):
            runs = Reason(f"its init container {first['name']} runs", weight=0)
            yield _awaits_the_master(picture) if first["name"] == _OPERATORS_CONTAINER else runs
        elif first is container:
            yield from _preparation(container, pod, picture)
    elif waiting and waiting.get("reason") != "CrashLoopBackOff":
        fix = "correct what the text names (a secret or config map, or a program that is not in the image)"
        if "runAsNonRoot" in waiting.get("message", ""):
            fix = "set run_as_user in the pod template's security context: it holds for all containers of the pod"
        yield Reason(_no_start(waiting), fix)
    end = state.get("terminated") or container.get("lastState", {}).get("terminated")
    if end and (end["exitCode"] or end.get("reason") == "OOMKilled" or waiting):
        yield from _end(container, end, pod, picture)


def _awaits_the_master(picture: Picture) -> Reason:
    """Of a worker whose init container looks the master's name up: that leads nowhere while a container of the master
    is not ready."""
    for master in picture.pods:
        is_master = master["metadata"].get("labels", {}).get(_ROLE) == "master"
        for each in master["status"].get("containerStatuses", ()):
            since = each.get("state", {}).get("running", {}).get("startedAt")
            is_new = since is None or picture.now < _time(since) + _PATIENCE
            if is_master and not is_new and not each.get("ready"):
                text = f"waits until the master is ready, which its container {each['name']} is not"
                return Reason(text, f"correct or remove the readiness probe of {each['name']}")
    return Reason("waits until the master's pod has an address", weight=0)


def _no_start(why: Json) -> str:
    return f"its container cannot start: {why.get('reason')}: {_cut(why.get('message', ''))}"


def _is_done(container: Json) -> bool:
    """Of an init container; one that goes on beside the others is done when it has started."""
    return container.get("state", {}).get("terminated", {}).get("exitCode") == 0 or bool(container.get("started"))


def _pull_error(pod: Json, waiting: Json, picture: Picture) -> str:
    """The registry's own words: while the kubelet backs off, only an event has them."""
    events = [event for event in _about(pod, picture) if event["message"].startswith("Failed to pull image")]
    if waiting["reason"] == "ImagePullBackOff" and events:
        return _cut(re.sub(r'^Failed to pull image ".*?": ', "", events[-1]["message"]))
    return _cut(waiting.get("message") or waiting["reason"])


def _preparation(container: Json, pod: Json, picture: Picture) -> Iterator[Reason]:
    failures = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox")
    told = [event for event in _about(pod, picture) if event["reason"] in (*failures, "Pulling", "Pulled")]
    last = told[-1] if told else None
    if last is not None and last["reason"] in failures:
        yield Reason(_no_start(last), "correct the volume, secret or network that the text names")
    elif last is not None and last["reason"] == "Pulling":
        since = _age(picture.now - _when(last))
        yield Reason(f"its machine pulls the image {container['image']}, for {since}", weight=0)


def _end(container: Json, end: Json, pod: Json, picture: Picture) -> Iterator[Reason]:
    if end.get("reason") == "ContainerStatusUnknown":  # the kubelet's words, and no time
        yield Reason(f"container {container['name']} was lost: {_cut(end.get('message', ''))}")
        return
    restarts = container.get("restartCount", 0)
    is_now = "running" not in container.get("state", {})
    what = f"container {container['name']} ended with exit status {end['exitCode']}"
    often = f" and was started again {restarts} time(s)" if restarts else ""
    if end.get("reason") == "OOMKilled":
        containers = [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
        limits = {one["name"]: one.get("resources", {}).get("limits", {}) for one in containers}
        limit = limits.get(container["name"], {}).get("memory", "its machine")
        what = f"out of memory: the kernel ended a process of it at the limit of {limit}; {what}"
        fix = "raise mem in requests and limits, or start fewer ranks and loader workers per pod"
        is_now = is_now or restarts > 0
    else:
        often += _next_try(pod["metadata"]["name"], container, picture)
        option = "" if "terminated" in container.get("state", {}) else " --previous"
        fix = "" if end.get("message") else f"kubectl logs{option} shows its output"
    yield Reason(f"{what} at {_clock(_time(end['finishedAt']))}{often}", fix, current=is_now)
    words = [line for line in (end.get("message") or "").splitlines() if line.strip()]
    errors = [line for line in words if line.removeprefix("[safedist] ").startswith("error")]
    if words:
        yield Reason(f"its last words: {_cut((errors or words)[-1])}", weight=1, current=is_now)


def _next_try(pod: str, container: Json, picture: Picture) -> str:
    """The kubelet waits longer each time: 10 s, 20 s, … 300 s."""
    waiting = container.get("state", {}).get("waiting", {})
    texts = [(picture.now, waiting.get("message", ""))] if waiting.get("reason") == "CrashLoopBackOff" else []
    for event in picture.events:  # the operator's, of the job; worker-10's holds worker-1, too
        if event["reason"] == "CrashLoopBackOff" and f"pod={pod}_" in event["message"]:
            texts.append((_when(event), event["message"]))
    found = [(when, re.search(r"back-off (\w+) restarting", text)) for when, text in texts]
    pauses = [(when, match[1]) for when, match in found if match]
    return f"; the pause before the next start was {max(pauses)[1]} at last, and grows to 5 min" if pauses else ""


# --- what is over -----------------------------------------------------------------------------------------------------


def _replacements(picture: Picture) -> Iterator[Reason]:
    """Pods that went and came back under their name: events of more than one uid."""
    uids: dict[str, dict[str, list[Json]]] = {}
    for event in sorted(picture.events, key=_when):
        about = event["involvedObject"]
        if about.get("kind") == "Pod" and "uid" in about:
            uids.setdefault(about["name"], {}).setdefault(about["uid"], []).append(event)
    for name, lives in uids.items():
        *gone, _ = lives.values()
        for events in gone:
            causes = [_STOPS[event["reason"]] for event in events if event["reason"] in _STOPS]
            stop = [event for event in events if event["reason"] == "Killing"]
            unknown = "it was deleted: by somebody, by a drain, or for its machine" if stop else "it failed"
            text = f"was stopped at {_clock(_when((stop or events)[-1]))} and replaced: {[unknown, *causes][-1]}"
            yield Reason(text, who=name, weight=0, current=False)


# --- words and times --------------------------------------------------------------------------------------------------


def _about(pod: Json, picture: Picture) -> list[Json]:
    name = pod["metadata"]["name"]
    return sorted((event for event in picture.events if event["involvedObject"].get("name") == name), key=_when)


def _when(event: Json) -> float:
    latest = (event.get("series") or {}).get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return _time(latest or event["metadata"]["creationTimestamp"])


def _time(text: str) -> float:
    """Seconds since 1970 of what Kubernetes writes: ``2026-11-25T22:46:35Z``, with or without microseconds."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%H:%M:%S UTC")


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _TEXT else f"{line[:_TEXT]} …"
