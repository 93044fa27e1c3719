"""Processes that a rank starts hand tensors to it, wherever its scratch is: sockets below TMPDIR have short paths."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

EPOCH = [1.0, 13.0, 41.0, 85.0]


@pytest.fixture
def root() -> Iterator[Path]:
    """A scratch root with a long path. Below a short one the same names fit by themselves."""
    top = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
    path = top / ("x" * (180 - len(str(top)) - 1))
    path.mkdir()
    yield path
    shutil.rmtree(top)


def test_workers_of_every_kind_hand_their_tensors_over(warm, tmp_path, root) -> None:
    before = set(Path("/tmp").glob("s-*"))
    ended = warm.run("job_workers:load", tmp_path / "job", environment={"SAFEDIST_SCRATCH_ROOT": str(root)})
    assert ended.code == 0, ended.err
    twice, once = ("fork", "persistent", "by file system"), ("spawn", "forkserver")
    assert ended.value == {"queue": [10.0], **dict.fromkeys(twice, EPOCH * 2), **dict.fromkeys(once, EPOCH)}
    assert list(root.iterdir()) == []
    links = set(Path("/tmp").glob("s-*")) - before
    assert [link for link in links if link.is_symlink() and link.readlink().is_relative_to(root)] == []
