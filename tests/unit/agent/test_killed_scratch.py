"""Which scratch directories of others may be removed: those of the provably dead, and no others."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from flytekitplugins_safedist.agent import scratch
from flytekitplugins_safedist.agent.scratch import JobScratch
from flytekitplugins_safedist.fs.oserrors import Mount
from tests.harness import needs


def killed(root: Path, *, is_kept: bool = False) -> Path:
    """The directory of a process that was killed in the midst of its work."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        job = scratch.make_job(root)
        with scratch.own(job, is_kept=is_kept):
            os.write(writer, str(job.path).encode())
            signal.pause()
        os._exit(0)
    path = Path(os.read(reader, 4096).decode())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)
    return path


def test_what_a_killed_process_left_is_removed_with_all_that_is_in_it(tmp_path: Path) -> None:
    path = killed(tmp_path)
    (scratch.make_rank(JobScratch(path, path), 0, 0).path / "checkpoint").write_text("x")
    assert scratch.sweep(tmp_path) == [path]
    assert list(tmp_path.iterdir()) == []


def test_what_belongs_to_the_living_or_to_nobody_stays_and_a_root_may_be_gone(tmp_path: Path) -> None:
    scratch.make_job(tmp_path)
    with scratch.own(scratch.make_job(tmp_path), is_kept=False):
        assert scratch.sweep(tmp_path) == []
    assert scratch.sweep(tmp_path / "nowhere") == [], "somebody else's error"


def test_what_is_to_be_kept_stays_but_for_what_may_hold_secrets(tmp_path: Path) -> None:
    path = killed(tmp_path, is_kept=True)
    (path / "orders" / "inputs.pb").write_text("secret")
    for _ in range(2):
        assert scratch.sweep(tmp_path) == []
        assert sorted(each.name for each in path.iterdir()) == ["inputs", "logs", "node", "owner"]


def test_a_directory_that_is_owned_is_locked_for_who_removes_what_is_old(tmp_path: Path) -> None:
    job = scratch.make_job(tmp_path)
    descriptor = os.open(job.path, os.O_RDONLY)
    try:
        with scratch.own(job, is_kept=True), pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def of_another_user(path: Path) -> None:
    needs.root("give a directory to another user")
    os.chown(path, 65534, 65534)


def not_yet_said(path: Path) -> None:
    (path / "owner").write_text("")


def behind_a_link(path: Path) -> None:
    path.symlink_to(path.rename(path.parent / "elsewhere"))


@pytest.mark.parametrize("change", [of_another_user, not_yet_said, behind_a_link])
def test_what_may_belong_to_another_stays(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = killed(tmp_path)
    change(path)
    assert scratch.sweep(tmp_path) == []
    assert (path / "orders").exists()


def test_on_a_file_system_that_other_machines_have_nothing_is_locked_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = killed(tmp_path)
    monkeypatch.setattr(scratch, "mount_of", lambda _: Mount("/", "nfs4", "", ""))
    job = scratch.make_job(tmp_path)
    with scratch.own(job, is_kept=False):
        assert not (job.path / "owner").exists()
        assert scratch.sweep(tmp_path) == []
    assert path.exists()


def test_a_directory_that_cannot_be_marked_is_used_all_the_same(tmp_path: Path) -> None:
    job = scratch.make_job(tmp_path)
    (job.path / "owner").mkdir()
    with scratch.own(job, is_kept=False):
        assert scratch.sweep(tmp_path) == []
