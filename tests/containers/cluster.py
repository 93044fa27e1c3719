"""Pods as containers: a network of their own, an S3 server, and the containers that a job's pods become.

What Kubernetes does is done by docker: a pod's name is its host name and resolves in the network; a container of its
own holds the pod's network, so that an address outlives the restart of the main one; an ``emptyDir`` is a directory
that outlives the container; ``restartPolicy: OnFailure`` is docker's own restart in place. Names, variables and
commands are those that ``render`` shows, unchanged. Left out: init containers (the one of a PyTorchJob's worker only
waits for a name to resolve; without it, starting is harder, not easier) and limits on cpu.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from docker.errors import NotFound
from docker.models.containers import Container
from docker.types import Mount
from flyteidl.core import errors_pb2, literals_pb2

from tests.containers import network
from tests.containers.engine import (
    BUCKET,
    DEADLINE,
    NOTHING,
    PORT,
    S3,
    Docker,
    Options,
    filter_packets,
    freeze,
    remove,
    runs,
    state,
)
from tests.harness.flyte import executed, pods
from tests.harness.procs import Gate
from tests.harness.product import CHECKPOINTS_RECORD, job_manifest


@dataclass(frozen=True)
class Ended:
    """A pod that has ended.

    Attributes:
        codes: the exit status of every run of its container, in order; 128 + n for signal n.
        log: what its container wrote, all runs.
    """

    codes: tuple[int, ...]
    log: str

    @property
    def code(self) -> int:
        return self.codes[-1]


@dataclass
class Pod:
    """One pod of a job, started as often as the test says so.

    Attributes:
        rules: of iptables, in its network.
    """

    docker: Docker
    spec: Mapping[str, Any]
    network: str
    options: Options
    volumes: Path
    rules: tuple[str, ...] = field(default=(), init=False)
    lives: list[tuple[Container, Container]] = field(default_factory=list, init=False)
    given_up: list[tuple[Container, Container]] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        return str(self.spec["metadata"]["name"])

    @property
    def sandbox(self) -> Container:
        """The container that does nothing but hold the pod's network, like Kubernetes' own ("pause")."""
        return self.lives[-1][0]

    @property
    def container(self) -> Container:
        """That of the primary container, of the pod's latest life."""
        return self.lives[-1][1]

    @property
    def main(self) -> Mapping[str, Any]:
        """The primary container: the first one."""
        main: Mapping[str, Any] = self.spec["spec"]["containers"][0]
        return main

    def start(self) -> Pod:
        """Create it anew, as the operator does after the pod was deleted: nothing is left of an earlier one."""
        self.remove()
        image = self.main["image"]
        named = Options(more={"hostname": self.name, **network.place(self.docker, self.network, self.name)})
        sandbox = self.docker.run(f"{self.name}.sandbox", image, ("sleep", "infinity"), named)
        for rule in self.rules:
            filter_packets(sandbox, "-I", rule)
        restart = {"Never": {"Name": "no"}, "OnFailure": {"Name": "on-failure", "MaximumRetryCount": 6}}
        how = {"network_mode": f"container:{sandbox.id}", "restart_policy": restart[self.spec["spec"]["restartPolicy"]]}
        own = Options(self._environment(), self._mounts(), how)
        command = [*(self.main.get("command") or ()), *(self.main.get("args") or ())]
        self.lives.append((sandbox, self.docker.run(self.name, image, command, own + self.options)))
        return self

    def stop(self, grace: int | None = None) -> Ended:
        """As when the pod is preempted or drained: told to stop, and gone before its grace period is over, at whose end
        it would be killed."""
        # docker takes it for the user's wish, and starts nothing again
        self.container.stop(timeout=grace or int(self.spec["spec"]["terminationGracePeriodSeconds"]))
        self.docker.ends.wait(self.ended_for_good, f"{self.name} leaves", DEADLINE)
        ended = self.wait()
        assert not self.docker.ends.killed(self.container), f"{self.name} had not left by itself:\n{ended.log}"
        return ended

    def remove(self) -> None:
        """As when the pod is deleted: its processes end while they still have a network."""
        for container in reversed(self.lives[-1] if self.lives else ()):
            remove(container)

    def give_up(self) -> tuple[Container, Container]:
        """As when its machine is cut off, and Kubernetes counts it as deleted: what runs there goes on, and another pod
        may have its name. Here the name then leads to both, which is harder than on a cluster."""
        sandbox, main = self.lives.pop()
        for container in (sandbox, main):
            container.rename(f"{container.name}.given-up-{len(self.given_up)}")
        self.given_up.append((sandbox, main))
        return sandbox, main

    def _environment(self) -> dict[str, str]:
        return {one["name"]: self._value(one) for one in self.main["env"]}

    def _value(self, variable: Mapping[str, Any]) -> str:
        if "resourceFieldRef" in variable.get("valueFrom", {}):
            return "0"  # nobody limits a container's disk here, nor evicts it
        if "valueFrom" in variable:
            fields = {"metadata.name": self.name, "spec.nodeName": f"machine-of-{self.name}"}
            return fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        return str(variable.get("value", ""))  # Go leaves an empty value out

    def _mounts(self) -> tuple[Mount, ...]:
        kinds = {one["name"]: one for one in self.spec["spec"].get("volumes", ())}
        mounts = []
        for mount in self.main.get("volumeMounts", ()):
            volume, target = kinds[mount["name"]], mount["mountPath"]
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                mounts.append(Mount(target, None, type="tmpfs", tmpfs_mode=0o1777))
                continue
            directory = self.volumes / f"{self.name}-{mount['name']}-{len(self.lives)}.{len(self.given_up)}"
            directory.mkdir(parents=True)
            directory.chmod(0o777)  # as the kubelet makes it
            mounts.append(Mount(target, str(directory), type="bind"))
        return tuple(mounts)

    @property
    def log(self) -> str:
        # Both streams in the order in which they were written, as `kubectl logs` shows them.
        try:
            written: bytes = self.container.logs()
        except NotFound:
            return "(removed)"
        return written.decode(errors="replace")

    def says(self, text: str) -> None:
        """Wait until its log holds *text*."""
        end = time.monotonic() + DEADLINE
        while text not in self._log_until(text, end):
            # The stream ends with every run of the container; the next one's is in the same log.
            assert self.runs, f"{self.name} has ended without saying {text!r}"
            assert time.monotonic() < end, f"not within {DEADLINE:g} s: {self.name} says {text!r}"

    def _log_until(self, text: str, end: float) -> str:
        """What the log holds as far as *text*, or to the end of the run, whenever it comes."""
        stream = self.container.logs(stream=True, follow=True)
        late = threading.Timer(max(0.0, end - time.monotonic()), stream.close)
        late.start()
        read = b""
        try:
            for part in stream:
                read += part
                if text.encode() in read:
                    break
        finally:
            late.cancel()
            stream.close()
        return read.decode(errors="replace")

    @property
    def runs(self) -> bool:
        return runs(self.container)

    def wait(self, runs: int = 1, within: float = DEADLINE) -> Ended:
        """Wait until its container has ended *runs* times: with ``OnFailure``, one that fails starts again."""
        ended, what = self.docker.ends, f"{self.name} ends {runs} time(s)"
        # A pod that ended for good before: the daemon's word on its last run may still be on its way, so all words are
        # counted against the starts that the daemon knows of.
        ended.wait(lambda: len(self.codes) >= runs or self.ended_for_good(), what, within)
        return Ended(self.codes, self.log)

    def ended_for_good(self) -> bool:
        """Whether it does not run, and the daemon has told how each of its runs ended."""
        return not self.runs and len(self.codes) > int(self.container.attrs.get("RestartCount", 0))

    @property
    def codes(self) -> tuple[int, ...]:
        return self.docker.ends.of(self.container)

    def signal(self, number: int, process: int | None = None) -> None:
        """Send a signal to its first process as the kernel does; docker takes a kill of its own for the user's wish."""
        os.kill(process or self.pid, number)

    @property
    def address(self) -> str:
        """Of its latest life."""
        return network.address(self.sandbox, self.network)

    @property
    def pid(self) -> int:
        return int(state(self.container)["Pid"])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Frozen, connections open, as on a machine that hangs."""
        freeze(self.container)
        try:
            yield
        finally:
            self.container.unpause()

    @contextmanager
    def partitioned(self) -> Iterator[None]:
        """It sends and receives nothing, and nobody is told."""
        with self.under("INPUT ! -i lo -j DROP", "OUTPUT ! -o lo -j DROP"):
            yield

    def without_store(self) -> contextlib.AbstractContextManager[None]:
        """Its connections to the S3 server are refused, old ones included."""
        return self.under(f"OUTPUT -p tcp --dport {PORT} -j REJECT --reject-with tcp-reset")

    @contextmanager
    def under(self, *rules: str) -> Iterator[None]:
        """Its network, and those of its lives that begin meanwhile, are under rules of iptables."""
        self.rules = rules
        for rule in rules if self.lives else ():
            filter_packets(self.sandbox, "-I", rule)
        try:
            yield
        finally:
            self.rules = ()
            for rule in rules if self.lives and runs(self.sandbox) else ():
                filter_packets(self.sandbox, "-D", rule)


@dataclass
class Job:
    """One attempt of an execution of a task on a cluster."""

    s3: S3
    pods: list[Pod]
    name: str
    attempt: int
    started: float = field(default_factory=time.monotonic)

    def start(self) -> list[Pod]:
        """Start every pod, the last one first."""
        for pod in reversed(self.pods):
            pod.start()
        return self.pods

    @contextmanager
    def store_down(self) -> Iterator[None]:
        """Its pods' connections to the S3 server are refused, old ones included; not those of others, nor ours."""
        with contextlib.ExitStack() as down:
            for pod in self.pods:
                down.enter_context(pod.without_store())
            yield

    def run(self, within: float = DEADLINE) -> list[Ended]:
        """Start every pod, and wait for the first end of each."""
        self.start()
        return self.wait(within)

    def remove(self) -> None:
        """Its containers, whatever they do."""
        for pod in self.pods:
            pod.remove()
            for container in (one for life in pod.given_up for one in reversed(life)):
                remove(container)

    def wait(self, within: float = DEADLINE) -> list[Ended]:
        end = time.monotonic() + within
        return [pod.wait(within=end - time.monotonic()) for pod in self.pods]

    @property
    def prefix(self) -> str:
        """That of its outputs."""
        return f"metadata/{self.name}/n0/data/{self.attempt}/"

    @property
    def checkpoints(self) -> str:
        """Flyte's checkpoint prefix."""
        return f"s3://{BUCKET}/checkpoints/{self.name}-{self.attempt}"

    @property
    def uploaded(self) -> list[str]:
        """Names of what is at the output prefix, but for decks, the record of checkpoints, and hidden ones."""
        names = self.s3.names(self.prefix)
        return [name for name in names if not name.startswith(("deck", ".")) and name != CHECKPOINTS_RECORD]

    @property
    def output(self) -> Any:
        """The one output, a JSON text."""
        literals = literals_pb2.LiteralMap.FromString(self.s3.get(f"{self.prefix}outputs.pb"))
        return json.loads(literals.literals["o0"].scalar.primitive.string_value)

    @property
    def error(self) -> errors_pb2.ContainerError:
        """The one error."""
        (name,) = [one for one in self.uploaded if one.startswith("error")]
        return errors_pb2.ErrorDocument.FromString(self.s3.get(self.prefix + name)).error


@dataclass
class Cluster:
    """Where jobs run.

    Attributes:
        templates: registered tasks by their function's name.
        network: the pods' network.
    """

    docker: Docker
    s3: S3
    network: str
    templates: Mapping[str, Any]

    def job(
        self,
        task: str,
        directory: Path,
        *,
        environment: Mapping[str, str] | None = None,
        options: Options = NOTHING,
        after: Job | None = None,
        **inputs: int,
    ) -> Job:
        """A job that is ready to start.

        Args:
            task: the function's name.
            directory: for the pods' emptyDirs.
            environment: variables that a platform would add; and ``TEST_HEARTBEAT`` and ``TEST_UPLOAD``, seconds, in
                the place of the task's own timeouts.
            options: further ones for every pod's container.
            after: the attempt before this one.
            inputs: of the task.
        """
        name = after.name if after else f"f{uuid.uuid4().hex[:15]}"
        job = Job(self.s3, [], name, after.attempt + 1 if after else 0)
        files = {
            "{{.input}}": self.s3.put(f"metadata/{name}/inputs.pb", _literals(inputs)),
            "{{.outputPrefix}}": f"s3://{BUCKET}/{job.prefix.rstrip('/')}",
            "{{.rawOutputDataPrefix}}": f"s3://{BUCKET}/raw/{name}",
            "{{.checkpointOutputPrefix}}": job.checkpoints,
            "{{.prevCheckpointPrefix}}": after.checkpoints if after else "",
        }
        manifest = executed(job_manifest(self.templates[task]), files, name=name, attempt=job.attempt)
        calm = {"HOROVOD_CYCLE_TIME": os.environ["HOROVOD_CYCLE_TIME"]}  # tests/conftest.py says why
        given = Options({**self.s3.environment, **calm, **(environment or {})}) + options
        for spec in pods(manifest):
            _set_timeouts(spec, environment or {})
            job.pods.append(Pod(self.docker, spec, self.network, given, directory / "volumes"))
        return job


def _set_timeouts(spec: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    names = {"TEST_HEARTBEAT": "heartbeat", "TEST_UPLOAD": "upload"}
    own = {names[name]: float(value) for name, value in environment.items() if name in names}
    for variable in spec["spec"]["containers"][0]["env"]:
        if variable["name"] == "SAFEDIST_JOB":
            registered = json.loads(variable["value"])
            variable["value"] = json.dumps({**registered, "timeouts": {**registered["timeouts"], **own}})


def _literals(inputs: Mapping[str, int]) -> bytes:
    said = literals_pb2.LiteralMap()
    for name, value in inputs.items():
        said.literals[name].scalar.primitive.integer = value
    written: bytes = said.SerializeToString()
    return written


def report(job: Job) -> str:
    """What a failed test shows of its job."""
    parts = [f"uploaded: {job.uploaded}"]
    for pod in job.pods:
        if pod.lives:
            parts.append(f"--- {pod.name}: exit codes {pod.codes}\n" + "\n".join(pod.log.splitlines()[-60:]))
    return "\n".join(parts)


def gated(gate: Gate, place: str = "in the function", **more: str) -> dict[str, Any]:
    """How *gate* is reached from a job's pods, as arguments of :meth:`Cluster.job`: ranks stand there in *place*; with
    *more* variables."""
    directory = gate.said.parent
    return {
        "environment": {"TEST_GATE": place, "TEST_SAID": "/gate/said", "TEST_WORD": "/gate/word", **more},
        "options": Options(mounts=(Mount("/gate", str(directory), type="bind"),)),
    }
