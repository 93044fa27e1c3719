"""The group over Horovod, among real Horovod ranks that the real ``horovodrun`` has started (gloo, one machine)."""

from __future__ import annotations

import json
import sys

import pytest

from tests.fs import horovod_ranks
from tests.fs.test_race_group import serving
from tests.harness.procs import ROOT

RANKS = 2


@pytest.mark.horovod
def test_ranks_of_horovodrun_do_what_others_do_and_name_who_is_missing(warm, tmp_path):
    hosts = ["-H", f"localhost:{RANKS}", "--network-interface", "lo"]
    command = ["--gloo", "-np", str(RANKS), *hosts, sys.executable, horovod_ranks.__file__, str(tmp_path)]
    # Ranks import for longer than Horovod's own 30 s where much else runs.
    variables = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "240", "TEST_RANKS": str(RANKS), "TEST_NODES": "1"}
    options = {"kind": "module", "libraries": False, "environment": {**variables, "PYTHONPATH": str(ROOT)}}
    with serving() as web:
        done = warm.run("horovod.runner.launch:__main__", tmp_path / "run", arguments=[*command, web], **options)
    assert done.code == 0, done.out + done.err
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert [{name: text for name, text in wrong.items() if text} for wrong, _ in told] == [{}] * RANKS
    *came, absent = (missing for _, missing in told)
    assert all(f"did not come to the meeting point: {RANKS - 1} [" in error for error in came)
    assert absent == ""
