"""The group over Horovod, among real Horovod ranks that the real ``horovodrun`` has started (gloo, one machine)."""

from __future__ import annotations

import json
import sys

import pytest

from tests.fs import horovod_ranks

RANKS = 2


@pytest.mark.horovod
def test_ranks_of_horovodrun_meet_name_who_is_missing_and_have_one_result_one_error_and_one_download(warm, tmp_path):
    hosts = ["-H", f"localhost:{RANKS}", "--network-interface", "lo"]
    command = ["--gloo", "-np", str(RANKS), *hosts, sys.executable, horovod_ranks.__file__, str(tmp_path)]
    # Ranks import for longer than Horovod's own 30 s where much else runs.
    options = {"kind": "module", "libraries": False, "environment": {"HOROVOD_GLOO_TIMEOUT_SECONDS": "240"}}
    done = warm.run("horovod.runner.launch:__main__", tmp_path / "run", arguments=command, **options)
    assert done.code == 0, done.out + done.err
    found = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(RANKS)]
    *came, absent = (rank.pop("missing") for rank in found)
    assert all(f"did not come to the meeting point: {RANKS - 1} [" in error for error in came)
    assert absent == ""
    assert len(list(tmp_path.glob("worked-*"))) == 1
    for name in ("by_job", "by_node"):
        assert len({rank.pop(name) for rank in found}) == 1
    same = {"seen_after_the_barrier": RANKS, "failed": True, "first": True, "fetched": "weights"}
    assert found == [same] * RANKS
