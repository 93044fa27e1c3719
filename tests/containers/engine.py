"""The docker daemon of the container tests, what it tells of containers, and an S3 server in one.

All that the workers of a test session make is labelled with the session, and removed by its last worker.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from docker import DockerClient
from docker.errors import APIError, NotFound
from docker.models.containers import Container
from docker.types import Mount

BUCKET = "flyte"
LABEL = "flytekitplugins-safedist.test"
KEY = "test"
"""What moto takes for credentials: anything."""
PORT = 5000
"""Of the S3 server, in its container."""
DEADLINE = 480.0
"""Seconds after which a test gives up on something that must happen; generous, for slow machines. Never a measure."""


@dataclass(frozen=True)
class Options:
    """What a container is given beside its image and its command.

    Attributes:
        more: further arguments of ``DockerClient.containers.create``.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)

    def __add__(self, other: Options) -> Options:
        environment = {**self.environment, **other.environment}
        return Options(environment, self.mounts + other.mounts, {**self.more, **other.more})


NOTHING = Options()


class Docker:
    """The daemon, and what this session made there."""

    def __init__(self, session: str) -> None:
        self.session = session
        # By the environment, as docker's own client; with the newest protocol that the daemon knows (20.10: 1.41).
        self.client = DockerClient.from_env(timeout=int(DEADLINE))
        self.ends = Ends(self)

    @property
    def labels(self) -> dict[str, str]:
        return {LABEL: self.session}

    def run(self, name: str, image: str, command: Sequence[str], options: Options) -> Container:
        """Start a container; what remains of it is removed with the session."""
        made = self._create(image, command, options + Options(more={"name": name, "labels": self.labels}))
        made.start()
        return made

    def _create(self, image: str, command: Sequence[str], options: Options) -> Container:
        environment, mounts = dict(options.environment), list(options.mounts)
        made: Container = self.client.containers.create(
            image, list(command), environment=environment, mounts=mounts, **options.more
        )
        return made

    def once(self, image: str, command: Sequence[str], options: Options) -> Ran:
        """Run a command in a container of its own, which belongs to the caller: no other worker removes it."""
        container = self._create(image, command, options)
        try:
            container.start()
            code = container.wait()["StatusCode"]
            out, err = (container.logs(**{one: True, other: False}) for one, other in (STREAMS, STREAMS[::-1]))
        finally:
            remove(container)
        return Ran(code, out.decode(errors="replace"), err.decode(errors="replace"))

    def remove_everything(self) -> None:
        """Containers, with their volumes, and networks of this session."""
        which = {"label": f"{LABEL}={self.session}"}
        for container in self.client.containers.list(all=True, filters=which, ignore_removed=True):
            remove(container)
        for network in self.client.networks.list(filters=which):
            network.remove()


STREAMS = ("stdout", "stderr")


@dataclass(frozen=True)
class Ran:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


def remove(container: Container) -> None:
    """Whatever it does, and also when it is gone."""
    try:
        container.remove(force=True, v=True)
    except NotFound:
        return


class Ends:
    """The exit codes of every run of this session's containers, and whom the daemon killed, as it tells them."""

    def __init__(self, docker: Docker) -> None:
        self._codes: dict[str, list[int]] = defaultdict(list)
        self._killed: set[str] = set()
        self._changed = threading.Condition()
        which = {"label": f"{LABEL}={docker.session}", "type": "container", "event": ["die", "kill"]}
        self._stream = docker.client.events(decode=True, filters=which)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for event in self._stream:
            said = event["Actor"]["Attributes"]
            with self._changed:
                if event["Action"] == "die":
                    self._codes[event["id"]].append(int(said["exitCode"]))
                elif int(said["signal"]) == signal.SIGKILL:
                    self._killed.add(event["id"])
                self._changed.notify_all()

    def of(self, container: Container) -> tuple[int, ...]:
        """Of each run that has ended, in order; 128 + n for signal n."""
        with self._changed:
            return tuple(self._codes[container.id])

    def killed(self, container: Container) -> bool:
        """Whether the daemon sent it SIGKILL before it had ended, as at the end of a grace period."""
        with self._changed:
            return container.id in self._killed

    def wait(self, true: Callable[[], Any], what: str, deadline: float) -> None:
        """Wait until something is so, looking again whenever a container has ended."""
        with self._changed:
            assert self._changed.wait_for(true, deadline), f"not within {deadline:g} s: {what}"


def until(true: Callable[[], Any], what: str, deadline: float = DEADLINE) -> Any:
    """Wait for a state that nothing announces, looking again and again; gives what *true* gave."""
    end = time.monotonic() + deadline
    while not (seen := true()):
        assert time.monotonic() < end, f"not within {deadline:g} s: {what}"
        time.sleep(0.2)
    return seen


def freeze(container: Container) -> None:
    """Pause a container. runc gives up where a process of it is just being forked, as ranks' are: then once more."""

    def paused() -> bool:
        try:
            container.pause()
        except APIError as error:
            if "unable to freeze" not in str(error):
                raise
            return False
        return True

    until(paused, f"{container.name} is frozen")


@dataclass(frozen=True)
class S3:
    """A moto server in a container: a real S3 API, and its state is gone with it.

    Tests reach it through a port on loopback, pods by its name in their network.
    """

    name: str
    port: int

    @property
    def environment(self) -> dict[str, str]:
        """What a pod needs to reach it."""
        return {
            "FLYTE_AWS_ENDPOINT": f"http://{self.name}:{PORT}",
            "FLYTE_AWS_ACCESS_KEY_ID": KEY,
            "FLYTE_AWS_SECRET_ACCESS_KEY": KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    @property
    def client(self) -> Any:
        """One that waits for a server with much to do."""
        return self._client(attempts=5, patience=120)

    def _client(self, *, attempts: int, patience: float) -> Any:
        import botocore.config
        import botocore.session

        return botocore.session.get_session().create_client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            region_name="us-east-1",
            aws_access_key_id=KEY,
            aws_secret_access_key=KEY,
            config=botocore.config.Config(
                connect_timeout=5, read_timeout=patience, retries={"total_max_attempts": attempts}
            ),
        )

    def answers(self) -> bool:
        from botocore.exceptions import BotoCoreError

        try:
            self._client(attempts=1, patience=20).list_buckets()
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


def start_s3(docker: Docker, image: str, network: str) -> S3:
    """Start the server in *network*."""
    name = f"s3-{docker.session}"
    server = ("moto_server", "--host", "0.0.0.0", "--port", str(PORT))
    published = {"network": network, "ports": {f"{PORT}/tcp": ("127.0.0.1", None)}}
    container = docker.run(name, image, server, Options(more=published))
    container.reload()
    s3 = S3(name, int(container.ports[f"{PORT}/tcp"][0]["HostPort"]))
    until(s3.answers, "the S3 server answers")
    s3.client.create_bucket(Bucket=BUCKET)
    return s3


def filter_packets(container: Container, do: str, rule: str) -> None:
    """Insert ("-I") or delete ("-D") a rule of iptables inside a container's network."""
    where = ("nsenter", "--target", str(state(container)["Pid"]), "--net")
    subprocess.run([*where, "iptables", "--wait", do, *rule.split()], check=True)


def state(container: Container) -> dict[str, Any]:
    """What the daemon says of it now; empty when it was removed."""
    try:
        container.reload()
    except NotFound:
        return {}
    found: dict[str, Any] = container.attrs["State"]
    return found


def runs(container: Container) -> bool:
    """Whether it runs, or is about to start again."""
    now = state(container)
    return bool(now.get("Running") or now.get("Restarting"))
