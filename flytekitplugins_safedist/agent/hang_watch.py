"""This node's part in finding out whether the job hangs: it says so when its ranks wait too long, and what they do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from .. import envvars
from ..coordinator.messages import HangNotice
from ..errors import HangError
from ..failures import Failure
from ..hangs.judge import KINDS, Hang
from ..hangs.processes import Process
from ..hangs.snapshot import Snapshot
from ..hangs.watch import LocalRank, Watch
from ..rank.outcome import RankOutcome
from .rank_set import Ranks


class HangWatch:
    """The ranks of one node in one round.

    Args:
        ranks: of the round.
        number: the round's, as people count.
        tell: says for how many seconds a rank has waited, and whether that will be ended.
        leave: leaves a text in a file, of a name; returns its address, or why there is none.
    """

    def __init__(
        self, ranks: Ranks, number: int, *, tell: Callable[[float, bool], object], leave: Callable[[str, str], str]
    ) -> None:
        self._ranks, self._number, self._tell, self._leave = ranks, number, tell, leave
        self._hangs = ranks.plan.settings.hangs
        self._watch = Watch(self._hangs)
        self.evidence = ""
        """All that the leader has seen of the hang, where a rank here is to fail for it."""

    def look(self) -> None:
        """Where it is time, see how far the ranks are."""
        late = self._watch.look(self._running())
        if late:
            seconds = max(wait.age for wait in late)
            self._tell(max(seconds, 0.001), self._watch.is_urgent(late))

    def shown(self, notice: HangNotice) -> str:
        """What is said of a hang in the node's log."""
        hang = _hang_of(notice)
        return f"the job does not move, for {hang.seconds:.0f} s now: {hang.why}\n{hang.picture}"

    def failure(self, notice: HangNotice) -> RankOutcome | None:
        """Of the rank that is to fail for it; None where that is not here, or nothing is to be done about it."""
        hang = _hang_of(notice)
        if hang.rank not in self._ranks.pages or not hang.may_end(self._hangs):
            return None
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

    def snapshots(self) -> list[Snapshot]:
        """What the ranks of this node do right now; takes a second or two."""
        taken = self._watch.snapshots(self._running(), self._ranks.plan.server.ask_for_stacks)
        self._ranks.gpus.look()
        places = {each.rank: each.order.context.local_rank for each in self._ranks.running}
        gpus = {rank: self._ranks.gpus.of(local_rank) for rank, local_rank in places.items()}
        found = [replace(each, gpus=gpus[each.rank][0], faults=gpus[each.rank][1]) for each in taken]
        return found + [Snapshot(rank, Process(0), returned=True) for rank in self._ranks.returned()]

    def _running(self) -> list[LocalRank]:
        return [
            LocalRank(
                rank=each.rank,
                world_size=each.order.context.world_size,
                pid=each.pid,
                stacks=each.order.files.stacks,
                socket=each.order.files.records,
                steps=each.page.steps,
                horovod=each.page.waits,
                is_horovods=envvars.HOROVOD_CONTROLLER in each.order.environment,
                debugged=each.page.debugs,
                has_entered=each.page.entered,
            )
            for each in self._ranks.running
        ]


def _hang_of(notice: HangNotice) -> Hang:
    data = json.loads(notice.text)
    return Hang(**{**data, "culprits": tuple(data["culprits"]), "waiting": tuple(data["waiting"])})
