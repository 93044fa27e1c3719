"""Tasks whose agent is watched by flat.py: one prints gigabytes, one fails in each of many rounds."""

from __future__ import annotations

import os
import time

from flytekit import task

from flytekitplugins_safedist import SafeTorch, Timeouts, current_rank

ROUNDS = int(os.environ.get("FLAT_ROUNDS", "100"))
AHEAD_BYTES = 64 << 20
"""How far a rank may be ahead of the agent: it prints on when its log, on disk, is shorter than this."""

BLOCK = (b"x" * 99 + b"\n") * 40_000


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=Timeouts(exit=300)))
def prints(gigabytes: float) -> int:
    """Each of two ranks prints half of that."""
    printed = 0
    while printed < gigabytes * 1e9 / 2:
        while os.fstat(1).st_blocks * 512 > AHEAD_BYTES:
            time.sleep(0.01)
        os.write(1, BLOCK)
        printed += len(BLOCK)
    return printed


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=ROUNDS - 1, timeouts=Timeouts(stop=1)))
def fails_in_every_round_but_the_last() -> int:
    """The other rank is stopped each time."""
    me = current_rank()
    if me.round == ROUNDS - 1:
        return me.round
    if me.rank == 0:
        raise ValueError("and again")
    time.sleep(60)
    return -1
