from __future__ import annotations

import os

from flytekitplugins_safedist.fs import oserrors
from flytekitplugins_safedist.fs.oserrors import UNKNOWN, entries, parse_mountinfo

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
30 22 0:25 / /dev/shm rw,nosuid - tmpfs tmpfs rw,size=64m
40 22 0:40 / /data rw,relatime shared:9 master:2 - nfs4 filer:/export rw,vers=4.2,soft,acdirmax=60
41 40 0:41 / /data/with\\040space ro - lustre mgs@tcp:/scratch ro,flock
42 22 0:42 / /data rw - tmpfs over rw
"""


def test_a_path_lies_on_the_deepest_and_latest_mount():
    types = {
        "/dev/shm/x": "tmpfs",
        "/devices": "ext4",
        "/data/with space/f": "lustre",
        "/data2/f": "ext4",  # its name only begins alike
        "/data/f": "tmpfs",  # a later mount covers an earlier one on the same point
    }
    assert {path: parse_mountinfo(MOUNTS, path).fstype for path in types} == types


def test_options_of_mount_and_server_are_both_shown():
    nfs = parse_mountinfo("\n".join(MOUNTS.splitlines()[:3]), "/data")
    assert nfs.options == "rw,relatime,vers=4.2,soft,acdirmax=60"
    assert str(nfs) == "nfs4 from filer:/export at /data (rw,relatime,vers=4.2,soft,acdirmax=60)"
    assert not nfs.is_local
    assert parse_mountinfo(MOUNTS, "/").is_local
    assert parse_mountinfo("nonsense\n", "/x") == UNKNOWN


def test_entries_are_counted_and_cut(tmp_path):
    assert entries(tmp_path) == "empty"
    for index in range(12):
        (tmp_path / f"{index:02d}").touch()
    assert entries(tmp_path, most=2) == "12 entries: 00, 01, …"
    assert "cannot be listed" in entries(tmp_path / "none")


def test_the_name_of_another_mount_may_be_any_bytes(monkeypatch, tmp_path):
    table = tmp_path / "mountinfo"
    table.write_bytes(b"22 1 0:21 / / rw - ext4 /dev/a rw\n23 22 0:22 / /tmp/\xff\x85 rw - fuse.x x rw\n")
    monkeypatch.setattr(oserrors, "MOUNTS", table)
    assert oserrors.mount_of("/").fstype == "ext4"
    assert oserrors.mount_of(os.fsdecode(b"/tmp/\xff\x85/file")).fstype == "fuse.x"


def test_the_name_of_a_mount_may_have_spaces_of_other_alphabets(monkeypatch, tmp_path):
    table = tmp_path / "mountinfo"
    table.write_text("22 1 0:21 / / rw - ext4 /dev/a rw\n23 22 0:22 / /tmp/a\u00a0b\u2028c rw - fuse.x x rw\n")
    monkeypatch.setattr(oserrors, "MOUNTS", table)
    assert oserrors.mount_points() == {"/", "/tmp/a\u00a0b\u2028c"}
    assert oserrors.mount_of("/tmp/a\u00a0b\u2028c/file").fstype == "fuse.x"
