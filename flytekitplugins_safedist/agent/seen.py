"""The record of a run: begun with the node's agent, sent to node 0, and shown by the node that uploads the verdict."""

from __future__ import annotations

import contextvars
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..errors import FsTimeoutError
from ..fs.store import bounded
from ..hangs.gpus import LOOK_SECONDS as GPU_SECONDS
from ..rank.outcome import RankOutcome
from ..rank.outcome_text import how
from ..rank.shared_inputs import amount
from ..record import findings, node, page, run_page, trace
from ..record.events import GpuPart
from ..record.node import EARLIER, NodeRecorder, RankEnd, text_of
from ..record.run_page import ConsoleDeck, Kept
from ..scrub import scrubber
from ..store.errors import one_line
from .actions import StartRanks
from .live import RunLive
from .membership import Membership
from .policy import NodePolicy
from .prepare import NodePlan
from .rank_set import Ranks
from .reports import Report
from .verdict import Verdict

logger = logging.getLogger(__name__)

PAGE_SECONDS = 60.0
"""Between two uploads of the page of a job that runs, at least."""

_LEAVE_SECONDS = 10.0
"""For a file that is left in a store."""

_CANCEL_SECONDS = 5.0
_JOB_BYTES = 4 << 20
_NODE_BYTES = 4 << 10, 256 << 10
"""What all nodes may send to node 0, and a single one at least and at most."""


class RunSeen:
    """This node's part, with what came before its agent.

    Args:
        plan: what the agent begins with.
        job: this node in its job.
        policy: has what is known of the job.
    """

    def __init__(self, plan: NodePlan, job: Membership, policy: NodePolicy) -> None:
        self._plan, self._job, self._policy, self._limit, self._number = plan, job, policy, 0, 0
        self._scrub = scrubber(plan.job.ranks_environment)
        self._record = NodeRecorder(socket.gethostname(), self._scrub)
        for name, times in (EARLIER.value or {}).items():
            self._record.phase(name, *times)
        self._record.phase("prepare", time.monotonic() - plan.seconds, plan.seconds)
        self.live = RunLive(plan, policy, self._scrub)
        self._deck: ConsoleDeck | None = None
        self._telling: threading.Thread | None = None
        self._begun, self._noting = 0, threading.Lock()
        self._next = self._next_gpus = 0.0
        flyte = plan.job.attempt.flyte
        if not plan.job.is_local and plan.job.settings.decks is not None and flyte.output_metadata_prefix is not None:
            self._deck = ConsoleDeck(flyte.output_metadata_prefix, flyte.raw_output_prefix)

    def begins(self, start: StartRanks, checked: float) -> None:
        """A round begins; the nodes were *checked* before, for so many seconds."""
        least, most = _NODE_BYTES
        self._begun += 1
        self._limit, self._number = min(most, max(least, _JOB_BYTES // start.size)), start.number
        waited = self._record.begins(start.number, start.node_rank, checked)
        self.live.begins(start.number, start.node_rank, waited)

    def why(self, text: str) -> None:
        """Why the latest round ended, as the coordinator says."""
        self._record.why(text)

    def over(self, ranks: Ranks, found: RankOutcome | None = None) -> None:
        """The ranks of the round have ended, for what this node has *found*: node 0 is to know, before it hears of the
        end itself."""
        try:
            self._over(ranks, found)
        except Exception as error:  # no job fails for its picture
            logger.warning(f"the record of this run lacks the end of a round: {type(error).__name__}: {error}")

    def _over(self, ranks: Ranks, found: RankOutcome | None) -> None:
        if found is not None:
            self._record.why(f"rank {found.rank}: {how(found)}")
        if not self._record.is_open:
            return
        since_boot, now = time.monotonic() - time.time(), time.monotonic()
        ended = {each.rank: (how(each), each.time_ns / 1e9 + since_boot) for each in ranks.outcomes()}
        unseen = "nobody saw its end", now
        ends = [RankEnd(rank, self._events(rank), *ended.get(rank, unseen)) for rank in ranks.pages]
        with self._noting:  # node 0 keeps the last: one that says that the round goes on must not follow
            self._record.over(ends)
            self._record.part.inputs = amount(self._plan.scratch.inputs)
            self._job.note(lambda: text_of(self._record.part, self._limit))
        self.live.look(ranks, now=True)

    def _events(self, rank: int) -> Path:
        return self._plan.scratch.files(self._number, rank).events

    # --- while it runs -----------------------------------------------------------------------------------------------
    def look(self, ranks: Ranks | None) -> None:
        """Where it is time, tell how far the ranks are; on node 0 Flyte's console, on the others node 0. One upload at
        a time, in a thread: a store that is slow holds up nothing here."""
        self.live.look(ranks)
        now = time.monotonic()
        if now >= self._next_gpus:
            self._next_gpus = now + GPU_SECONDS
            for gpu in self._plan.gpus.usage():
                if gpu.busy is not None and gpu.memory is not None:
                    total, piece = gpu.memory_total or 0, ([gpu.busy], [gpu.memory], gpu.slowed)
                    self._record.sees(GpuPart(gpu.index, gpu.uuid, total, now, GPU_SECONDS, *piece))
        if self._deck is None or ranks is None or now < self._next:
            return
        if self._telling is None or not self._telling.is_alive():
            self._next = now + PAGE_SECONDS
            ends = [RankEnd(rank, self._events(rank), "running", now) for rank in ranks.pages]
            context = contextvars.copy_context()  # flytekit's
            telling = threading.Thread(
                target=context.run, args=(self._tell, self._deck, ends, self._begun), name="safedist-deck", daemon=True
            )
            with suppress(RuntimeError):  # the container may have no further thread: no job fails for its picture
                telling.start()
                self._telling = telling

    def _tell(self, deck: ConsoleDeck, ends: Sequence[RankEnd], begun: int) -> None:
        try:
            self._record.part.inputs = amount(self._plan.scratch.inputs)
            part = self._record.now(ends)
            if self._job.leads:
                found = findings.found_in(node.merged(part, self._job.notes()))
                told = replace(self._told(None, ""), trace="", goes_on=True)
                deck.put({run_page.NAME: page.fragment(found, told)})
            else:
                with self._noting:
                    if self._record.is_open and self._begun == begun:
                        self._job.note(lambda: text_of(part, self._limit))
        except (Exception, CancelledError) as error:  # whatever the store's client raises
            logger.debug(f"the page of the run is not uploaded now: {type(error).__name__}: {error}")

    def _end_telling(self) -> None:
        """What is uploaded from here on is the last: an upload that is under way is not to come after it."""
        if self._deck is not None and self._telling is not None and self._telling.is_alive():
            self._deck.cancel()
            self._telling.join(_CANCEL_SECONDS)

    def close(self) -> None:
        """The job has ended here."""
        self._end_telling()
        self.live.close()

    # --- at its end --------------------------------------------------------------------------------------------------

    def leave(self, name: str, text: str) -> str:
        """Leave a text beside what the task makes, without its secrets; its address, or why it is not there: no failure
        waits for long until it can be told whole."""
        try:
            kept = Kept.of(is_local=self._plan.job.is_local)
            _put(kept, name, self._scrub(text).encode("utf-8", "backslashreplace"))
        except Exception as error:  # whatever the store's client raises
            return f"they could not be left ({one_line(error)})"
        return f"{kept.address}/{name}"

    def show(self, report: Report, say: Callable[[str], object]) -> None:
        """Make the page of the run, for Flyte's deck, and leave it in a file in a local run. *report* has both; neither
        where it cannot be made: no job fails for its picture. Who held the others back is said as well."""
        job = self._plan.job
        self._end_telling()
        try:
            parts = node.merged(self._record.part, self._job.notes())
            found = findings.found_in(parts)
            if found.held:
                say(findings.held_line(found.held).rstrip("."))
            is_local = self._plan.job.is_local
            if not is_local and job.settings.decks is None:
                return
            kept = Kept.of(is_local=is_local)
            _put(kept, "trace.json.gz", trace.trace(parts))
            report.page = page.fragment(found, self._told(report.verdict, kept.address))
            if is_local:
                kept.put("run.html", page.whole(report.page, job.call.name).encode())
                report.page_file = f"{kept.address}/run.html"
        except Exception as error:  # a full disk, a store that is down: what the job has made counts
            logger.warning(f"the record of this run could not be shown: {type(error).__name__}: {error}")

    def _told(self, verdict: Verdict | None, kept: str) -> page.JobEnd:
        books, most = self._policy.books, self._policy.rules.max_restarts
        budgets = [f"restart: {books.restart_text(spent, most)}" for spent in books.restarts]
        budgets += [f"loss: {spent.why}" for spent in books.losses]
        return page.JobEnd(
            task=self._plan.job.call.name,
            code=verdict.code if verdict is not None else "",
            cause=self._scrub(str(verdict.error)) if verdict is not None else "",
            budgets=[self._scrub(each) for each in budgets],
            trace=f"{kept}/trace.json.gz",
        )


def _put(kept: Kept, name: str, data: bytes) -> None:
    late = FsTimeoutError("the store has not answered", seen=f"{_LEAVE_SECONDS:g} s")
    bounded(lambda: kept.put(name, data), _LEAVE_SECONDS, late)
