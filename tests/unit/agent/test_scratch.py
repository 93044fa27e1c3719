"""Scratch: private directories in a fixed layout, measured, limited, and removed whatever a user left in them."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from flytekitplugins_safedist.agent import disk, scratch
from flytekitplugins_safedist.agent.disk import Usage
from flytekitplugins_safedist.config.caches import CACHES
from flytekitplugins_safedist.config.options import SCRATCH_MOUNT
from flytekitplugins_safedist.errors import ScratchError
from flytekitplugins_safedist.texts import human

NOBODY = 65534


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A directory, mode 0755, of the user that this test runs as: never root, whom permissions do not stop."""
    root = Path(tempfile.mkdtemp(prefix="safedist-test-"))
    root.chmod(0o755)
    privileged = os.geteuid() == 0
    if privileged:
        os.chown(root, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    try:
        yield root
    finally:
        if privileged:
            os.seteuid(0)
        # As root, or as the owner after opening what a failed test left closed.
        for directory, names, _ in os.walk(root):
            for name in names:
                (Path(directory) / name).chmod(0o700)
        shutil.rmtree(root)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- layout ----------------------------------------------------------------------------------------------------------
def test_a_tree_of_any_depth_is_measured_and_removed(tmp_path):
    job = tmp_path / "job"
    job.mkdir()
    at = os.open(job, os.O_RDONLY)
    for _ in range(1100):  # deeper than Python recurses, and longer than a path may be
        os.mkdir("deep", dir_fd=at)
        below = os.open("deep", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at))
    os.close(at)
    assert disk.bytes_of(job) >= 0
    assert scratch.remove(job) is None
    assert not job.exists()
    assert scratch.remove(job) is None, "that it is not there is no trouble"


def test_the_layout_is_the_documented_one_and_private_throughout_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        job = scratch.make_job(tmp_path)
        rank = scratch.make_rank(job, 1, 3)
    finally:
        os.umask(before)
    assert job.path.parent == tmp_path
    assert job.path.name.startswith("safedist-")
    assert rank.path == job.path / "round-1" / "rank-3"
    assert rank.caches == job.path / "cache" / "rank-3"
    assert rank.tmp.resolve() == rank.path / "tmp"
    assert (job.orders, job.logs) == (job.path / "orders", job.path / "logs")
    assert job.log(1, 3) == job.path / "logs" / "round-1-rank-3.log"
    made = {path.relative_to(job.path).as_posix() for path in job.path.rglob("*")}
    parts = {"1-3", "round-1", *(f"round-1/rank-3{part}" for part in ("", "/tmp", "/flyte"))}
    caches = {"cache", "cache/rank-3", *(f"cache/rank-3/{cache.name}" for cache in CACHES)}
    assert made == {"orders", "logs", "node", "inputs", *parts, *caches}
    assert {mode(path) for path in [job.path, *job.path.rglob("*")]} == {0o700}


def test_jobs_of_one_name_and_ranks_of_one_round_can_be_made_at_once_and_a_rank_is_made_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        jobs = list(pool.map(lambda _: scratch.make_job(tmp_path), range(64)))
        ranks = list(pool.map(lambda rank: scratch.make_rank(jobs[0], 0, rank), range(32)))
    assert len({job.path for job in jobs}) == 64
    assert [rank.path.name for rank in ranks] == [f"rank-{rank}" for rank in range(32)]
    with pytest.raises(ScratchError) as caught:
        scratch.make_rank(jobs[0], 0, 5)
    assert caught.value.where == {"path": jobs[0].rank(0, 5).path}
    assert str(caught.value.seen).startswith("EEXIST")


RAYS = "/ray/session_2026-11-26_08-00-00_000000_9999999/sockets/plasma_store_0000000000000"


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "symlink_to", refuse)


def root_of(short_tmp: Path, length: int) -> Path:
    """A directory whose path has this length."""
    root = short_tmp / ("x" * (length - len(str(short_tmp)) - 1))
    root.mkdir()
    return root


@pytest.mark.usefixtures("no_links")
def test_where_no_link_can_be_made_the_sockets_of_python_and_torch_fit_all_the_same(short_tmp: Path) -> None:
    job = scratch.make_job(root_of(short_tmp, len(SCRATCH_MOUNT)))
    assert job.short == job.path
    assert len(str(job.rank(999, 9999).tmp)) + len("/torch-shm-dir-XXXXXX/manager.sock") <= 107


@pytest.mark.parametrize("length", [len(SCRATCH_MOUNT), 60, 200])
def test_sockets_fit_below_a_root_of_any_length(short_tmp: Path, length: int) -> None:
    job = scratch.make_job(root_of(short_tmp, length))
    rank = scratch.make_rank(job, 0, 0)
    assert len(str(job.rank(999, 9999).tmp)) + len(RAYS) <= 107, "of the round and rank with the longest names"
    assert rank.tmp.resolve() == (job.path / "round-0" / "rank-0" / "tmp").resolve()
    if job.short != job.path:
        assert scratch.remove(job.short) is None
        assert rank.path.is_dir(), "only the link goes"


@pytest.mark.usefixtures("no_links")
def test_a_root_that_cannot_fit_is_refused_with_the_numbers_and_nothing_stays(tmp_path: Path) -> None:
    root = tmp_path / ("x" * 100)
    root.mkdir()
    with pytest.raises(ScratchError, match="too long for sockets") as caught:
        scratch.make_job(root)
    assert caught.value.seen == f"{len(str(root))} bytes"
    assert str(caught.value.expected).startswith("at most 40 bytes")
    assert "/dev/shm: Read-only file system" in caught.value.where["tried for a link"]
    assert list(root.iterdir()) == []


# --- what goes wrong -------------------------------------------------------------------------------------------------
HINT = "set Scratch(path=...) or SAFEDIST_SCRATCH_ROOT to a directory that this user may write"


def test_a_root_that_this_user_may_not_write_is_named_with_the_way_out(unprivileged: Path) -> None:
    unprivileged.chmod(0o555)
    with pytest.raises(ScratchError) as caught:
        scratch.make_job(unprivileged)
    unprivileged.chmod(0o755)
    assert str(caught.value) == (
        f"the scratch directory cannot be made [path={unprivileged}] (seen: EACCES: Permission denied; "
        f"expected: a writable directory with room, which takes sockets). Fix: {HINT}"
    )


def test_a_root_that_is_missing_or_a_file_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, seen in (("missing", "ENOENT: No such file"), ("file", "ENOTDIR: Not a directory")):
        with pytest.raises(ScratchError, match=rf"directory cannot be made \[path=.*/{name}\] \(seen: {seen}"):
            scratch.make_job(tmp_path / name)


def test_a_job_directory_that_cannot_be_completed_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fake: a file system that runs out of inodes between two directories cannot be ordered here.
    made: list[str] = []
    mkdir = Path.mkdir

    def full_after_one(self: Path, *args: int, **kwargs: int) -> None:
        if made:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        made.append(self.name)
        mkdir(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", full_after_one)
    with pytest.raises(ScratchError, match="ENOSPC: No space left on device"):
        scratch.make_job(tmp_path)
    monkeypatch.undo()
    assert made == ["orders"]
    assert list(tmp_path.iterdir()) == []


# --- removal ---------------------------------------------------------------------------------------------------------
def tree(root: Path) -> Path:
    job = root / "job"
    for directory in ("job", "job/a", "job/a/b", "job/a/b/c", "job/d"):
        (root / directory).mkdir()
        for name in ("1", "2"):
            (root / directory / name).write_text("x")
    return job


@pytest.mark.parametrize("closed", [0o500, 0o400, 0o100, 0o000])
def test_directories_without_permissions_are_removed_and_the_root_keeps_its_mode(
    monkeypatch: pytest.MonkeyPatch, unprivileged: Path, closed: int
) -> None:
    job = tree(unprivileged)
    for directory in ("a/b/c", "a/b", "a", "d", "."):
        (job / directory).chmod(closed)
    where = unprivileged / "closed"  # nor does it matter where the process is
    where.mkdir()
    monkeypatch.chdir(where)
    where.chmod(0)
    assert scratch.remove(job) is None
    assert list(unprivileged.iterdir()) == [where]
    assert mode(unprivileged) == 0o755, "the root is not ours to open or close"


def test_links_out_of_scratch_are_removed_without_following_them(unprivileged: Path) -> None:
    job = tree(unprivileged)
    outside = unprivileged / "outside"
    outside.mkdir(mode=0o750)
    (outside / "kept").write_text("x")
    (job / "a" / "directory").symlink_to(outside)
    (job / "a" / "file").symlink_to(outside / "kept")
    (job / "a" / "dangling").symlink_to(outside / "missing")
    (job / "a").chmod(0o500)
    assert scratch.remove(job) is None
    assert [path.name for path in unprivileged.iterdir()] == ["outside"]
    assert (outside / "kept").read_text() == "x"
    assert mode(outside) == 0o750


def test_what_cannot_be_removed_is_named_and_the_rest_is_gone(unprivileged: Path) -> None:
    job = tree(unprivileged)
    unprivileged.chmod(0o555)  # the entry "job" itself cannot be taken out of it, and its mode is not ours to change
    left = scratch.remove(job)
    unprivileged.chmod(0o755)
    assert left is not None
    assert str(job) in left
    assert "Permission denied" in left
    assert list(job.iterdir()) == []
    assert mode(unprivileged) == 0o755


# --- measuring -------------------------------------------------------------------------------------------------------
def test_bytes_are_those_on_disk_links_not_followed(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * (1 << 20))
    inside = tmp_path / "inside"
    (inside / "deep").mkdir(parents=True)
    (inside / "deep" / "file").write_bytes(b"x" * 100_000)
    (inside / "link").symlink_to(tmp_path / "big")
    (inside / "up").symlink_to(tmp_path)
    with (inside / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    assert 100_000 <= disk.bytes_of(inside) < 200_000
    assert disk.bytes_of(tmp_path / "missing") == 0


def test_usage_is_measured_for_each_rank_of_one_round(tmp_path: Path) -> None:
    job = scratch.make_job(tmp_path)
    for round_, rank, size in ((0, 0, 1 << 20), (1, 0, 1 << 16), (1, 1, 1 << 18)):
        (scratch.make_rank(job, round_, rank).tmp / "data").write_bytes(os.urandom(size))
    job.log(1, 2).write_bytes(b"x" * (1 << 19))
    job.errors(1, 2).write_bytes(b"x" * (1 << 19))
    job.log(0, 2).write_bytes(b"x" * (1 << 14))
    measured = disk.usage(job, 1, [0, 1, 2])
    assert measured.path == job.path
    assert [rank for rank, _ in measured.by_rank] == [0, 1, 2]
    sizes = dict(measured.by_rank)
    assert 1 << 16 <= sizes[0] < 1 << 17
    assert 1 << 18 <= sizes[1] < 1 << 19
    assert sizes[2] == 1 << 20, "its log, and what it says of errors"
    assert (1 << 20) + (1 << 14) <= measured.earlier < 1 << 21
    assert measured.total == sum(sizes.values()) + measured.earlier
    assert measured.free > 0


def test_usage_in_words_names_who_filled_it_first() -> None:
    usage = Usage(path=Path("/s/job"), by_rank=((0, 512), (1, 3 * 2**30)), free=5 * 2**20)
    assert usage.largest() == 1
    assert str(usage) == "3.0 GiB in /s/job (rank 1: 3.0 GiB, rank 0: 512 B); 5.0 MiB free on its file system"
    with_earlier = str(replace(usage, earlier=2**30))
    assert with_earlier.startswith("4.0 GiB in /s/job (rank 1: 3.0 GiB, rank 0: 512 B, earlier rounds: 1.0 GiB);")


def test_sizes_are_written_for_people() -> None:
    sizes = (0, 1023, 1024, 1536, 2**20, 3 * 2**30, 2**40, 5 * 2**50)
    texts = ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "3.0 GiB", "1.0 TiB", "5120.0 TiB"]
    assert [human(size) for size in sizes] == texts


def test_what_ranks_share_counts_once_and_stays_for_the_next_round_and_the_last_one_does_not(tmp_path):
    job = scratch.make_job(tmp_path)
    (job.inputs / "model").write_bytes(os.urandom(1 << 20))
    (job.node / "mine").write_bytes(os.urandom(1 << 18))
    before = disk.usage(job, 0, [0, 1]).total
    for rank in range(2):
        (scratch.make_rank(job, 0, rank).path / "model").hardlink_to(job.inputs / "model")
    found = disk.usage(job, 0, [0, 1])
    assert before >= (1 << 20) + (1 << 18)
    assert abs(found.total - before) < 1 << 10
    assert "node_dir and inputs: " in str(found)
    for round_ in (1, 10):
        (scratch.make_rank(job, round_, 0).tmp / "file").write_text("text")
    scratch.remove_rounds_before(job, 10)
    assert (job.inputs / "model").exists()
    assert (job.node / "mine").exists()
    assert sorted(path.name for path in job.path.iterdir()) == [
        "10-0",
        *("cache", "inputs", "logs", "node", "orders", "round-10"),
    ]


def test_compile_caches_are_the_ranks_in_every_round_and_count_as_its_own(tmp_path):
    job = scratch.make_job(tmp_path)
    caches = scratch.make_rank(job, 0, 1).caches
    (caches / "inductor" / "kernel.so").write_bytes(os.urandom(1 << 18))
    scratch.remove_rounds_before(job, 1)
    assert scratch.make_rank(job, 1, 1).caches == caches
    assert (caches / "inductor" / "kernel.so").stat().st_size == 1 << 18
    assert dict(disk.usage(job, 1, [1]).by_rank)[1] >= 1 << 18


def test_a_lock_that_a_killed_rank_left_in_a_cache_does_not_hold_the_next_round(tmp_path):
    from torch.utils.file_baton import FileBaton

    job = scratch.make_job(tmp_path)
    build = scratch.make_rank(job, 0, 0).caches / "torch_extensions" / "mine"
    build.mkdir()
    assert FileBaton(str(build / "lock")).try_acquire()  # and never released
    scratch.make_rank(job, 1, 0)
    assert FileBaton(str(build / "lock")).try_acquire()


def test_what_is_imported_for_all_ranks_has_caches_of_its_own(tmp_path):
    job = scratch.make_job(tmp_path)
    given = scratch.make_caches(job.preload, {"triton"})
    assert Path(given["TORCHINDUCTOR_CACHE_DIR"]) == job.path / "cache" / "preload" / "inductor"
    assert "TRITON_CACHE_DIR" not in given
    assert all(Path(path).is_dir() for path in given.values())
