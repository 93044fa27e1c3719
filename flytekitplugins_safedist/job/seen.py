"""The record of a run: begun with the node's agent, and shown by the node that uploads the verdict."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence

from ..flyte import run_page
from ..handoff import HERE
from ..ranks.order import EVENTS, order_file
from ..ranks.outcome import RankOutcome, how
from ..record import findings, node, page, trace
from ..record.node import NodeRecorder, RankEnd
from ..record.scrub import scrubber
from .facts import History
from .prepare import NodePlan
from .verdict import Verdict

logger = logging.getLogger(__name__)

DECK = "Run"
"""What the page is called among a task's decks."""


def recorder(plan: NodePlan) -> NodeRecorder:
    """What notes this node's part, with what came before its agent."""
    made = NodeRecorder(socket.gethostname(), scrubber(plan.job.ranks_environment))
    if HERE.staged is not None:
        made.phase("staging", *HERE.staged)
    made.phase("prepare", time.monotonic() - plan.seconds, plan.seconds)
    return made


def over(
    record: NodeRecorder, plan: NodePlan, outcomes: Sequence[RankOutcome], found: RankOutcome | None = None
) -> None:
    """The ranks of a round have ended, for what this node has *found*."""
    since_boot = time.monotonic() - time.time()
    if found is not None:
        record.why(f"rank {found.rank}: {how(found)}")
    ends = []
    for each in outcomes:
        file = order_file(plan.scratch, each.round, each.rank).with_suffix(EVENTS)
        ends.append(RankEnd(each.rank, file, how(each), each.time_ns / 1e9 + since_boot))
    record.over(ends)


def shown(
    plan: NodePlan, record: NodeRecorder, verdict: Verdict | None, history: History, say: Callable[[str], object]
) -> str:
    """The page of the run, for Flyte's deck; "" where it cannot be made: no job fails for its picture.

    Locally it is left in a file, and *say* is told where.
    """
    scrub = scrubber(plan.job.ranks_environment)
    try:
        parts = node.merged(record.part, {})
        found = findings.found_in(parts)
        if found.held:
            say(findings.held_line(found.held).rstrip("."))
        is_local = plan.job.attempt.flyte.mode != "TASK_EXECUTION"
        if not is_local and not plan.job.task.enable_deck:
            return ""
        kept = run_page.Kept.of(is_local=is_local)
        kept.put("trace.json.gz", trace.trace(parts, scrub))
        made = page.fragment(found, _told(plan, verdict, history, kept.address), scrub)
        if is_local:
            kept.put("run.html", page.whole(made, plan.job.task.name).encode())
            say(f"the record of this run: {kept.address}/run.html")
    except Exception as error:  # a full disk, a store that is down: what the job has made counts
        logger.warning(f"the record of this run could not be shown: {type(error).__name__}: {error}")
        return ""
    return made


def _told(plan: NodePlan, verdict: Verdict | None, history: History, kept: str) -> page.JobEnd:
    budgets = [f"restart: {spent.why}" for spent in history.restarts]
    budgets += [f"loss: {spent.why}" for spent in history.losses]
    return page.JobEnd(
        task=plan.job.task.name,
        failed=verdict is not None,
        code=verdict.code if verdict is not None else "",
        cause=str(verdict.error) if verdict is not None else "",
        budgets=budgets,
        trace=f"{kept}/trace.json.gz",
    )
