"""Each rank has its own scratch; and when scratch is full, over its limit or not to be written, one error says so.

The disk that fills up is a real one, a tmpfs of a few megabytes, and mounting it takes root. Without root these tests
fail, and say so: the project's CI runs them as root.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flytekitplugins_safedist.errors import ScratchError
from tests.harness.procs import uploaded_error, uploaded_output
from tests.harness.product import CACHES


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 8 MiB in all."""
    if os.geteuid() != 0:
        pytest.fail("mounting a small tmpfs takes root; run this test as root, as CI does")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "safedist-test", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_each_rank_has_its_own_places_and_nobody_else_may_look(warm, tmp_path, ranks_gate):
    warm.run("job_private:look_around", tmp_path / "job", environment=ranks_gate.environment)
    zero, one = sorted((json.loads(line) for line in ranks_gate.heard(2)), key=lambda each: each["rank"])
    shared = {"TRITON_CACHE_DIR"}
    for name in zero["places"].keys() - shared:
        assert zero["places"][name] != one["places"][name], name
        for each in (zero, one):
            caches = Path(each["real"]["scratch"]).parents[1] / "cache" / f"rank-{each['rank']}"
            own = caches if name in {cache.variable for cache in CACHES} else each["real"]["scratch"]
            assert Path(each["real"][name]).is_relative_to(own), name
            assert each["modes"][name] == "0o700", name
    for each in (zero, one):
        assert each["places"]["TRITON_CACHE_DIR"] == "/shared/triton"
        assert each["places"]["tempfile"] == each["places"]["TMPDIR"] == each["places"]["of a child"]
        assert {cache.variable for cache in CACHES} <= each["places"].keys()


def test_a_relative_path_is_one_file_of_all_ranks_and_scratch_and_the_working_directory_are_not(warm, tmp_path):
    """What docs/configuration.md says of ``open("result.txt", "w")``."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "data.txt").write_text("of the project")
    ended = warm.run("job_private:write_results", tmp_path / "job", cwd=project)
    assert ended.value == {"data": "of the project", "scratch": "rank 0", "working directory": "rank 0"}
    assert (project / "result.txt").read_text() == "rank 1"  # which wrote last
    assert sorted(path.name for path in project.iterdir()) == ["data.txt", "result.txt"]


@pytest.mark.end("full disk", "USER:OSError")
@pytest.mark.parametrize(
    ("limit", "said"),
    [(None, "Scratch is without a size limit"), ("7Mi", "limited to 7.0 MiB by Scratch(size_limit=...)")],
)
def test_a_full_disk_is_one_error_with_directory_limit_and_who_filled_it(
    warm, tmp_path, ranks_gate, small_disk, limit, said, as_promised
):
    environment = {**ranks_gate.environment, "TEST_SCRATCH": str(small_disk)}
    if limit is not None:
        environment["TEST_LIMIT"] = limit
    running = warm.start("job_private:fill_the_disk", tmp_path / "job", environment=environment, kind="execute")
    ranks_gate.heard(1)
    ranks_gate.let_go(1)
    ended = running.wait()
    as_promised(ended)
    text = uploaded_error(ended).message
    assert f"{small_disk}/safedist-" in text
    assert said in text
    assert text.index("rank 1: ") < text.index("rank 0: "), "who holds most comes first"
    assert "No space left on device" in text
    assert "Scratch(path=...)" in text
    assert list(small_disk.iterdir()) == []


def test_outputs_find_room_on_the_disk_that_the_task_has_filled(warm, tmp_path, small_disk):
    environment = {"TEST_SCRATCH": str(small_disk)}
    ended = warm.run("job_private:fill_the_disk_and_go_on", tmp_path / "job", environment=environment, kind="execute")
    assert (ended.code, ended.uploaded) == (0, ["outputs.pb"]), ended.err
    assert uploaded_output(ended) == "[Errno 28] No space left on device"


@pytest.mark.end("full disk", "USER:ScratchError")
def test_a_rank_over_the_limit_ends_the_job_with_who_holds_how_much(warm, tmp_path, ranks_gate, as_promised):
    (tmp_path / "scratch").mkdir()
    environment = {"TEST_SCRATCH": str(tmp_path / "scratch"), "TEST_LIMIT": "1Mi", **ranks_gate.environment}
    ended = warm.run("job_private:over_the_limit", tmp_path / "job", environment=environment, kind="execute")
    as_promised(ended)
    text = uploaded_error(ended).message
    assert "the ranks of this node wrote more than their scratch limit" in text
    assert "the same ScratchError would come again" in text
    assert f"directory={tmp_path / 'scratch'}/safedist-" in text
    assert "at most 1.0 MiB" in text
    assert text.index("rank 1: 3.") < text.index("rank 0: ")
    assert list((tmp_path / "scratch").iterdir()) == []


def test_without_a_limit_of_the_users_the_pods_own_ends_the_job_before_the_kubelet_evicts_it(warm, tmp_path):
    ended = warm.run(
        "job_private:over_the_limit", tmp_path / "job", environment={"SAFEDIST_EPHEMERAL_STORAGE": str(2 << 20)}
    )
    text = str(ended.error)
    assert "at most 1.0 MiB by the pod's ephemeral storage of 2.0 MiB" in text
    assert text.index("rank 1: 3.") < text.index("rank 0: ")
    assert "the same ScratchError would come again" in text
    assert ended.scratch == []


def test_scratch_in_a_place_that_is_not_there_is_an_error_that_names_it(warm, tmp_path):
    place = tmp_path / "place"
    ended = warm.run("job_private:nothing", tmp_path / "job", environment={"TEST_SCRATCH": str(place)})
    assert isinstance(ended.error, ScratchError)
    assert str(place) in str(ended.error)
    assert "Scratch(path=...) or SAFEDIST_SCRATCH_ROOT" in str(ended.error)


def test_scratch_on_a_read_only_disk_is_an_error_that_names_it(warm, tmp_path, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    ended = warm.run("job_private:nothing", tmp_path / "job", environment={"TEST_SCRATCH": str(small_disk)})
    assert isinstance(ended.error, ScratchError)
    assert str(small_disk) in str(ended.error)
    assert "EROFS" in str(ended.error)
