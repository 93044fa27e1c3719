"""A job on a laptop: a person sits at its terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.procs import Ended, Running, Warm

PYFLYTE = str(Path(sys.executable).parent / "pyflyte")
JOB = str(Path(__file__).parents[1] / "jobs" / "job_local.py")
CTRL_C = "\x03"


def on_a_terminal(
    warm: Warm, files: Path, typed: list[tuple[list[str], str]], command: list[str], **more: Any
) -> Running:
    """Run a command on a terminal, where ``typed`` says what is typed when something has appeared."""
    whole = [sys.executable, "-m", "tests.terminal", json.dumps(typed), *command]
    return warm.command(whole, files, {"COLUMNS": "200", **more})


ENDED = "[safedist] interrupted (Ctrl-C): every rank has been ended"


def after(text: str, ended: Ended) -> str:
    """What the terminal showed after the last ``text``, without its echo of Ctrl-C (which drops what is on its way)."""
    return ended.out.replace("^C", "").rpartition(text)[2].strip()


@pytest.mark.parametrize(
    "command", [[sys.executable, JOB, "waits"], [PYFLYTE, "run", JOB, "waits"]], ids=["python", "pyflyte"]
)
def test_ctrl_c_is_one_line(warm, tmp_path, command):
    typed = [(["[rank 0] here", "[rank 1] here"], CTRL_C)]
    ended = on_a_terminal(warm, tmp_path / "job", typed, command).wait()
    assert after("here", ended) == ENDED
    assert ended.code == 130
    assert ended.left == ended.scratch == []


def test_ctrl_c_while_the_rank_server_imports_is_one_line(warm, tmp_path):
    typed = [(["imported again"], CTRL_C)]
    command = [PYFLYTE, "run", JOB, "waits"]
    ended = on_a_terminal(warm, tmp_path / "job", typed, command, TEST_HOW="import").wait()
    assert after("imported again", ended) == ENDED
    assert ended.code == 130
    assert ended.left == ended.scratch == []
