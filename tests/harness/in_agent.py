"""What a test has an agent do otherwise than usual, by variables: an agent imports nothing of the task's module."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.harness import mounts, nvml
from tests.harness.procs import say, wait_for_word
from tests.harness.product import disk, policy, run_record, verdict


def adapt() -> None:
    """Have this process do as its variables say.

    - ``TEST_NVML_LIBRARY``: find that driver.
    - ``TEST_LEAVE_WORD``: whoever is about to leave evidence of a hang says so, and waits for a word there.
    - ``TEST_MEASURE_WAITS``: whoever is about to see what is in scratch says so, and waits for a word.
    - ``TEST_PAGE_SECONDS``: the run's page is uploaded that often.
    - ``TEST_PUTS_WAIT``: whoever is about to upload a verdict says so, and waits for a word; it is everybody's turn.
    - ``TEST_ENTERS``: this process, and so all that it starts, is in that control group.
    - ``TEST_MOUNTS``: this is mounted for the same, each as the command line of ``mount``.
    """
    if "TEST_ENTERS" in os.environ:
        Path(os.environ["TEST_ENTERS"], "cgroup.procs").write_text(str(os.getpid()))
    for arguments in json.loads(os.environ.get("TEST_MOUNTS", "[]")):
        mounts.mount(*arguments)
    nvml.load()
    if "TEST_LEAVE_WORD" in os.environ:
        leave = run_record.RunRecord.leave

        def leave_when_told(record: Any, name: str, text: str) -> Any:
            say("leaves")
            with open(os.environ["TEST_LEAVE_WORD"], "rb", buffering=0) as file:
                file.read(1)
            return leave(record, name, text)

        run_record.RunRecord.leave = leave_when_told
    if "TEST_MEASURE_WAITS" in os.environ:
        usage = disk.usage

        def usage_when_told(*given: Any) -> Any:
            say("measures")
            wait_for_word()
            return usage(*given)

        disk.usage = usage_when_told
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
