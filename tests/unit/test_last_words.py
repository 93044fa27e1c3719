"""The one line that a failed container leaves behind, and a success that nothing takes back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flytekitplugins_safedist import termination

LEAVES = """
import os, sys
from flytekitplugins_safedist import stopping
stopping.listen()
for uploaded, code in ((True, 0), (True, 1), (False, 0), (False, 3)):
    child = os.fork()
    if child == 0:
        if uploaded:
            stopping.decided(0)
        sys.stdout = open("/dev/full", "w")
        sys.stdout.write("the last line")
        stopping.leave(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

LINGERS = """
import atexit, threading
from flytekitplugins_safedist import stopping
threading.Thread(target=threading.Event().wait).start()
atexit.register(threading.Event().wait)
stopping.decided(0)
stopping.leave_within(0.1)
stopping.leave(0)
"""


@pytest.fixture
def termination_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "termination-log"
    monkeypatch.setattr(termination, "PATH", str(path))
    return path


def test_the_cause_comes_first_and_what_follows_behind_it_once(termination_log: Path) -> None:
    termination_log.touch()
    for text in ("the cause", "a consequence", "the cause"):
        termination.say(text)
    assert termination_log.read_text() == "the cause\na consequence\n"


@pytest.mark.parametrize("text", ["line\n" * 2000, "é" * 3000, "x" * 5000])
def test_no_more_is_written_than_the_kubelet_takes_and_that_is_whole(termination_log: Path, text: str) -> None:
    termination_log.touch()
    termination.say("first")
    termination.say(text)
    termination.say("no room for this")
    written = termination_log.read_bytes()
    assert 4080 < len(written) <= 4096
    first, *others = written.decode().splitlines()
    assert first == "first"
    assert set(others) <= {"line", "é" * (len(others[0])), "x" * len(others[0])}


def test_outside_a_pod_no_termination_log_is_made(termination_log: Path) -> None:
    termination.say("x")
    assert not termination_log.exists()


def test_once_uploaded_nothing_turns_success_into_failure() -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["0", "0", "1", "3"], ended.stderr


def test_what_never_ends_keeps_no_process_whose_verdict_is_uploaded() -> None:
    """A thread and a handler. It hangs where that is not so."""
    assert subprocess.run([sys.executable, "-c", LINGERS], check=False, timeout=240).returncode == 0
