"""A node's part in the checks before the first rank of its job: what it is told to begin waits here meanwhile."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from .. import envvars
from ..checks import probe
from ..checks.judge import NodeReport, Trouble
from ..fs.identity import Identity
from ..ranks.backends.torch import TorchBackend
from .messages import Ended, Go, Message, Stop
from .preflight_messages import Checked, Cleared
from .prepare import NodePlan

logger = logging.getLogger(__name__)


class PreflightGate:
    """Hands on that a round begins; where the nodes are to be checked before, when that is done.

    Args:
        plan: this node's.
        tell: says something to the coordinator.
        begin: begins a round.
    """

    def __init__(self, plan: NodePlan, tell: Callable[[Message], object], begin: Callable[[Go], object]) -> None:
        self._plan, self._tell, self._begin = plan, tell, begin
        self._waits: Go | None = None
        self._found: Checked | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def go(self, go: Go) -> None:
        """A round is to begin."""
        if not go.checks or self._plan.settings.preflight is None:
            self.close()
            self._begin(go)
        elif self._waits is not None and self._waits.round == go.round:
            if self._found is not None:
                self._tell(self._found)  # again, to a connection that came back
        else:
            self.close()
            self._waits = go
            threading.Thread(target=self._check, args=(go,), name="safedist-preflight", daemon=True).start()

    def cleared(self, cleared: Cleared) -> None:
        """Every node has checked."""
        waits = self._waits
        if waits is not None and waits.round == cleared.round:
            self.close()
            logger.info(f"preflight: {cleared.text}")
            self._begin(waits)

    def stop(self, stop: Stop) -> None:
        """The round is over before it began here."""
        if self._waits is not None and self._waits.round == stop.round:
            self.close()
            self._tell(Ended(stop.round))

    def close(self) -> None:
        """Check no more."""
        self._waits = self._found = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _check(self, go: Go) -> None:
        plan, settings = self._plan, self._plan.settings
        assert settings.preflight is not None  # noqa: S101  (who asks has looked)
        seconds, file = settings.preflight.timeout, plan.scratch.orders / f"preflight-{go.round}.json"
        place = Identity(go.node_rank, go.nnodes, 0, 1, go.node_rank, go.nnodes, go.round, plan.job.number)
        run_id, timeout = plan.job.attempt.run_id, settings.timeouts.rendezvous
        named = TorchBackend().environment(place, go.values, run_id=run_id, timeout=timeout)
        meeting = {name: go.values[name] for name in (envvars.MEETING,) if name in go.values}
        environment = {**plan.job.ranks_environment, **named, **meeting, envvars.ROUND: str(go.round)}
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", probe.__name__, str(plan.scratch.path), str(file), str(seconds)],
            env={**environment, **dict(settings.environment)},
            cwd=plan.scratch.path,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        if self._waits is not go:  # all was over before it began
            process.kill()
        ended, report = f"have not ended in {seconds:g} s: raise Preflight(timeout=...)", NodeReport()
        with suppress(subprocess.TimeoutExpired):
            ended = f"have ended with status {process.wait(seconds)}"
        with suppress(OSError, ValueError):  # none, or of a process that was killed
            report = NodeReport.from_dict(json.loads(file.read_text()))
        if process.returncode != 0:
            report = replace(report, told=(Trouble("Checks", is_broken=True, text=f"its checks {ended}"),))
        if self._waits is go:
            self._found = Checked(go.round, report)
            self._tell(self._found)
