"""A node's part in the checks before the first rank of its job: what it is told to begin waits here meanwhile."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from .. import envvars
from ..fs.identity import Identity
from ..preflight import probe
from ..preflight.judge import NodeReport, Trouble
from ..rank.backends.torch import TorchBackend
from .messages import Ended, Go, Message, Stop
from .preflight_messages import Checked, Cleared
from .prepare import NodePlan

logger = logging.getLogger(__name__)

_END_SECONDS, _LATE_SECONDS = 3.0, 5.0
_OF_THE_LIMIT = 0.9
"""For what probes wait for each other: one that waits in vain still ends in time to say so."""


class PreflightGate:
    """Hands on that a round begins; where the nodes are to be checked before, when that is done.

    Args:
        plan: this node's.
        tell: says something to the coordinator.
        begin: begins a round; after so many seconds of checks.
    """

    def __init__(self, plan: NodePlan, tell: Callable[[Message], object], begin: Callable[[Go, float], object]) -> None:
        self._plan, self._tell, self._begin = plan, tell, begin
        self._lock = threading.Lock()  # what is over is not told, and what begins is ended with it
        self._waits: Go | None = None
        self._since = 0.0
        self._found: Checked | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._late: threading.Timer | None = None

    def go(self, go: Go) -> None:
        """A round is to begin."""
        waits, preflight = self._waits, self._plan.settings.preflight
        if not go.checks or preflight is None:
            self.close()
            self._begin(go, 0.0)
        elif waits is not None and (waits.round, waits.values) == (go.round, go.values):
            if self._found is not None:
                self._tell(self._found)  # again, to a connection that came back
        else:  # also of the same number: a replaced node 0 counts anew, and offers other ports
            self.close()
            self._waits, self._since, seconds = go, time.monotonic(), preflight.timeout
            # The coordinator has no limit for this: every path of _check ends in a Checked, and this says it for one
            # that hangs in a system call.
            late = _unfit(f"hang: no answer in {seconds + _LATE_SECONDS:g} s")
            self._late = threading.Timer(seconds + _LATE_SECONDS, self._answer, (go, late))
            self._late.daemon = True
            self._late.start()
            threading.Thread(target=self._check, args=(go, seconds), name="safedist-preflight", daemon=True).start()

    def cleared(self, cleared: Cleared) -> None:
        """Every node has checked."""
        waits = self._waits
        if waits is not None and waits.round == cleared.round:
            self.close()
            logger.info(f"preflight: {cleared.text}")
            self._begin(waits, time.monotonic() - self._since)

    def stop(self, stop: Stop) -> None:
        """The round is over before it began here."""
        if self._waits is not None and self._waits.round == stop.round:
            self.close()
            self._tell(Ended(stop.round))

    def close(self) -> None:
        """Check no more."""
        with self._lock:
            self._waits = self._found = None
            process, self._process = self._process, None
        if self._late is not None:
            self._late.cancel()
        if process is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # what the kernel cannot end now (fsync on a dead disk) is left
                process.wait(_END_SECONDS)

    def _check(self, go: Go, seconds: float) -> None:
        try:
            report = self._report(go, seconds)
        except Exception as error:  # no process, no memory
            report = _unfit(f"could not start: {type(error).__name__}: {error}")
        self._answer(go, report)

    def _answer(self, go: Go, report: NodeReport) -> None:
        with self._lock:
            if self._waits is go and self._found is None:
                self._found = Checked(go.round, report)
                self._tell(self._found)

    def _report(self, go: Go, seconds: float) -> NodeReport:
        plan, settings, until = self._plan, self._plan.settings, time.monotonic() + _OF_THE_LIMIT * seconds
        file = plan.scratch.orders / f"preflight-{go.round}.json"
        file.unlink(missing_ok=True)  # of a round of the same number
        place = Identity(go.node_rank, go.nnodes, 0, 1, go.node_rank, go.nnodes, go.round, plan.job.number)
        run_id, timeout = plan.job.attempt.run_id, settings.timeouts.rendezvous
        named = TorchBackend().environment(place, go.values, run_id=run_id, timeout=timeout)
        meeting = {name: go.values[name] for name in (envvars.MEETING,) if name in go.values}
        environment = {**plan.job.ranks_environment, **named, **meeting, envvars.ROUND: str(go.round)}
        process = subprocess.Popen(
            [sys.executable, "-m", probe.__name__, str(plan.scratch.path), str(file), str(until)],
            env={**environment, **plan.job.call.variables},
            cwd=plan.scratch.path,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        with self._lock:
            if self._waits is go:
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
