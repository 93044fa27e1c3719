"""What a rank server ends of what it has been handed, and what it removes."""

from __future__ import annotations

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
