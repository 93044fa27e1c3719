"""What one client makes, another waits for: late, stale, and never."""

from __future__ import annotations

import re

from flytekitplugins_safedist.errors import FsTimeoutError
from flytekitplugins_safedist.fs import wait_for
from tests.fs.ranks import Process, rank_env
from tests.harness.fusefs import FuseMount, require


def test_size_and_content_are_believed_only_after_opening(tmp_path):
    require()
    with (
        FuseMount(tmp_path / "server", tmp_path / "one") as one,
        FuseMount(tmp_path / "server", tmp_path / "two", stale_attrs=3600) as two,
    ):
        (one.path / "log").write_bytes(b"")
        assert (two.path / "log").stat().st_size == 0
        (one.path / "log").write_bytes(b"x" * 1000)
        assert (two.path / "log").stat().st_size == 0, "this client's stat is an hour behind"
        assert wait_for(two.path / "log", size=1000) == two.path / "log"
        assert wait_for(two.path / "log", content=b"x" * 1000)


def test_a_passing_eio_and_estale_do_not_end_the_wait(tmp_path):
    require()
    with FuseMount(tmp_path / "server", tmp_path / "client") as client:
        (client.path / "there").write_bytes(b"1")
        faults = [{"op": "open", "errno": code, "first": 4} for code in ("EIO", "ESTALE", "EINTR")]
        client.set(faults=[*faults, {"op": "opendir", "errno": "EIO"}])
        assert wait_for(client.path / "there", content=b"1")


def test_the_timeout_says_everything_one_would_ask_next(tmp_path):
    require()
    with FuseMount(tmp_path / "server", tmp_path / "client") as client:
        (client.path / "something-else").write_bytes(b"")

        def wait() -> None:
            wait_for(client.path / "model.pt", size=10, timeout=0.05, made_by="rank 0")

        process = Process(wait, env=rank_env(3, 4, per_node=2))
        error = process.outcome().error()
    assert isinstance(error, FsTimeoutError)
    text = str(error)
    assert "model.pt" in text
    assert re.search(r"waited \d+\.\d", text)
    assert "rank=rank 3 of 4 (local rank 1 on node 1)" in text
    assert "to_be_made_by=rank 0" in text
    assert "file_system=fuse" in text
    assert "1 entries: something-else" in text
    assert "a file of 10 bytes" in text
    assert "raise timeout= or SAFEDIST_FS_TIMEOUT" in text


def test_one_setting_for_the_job_bounds_every_wait(tmp_path):
    process = Process(lambda: wait_for(tmp_path / "never"), env={"SAFEDIST_FS_TIMEOUT": "0.05"})
    assert isinstance(process.outcome().error(), FsTimeoutError)
