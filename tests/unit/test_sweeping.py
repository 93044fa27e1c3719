"""Which scratch directories of others may be removed: those of the provably dead, and no others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from flytekitplugins_safedist import scratch, sweeping
from flytekitplugins_safedist.scratch import JobScratch


def made(root: Path) -> JobScratch:
    return scratch.make_job(root, execution="e", attempt=0)


def killed(root: Path) -> JobScratch:
    """The directory of a process that was killed in the midst of its work."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        job = made(root)
        with sweeping.owned(job):
            os.write(writer, str(job.path).encode())
            signal.pause()
        os._exit(0)
    job = JobScratch(Path(os.read(reader, 4096).decode()))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)
    return job


def test_what_a_killed_process_left_is_removed_with_all_that_is_in_it(tmp_path: Path) -> None:
    job = killed(tmp_path)
    (scratch.make_rank(job, 0, 0).path / "checkpoint").write_text("x")

    assert sweeping.sweep(tmp_path) == [job.path]

    assert list(tmp_path.iterdir()) == []
    assert sweeping.sweep(tmp_path) == []


def test_what_belongs_to_the_living_stays(tmp_path: Path) -> None:
    with sweeping.owned(made(tmp_path)):
        assert sweeping.sweep(tmp_path) == []


def test_what_nobody_owns_was_meant_to_be_kept(tmp_path: Path) -> None:
    job = made(tmp_path)

    assert sweeping.sweep(tmp_path) == []

    assert job.path.exists()


def other_pod(job: JobScratch) -> None:
    owner = job.path / "owner"
    owner.write_text("other-" + owner.read_text())


def other_boot(job: JobScratch) -> None:
    (job.path / "owner").write_text(f"{os.uname().nodename} 00000000-0000-0000-0000-000000000000\n")


def not_yet_said(job: JobScratch) -> None:
    (job.path / "owner").write_text("")


def behind_a_link(job: JobScratch) -> None:
    elsewhere = job.path.rename(job.path.parent / "elsewhere")
    job.path.symlink_to(elsewhere)


@pytest.mark.parametrize("change", [other_pod, other_boot, not_yet_said, behind_a_link])
def test_what_may_belong_to_another_stays(tmp_path: Path, change: Callable[[JobScratch], None]) -> None:
    job = killed(tmp_path)
    change(job)

    assert sweeping.sweep(tmp_path) == []

    assert (job.path / "orders").exists()


def test_where_the_kernel_does_not_say_which_boot_it_is_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "boot_id", lambda: "")
    job = killed(tmp_path)

    assert sweeping.sweep(tmp_path) == []
    assert job.path.exists()


def test_a_root_that_is_not_there_is_somebody_elses_error(tmp_path: Path) -> None:
    assert sweeping.sweep(tmp_path / "nowhere") == []


def test_a_directory_that_cannot_be_marked_is_used_all_the_same(tmp_path: Path) -> None:
    job = made(tmp_path)
    (job.path / "owner").mkdir()

    with sweeping.owned(job):
        assert sweeping.sweep(tmp_path) == []
