"""FlyteFile and FlyteDirectory in download_once: flytekit's own data access, a real S3 client and server (moto's)."""

from __future__ import annotations

from pathlib import Path

import aiobotocore.session  # noqa: F401  (these once, and not in every rank)
import flytekit.types.directory
import flytekit.types.file  # noqa: F401
import pytest
import s3fs  # noqa: F401

from flytekitplugins_safedist.errors import WorkFailedError
from flytekitplugins_safedist.fs import download_once
from tests.fs.ranks import corner, processes, rank_env

RANKS, PER_NODE = 4, 2


def _in_ranks(s3, tmp_path, work):
    """What ``work(place)`` gives in each of 2 x 2 ranks; ``place`` is one directory for each node."""

    def start(rank):
        from flytekit import FlyteContextManager
        from flytekit.configuration import DataConfig
        from flytekit.core.data_persistence import FileAccessProvider

        # A task's process has its environment from birth; in this one, flytekit may have been imported before it.
        access = FileAccessProvider(str(tmp_path / "sandbox"), str(tmp_path / "raw"), DataConfig.auto())
        with FlyteContextManager.with_context(FlyteContextManager.current_context().with_file_access(access)):
            return work(tmp_path / f"node{rank // PER_NODE}")

    with corner() as meeting:
        envs = [{**rank_env(rank, RANKS, PER_NODE), **s3.environment, **meeting} for rank in range(RANKS)]
        with processes([(start, rank) for rank in range(RANKS)], envs) as started:
            return [one.outcome() for one in started]


@pytest.mark.parametrize("kind", ["plain", "as a task gets it", "an address alone"])
def test_a_flyte_file_is_fetched_once_per_node(s3, tmp_path, kind):
    key = f"{kind.replace(' ', '-')}/weights.bin"
    uri = s3.put(key, b"w" * 10_000)

    def work(place: Path) -> int:
        from flytekit.types.file import FlyteFile

        made = {
            "plain": lambda: FlyteFile(uri),
            "as a task gets it": lambda: FlyteFile.from_source(uri),
            "an address alone": lambda: uri,  # with Flyte's endpoint and credentials, which fsspec does not know
        }[kind]()
        found = download_once(made, place / "data" / "weights.bin")
        assert found == place / "data" / "weights.bin"
        return found.read_bytes().count(b"w")

    assert [one.get() for one in _in_ranks(s3, tmp_path, work)] == [10_000] * RANKS
    assert s3.count("GET", key) == RANKS // PER_NODE


def test_a_directory_whose_name_looks_like_a_pattern_is_fetched_from_the_store(s3, tmp_path):
    for name in ("run-[lr=0.1]/weights*.bin", "run-l/other"):
        s3.put(name, name.encode())

    def work(place: Path) -> list[str]:
        found = download_once("s3://code/run-[lr=0.1]", place / "run")
        return [file.name for file in found.iterdir()]

    assert [one.get() for one in _in_ranks(s3, tmp_path, work)] == [["weights*.bin"]] * RANKS


def test_a_flyte_directory_is_fetched_once_per_node(s3, tmp_path):
    prefix = "of-a-task/images"
    for name in ("a.png", "b.png", "deep/c.png"):
        s3.put(f"{prefix}/{name}", name.encode())
    uri = f"s3://code/{prefix}"

    def work(place: Path) -> dict[str, str]:
        from flytekit.types.directory import FlyteDirectory

        found = download_once(FlyteDirectory.from_source(uri), place / "images")
        return {str(file.relative_to(found)): file.read_text() for file in found.rglob("*.png")}

    whole = {name: name for name in ("a.png", "b.png", "deep/c.png")}
    assert [one.get() for one in _in_ranks(s3, tmp_path, work)] == [whole] * RANKS
    assert s3.count("GET", f"{prefix}/deep/c.png") == RANKS // PER_NODE


def test_a_flyte_file_that_is_not_there_is_one_error_for_all(s3, tmp_path):
    uri = s3.put("exists", b"") + "-not"

    def work(place: Path) -> Path:
        from flytekit.types.file import FlyteFile

        return download_once(FlyteFile(uri), place / "data", shared=True)

    errors = [one.error() for one in _in_ranks(s3, tmp_path, work)]
    assert {type(error) for error in errors} == {WorkFailedError}
    assert len({str(error) for error in errors}) == 1
    assert uri in str(errors[0])
    assert not (tmp_path / "node0" / "data").exists()
