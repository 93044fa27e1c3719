"""What a rank server ends of what it has been handed, and what it removes."""

from __future__ import annotations

import ctypes
import os
import signal

from flytekitplugins_safedist.rank_server import cleanup
from tests.harness.procs import alive, until


def test_children_are_ended_however_little_time_there_is() -> None:
    spare = set(cleanup.children())
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    cleanup.end_descendants(spare=spare, patience=0.5)
    until(lambda: not alive(child), "the child ends")


def test_a_process_may_have_a_name_that_is_no_text() -> None:
    """Fifteen bytes are all that the kernel keeps of it: a title in Japanese is cut within a letter."""
    spare = set(cleanup.children())
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(15, b"\xff) \xe3\x83", 0, 0, 0)  # PR_SET_NAME
        os.write(write, b"named")
        while True:
            signal.pause()
    assert os.read(read, 5) == b"named"
    assert cleanup.state_and_parent(child)[1] == os.getpid()
    assert not cleanup.catches(child, signal.SIGUSR2)
    cleanup.end_descendants(spare=spare, patience=10)
    assert not alive(child)
