"""What a test has an agent do otherwise than usual, by variables: an agent imports nothing of the task's module."""

from __future__ import annotations

import os
from typing import Any

from tests.harness import nvml
from tests.harness.procs import say, wait_for_word
from tests.harness.product import policy, run_record, verdict


def adapt() -> None:
    """Have this process do as its variables say.

    - ``TEST_NVML_LIBRARY``: find that driver.
    - ``TEST_PAGE_SECONDS``: the run's page is uploaded that often.
    - ``TEST_PUTS_WAIT``: whoever is about to upload a verdict says so, and waits for a word; it is everybody's turn.
    """
    nvml.load()
    if "TEST_PAGE_SECONDS" in os.environ:
        run_record.PAGE_SECONDS = float(os.environ["TEST_PAGE_SECONDS"])
    if "TEST_PUTS_WAIT" in os.environ:
        policy.TURN_SECONDS = 0.0
        put_new = verdict.put_new

        def put_when_told(filesystem: Any, address: str, data: bytes) -> bool:
            say(f"puts {address.rpartition('/')[2]}")
            wait_for_word()
            done: bool = put_new(filesystem, address, data)
            return done

        verdict.put_new = put_when_told
