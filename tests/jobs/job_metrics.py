"""Tasks whose agents tell of them while they run."""

from __future__ import annotations

import os
import signal

from flytekit import task

from flytekitplugins_safedist import Metrics, SafeTorch, current_rank
from tests.harness.procs import say, wait_for_word

METRICS = Metrics(
    prometheus=int(os.environ["TEST_PORT"]) if "TEST_PORT" in os.environ else None, otlp="TEST_OTLP" in os.environ
)
STEPS = 3


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=1, metrics=METRICS))
def restarts_once() -> int:
    """Takes three steps and waits for a word; fails in the first round."""
    me = current_rank()
    for step in range(STEPS):
        me.progress(step, loss=0.5)
    say(f"rank {me.rank} in round {me.round}")
    if (me.round, me.rank) == (0, 0):
        signal.pause()  # until it is ended with the other one
    wait_for_word()
    if me.round == 0:
        raise ValueError("bad data")
    return me.round
