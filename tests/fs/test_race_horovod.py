"""The group over Horovod, among real Horovod ranks that the real ``horovodrun`` has started (gloo, one machine)."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.fs import horovod_ranks
from tests.fs.ranks import launched

RANKS = 3


@pytest.mark.horovod
def test_ranks_of_horovodrun_meet_name_who_is_missing_and_have_one_result_one_error_and_one_download(tmp_path):
    horovodrun = Path(sys.executable).with_name("horovodrun")
    hosts = ["-H", f"localhost:{RANKS}", "--network-interface", "lo"]
    command = [horovodrun, "--gloo", "-np", str(RANKS), *hosts, sys.executable]
    # Ranks import for longer than Horovod's own 30 s where much else runs.
    launched(Path(horovod_ranks.__file__), command, tmp_path, HOROVOD_GLOO_TIMEOUT_SECONDS="240")
    found = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(RANKS)]
    *came, absent = (rank.pop("missing") for rank in found)
    # The first to give up says for all who has not come by then: the slower of the two that come may be another.
    assert all(re.search(rf"did not come to the meeting point: (\d, )?{RANKS - 1} \[", error) for error in came)
    assert absent == ""
    assert len(list(tmp_path.glob("worked-*"))) == 1
    for name in ("by_job", "by_node"):
        assert len({rank.pop(name) for rank in found}) == 1
    same = {"seen_after_the_barrier": RANKS, "failed": True, "first": True, "fetched": "weights"}
    assert found == [same] * RANKS
