"""What ``atomic_write`` makes of replies that are lost, one after the other.

Played by the two calls themselves, because the order of faults cannot be told to a FUSE client exactly: the kernel asks
for attributes when it pleases. ``tests/fs`` has real clients that fail by chance.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from flytekitplugins_safedist.errors import FsError
from flytekitplugins_safedist.fs import atomic_dir, atomic_path, atomic_write
from flytekitplugins_safedist.fs.stale_files import aside


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EINTR])
def test_a_rename_whose_reply_is_lost_is_known_as_done_though_the_next_look_fails(tmp_path, monkeypatch, code):
    rename, lstat, failures = Path.rename, Path.lstat, []

    def lost(self, target):
        rename(self, target)
        failures.append("rename")
        # ESTALE has the kernel try again by itself (fs/namei.c, do_renameat2): the second time there is no such file.
        raise OSError(errno.ENOENT, "done already")

    def once(self):
        if failures.count("lstat") < failures.count("rename"):
            failures.append("lstat")
            raise OSError(code, "for a moment")
        return lstat(self)

    monkeypatch.setattr(Path, "rename", lost)
    monkeypatch.setattr(Path, "lstat", once)
    with atomic_write(tmp_path / "file") as file:
        file.write(b"whole")
    assert failures == ["rename", "lstat"]
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_what_an_earlier_try_has_left_under_the_drafts_name_is_not_mixed_with_the_new(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda size: "00" * size)
    aside(tmp_path / "file").write_bytes(b"longer than what comes")
    with atomic_write(tmp_path / "file") as file:
        file.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_a_file_keeps_its_permissions_when_it_is_replaced(tmp_path, mode):
    (tmp_path / "secret").touch()
    (tmp_path / "secret").chmod(mode)
    with atomic_write(tmp_path / "secret", "w") as file:
        file.write("new")
    assert (tmp_path / "secret").read_text() == "new"
    assert (tmp_path / "secret").stat().st_mode & 0o777 == mode
    with atomic_write(tmp_path / "secret", permissions=0o640):
        pass
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o640


def test_a_private_files_successor_is_at_no_moment_open_to_others(tmp_path, monkeypatch):
    (tmp_path / "secret").touch(mode=0o600)
    fchmod, before = os.fchmod, []

    def look(handle, mode):
        before.append(stat.S_IMODE(os.fstat(handle).st_mode))
        fchmod(handle, mode)

    monkeypatch.setattr(os, "fchmod", look)
    with atomic_write(tmp_path / "secret") as file:
        file.write(b"new")
    assert before == [0o600]


def test_a_link_that_is_replaced_gives_its_targets_permissions_to_nobody(tmp_path):
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "link").symlink_to("secret")
    (tmp_path / "plain").touch()
    with atomic_write(tmp_path / "link") as file:
        file.write(b"new")
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert (tmp_path / "secret").read_bytes() == b""


def test_a_directory_whose_making_was_done_though_the_reply_was_lost_is_the_draft(tmp_path, monkeypatch):
    mkdir, made = Path.mkdir, []

    def lost(self, *args, **options):
        mkdir(self, *args, **options)
        if not made:
            made.append(self)
            raise OSError(errno.EIO, "for a moment")

    monkeypatch.setattr(Path, "mkdir", lost)
    with atomic_dir(tmp_path / "dir") as draft:
        (draft / "file").touch()
    assert made == [draft]
    assert (tmp_path / "dir" / "file").exists()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_bring_names_to_stable_storage_is_no_error(tmp_path, monkeypatch, code):
    fsync, refused = os.fsync, []

    def refusing(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            refused.append(handle)
            raise OSError(code, "not for directories")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refusing)
    with atomic_write(tmp_path / "file") as file:
        file.write(b"new")
    assert len(refused) == 1
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_directory_where_a_file_was_to_be_made_is_an_error_and_goes(tmp_path):
    with pytest.raises(FsError), atomic_path(tmp_path / "file") as draft:
        (draft / "below").mkdir(parents=True)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_replaced_in_one_step_and_the_old_one_goes(tmp_path):
    for name in ("old", "new"):
        with atomic_dir(tmp_path / "ckpt", exists="replace") as draft:
            (draft / name).touch()
    assert [one.name for one in (tmp_path / "ckpt").iterdir()] == ["new"]
    assert [one.name for one in tmp_path.iterdir()] == ["ckpt"]


def test_a_block_that_fails_leaves_no_file_aside(tmp_path):
    def fail():
        with atomic_path(tmp_path / "file") as draft:
            draft.touch()
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert list(tmp_path.iterdir()) == []
