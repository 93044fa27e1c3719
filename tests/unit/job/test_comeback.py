"""A pod that waits for others who are not coming any more: the verdict is in the store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flytekitplugins_safedist.job import comeback

WAITS = """
import sys, threading
from pathlib import Path
from flytekitplugins_safedist.job import comeback; from flytekitplugins_safedist import stopping
comeback.LOOK_SECONDS = 0.01
if sys.argv[2] == "container":
    stopping.listen()
looked = threading.Semaphore(0)
def verdict():
    looked.release()
    return Path(sys.argv[1]).exists()
with comeback.leaving_when_decided(verdict, print, begun=lambda: sys.argv[3] == "begun"):
    if sys.argv[2:] == ["container", "not begun"]:
        for _ in range(3):
            looked.acquire()
        print("the verdict comes", flush=True)
        Path(sys.argv[1]).touch()
        threading.Event().wait()
raise SystemExit(7)
"""


def waits(verdict: Path, *how: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", WAITS, str(verdict), *how]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_container_that_waits_for_the_others_ends_with_0_when_the_verdict_comes(tmp_path):
    done = waits(tmp_path / "outputs.pb", "container", "not begun")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "the verdict comes"), done.stderr


@pytest.mark.parametrize("how", [("container", "begun"), ("laptop", "not begun")])
def test_a_node_whose_ranks_run_and_a_users_own_interpreter_are_not_ended(tmp_path, how):
    (tmp_path / "outputs.pb").touch()
    assert waits(tmp_path / "outputs.pb", *how).returncode == 7


def test_a_store_that_cannot_be_asked_is_no_verdict():
    said: list[str] = []

    def down() -> bool:
        raise ConnectionError("refused")

    assert comeback.is_decided(down, said.append) is False
    assert "refused" in said[0]
