"""Three nodes, of which node 0 is lost for good: both survivors think that it is theirs to upload the verdict."""

from __future__ import annotations

from flytekit import task

from flytekitplugins_safedist import SafeTorch, Timeouts, current_rank
from tests.harness.procs import say, wait_for_word


@task(task_config=SafeTorch(nnodes=3, timeouts=Timeouts(stop=0.5, exit=5, heartbeat=5, rendezvous=12)))
def not_replaced() -> str:
    say(f"rank {current_rank().rank}")
    wait_for_word()
    return "never"
