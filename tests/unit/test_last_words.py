"""The one line that a failed container leaves behind, and a success that nothing takes back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flytekitplugins_safedist import lastwords

LEAVES = """
import sys
from flytekitplugins_safedist import stopping
stopping.listen()
if sys.argv[1] == "uploaded":
    stopping.decided(0)
sys.stdout = open("/dev/full", "w")
sys.stdout.write("the last line")
stopping.leave(int(sys.argv[2]))
"""


@pytest.fixture
def termination_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "termination-log"
    monkeypatch.setattr(lastwords, "TERMINATION_LOG", str(path))
    return path


def test_the_cause_is_one_line_of_the_termination_log_and_the_first_one_counts(termination_log: Path) -> None:
    termination_log.touch()
    lastwords.to_termination_log(lastwords.sentence_of(OSError("the store is down\nand more")))
    lastwords.to_termination_log("a consequence")
    assert termination_log.read_text() == "OSError: the store is down\n"


def test_outside_a_pod_no_termination_log_is_made(termination_log: Path) -> None:
    lastwords.to_termination_log("x")
    assert not termination_log.exists()


@pytest.mark.parametrize(
    ("uploaded", "code", "left"), [("uploaded", 0, 0), ("uploaded", 1, 0), ("not yet", 0, 1), ("not yet", 3, 3)]
)
def test_once_uploaded_nothing_turns_success_into_failure(uploaded: str, code: int, left: int) -> None:
    command = [sys.executable, "-c", LEAVES, uploaded, str(code)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == left
