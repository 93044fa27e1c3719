from __future__ import annotations

import itertools
import os

import pytest

from flytekitplugins_safedist.errors import FsAccessError, FsError, FsTimeoutError, PathBlockedError
from flytekitplugins_safedist.fs import wait_for
from flytekitplugins_safedist.fs.paths import LOOKS_PER_S, pauses


def test_what_is_there_is_returned_at_once(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    for wanted in ({}, {"kind": "file"}, {"size": 3}, {"content": b"abc"}, {"content": lambda path: path.exists()}):
        assert wait_for(tmp_path / "f", timeout=1e-9, **wanted) == tmp_path / "f"
    assert wait_for(tmp_path, kind="dir", timeout=1e-9) == tmp_path


@pytest.mark.parametrize(
    ("wanted", "seen"),
    [
        ({"size": 4}, r"3 bytes.*of 4 bytes"),
        ({"content": b"abd"}, "other content"),
        ({"content": lambda path: False}, "content that is not as expected"),
    ],
)
def test_the_timeout_says_what_was_there_instead(tmp_path, wanted, seen):
    (tmp_path / "f").write_bytes(b"abc")
    with pytest.raises(FsTimeoutError, match=seen):
        wait_for(tmp_path / "f", timeout=0.01, **wanted)


def test_content_that_is_no_bytes_is_refused_not_passed_over(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    with pytest.raises(TypeError):
        wait_for(tmp_path / "f", content="abd", timeout=0.01)
    with pytest.raises(FsTimeoutError, match="other content"):
        wait_for(tmp_path / "f", content=bytearray(b"abd"), timeout=0.01)


def test_a_file_that_goes_on_behind_what_is_expected_is_other_content():
    # The kernel gives no size for it, as some network clients give an old one; only reading on tells.
    with pytest.raises(FsTimeoutError, match="other content"):
        wait_for("/proc/sys/kernel/ostype", size=0, content=b"Linux", timeout=0.01)
    wait_for("/proc/sys/kernel/ostype", size=0, content=b"Linux\n", timeout=60)


def test_the_wrong_kind_is_an_error_at_once(tmp_path):
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(PathBlockedError):
        wait_for(tmp_path / "f", kind="dir", timeout=3600)
    with pytest.raises(PathBlockedError):
        wait_for(tmp_path, kind="file", timeout=3600)
    with pytest.raises(PathBlockedError):
        wait_for(tmp_path / "f" / "below", timeout=3600)


def test_a_link_to_nothing_is_not_there_yet(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "later")
    with pytest.raises(FsTimeoutError):
        wait_for(tmp_path / "link", timeout=0.01)
    (tmp_path / "later").touch()
    assert wait_for(tmp_path / "link", timeout=60) == tmp_path / "link"


def test_a_fifo_does_not_hang_it(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    assert wait_for(tmp_path / "fifo", kind="file", timeout=1) == tmp_path / "fifo"


@pytest.mark.parametrize("text", ["soon", "0", "nan"])
def test_a_wrong_setting_for_the_job_is_refused_by_name(tmp_path, monkeypatch, text):
    monkeypatch.setenv("SAFEDIST_FS_TIMEOUT", text)
    with pytest.raises(FsError, match="SAFEDIST_FS_TIMEOUT") as caught:
        wait_for(tmp_path)
    assert text in str(caught.value)
    with pytest.raises(FsError, match="not a usable time"):
        wait_for(tmp_path, timeout=-1)


@pytest.mark.parametrize("ranks", [1, 8, 512, 10_000])
def test_all_ranks_together_look_no_more_often_than_promised(ranks):
    steady = list(itertools.islice(pauses(ranks), 100, 2100))
    looks_per_second = ranks / (sum(steady) / len(steady))
    assert looks_per_second <= max(LOOKS_PER_S, ranks / 0.25 if ranks <= 50 else 0) * 1.1


def test_an_error_of_the_callers_own_test_of_the_content_is_not_explained_again(tmp_path):
    # FsAccessError is an OSError too, as is what the file system says.
    refused = FsAccessError("the licence server refuses this host")

    def refuse(_path):
        raise refused

    (tmp_path / "file").write_text("")
    with pytest.raises(FsAccessError) as caught:
        wait_for(tmp_path / "file", content=refuse, timeout=5)
    assert caught.value is refused
