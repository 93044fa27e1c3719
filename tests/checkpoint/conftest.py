"""What these tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.moto_s3 import S3


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """An S3 API with a bucket, for one module."""
    server = S3(tmp_path_factory.mktemp("s3"))
    server.put("there", b"")
    yield server
    server.close()
