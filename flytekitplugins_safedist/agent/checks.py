"""A node's part in the checks before the first rank of its job: a round of its own, whose ranks are the checks."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from .. import envvars
from ..config.options import Preflight
from ..coordinator.books import Round
from ..coordinator.coordinator import Fitness
from ..fs.identity import Identity
from ..preflight import probe
from ..preflight.judge import NodeReport, Trouble, judge
from ..rank.backends.torch import TorchBackend
from .actions import StartRanks
from .orders import offered_to
from .prepare import NodePlan

logger = logging.getLogger(__name__)

CHECKS = -1
"""The number by which the checks before the first rank name their round where ranks meet."""

_END_SECONDS, _LATE_SECONDS = 3.0, 5.0
_OF_THE_LIMIT = 0.9
"""For what probes wait for each other: one that waits in vain still ends in time to say so."""


@dataclass(frozen=True)
class Checked:
    """In the inbox: the checks of a round have ended here; the report as text, and how long they took, in seconds."""

    round: Round
    report: str
    seconds: float


class Checks:
    """This node's.

    Args:
        plan: this node's.
        put: takes :class:`Checked`.
    """

    def __init__(self, plan: NodePlan, put: Callable[[object], object]) -> None:
        self._plan, self._put = plan, put
        self._lock = threading.Lock()  # what is over is not told, and what begins is ended with it
        self._runs: StartRanks | None = None
        self._since = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._late: threading.Timer | None = None

    def begin(self, start: StartRanks) -> None:
        """Check this node."""
        self.close()
        preflight = self._plan.settings.preflight
        seconds = 0.0 if preflight is None else preflight.timeout
        self._runs, self._since = start, time.monotonic()
        # The coordinator has no limit for this: every path of _check ends in a report, and this says it for one that
        # hangs in a system call.
        late = _unfit(f"hang: no answer in {seconds + _LATE_SECONDS:g} s")
        self._late = threading.Timer(seconds + _LATE_SECONDS, self._answer, (start, late))
        self._late.daemon = True
        self._late.start()
        threading.Thread(target=self._check, args=(start, seconds), name="safedist-preflight", daemon=True).start()

    def close(self) -> None:
        """Check no more."""
        with self._lock:
            self._runs = None
            process, self._process = self._process, None
        if self._late is not None:
            self._late.cancel()
        if process is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # what the kernel cannot end now (fsync on a dead disk) is left
                process.wait(_END_SECONDS)

    def _check(self, start: StartRanks, seconds: float) -> None:
        try:
            report = self._report(start, seconds)
        except Exception as error:  # no process, no memory
            report = _unfit(f"could not start: {type(error).__name__}: {error}")
        self._answer(start, report)

    def _answer(self, start: StartRanks, report: NodeReport) -> None:
        with self._lock:
            if self._runs is start:
                self._runs = None
                text = json.dumps(report.to_dict(), ensure_ascii=False)
                self._put(Checked(start.round, text, time.monotonic() - self._since))

    def _report(self, start: StartRanks, seconds: float) -> NodeReport:
        plan, settings, until = self._plan, self._plan.settings, time.monotonic() + _OF_THE_LIMIT * seconds
        file = plan.scratch.orders / f"preflight-{start.round.number}.json"
        file.unlink(missing_ok=True)  # of a round of the same number
        place = Identity(start.node_rank, start.size, 0, 1, start.node_rank, start.size, start.number, plan.job.number)
        run_id, timeout = plan.job.attempt.run_id, settings.timeouts.rendezvous
        offered = offered_to(start)
        named = TorchBackend().environment(place, offered, run_id=run_id, timeout=timeout)
        meeting = {envvars.MEETING: str(plan.meeting)} if plan.meeting is not None else {}
        environment = {**plan.job.ranks_environment, **named, **meeting, envvars.ROUND: str(CHECKS)}
        process = subprocess.Popen(
            [sys.executable, "-m", probe.__name__, str(plan.scratch.path), str(file), str(until)],
            env={**environment, **plan.job.call.variables},
            cwd=plan.scratch.path,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        with self._lock:
            if self._runs is start:
                self._process = process
            else:  # all was over before it began
                process.kill()
        ended, report = f"have not ended in {seconds:g} s", NodeReport()
        with suppress(subprocess.TimeoutExpired):
            ended = f"have ended with status {process.wait(seconds)}"
        with suppress(OSError, ValueError):  # none, or of a process that was killed
            report = NodeReport.from_dict(json.loads(file.read_text()))
        return report if process.returncode == 0 else replace(report, troubles=_unfit(ended).troubles)


def _unfit(why: str) -> NodeReport:
    return NodeReport(troubles=(Trouble("Checks", is_broken=True, text=f"its checks {why}"),))


def judged_by(preflight: Preflight | None) -> Callable[[Mapping[int, str], Mapping[int, str]], Fitness]:
    """Judges the reports of all nodes, as the task's settings say."""

    def judge_reports(reports: Mapping[int, str], names: Mapping[int, str]) -> Fitness:
        read = {rank: NodeReport.from_dict(json.loads(report)) for rank, report in reports.items()}
        if preflight is None:
            return Fitness("", "")
        judged = judge(read, names, preflight.slow)
        return Fitness(judged.text, judged.code if preflight.action == "fail" else "")

    return judge_reports
