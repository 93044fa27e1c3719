"""A node's part in the checks before the first rank of its job: a round of its own, whose ranks are the checks."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from .. import package
from ..config.options import Preflight
from ..coordinator.books import Round
from ..fs.identity import Identity
from ..preflight.judge import Judged, NodeReport, Trouble, judge
from ..rank.backends.torch import TorchBackend
from ..store.patience import in_thread
from ..texts import named
from .actions import StartRanks
from .orders import meeting
from .prepare import NodePlan

logger = logging.getLogger(__name__)

CHECKS = -1
"""The number by which the checks before the first rank name their round where ranks meet."""

_END_SECONDS, _LATE_SECONDS = 3.0, 5.0
_BOOT = "from flytekitplugins_safedist.preflight.probe import main; main()"
_OF_THE_LIMIT = 0.9
"""For what probes wait for each other: one that waits in vain still ends in time to say so."""


@dataclass(frozen=True)
class Checked:
    """The checks of a round have ended here; the report as text, and how long they took, in seconds."""

    round: Round
    report: str
    seconds: float


class Checks:
    """This node's, in one round. What may hang (a fork, a dead disk) is done in a thread, which is looked at again and
    again.

    Args:
        plan: this node's.
        start: of the round.
    """

    def __init__(self, plan: NodePlan, start: StartRanks) -> None:
        self._plan, self._start = plan, start
        preflight = plan.settings.preflight
        self._seconds = 0.0 if preflight is None else preflight.timeout
        self._since = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False
        self._report = in_thread(self._check)

    def look(self) -> Checked | None:
        """What the checks have come to, once. The coordinator has no limit for this: they come to something in time."""
        lasts, most = time.monotonic() - self._since, self._seconds + _LATE_SECONDS
        if self._is_over or (not self._report.done() and lasts < most):
            return None
        report = _unfit(f"hang: no answer in {most:g} s")
        if self._report.done():
            error = self._report.exception()  # no process, no memory
            report = self._report.result() if error is None else _unfit(f"could not start: {named(error)}")
        self._is_over = True
        return Checked(self._start.round, json.dumps(report.to_dict(), ensure_ascii=False), lasts)

    def close(self) -> None:
        """Check no more."""
        self._is_over = True  # a process that begins now is ended by its thread, which looks at this then
        process, self._process = self._process, None  # each round that follows ends with this: it is waited for once
        if process is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # what the kernel cannot end now (fsync on a dead disk) is left
                process.wait(_END_SECONDS)

    def _check(self) -> NodeReport:
        plan, start = self._plan, self._start
        until = time.monotonic() + _OF_THE_LIMIT * self._seconds
        file = plan.scratch.orders / f"preflight-{start.round.number}.json"
        file.unlink(missing_ok=True)  # of a round of the same number
        place = Identity(start.node_rank, start.size, 0, 1, start.node_rank, start.size, start.number, plan.job.number)
        meets = meeting(start, plan, place, TorchBackend(), CHECKS)
        self._process = process = subprocess.Popen(
            [sys.executable, *package.program(_BOOT, str(plan.scratch.path), str(file), str(until))],
            env={**plan.job.ranks_environment, **meets, **plan.job.call.variables},
            cwd=plan.scratch.path,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        if self._is_over:
            process.kill()
        ended, report = f"have not ended in {self._seconds:g} s", NodeReport()
        with suppress(subprocess.TimeoutExpired):
            ended = f"have ended with status {process.wait(self._seconds)}"
        with suppress(OSError, ValueError):  # none, or of a process that was killed
            report = NodeReport.from_dict(json.loads(file.read_text()))
        return report if process.returncode == 0 else replace(report, troubles=_unfit(ended).troubles)


def _unfit(why: str) -> NodeReport:
    return NodeReport(troubles=(Trouble("Checks", is_broken=True, text=f"its checks {why}"),))


def judge_reports(preflight: Preflight | None, reports: Mapping[int, str], names: Mapping[int, str]) -> Judged:
    """Judges the reports of all nodes, as the task's settings say."""
    if preflight is None:
        return Judged("", "")
    read = {rank: NodeReport.from_dict(json.loads(report)) for rank, report in reports.items()}
    judged = judge(read, names, preflight.slow)
    return judged if preflight.action == "fail" else replace(judged, code="")
