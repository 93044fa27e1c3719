"""How a signal comes into the agent's inbox."""

from __future__ import annotations

import os
import queue
import signal
import time

from flytekitplugins_safedist.agent import signals


def test_a_signal_says_when_it_came_however_late_it_is_taken() -> None:
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    with signals.into(inbox, lambda _: 0.0):
        before = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        after = time.monotonic()
        time.sleep(0.01)
        signalled = inbox.get(timeout=30)
    assert isinstance(signalled, signals.Signalled)
    assert signalled.number == signal.SIGTERM
    assert before <= signalled.at <= after


def test_sighup_that_nohup_has_ignored_stays_so() -> None:
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.into(inbox, lambda _: 0.0):
            os.kill(os.getpid(), signal.SIGHUP)
        assert inbox.empty()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
