"""Pods as containers: a network of their own, an S3 server, and the containers that a job's pods become.

What Kubernetes does is done by docker: a pod's name is its host name and resolves in the network, an ``emptyDir`` is a
directory that outlives the container, ``restartPolicy: OnFailure`` is docker's own restart in place. Names, variables
and commands are those of ``render --pods``, unchanged. Left out: init containers (the one of a PyTorchJob's worker only
waits for a name to resolve; without it, starting is harder, not easier) and limits on cpu.
"""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flyteidl.core import errors_pb2, literals_pb2

from flytekitplugins_safedist.render import Cluster as Backend
from flytekitplugins_safedist.render import Execution, job_manifest, pods
from tests.procs import Gate

BUCKET = "flyte"
LABEL = "flytekitplugins-safedist.test"
KEY = "test"
"""What moto takes for credentials: anything."""
DEADLINE = 240.0
"""Seconds after which a test gives up on something that must happen; generous, for slow machines. Never a measure."""


class Docker:
    """The docker client, and what this session made with it."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.session = uuid.uuid4().hex[:8]

    def __call__(self, *arguments: str, check: bool = True) -> str:
        done = subprocess.run([self.client, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, f"docker {' '.join(arguments)}: {done.stderr}"
        return done.stdout.strip()

    @property
    def label(self) -> str:
        return f"{LABEL}={self.session}"

    def run(self, name: str, image: str, options: Sequence[str], command: Sequence[str]) -> None:
        """Start a container; what remains of it is removed with the session."""
        self("run", "--detach", "--name", name, "--label", self.label, *options, image, *command)

    def inspect(self, name: str, what: str) -> Any:
        return json.loads(self("inspect", "--format", f"{{{{json {what}}}}}", name))

    def remove_everything(self) -> None:
        """Containers, with their volumes, and networks of this session."""
        which = ("--filter", f"label={self.label}")
        if containers := self("ps", "--all", "--quiet", *which).split():
            self("rm", "--force", "--volumes", *containers)
        if networks := self("network", "ls", "--quiet", *which).split():
            self("network", "rm", *networks)


def until(true: Callable[[], Any], what: str, deadline: float = DEADLINE) -> Any:
    """Wait for a state that docker does not announce, looking again and again; gives what *true* gave."""
    end = time.monotonic() + deadline
    while not (seen := true()):
        assert time.monotonic() < end, f"not within {deadline:g} s: {what}"
        time.sleep(0.2)
    return seen


class S3:
    """A moto server in a container: a real S3 API, and its state is gone with it.

    Tests reach it through a port on loopback, pods by its name in their network.
    """

    def __init__(self, docker: Docker, image: str, network: str) -> None:
        import botocore.config
        import botocore.session

        self._docker = docker
        self.name = f"s3-{docker.session}"
        server = ("moto_server", "--host", "0.0.0.0", "--port", "5000")
        docker.run(self.name, image, ("--network", network, "--publish", "127.0.0.1::5000"), server)
        port = docker("port", self.name, "5000").splitlines()[0].rsplit(":", 1)[1]
        self.client = botocore.session.get_session().create_client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            region_name="us-east-1",
            aws_access_key_id=KEY,
            aws_secret_access_key=KEY,
            config=botocore.config.Config(connect_timeout=5, read_timeout=20, retries={"total_max_attempts": 1}),
        )
        until(self._answers, "the S3 server answers")
        self.client.create_bucket(Bucket=BUCKET)
        self.environment = {
            "FLYTE_AWS_ENDPOINT": f"http://{self.name}:5000",
            "FLYTE_AWS_ACCESS_KEY_ID": KEY,
            "FLYTE_AWS_SECRET_ACCESS_KEY": KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def _answers(self) -> bool:
        from botocore.exceptions import BotoCoreError

        try:
            self.client.list_buckets()
        except BotoCoreError:
            return False
        return True

    def upload(self, location: str, content: bytes) -> None:
        """Put an object at an ``s3://bucket/key``."""
        bucket, _, key = location.removeprefix("s3://").partition("/")
        self.client.create_bucket(Bucket=bucket)
        self.client.put_object(Bucket=bucket, Key=key, Body=content)

    def put(self, key: str, content: bytes) -> str:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)
        return f"s3://{BUCKET}/{key}"

    def get(self, key: str) -> bytes:
        content: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return content

    def names(self, prefix: str) -> list[str]:
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())
        return sorted(one["Key"].removeprefix(prefix) for one in found)

    @contextmanager
    def down(self) -> Iterator[None]:
        """Pods' connections to it are refused, old ones included; the test's own are too."""
        with rules(self._docker, self.name, "INPUT -p tcp --dport 5000 -j REJECT --reject-with tcp-reset"):
            yield


@contextmanager
def rules(docker: Docker, container: str, *wanted: str) -> Iterator[None]:
    """Rules of iptables inside a container's network; gone at the end, if the container still runs."""
    where = ("nsenter", "--target", str(docker.inspect(container, ".State.Pid")), "--net", "iptables", "--wait")
    for rule in wanted:
        subprocess.run([*where, "-I", *rule.split()], check=True)
    try:
        yield
    finally:
        if docker.inspect(container, ".State.Running"):
            for rule in wanted:
                subprocess.run([*where, "-D", *rule.split()], check=True)


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
    options: tuple[str, ...]
    volumes: Path
    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    since: float = field(default=0.0, init=False)

    @property
    def name(self) -> str:
        return str(self.spec["metadata"]["name"])

    @property
    def main(self) -> Mapping[str, Any]:
        """The primary container: the first one."""
        main: Mapping[str, Any] = self.spec["spec"]["containers"][0]
        return main

    def start(self, *more: str) -> Pod:
        """Create it anew, as the operator does after the pod was deleted: nothing is left of an earlier one."""
        self.docker("rm", "--force", self.name, check=False)
        self.since = time.time()
        restart = {"Never": "no", "OnFailure": "on-failure:6"}[self.spec["spec"]["restartPolicy"]]
        options = ["--hostname", self.name, "--restart", restart, *self._environment(), *self._mounts(), *self.options]
        command = [*(self.main.get("command") or ()), *(self.main.get("args") or ())]
        self.docker.run(self.name, self.main["image"], [*options, *more], command)
        return self

    def _environment(self) -> Iterator[str]:
        for one in self.main["env"]:
            known = {"metadata.name": self.name}
            value = one["value"] if "value" in one else known[one["valueFrom"]["fieldRef"]["fieldPath"]]
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
        with rules(self.docker, self.name, "INPUT ! -i lo -j DROP", "OUTPUT ! -o lo -j DROP"):
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
            pod.docker("rm", "--force", "--volumes", pod.name, check=False)

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
            Pod(self.docker, spec, ("--network", self.network, *flags, *options), directory / "volumes")
            for spec in pods(manifest)
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
