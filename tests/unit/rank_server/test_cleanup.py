"""What a rank server ends of what it has been handed, and what it removes."""

from __future__ import annotations

import ctypes
import os
import signal
from types import SimpleNamespace

import pytest

from flytekitplugins_safedist.rank_server import cleanup
from tests.harness import needs
from tests.harness.procs import alive, until

NOBODY = 65534


def test_children_are_ended_however_little_time_there_is() -> None:
    spare = set(cleanup.children())
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    cleanup.end_descendants(spare=spare, patience=0.5)
    until(lambda: not alive(child), "the child ends")


def test_what_the_kernel_cannot_end_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process in an uninterruptible sleep, which no signal reaches."""
    spare, now = set(cleanup.children()), [0.0]
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    with monkeypatch.context() as patched:
        time = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
        patched.setattr(cleanup, "time", time)
        patched.setattr(cleanup, "send_signal", lambda *_, **__: None)
        cleanup.end_descendants(spare=spare, patience=0.1)
    cleanup.end_descendants(spare=spare, patience=10)
    assert not alive(child)
    assert now[0] < 0.2


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


def test_what_goes_on_as_another_user_is_left_alone_and_not_waited_for() -> None:
    """As of a rank that has called sudo."""
    needs.root("start a process of another user")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            theirs = os.fork()
            while theirs == 0:
                signal.pause()
            os.write(write, str(theirs).encode())
            os.setuid(NOBODY)
            cleanup.end_group(theirs)
            cleanup.end_descendants(spare=(), patience=3600)
            os._exit(0)
        finally:
            os._exit(1)
    theirs = int(os.read(read, 20))
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert alive(theirs)
    finally:
        os.kill(theirs, signal.SIGKILL)
