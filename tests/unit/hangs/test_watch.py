"""What a node's watch makes of what its ranks answer: real processes answer it in tests/agents."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist import Hangs
from flytekitplugins_safedist.hangs import processes, recorders
from flytekitplugins_safedist.hangs.recorders import RankRecord
from flytekitplugins_safedist.hangs.stacks import Frame, Stack
from flytekitplugins_safedist.hangs.waits import Steps, Wait
from flytekitplugins_safedist.hangs.watch import LocalRank, Watch
from tests.harness.procs import until

ONE = LocalRank(0, 2, 1, Path("stacks"), Path("socket"), Steps())
BARRIER = Wait(0, "0", "0,1", "barrier", 1, 0.0, "gloo")
RECEIVES: Stack = (Frame("/lib/torch/distributed/distributed_c10d.py", 2300, "recv"), Frame("/app/train.py", 7, "step"))


AT_ONCE = Hangs(floor=0.001, ceiling=0.002)
"""Each wait is too long."""


class Ranks:
    """One, and what it answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.record = RankRecord(is_whole=True)
        self.stack: Stack | None = RECEIVES
        self.questions = 0
        self.watch, self.one = Watch(AT_ONCE), ONE
        monkeypatch.setattr(recorders, "read", lambda sockets, names: {0: self.record})
        monkeypatch.setattr(recorders, "stack", self._stack)

    def _stack(self, _: Path) -> Stack | None:
        self.questions += 1
        return self.stack

    def late(self) -> tuple[Wait, ...]:
        """Of an answer that is given from now on."""
        wanted, found = self.questions + 2, []

        def is_answered() -> bool:
            found.append(self.watch.look([self.one]))
            return self.questions > wanted  # then the one before has been taken in

        until(is_answered, "it is asked")
        return next((late for late in reversed(found) if late), ())

    def since(self) -> float:
        """Of the one that is late."""
        [wait] = self.late()
        return wait.since


def test_a_call_that_nothing_records_lasts_as_long_as_nothing_of_the_rank_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(monkeypatch)
    [wait] = ranks.late()
    assert (wait.operation, wait.number, wait.members) == ("recv", 0, "0,1")
    assert ranks.since() == wait.since
    ranks.record = RankRecord(count=1, is_whole=True)  # it has sent and received since, in that line
    ranks.late()
    assert ranks.since() > wait.since


TAKES = "import sys\nfor line in sys.stdin: print(flush=True)"


@pytest.mark.processes
def test_a_call_of_gloos_is_another_where_its_thread_has_been_woken_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """One message after the other, in the same line of a loop: nothing records them."""
    ranks = Ranks(monkeypatch)
    ranks.record = RankRecord(is_whole=True, backends=("gloo",))
    command = [sys.executable, "-c", TAKES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:

        def is_woken() -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.stdout.readline()
            until(lambda: "pipe" in processes.look([process.pid])[process.pid].wchan, "it waits again")

        is_woken()
        ranks.one = replace(ONE, pid=process.pid)
        since = ranks.since()
        assert ranks.since() == since
        is_woken()
        ranks.late()
        assert ranks.since() > since
        ranks.record = replace(ranks.record, backends=("nccl",))  # whose threads wake by themselves
        ranks.late()
        since = ranks.since()
        is_woken()
        ranks.late()
        assert ranks.since() == since
        process.communicate()


@pytest.mark.parametrize("facts", [{"unwatched": ("gloo",)}, {"waits": {BARRIER.key: BARRIER}}])
def test_a_call_counts_only_where_operations_are_recorded_and_this_one_is_not(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]
) -> None:
    ranks = Ranks(monkeypatch)
    ranks.record = replace(ranks.record, **facts)
    assert "recv" not in {wait.operation for wait in ranks.late()}


def test_a_rank_whose_interpreter_is_held_is_not_asked_for_its_stack_at_each_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each question keeps a thread of torch's that answers."""
    ranks, looks = Ranks(monkeypatch), []
    ranks.stack = None
    monkeypatch.setattr(recorders, "read", lambda *_: looks.append(1) or {0: ranks.record})
    until(lambda: ranks.watch.look([ONE]) or len(looks) > 3, "it is asked")
    assert ranks.questions == 1


@pytest.mark.parametrize("where", ["threading.Thread.start", "concurrent.futures.ThreadPoolExecutor.submit"])
def test_a_container_that_may_have_no_further_thread_is_looked_at_later(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It is what the thread that asks says, or those that it asks with."""
    watch, failures, looks = Watch(AT_ONCE), [], []

    def fail(*_: Any) -> None:
        failures.append(1)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(where, fail)
        until(lambda: watch.look([ONE]) or len(failures) > 2, "it is tried again")
        [found] = watch.snapshots([ONE], bool)
        assert (found.waits, found.begun, found.is_whole) == ((), {}, False)
    monkeypatch.setattr(recorders, "read", lambda *_: looks.append(1) or {})
    until(lambda: watch.look([ONE]) or looks, "it is asked")


def test_what_is_not_watched_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(monkeypatch)
    ranks.record = RankRecord(unwatched=("gloo",))
    with caplog.at_level(logging.WARNING):
        ranks.late()
        ranks.late()
    assert caplog.messages == ["hangs in collectives of gloo are not found: this torch does not record them"]


def test_what_a_library_or_the_user_wants_ended_is_urgent() -> None:
    endless = Wait(0, "", "", "recv", 0, 1.0, "call")
    assert not Watch(Hangs()).is_urgent([endless])
    assert Watch(Hangs()).is_urgent([endless, replace(endless, timeout=60.0)])
    assert Watch(Hangs(floor=60)).is_urgent([endless])
