"""What a node's agent does around the process that checks it. What that process meets there cannot be had here (a dead
disk, no more processes): stand-ins of it."""

from __future__ import annotations

import errno
import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from flytekitplugins_safedist.agent import checks
from flytekitplugins_safedist.agent.actions import StartRanks
from flytekitplugins_safedist.agent.checks import Checked, Checks
from flytekitplugins_safedist.config.options import Preflight, Timeouts
from flytekitplugins_safedist.coordinator.books import Leader, Round
from flytekitplugins_safedist.preflight.judge import NodeReport
from tests.harness.procs import until


class Stuck:
    """A process that the kernel cannot end."""

    returncode = None
    killed = False
    waits = 0
    """Of the agent itself, for its end."""

    def __init__(self) -> None:
        self.over, self.is_known = threading.Event(), threading.Event()

    def kill(self) -> None:
        self.killed = True

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "waits for ever"
        self.is_known.set()
        self.waits += threading.current_thread() is threading.main_thread()
        if self.killed or not self.over.wait(60):
            raise subprocess.TimeoutExpired("probe", timeout)
        self.returncode = 7
        return 7


class Node(Checks):
    """Of node 1 of 2."""

    def __init__(self, directory: Path, start: StartRanks, limit: float = 60.0) -> None:
        settings = SimpleNamespace(preflight=Preflight(timeout=limit), timeouts=Timeouts())
        call = SimpleNamespace(variables={})
        job = SimpleNamespace(number=0, attempt=SimpleNamespace(run_id="job"), ranks_environment={}, call=call)
        place = SimpleNamespace(path=directory, orders=directory)
        plan: Any = SimpleNamespace(settings=settings, job=job, scratch=place, meeting=None)
        super().__init__(plan, start)


def start(port: int) -> StartRanks:
    values = {"MASTER_ADDR": "node-0", "MASTER_PORT": str(port)}
    return StartRanks(Round(Leader(port, "a"), 0), 0, 1, 2, values, is_checks=True)


def starting(monkeypatch: pytest.MonkeyPatch, start: Callable[..., object]) -> None:
    monkeypatch.setattr(subprocess, "Popen", start)


def text_of(node: Node) -> str:
    """What its checks have come to."""
    found: list[Checked] = []
    until(lambda: found.extend(filter(None, [node.look()])) or found, "the checks have ended")
    checked = found[0]
    (trouble,) = NodeReport.from_dict(json.loads(checked.report)).troubles
    assert (trouble.subject, trouble.is_broken) == ("Checks", True)
    return trouble.text


def test_checks_that_cannot_start_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    starting(monkeypatch, refuse)
    node = Node(tmp_path, start(1))
    assert "could not start: BlockingIOError: [Errno 11] Resource" in text_of(node)
    node.close()


def test_checks_whose_start_hangs_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "_LATE_SECONDS", 0.0)
    released, late = threading.Event(), Stuck()

    def hang(*_: object, **__: object) -> Stuck:
        released.wait(60)
        return late

    starting(monkeypatch, hang)
    node = Node(tmp_path, start(1), limit=0.01)
    assert "hang: no answer in 0.01 s" in text_of(node)
    node.close()
    released.set()


def test_a_process_that_cannot_be_ended_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    process = Stuck()
    starting(monkeypatch, lambda *_, **__: process)
    node = Node(tmp_path, start(1))
    assert process.is_known.wait(60)
    node.close()
    assert process.killed
    node.close()  # each round of ranks that follows ends with it
    assert process.waits == 1


def test_of_two_rounds_only_the_newer_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A replaced node 0 may count its rounds anew: the number is the same."""
    processes, started = [Stuck(), Stuck()], Queue[str]()

    def open_process(*_: object, **options: Any) -> Stuck:
        started.put(options["env"]["MASTER_PORT"])
        return processes[int(options["env"]["MASTER_PORT"]) - 1]

    starting(monkeypatch, open_process)
    older = Node(tmp_path, start(1))
    assert started.get(timeout=60) == "1"
    older.close()
    newer = Node(tmp_path, start(2))
    assert started.get(timeout=60) == "2"
    processes[0].over.set()
    assert processes[0].killed
    assert older.look() is None
    assert newer.look() is None
    processes[1].over.set()
    assert "ended with status 7" in text_of(newer)
