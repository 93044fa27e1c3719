"""This node's part in finding out whether the job hangs: it says so when its ranks wait too long, and what they do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace

from .. import envvars
from ..config.options import Hangs
from ..coordinator.messages import HangNotice
from ..errors import HangError
from ..failures import Failure
from ..hangs.judge import KINDS, Hang
from ..hangs.processes import Process
from ..hangs.snapshot import Snapshot
from ..hangs.watch import LocalRank, Watch
from ..rank.outcome import RankOutcome
from ..rank_server.client import RankServer
from .rank_set import Ranks


class HangWatch:
    """The ranks of one node in one round.

    Args:
        number: the round's, as people count.
        ranks: of the round.
        server: signals them.
        hangs: what the user wants to be done.
        tell: says for how many seconds a rank has waited, and whether that will be ended.
        leave: leaves a text in a file, of a name; returns its address, or why there is none.
    """

    def __init__(
        self,
        number: int,
        ranks: Ranks,
        *,
        server: RankServer,
        hangs: Hangs,
        tell: Callable[[float, bool], object],
        leave: Callable[[str, str], str],
    ) -> None:
        self._number = number
        self._ranks = ranks
        self._server = server
        self._hangs = hangs
        self._tell = tell
        self._leave = leave
        self._watch = Watch(hangs)
        self.evidence = ""
        """All that the leader has seen of the hang, where a rank here is to fail for it."""

    def look(self) -> None:
        """Where it is time, see how far the ranks are."""
        late = self._watch.look(self._running())
        if late:
            seconds = max(time.time() - wait.since for wait in late)
            self._tell(max(seconds, 0.001), self._watch.is_urgent(late))

    def shown(self, notice: HangNotice) -> str:
        """What is said of a hang in the node's log."""
        hang = _hang_of(notice)
        return f"the job does not move, for {hang.seconds:.0f} s now: {hang.why}\n{hang.picture}"

    def failure(self, notice: HangNotice) -> RankOutcome | None:
        """Of the rank that is to fail for it; None where that is not here, or nothing is to be done about it."""
        hang = _hang_of(notice)
        return self._failure(hang) if hang.rank in self._ranks.pages and hang.may_end(self._hangs) else None

    def snapshots(self) -> list[Snapshot]:
        """What the ranks of this node do right now; takes a second or two."""
        taken = self._watch.snapshots(self._running(), self._server.ask_for_stacks)
        self._ranks.gpus.look()
        places = {order.context.rank: order.context.local_rank for order, _ in self._ranks.running.values()}
        gpus = {rank: self._ranks.gpus.of(local_rank) for rank, local_rank in places.items()}
        found = [replace(each, gpus=gpus[each.rank][0], faults=gpus[each.rank][1]) for each in taken]
        now = time.time()
        return found + [Snapshot(rank, Process(0), time=now, returned=True) for rank in self._ranks.returned()]

    def _running(self) -> list[LocalRank]:
        return [
            LocalRank(
                rank=order.context.rank,
                world_size=order.context.world_size,
                pid=pid,
                stacks=order.files.stacks,
                socket=order.files.records,
                steps=page.steps,
                horovod=page.waits,
                is_horovods=envvars.HOROVOD_CONTROLLER in order.environment,
                debugged=page.debugs,
                has_entered=page.entered,
            )
            for pid, (order, page) in self._ranks.running.items()
        ]

    def _failure(self, hang: Hang) -> RankOutcome:
        error = HangError(
            f"the job does not move: {hang.why}",
            where={"kind": hang.kind, **({"step": hang.step} if hang.step >= 0 else {})},
            seen=f"{hang.what} that has not ended for {hang.seconds:.0f} s",
            expected=repr(self._hangs),
            hint=KINDS[hang.kind].hint,
        )
        facts = {"failure": Failure.HANG, "repeats": self._hangs.action == "fail"}
        kept = self._leave(f"hang-round-{self._number}.txt", f"{error}\n\n{self.evidence}\n")
        others = f"{hang.picture}\n\nAll stacks and connections of all ranks: {kept}"
        blamed = self._ranks.blame(hang.rank, error, **facts)
        fault = self._ranks.gpus.behind(blamed.local_rank) if hang.kind == "gpu" else None
        return replace(blamed, others=others, gpu=fault)


def _hang_of(notice: HangNotice) -> Hang:
    data = json.loads(notice.text)
    return Hang(**{**data, "culprits": tuple(data["culprits"]), "waiting": tuple(data["waiting"])})
