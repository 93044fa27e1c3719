"""Clients that remember what they did not find, as NFS and parallel file systems do: the helpers make them ask again.

Here a client remembers for an hour. Only opening the directory makes it ask the server, as nfs(5) promises.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from flytekitplugins_safedist.errors import PathBlockedError
from flytekitplugins_safedist.fs import download_once, ensure_dir, wait_for
from tests.harness.fusefs import FuseMount, require
from tests.harness.product import stage
from tests.harness.tarballs import project


@pytest.fixture
def pair(tmp_path):
    """The directory as its maker sees it, and as a client that remembers does."""
    require()
    with ExitStack() as stack:
        maker = stack.enter_context(FuseMount(tmp_path / "server", tmp_path / "maker"))
        other = stack.enter_context(FuseMount(tmp_path / "server", tmp_path / "other", not_there=3600))
        yield maker.path, other.path


def test_waiting_ends_though_the_client_has_looked_before(pair):
    maker, other = pair
    assert not (other / "made").exists()
    (maker / "made").touch()
    assert not (other / "made").exists()
    assert wait_for(other / "made", timeout=60) == other / "made"


def test_a_record_that_the_client_takes_for_missing_is_seen(pair, tmp_path):
    """Else what another job has fetched from another source would be taken for what somebody has put there."""
    maker, other = pair
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    assert not (other / ".data.safedist-source").exists()
    download_once(tmp_path / "one", maker / "data")
    with pytest.raises(PathBlockedError, match=f"seen: {tmp_path}/one; expected: {tmp_path}/two"):
        download_once(tmp_path / "two", other / "data")


def test_staging_sees_a_directory_that_the_client_takes_for_missing(pair, tmp_path):
    maker, other = pair
    assert not (other / "made").exists()
    (maker / "made").mkdir()
    assert not (other / "made").exists()
    (tmp_path / "fast.tar.gz").write_bytes(project({"made/code.py": "V = 1"}))
    stage(str(tmp_path / "fast.tar.gz"), other)
    assert (maker / "made/code.py").read_text() == "V = 1"


def test_a_directory_that_the_client_takes_for_missing_is_there(pair):
    maker, other = pair
    assert not (other / "made").exists()
    (maker / "made").mkdir()
    assert not (other / "made").exists()
    assert ensure_dir(other / "made", timeout=60).is_dir()
