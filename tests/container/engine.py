"""The docker client of the container tests, and an S3 server in a container; both leave nothing behind."""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
