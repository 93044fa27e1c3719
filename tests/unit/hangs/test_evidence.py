"""What a rank leaves for whoever looks at it, as real processes leave it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist.hangs import recorders, stacks
from flytekitplugins_safedist.hangs.evidence import SIGNAL, groups_file
from tests.harness.procs import until

BEGINS = """
import sys, time
from pathlib import Path
from flytekitplugins_safedist.hangs.evidence import Evidence
stacks, socket = Path(sys.argv[1], "stacks"), Path(sys.argv[1], "s.fr")
evidence = Evidence(stacks)
"""
IN_GROUPS = """
import datetime, torch
import torch.distributed as dist
evidence.follow(socket)
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
dist.new_group([0], group_desc="mine")
print("ready", flush=True)
sys.stdin.read()
"""
LATE = IN_GROUPS.replace("evidence.follow(socket)\n", "").replace(
    "import datetime", "evidence.follow(socket)\nimport datetime"
)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """Short enough for a socket's name."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def started(directory: Path, script: str) -> subprocess.Popen[str]:
    """A process that has begun to leave its evidence, and is where the script says."""
    command = [sys.executable, "-c", BEGINS + script, str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.processes
@pytest.mark.parametrize("script", [IN_GROUPS, LATE], ids=["torch is there", "torch is imported later"])
def test_a_rank_notes_its_groups_and_who_records_them_and_torch_answers(short_dir: Path, script: str) -> None:
    process = started(short_dir, script)
    socket = short_dir / "s.fr"

    def noted() -> dict[str, Any]:
        return dict(json.loads(groups_file(socket).read_text())) if groups_file(socket).exists() else {"groups": ()}

    try:
        until(lambda: len(noted()["groups"]) == 2, "both groups are noted")
        recorders_ = {"gloo": "fr_trace_json"}
        assert noted() == {"groups": {"0": "0", "1": "0"}, "recorders": recorders_, "endless": [], "problem": ""}
        until(lambda: recorders.ask(socket, "ping", 1.0) is not None, "torch answers")
        found = recorders.read({0: socket}, {})
        assert found[0].begun == {"gloo 0 0": 1}
        assert found[0].is_whole
        assert recorders.stack(socket)[0].file == "<string>"
        assert recorders.holding_the_interpreter({0: socket}) == []
    finally:
        process.communicate()


def blocks(thread: Path) -> bool:
    """Whether a thread never gets the signal."""
    [mask] = [line.split()[1] for line in (thread / "status").read_text().splitlines() if line.startswith("SigBlk")]
    return bool(int(mask, 16) >> (SIGNAL - 1) & 1)


@pytest.mark.processes
def test_to_ask_a_rank_for_its_stacks_interrupts_no_call_but_of_one_idle_thread(short_dir: Path) -> None:
    """In the main thread, torch's attempt to connect to its store ends with a signal, and begins anew or fails."""
    process = started(short_dir, "import numpy\nprint('ready', flush=True)\nsys.stdin.read()")
    try:
        threads = [thread for thread in Path(f"/proc/{process.pid}/task").iterdir() if not blocks(thread)]
        assert len(threads) == 1
        assert threads[0].name != str(process.pid)
        answers = stacks.ask({0: (process.pid, short_dir / "stacks")}, lambda pid: os.kill(pid, SIGNAL))
        assert [frame.file for frame in answers[0][0]] == ["<string>"], "the main thread's is there, and comes first"
    finally:
        process.communicate()
