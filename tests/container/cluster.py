"""Pods as containers: a network of their own, an S3 server, and the containers that a job's pods become.

What Kubernetes does is done by docker: a pod's name is its host name and resolves in the network; a container of its
own holds the pod's network, so that an address outlives the restart of the main one; an ``emptyDir`` is a directory
that outlives the container; ``restartPolicy: OnFailure`` is docker's own restart in place. Names, variables and
commands are those of ``render --pods``, unchanged. Left out: init containers (the one of a PyTorchJob's worker only
waits for a name to resolve; without it, starting is harder, not easier) and limits on cpu.
"""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flyteidl.core import errors_pb2, literals_pb2

from flytekitplugins_safedist.render import Cluster as Backend
from flytekitplugins_safedist.render import Execution, job_manifest, pods
from tests.container.engine import BUCKET, DEADLINE, S3, Docker, rules, until
from tests.procs import Gate


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
        files: by the name of a volume: the texts of a config map, or what an init container leaves in an ``emptyDir``.
    """

    docker: Docker
    spec: Mapping[str, Any]
    network: str
    options: tuple[str, ...]
    volumes: Path
    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    since: float = field(default=0.0, init=False)

    @property
    def name(self) -> str:
        return str(self.spec["metadata"]["name"])

    @property
    def sandbox(self) -> str:
        """The container that does nothing but hold the pod's network, like Kubernetes' own ("pause")."""
        return f"{self.name}.sandbox"

    @property
    def main(self) -> Mapping[str, Any]:
        """The primary container: the first one."""
        main: Mapping[str, Any] = self.spec["spec"]["containers"][0]
        return main

    def start(self, *more: str) -> Pod:
        """Create it anew, as the operator does after the pod was deleted: nothing is left of an earlier one."""
        self.remove()
        self.since = time.time()
        named = ("--hostname", self.name, "--network", self.network, "--network-alias", self.name)
        self.docker.run(self.sandbox, self.main["image"], named, ("sleep", "infinity"))
        restart = {"Never": "no", "OnFailure": "on-failure:6"}[self.spec["spec"]["restartPolicy"]]
        how = ("--network", f"container:{self.sandbox}", "--restart", restart, *self._environment(), *self._mounts())
        command = [*(self.main.get("command") or ()), *(self.main.get("args") or ())]
        self.docker.run(self.name, self.main["image"], [*how, *self.options, *more], command)
        return self

    def remove(self) -> None:
        """As when the pod is deleted."""
        self.docker("rm", "--force", "--volumes", self.name, self.sandbox, check=False)

    def _environment(self) -> Iterator[str]:
        for one in self.main["env"]:
            known = {"metadata.name": self.name}
            # Go leaves an empty value out.
            value = known[one["valueFrom"]["fieldRef"]["fieldPath"]] if "valueFrom" in one else one.get("value", "")
            yield from ("--env", f"{one['name']}={value}")

    def _mounts(self) -> Iterator[str]:
        kinds = {one["name"]: one for one in self.spec["spec"].get("volumes", ())}
        for mount in self.main.get("volumeMounts", ()):
            volume, target = kinds[mount["name"]], mount["mountPath"]
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                yield f"--mount=type=tmpfs,destination={target},tmpfs-mode=1777"
                continue
            directory = self.volumes / f"{self.name}-{mount['name']}-{self.since}"
            directory.mkdir(parents=True)
            directory.chmod(0o777)  # as the kubelet makes it
            for name, text in self.files.get(mount["name"], {}).items():
                (directory / name).write_text(text)
                (directory / name).chmod(0o555)
            yield f"--mount=type=bind,source={directory},destination={target}"

    @property
    def directories(self) -> list[Path]:
        """What its emptyDirs hold, of all its lives."""
        return sorted(self.volumes.glob(f"{self.name}-*"))

    @property
    def log(self) -> str:
        # Both streams in the order in which they were written, as `kubectl logs` shows them.
        done = subprocess.run(
            [self.docker.client, "logs", self.name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        return done.stdout.decode(errors="replace")

    def says(self, text: str) -> None:
        """Wait until its log holds *text*."""
        until(lambda: text in self.log or not self.runs, f"{self.name} says {text!r}")
        assert text in self.log, f"{self.name} has ended without saying {text!r}"

    @property
    def runs(self) -> bool:
        state = self.docker.inspect(self.name, ".State")
        return bool(state["Running"] or state["Restarting"])

    def wait(self, runs: int = 1, within: float = DEADLINE) -> Ended:
        """Wait until its container has ended *runs* times: with ``OnFailure``, one that fails starts again."""
        until(lambda: len(self.codes) >= runs or not self.runs, f"{self.name} ends {runs} time(s)", within)
        return Ended(self.codes, self.log)

    @property
    def codes(self) -> tuple[int, ...]:
        told = ("--since", f"{self.since:.6f}", "--until", f"{time.time() + 1:.6f}")
        which = ("--filter", f"container={self.name}", "--filter", "event=die")
        return tuple(
            int(one)
            for one in self.docker("events", *told, *which, "--format", "{{.Actor.Attributes.exitCode}}").split()
        )

    def signal(self, number: int, process: int | None = None) -> None:
        """Send a signal to its first process as the kernel does; docker takes a kill of its own for the user's wish."""
        subprocess.run(["kill", f"-{int(number)}", str(process or self.pid)], check=True)

    @property
    def pid(self) -> int:
        return int(self.docker.inspect(self.name, ".State.Pid"))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Frozen, connections open, as on a machine that hangs."""
        self.docker("pause", self.name)
        try:
            yield
        finally:
            self.docker("unpause", self.name)

    @contextmanager
    def partitioned(self) -> Iterator[None]:
        """It sends and receives nothing, and nobody is told."""
        with rules(self.docker, self.sandbox, "INPUT ! -i lo -j DROP", "OUTPUT ! -o lo -j DROP"):
            yield


@dataclass
class Job:
    """One execution of a task on a cluster."""

    s3: S3
    pods: list[Pod]
    prefix: str
    started: float = field(default_factory=time.monotonic)

    def start(self) -> list[Pod]:
        """Start every pod, the last one first."""
        for pod in reversed(self.pods):
            pod.start()
        return self.pods

    def run(self, within: float = DEADLINE) -> list[Ended]:
        """Start every pod, and wait for the first end of each."""
        self.start()
        return self.wait(within)

    def remove(self) -> None:
        """Its containers, whatever they do."""
        for pod in self.pods:
            pod.remove()

    def wait(self, within: float = DEADLINE) -> list[Ended]:
        end = time.monotonic() + within
        return [pod.wait(within=end - time.monotonic()) for pod in self.pods]

    @property
    def uploaded(self) -> list[str]:
        """Names of what is at the output prefix."""
        return [name for name in self.s3.names(self.prefix) if not name.startswith("deck")]

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
        options: Sequence[str] = (),
        backend: Backend | None = None,
        **inputs: int,
    ) -> Job:
        """A job that is ready to start.

        Args:
            task: the function's name.
            directory: for the pods' emptyDirs.
            environment: variables that a platform would add.
            options: further ones for every ``docker run``.
            backend: the Flyte backend's settings.
            inputs: of the task.
        """
        name = f"f{uuid.uuid4().hex[:15]}"
        prefix = f"metadata/{name}/n0/data/0/"
        files = {
            "{{.input}}": self.s3.put(f"metadata/{name}/inputs.pb", _literals(inputs)),
            "{{.outputPrefix}}": f"s3://{BUCKET}/{prefix.rstrip('/')}",
            "{{.rawOutputDataPrefix}}": f"s3://{BUCKET}/raw/{name}",
            "{{.checkpointOutputPrefix}}": f"s3://{BUCKET}/checkpoints/{name}",
            "{{.prevCheckpointPrefix}}": "",
        }
        manifest = job_manifest(self.templates[task], Execution(name=name, files=files), backend or Backend())
        given = {**self.s3.environment, **(environment or {})}
        flags = [text for pair in given.items() for text in ("--env", "=".join(pair))]
        made = [
            Pod(self.docker, spec, self.network, (*flags, *options), directory / "volumes") for spec in pods(manifest)
        ]
        return Job(self.s3, made, prefix)


def _literals(inputs: Mapping[str, int]) -> bytes:
    said = literals_pb2.LiteralMap()
    for name, value in inputs.items():
        said.literals[name].scalar.primitive.integer = value
    return said.SerializeToString()


def report(job: Job) -> str:
    """What a failed test shows of its job."""
    parts = [f"uploaded: {job.uploaded}"]
    for pod in job.pods:
        if pod.since:
            parts.append(f"--- {pod.name}: exit codes {pod.codes}\n" + "\n".join(pod.log.splitlines()[-60:]))
    return "\n".join(parts)


def gated(gate: Gate) -> dict[str, Any]:
    """What makes *gate* reachable in a job's pods, as arguments of :meth:`Cluster.job`."""
    directory = gate.said.parent
    return {
        "environment": {"TEST_HOW": "gate", "TEST_SAID": "/gate/said", "TEST_WORD": "/gate/word"},
        "options": (f"--mount=type=bind,source={directory},destination=/gate",),
    }
