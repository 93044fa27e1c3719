"""The record of a run: begun with the node's agent, sent to node 0, and shown by the node that uploads the verdict."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

from ..errors import FsTimeoutError
from ..flyte import run_page
from ..flyte.storage_errors import one_line
from ..fs.store import bounded
from ..handoff import HERE
from ..ranks.order import EVENTS, order_file
from ..ranks.outcome import RankOutcome
from ..ranks.outcome_text import how
from ..ranks.rank_set import Ranks
from ..record import findings, node, page, trace
from ..record.node import NodeRecorder, RankEnd
from ..record.scrub import scrubber
from .live import RunLive
from .membership import Membership
from .messages import Go
from .prepare import NodePlan
from .reports import Report
from .verdict import Verdict

logger = logging.getLogger(__name__)

_LEAVE_SECONDS = 10.0
_JOB_BYTES = 4 << 20
_NODE_BYTES = 4 << 10, 256 << 10
"""What all nodes may send to node 0, and a single one at least and at most."""


class RunSeen:
    """This node's part, with what came before its agent.

    Args:
        plan: what the agent begins with.
        job: this node in its job.
    """

    def __init__(self, plan: NodePlan, job: Membership) -> None:
        self._plan, self._job, self._limit = plan, job, 0
        self._scrub = scrubber(plan.job.ranks_environment)
        self._record = NodeRecorder(socket.gethostname(), self._scrub)
        if HERE.staged is not None:
            self._record.phase("staging", *HERE.staged)
        self._record.phase("prepare", time.monotonic() - plan.seconds, plan.seconds)
        self.live = RunLive(plan, job, self._scrub)

    def begins(self, go: Go) -> None:
        """A round begins."""
        least, most = _NODE_BYTES
        self._limit = min(most, max(least, _JOB_BYTES // go.nnodes))
        self.live.begins(go.node_rank, self._record.begins(go.round, go.node_rank))

    def why(self, text: str) -> None:
        """Why the latest round ended, as the coordinator says."""
        self._record.why(text)

    def over(self, ranks: Ranks, found: RankOutcome | None = None) -> None:
        """The ranks of the round have ended, for what this node has *found*: node 0 is to know, before it hears of the
        end itself."""
        since_boot = time.monotonic() - time.time()
        if found is not None:
            self._record.why(f"rank {found.rank}: {how(found)}")
        ends = []
        for each in ranks.outcomes():
            file = order_file(self._plan.scratch, each.round, each.rank).with_suffix(EVENTS)
            ends.append(RankEnd(each.rank, file, how(each), each.time_ns / 1e9 + since_boot))
        self._record.over(ends)
        self.live.look(ranks, now=True)
        self._job.note(lambda: self._record.text(self._limit))

    def leave(self, name: str, text: str) -> str:
        """Leave a text beside what the task makes, without its secrets; its address, or why it is not there: no failure
        waits for long until it can be told whole."""
        try:
            kept = run_page.Kept.of(is_local=self._plan.job.is_local)
            address, data = f"{kept.address}/{name}", self._scrub(text).encode("utf-8", "backslashreplace")
            late = FsTimeoutError("the store has not answered", seen=f"{_LEAVE_SECONDS:g} s")
            bounded(lambda: kept.put(name, data), _LEAVE_SECONDS, late)
        except Exception as error:  # whatever the store's client raises
            return f"they could not be left ({one_line(error)})"
        return address

    def show(self, report: Report, say: Callable[[str], object]) -> None:
        """Make the page of the run, for Flyte's deck, and leave it in a file in a local run. *report* has both; neither
        where it cannot be made: no job fails for its picture. Who held the others back is said as well."""
        job = self._plan.job
        try:
            parts = node.merged(self._record.part, self._job.notes())
            found = findings.found_in(parts)
            if found.held:
                say(findings.held_line(found.held).rstrip("."))
            is_local = self._plan.job.is_local
            if not is_local and not job.task.enable_deck:
                return
            kept = run_page.Kept.of(is_local=is_local)
            kept.put("trace.json.gz", trace.trace(parts))
            report.page = page.fragment(found, self._told(report.verdict, kept.address))
            if is_local:
                kept.put("run.html", page.whole(report.page, job.task.name).encode())
                report.page_file = f"{kept.address}/run.html"
        except Exception as error:  # a full disk, a store that is down: what the job has made counts
            logger.warning(f"the record of this run could not be shown: {type(error).__name__}: {error}")

    def _told(self, verdict: Verdict | None, kept: str) -> page.JobEnd:
        history = self._job.me.history
        budgets = [f"restart: {spent.why}" for spent in history.restarts]
        budgets += [f"loss: {spent.why}" for spent in history.losses]
        return page.JobEnd(
            task=self._plan.job.task.name,
            code=verdict.code if verdict is not None else "",
            cause=self._scrub(str(verdict.error)) if verdict is not None else "",
            budgets=[self._scrub(each) for each in budgets],
            trace=f"{kept}/trace.json.gz",
        )
