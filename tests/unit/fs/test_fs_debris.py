"""Drafts go with all they hold, as far as their owner may remove it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from flytekitplugins_safedist.fs import stale_files, sweep
from flytekitplugins_safedist.fs.mount_info import Mount
from flytekitplugins_safedist.fs.process import is_provably_dead, this_process
from flytekitplugins_safedist.fs.stale_files import _stamp, discard


@pytest.mark.parametrize("of_group", ["", "-all"])
def test_sweep_judges_nobody_of_another_machine_container_or_unknown_start(tmp_path, of_group):
    gone = replace(this_process(), pid=2**22 + 1)  # above the kernel's largest pid
    assert is_provably_dead(gone)
    others = [replace(gone, boot_id="0123abcd"), replace(gone, pid_ns="pid:[1]"), replace(gone, started=-1)]

    def draft(record):
        made = tmp_path / f".ckpt.safedist-{_stamp(record)}-0123456789ab{of_group}"
        made.mkdir()
        return made

    theirs, mine = [draft(record) for record in others], draft(gone)
    assert sweep(tmp_path) == [mine]
    assert sorted(tmp_path.iterdir()) == sorted(theirs)


def test_what_a_group_writes_on_a_network_file_system_stays_for_locks_there_are_no_proof(tmp_path, monkeypatch):
    gone = replace(this_process(), pid=2**22 + 1)
    draft = tmp_path / f".ckpt.safedist-{_stamp(gone)}-0123456789ab-all"
    draft.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(stale_files, "mount_of", lambda path: Mount("/", "nfs4", "server:/", "rw"))
        assert sweep(tmp_path) == []
    assert sweep(tmp_path) == [draft]


def test_what_could_not_be_removed_is_not_said_to_be(tmp_path, monkeypatch):
    draft = tmp_path / f".file.safedist-{_stamp(replace(this_process(), pid=2**22 + 1))}-0123456789ab"
    draft.touch()

    def refuse(*_args, **_options):
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr(type(draft), "unlink", refuse)
        assert sweep(tmp_path) == []
    assert sweep(tmp_path) == [draft]


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
