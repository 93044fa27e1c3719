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

from flytekitplugins_safedist.errors import FsError, PathBlockedError
from flytekitplugins_safedist.fs import atomic_path, atomic_write
from flytekitplugins_safedist.fs.atomic import aside, discard


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


def test_a_rename_that_fails_is_told_as_that_where_nothing_is_at_its_place(tmp_path, monkeypatch):
    def refused(self, target):
        raise PermissionError(errno.EACCES, "refused")

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(FsError, match="cannot rename"), atomic_write(tmp_path / "file"):
        pass


def test_what_an_earlier_try_has_left_under_the_drafts_name_is_not_mixed_with_the_new(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda size: "00" * size)
    aside(tmp_path / "file").write_bytes(b"longer than what comes")
    with atomic_write(tmp_path / "file") as file:
        file.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_file_keeps_its_permissions_when_it_is_replaced(tmp_path):
    (tmp_path / "secret").touch()
    (tmp_path / "secret").chmod(0o640)
    with atomic_write(tmp_path / "secret", "w") as file:
        file.write("new")
    assert (tmp_path / "secret").read_text() == "new"
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o640
    with atomic_write(tmp_path / "secret", permissions=0o222):  # also where who writes may not read
        pass
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o200


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


def test_a_file_system_that_cannot_bring_names_to_stable_storage_is_no_error(tmp_path, monkeypatch):
    fsync, refused = os.fsync, []

    def refusing(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            refused.append(handle)
            raise OSError(errno.EINVAL, "not for directories")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refusing)
    with atomic_write(tmp_path / "file") as file:
        file.write(b"new")
    assert len(refused) == 1
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_directory_replaces_nothing_but_an_empty_one_and_that_is_told_before_anything_is_written(tmp_path):
    def make(begun: list[Path]) -> None:
        with atomic_path(tmp_path / "ckpt") as draft:
            begun.append(draft)
            (draft / "below").mkdir(parents=True)
            (draft / "below" / "shard").write_text("whole")

    (tmp_path / "ckpt").mkdir()
    make([])
    begun: list[Path] = []
    with pytest.raises(PathBlockedError, match="a directory with contents is in the way"):
        make(begun)
    assert begun == []
    assert (tmp_path / "ckpt" / "below" / "shard").read_text() == "whole"
    (tmp_path / "link").symlink_to("ckpt")
    with atomic_path(tmp_path / "link") as draft:  # a link is not in the way: a file replaces it
        draft.touch()
    assert (tmp_path / "link").is_file()


def test_a_block_that_makes_nothing_is_an_error_and_one_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(FsError, match="what was to be written"), atomic_path(tmp_path / "file"):
        pass

    def fail() -> None:
        with atomic_write(tmp_path / "file", "w") as file:
            file.write("half")
            raise OSError(errno.EIO, "the user's own")

    with pytest.raises(OSError, match="the user's own") as caught:
        fail()
    assert not isinstance(caught.value, FsError)
    assert list(tmp_path.iterdir()) == []


def test_read_only_directories_go_too_without_root(tmp_path):
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents:  # pytest's are its user's alone
        if parent.stat().st_uid == os.geteuid() and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    keep = tmp_path / "keep"
    keep.mkdir(mode=0o500)
    (keep / "file").touch()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            draft = tmp_path / "draft"
            (draft / "closed" / "below").mkdir(parents=True)
            (draft / "closed" / "below" / "file").touch()
            (draft / "link").symlink_to(keep)
            (draft / "closed" / "below").chmod(0o555)
            (draft / "closed").chmod(0o000)
            discard(draft)
            code = int(draft.exists())
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert keep.stat().st_mode & 0o777 == 0o500
    assert (keep / "file").exists()


@pytest.mark.parametrize("write", [atomic_write, atomic_path])
def test_what_is_written_goes_where_the_block_began_wherever_the_working_directory_is_then(
    tmp_path, monkeypatch, write
):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with write("out") as there:
        os.chdir("elsewhere")
        there.write(b"x") if write is atomic_write else there.write_bytes(b"x")
    assert (tmp_path / "out").read_bytes() == b"x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "out"]
