"""Three nodes, of which node 0 is lost for good: both survivors think that it is theirs to upload the verdict.

Each agent that is about to put an error says so, and waits for a word.
"""

from __future__ import annotations

from typing import Any

from flytekit import task

from flytekitplugins_safedist import SafeTorch, Timeouts, current_rank
from tests.harness.procs import say, wait_for_word
from tests.harness.product import ending, uploads

ending.TURN_SECONDS = 0.0
_put_new = uploads.put_new


def _put_when_told(filesystem: Any, address: str, data: bytes) -> bool:
    say(f"puts {address.rpartition('/')[2]}")
    wait_for_word()
    return _put_new(filesystem, address, data)


uploads.put_new = _put_when_told


@task(task_config=SafeTorch(nnodes=3, timeouts=Timeouts(stop=0.5, exit=5, heartbeat=5, rendezvous=12)))
def not_replaced() -> str:
    say(f"rank {current_rank().rank}")
    wait_for_word()
    return "never"
