"""FlyteFile and FlyteDirectory in download_once: flytekit's own data access, a real S3 client and server (moto's)."""

from __future__ import annotations

from pathlib import Path

import aiobotocore.session  # noqa: F401  (these once, and not in every rank)
import pytest
import s3fs  # noqa: F401
from flytekit import FlyteContextManager
from flytekit.configuration import DataConfig
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytekitplugins_safedist.errors import WorkFailedError
from flytekitplugins_safedist.fs import download_once
from tests.fs.ranks import corner, processes, rank_env
from tests.harness.moto_s3 import BUCKET

RANKS, PER_NODE = 4, 2


def _in_ranks(s3, tmp_path, work):
    """What ``work(place)`` gives in each of 2 x 2 ranks; ``place`` is one directory for each node."""

    def start(rank):
        # A task's process has its environment from birth; in this one, flytekit may have been imported before it.
        access = FileAccessProvider(str(tmp_path / "sandbox"), str(tmp_path / "raw"), DataConfig.auto())
        with FlyteContextManager.with_context(FlyteContextManager.current_context().with_file_access(access)):
            return work(tmp_path / f"node{rank // PER_NODE}")

    with corner() as meeting:
        envs = [{**rank_env(rank, RANKS, PER_NODE), **s3.environment, **meeting} for rank in range(RANKS)]
        with processes([(start, rank) for rank in range(RANKS)], envs) as started:
            return [one.outcome().get() for one in started]


def test_what_flyte_names_is_fetched_once_per_node_and_what_is_not_there_is_one_error_for_all(s3, tmp_path):
    keys = [f"once/{number}/weights.bin" for number in range(3)]
    images = [f"of-a-task/images/{name}" for name in ("a.png", "b.png", "deep/c.png")]
    patterns = ["run-[lr=0.1]/weights*.bin", "run-l/other"]
    for key in (*keys, *images, *patterns):
        s3.put(key, key.encode())
    plain, as_a_task_gets_it, address = (f"s3://{BUCKET}/{key}" for key in keys)
    lost = f"s3://{BUCKET}/nowhere/data"

    def work(place: Path) -> tuple[dict[str, str], str]:
        download_once(FlyteFile(plain), place / keys[0])
        download_once(FlyteFile.from_source(as_a_task_gets_it), place / keys[1])
        download_once(address, place / keys[2])  # with Flyte's endpoint and credentials, which fsspec does not know
        download_once(FlyteDirectory.from_source(f"s3://{BUCKET}/of-a-task/images"), place / "of-a-task" / "images")
        download_once(f"s3://{BUCKET}/run-[lr=0.1]", place / "run-[lr=0.1]")  # not all that the pattern matches
        with pytest.raises(WorkFailedError) as caught:
            download_once(FlyteFile(lost), place / "data", shared=True)
        files = (path for path in place.rglob("*") if path.is_file() and "safedist" not in path.name)
        return {str(path.relative_to(place)): path.read_text() for path in files}, str(caught.value)

    (found, error), *others = _in_ranks(s3, tmp_path, work)
    assert found == {name: name for name in (*keys, *images, patterns[0])}
    assert others == [(found, error)] * (RANKS - 1)
    assert lost in error
    for key in (*keys, images[-1]):
        assert s3.count("GET", key) == RANKS // PER_NODE, key
