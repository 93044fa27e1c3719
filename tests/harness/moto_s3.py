"""A real S3 API on loopback: moto's server, in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.harness.procs import until

BUCKET = "code"


class S3:
    """A moto server in a process of its own, which counts what is asked of it in its log."""

    def __init__(self, root: Path) -> None:
        self._log = root / "moto.log"
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        until(lambda: self._address() or self._process.poll() is not None, "the server has an address")
        assert self._process.poll() is None, self._log.read_text()
        self.endpoint = self._address()[0]
        self.environment = {
            "FLYTE_AWS_ENDPOINT": self.endpoint,
            "FLYTE_AWS_ACCESS_KEY_ID": "test",
            "FLYTE_AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def _address(self) -> list[str]:
        return re.findall(r"Running on (http://127\.0\.0\.1:\d+)", self._log.read_text())

    @cached_property
    def _client(self) -> Any:
        import botocore.session

        return botocore.session.get_session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    def put(self, key: str, content: bytes) -> str:
        self._client.create_bucket(Bucket=BUCKET)
        self._client.put_object(Bucket=BUCKET, Key=key, Body=content)
        return f"s3://{BUCKET}/{key}"

    def get(self, key: str) -> bytes:
        content: bytes = self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return content

    def count(self, method: str, key: str) -> int:
        return len(re.findall(rf'"[^"]*{method} /{BUCKET}/{key}', self._log.read_text()))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
