"""This node's part in finding out whether the job hangs: it says so when its ranks wait too long, and what they do."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..config.options import Hangs
from ..diagnosis import evidence, records
from ..diagnosis.picture import Standing
from ..diagnosis.processes import Process
from ..diagnosis.progress import Progress, Steps
from ..diagnosis.stacks import Stack
from ..errors import HangError
from ..ranks.forkserver_client import RankServer
from ..ranks.outcome import Fault, RankOutcome
from ..ranks.rank_set import Ranks
from .hang_messages import Hung, Look, Seen, Stalled
from .messages import Message

_MOST_BETWEEN = 30.0
_FRAMES, _FRAMES_BESIDE = 40, 12
"""Of a rank's main thread, and of each other one, for the coordinator."""
_THREADS, _THREADS_OF_ALL = 8, 2048
"""Beside the main thread: of one rank, and of all ranks of the job, at most."""

_HINTS = {
    "gpu": "drain that node (kubectl cordon, kubectl drain) until the GPU is reset or replaced",
    "frozen": "look at who stops it (a debugger, SIGSTOP), or at its node's disk, file server or device",
    "gil": "look at the native call that does not come back, and have it release Python's lock while it waits",
    "input": "look at where its data come from (a file server, a DataLoader's worker), and give reads a deadline",
    "returned": "let every rank take part in the same number of collectives (uneven data: drop the last batch, or "
    "torch's Join), or end the function with a barrier",
    "missing": "look at the line where it stands: what it waits for, and whether all ranks call the same collectives",
    "slow": "if that line is an evaluation or a save of one rank, raise Hangs(ceiling=...) above its time",
    "mismatch": "let all ranks call the same collectives, with the same shapes, in the same order, in every branch",
    "symmetric": "look at the network between the nodes, and at whether ranks wait for each other in two groups",
}


class HangWatch:
    """The ranks of one node in one round.

    Args:
        round_no: its number.
        ranks: of the round.
        server: signals them.
        hangs: what the user wants to be done.
        tell: says something to the coordinator.
        fail: ends the round here, with the failure of a rank.
        leave: leaves a text in a file, of a name; returns its address, or why there is none.
    """

    def __init__(
        self,
        round_no: int,
        ranks: Ranks,
        *,
        server: RankServer,
        hangs: Hangs,
        tell: Callable[[Message], object],
        fail: Callable[[RankOutcome], object],
        leave: Callable[[str, str], str],
    ) -> None:
        self._round = round_no
        self._ranks = ranks
        self._server = server
        self._hangs = hangs
        self._tell = tell
        self._fail = fail
        self._leave = leave
        self._every = _MOST_BETWEEN if hangs.floor is None else min(_MOST_BETWEEN, hangs.floor / 10)
        self._progress = Progress(hangs.floor, hangs.ceiling, self._every)
        self._next = time.monotonic() + self._every

    def look(self) -> None:
        """Where it is time, see how far the ranks are."""
        now = time.monotonic()
        if now < self._next:
            return
        waited = self._progress.look(self._recorded({}), self._steps(), now)
        self._next = time.monotonic() + self._every
        if waited is not None:
            self._tell(Stalled(self._round, waited))

    def heard(self, message: Look | Hung) -> None:
        """Say what the ranks do; or have one fail, for which the job hangs."""
        if message.round != self._round:
            return
        if isinstance(message, Look):
            self._tell(Seen(self._round, message.number, tuple(self.standing())))
        elif (failure := self._failure(message)) is not None:
            self._fail(failure)

    def standing(self) -> list[Standing]:
        """What the ranks of this node do right now; takes a second or two."""
        running = {order.context.rank: (pid, order, page) for pid, (order, page) in self._ranks.running.items()}
        asked = {rank: (pid, order.stacks) for rank, (pid, order, _) in running.items()}
        found = evidence.gather(asked, self._server.ask_for_stacks)
        recorded = self._recorded({each.rank: each.stack for each in found})
        held = records.holding_the_interpreter(self._sockets())
        steps = self._steps()
        still = self._progress.still(steps, time.monotonic())
        self._ranks.gpus.look()
        gpus = {rank: self._ranks.gpus.of(order.context.local_rank) for rank, (_, order, _) in running.items()}
        standing = [
            replace(
                each,
                threads=self._sent(each.threads, running[each.rank][1].context.world_size),
                record=recorded.get(each.rank, records.Recorded()),
                steps=steps[each.rank],
                still=still.get(each.rank, 0.0),
                is_late=still.get(each.rank, 0.0) >= self._progress.step_threshold,
                holds_gil=each.rank in held,
                debugged=running[each.rank][2].debugs,
                gpus=gpus[each.rank][0],
                faults=gpus[each.rank][1],
            )
            for each in found
        ]
        return standing + [Standing(rank, Process(0), returned=True) for rank in self._ranks.returned()]

    def _sent(self, threads: Sequence[Stack], world_size: int) -> tuple[Stack, ...]:
        beside = threads[1 : 1 + min(_THREADS, _THREADS_OF_ALL // world_size)]
        return (*(stack[:_FRAMES] for stack in threads[:1]), *(stack[:_FRAMES_BESIDE] for stack in beside))

    def _failure(self, hung: Hung) -> RankOutcome | None:
        if self._hangs.action == "report":
            return None  # every node's log has it by now
        if hung.may_end and hung.waited < self._hangs.ceiling:
            return None
        if hung.by_steps and self._hangs.floor is None:
            return None  # what comes after the last step, and takes hours, tells none
        error = HangError(
            f"the job does not move: {hung.why}",
            where={"kind": hung.hang, **({"step": hung.step} if hung.step >= 0 else {})},
            seen=f"a {'step' if hung.by_steps else 'collective'} that has not ended for {hung.waited:.0f} s",
            expected=repr(self._hangs),
            hint=_HINTS[hung.hang],
        )
        facts = {"fault": Fault.RECOVERABLE, "code": error.error_code, "repeats": self._hangs.action == "fail"}
        kept = self._leave(f"hang-round-{self._round}.txt", f"{error}\n\n{hung.evidence}\n")
        others = f"{hung.picture}\n\nAll stacks and connections of all ranks: {kept}"
        blamed = self._ranks.blame(hung.rank, error, **facts)
        fault = self._ranks.gpus.behind(blamed.local_rank) if hung.hang == "gpu" else None
        return replace(blamed, others=others, gpu=fault)

    def _recorded(self, stacks: Mapping[int, Stack]) -> dict[int, records.Recorded]:
        """Each rank's collectives: torch's, or Horovod's where it has waited for any."""
        found = records.read(self._sockets())
        for order, page in self._ranks.running.values():
            rank, (begun, ended, about) = order.context.rank, page.waits
            if begun:
                found[rank] = records.of_horovod(begun, ended, stacks.get(rank, ()), about)
        return found

    def _steps(self) -> dict[int, Steps]:
        return {order.context.rank: page.steps for order, page in self._ranks.running.values()}

    def _sockets(self) -> dict[int, Path]:
        return {order.context.rank: order.records for order, _ in self._ranks.running.values()}
