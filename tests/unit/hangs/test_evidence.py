"""What a rank leaves for whoever looks at it, as real processes leave it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist.hangs import recorders, snapshot, stacks
from flytekitplugins_safedist.hangs.evidence import ASK, FORCE, groups_file
from tests.harness.procs import interpreter, until

BEGINS = """
import sys, time
from pathlib import Path
from flytekitplugins_safedist.hangs.evidence import Evidence
directory = Path(sys.argv[1])
evidence = Evidence(directory / "stacks")
"""
IN_GROUPS = """
evidence.follow(directory / "later.fr")
import torch
import torch.distributed as dist
from flytekitplugins_safedist.compat import torch as torch_inside
there = Evidence(directory / "stacks")
there.follow(directory / "there.fr")
for each in (evidence, there):
    torch_inside.call_at_groups(each.note_group)
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
dist.new_group([0], group_desc="mine")
dist.destroy_process_group(dist.new_group([0]))
print("ready", flush=True)
sys.stdin.readline()
dist.destroy_process_group()
sys.stdin.read()
"""


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """Short enough for a socket's name."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def started(directory: Path, script: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """A process that has begun to leave its evidence, and is where the script says."""
    return interpreter(BEGINS + script, str(directory))


@pytest.mark.processes
def test_a_rank_notes_its_groups_and_who_records_them_and_torch_answers(short_dir: Path) -> None:
    """Also where torch is imported later."""
    sockets = [short_dir / "later.fr", short_dir / "there.fr"]

    def noted() -> list[dict[str, Any]]:
        files = [groups_file(socket) for socket in sockets if groups_file(socket).exists()]
        return [json.loads(file.read_text()) for file in files]

    with started(short_dir, IN_GROUPS) as process:
        until(lambda: [len(each["groups"]) for each in noted()] == [2, 2], "both groups are noted")
        facts = {"recorders": {"gloo": "fr_trace_json"}, "endless": [], "again": {}, "closed": ["2"]}
        assert noted() == [{"groups": {"0": "0", "1": "0"}, **facts}] * 2
        for socket in sockets:
            until(lambda socket=socket: recorders.ask(socket, "ping", 1.0) is not None, "torch answers")
            found = recorders.read({0: socket}, {})
            assert (found[0].begun, found[0].is_whole) == ({"gloo 0 0": 1}, True)
            assert recorders.stack(socket)[0].file == "<string>"
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        until(lambda: not any(each["groups"] for each in noted()), "all are closed")
        for socket in sockets:
            found = recorders.read({0: socket}, {})
            assert (found[0].begun, found[0].is_whole) == ({}, True), "whatever it was in before"


def blocks(thread: Path, number: int) -> bool:
    """Whether a thread never gets a signal."""
    [mask] = [line.split()[1] for line in (thread / "status").read_text().splitlines() if line.startswith("SigBlk")]
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.processes
def test_to_ask_a_rank_for_its_stacks_interrupts_no_call_but_of_one_idle_thread(short_dir: Path) -> None:
    """In the main thread, torch's attempt to connect to its store ends with a signal, and begins anew or fails."""
    with started(short_dir, "import numpy\nprint('ready', flush=True)\nsys.stdin.read()") as process:
        threads = list(Path(f"/proc/{process.pid}/task").iterdir())
        for number in (ASK, FORCE):
            takers = [thread.name for thread in threads if not blocks(thread, number)]
            assert len(takers) == 1
            assert takers != [str(process.pid)]
        [own] = [thread for thread in threads if not blocks(thread, FORCE)]
        assert blocks(own, signal.SIGTERM), "else it may take it from the main thread, which then waits on"
        assert not blocks(own, signal.SIGSEGV)
        answers = stacks.ask({0: (process.pid, short_dir / "stacks")}, os.kill)
        assert [frame.file for frame in answers[0][0]] == ["<string>"], "the main thread's is there, and comes first"
        assert (answers[0].handles, answers[0].by_force) == ("", False), "no exception, and no native code"


RAISES = """
class OfMine(ValueError):
    def __str__(self):
        time.sleep(3600)
try:
    raise OfMine("a bad\\nbatch", object())
finally:
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.processes
def test_a_rank_that_stands_as_it_handles_an_exception_says_which(short_dir: Path) -> None:
    """In a ``finally``, say: nobody hears of it before that is done. No code of the exception's own is run."""
    with started(short_dir, RAISES) as process:
        answers = stacks.ask({0: (process.pid, short_dir / "stacks")}, os.kill)
        assert answers[0].handles == "OfMine: a bad batch"
        assert [frame.file for frame in answers[0][0]] == ["<string>"]


BUSY = """
class Loop:
    @property
    def inner(self):
        return True
    @property
    def outer(self):
        return self.inner
loop = Loop()
print("ready", flush=True)
while loop.outer:
    pass
"""


@pytest.mark.processes
def test_a_rank_that_makes_frames_all_the_time_outlives_being_looked_at(short_dir: Path) -> None:
    """What reads frames from outside, as faulthandler does, meets one that is half made: a look of a hundred then
    ended the process, under Python 3.10 and 3.11."""
    file = short_dir / "stacks"
    with started(short_dir, BUSY) as process:
        for _ in range(400):
            before = stacks.size(file)
            os.kill(process.pid, ASK)
            until(lambda before=before: stacks.size(file) > before or process.poll() is not None, "it has answered")
        assert process.poll() is None


@pytest.mark.processes
def test_a_rank_in_which_native_code_keeps_pythons_lock_is_shown_by_force_alone(short_dir: Path) -> None:
    # The one call says that it has begun, and ends with this process's end of the pipe.
    with started(short_dir, "import ctypes\nctypes.PyDLL(None).system(b'echo ready; read line')") as process:
        place = {0: (process.pid, short_dir / "stacks")}
        assert stacks.ask(place, os.kill, forces=False) == {}
        [taken] = snapshot.take(place, os.kill)
        assert [str(frame) for frame in taken.stack] == ['  File "<string>", line 8 in <module>']
        assert taken.holds_gil
