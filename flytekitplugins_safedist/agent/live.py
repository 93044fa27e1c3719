"""What this node tells of the run while it goes on: looked at once a second, handed to whoever asks."""

from __future__ import annotations

import logging
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from ..live import exporters, instruments
from ..live.instruments import Instrument, Readings
from ..live.line import Line, on_terminal
from ..live.pace import Pace, status
from ..log import PREFIX
from ..rank.shared_inputs import amount
from ..record.node import EARLIER
from . import memory
from .policy import NodePolicy
from .prepare import Job, NodePlan
from .rank_set import Ranks

logger = logging.getLogger(__name__)

_EVERY = 1.0
"""Seconds between two looks."""


class RunLive:
    """This node's part.

    Args:
        plan: what the agent begins with.
        policy: has what is known of the job.
        scrub: takes secrets out of a text.
    """

    def __init__(self, plan: NodePlan, policy: NodePolicy, scrub: Callable[[str], str]) -> None:
        self._policy, self._node, self._number = policy, -1, 0
        self._gpus, self._inputs = plan.gpus, plan.scratch.inputs
        self._began = self._next = self._waited = 0.0
        self._paces: dict[int, Pace] = defaultdict(Pace)
        self._values: Mapping[Instrument, Mapping[str, float]] = {}
        self._ranks: Ranks | None = None
        self._line: Line | None = None
        self._held = ExitStack()
        metrics = plan.settings.metrics
        self._measures = metrics.otlp or metrics.prometheus is not None
        if self._measures:
            about = {name: scrub(value) for name, value in _about(plan.job).items()}
            exporters.begin(metrics, self._read, about, self._held, logger.warning)
        if plan.job.is_local and on_terminal(plan.job.call.environment):
            self._line = Line(self._debugged)
            self._held.enter_context(self._line.shown())

    def _read(self) -> Readings:
        return self._values  # replaced as a whole: read by other threads

    def begins(self, number: int, node_rank: int, waited: float) -> None:
        """A round begins, for which this node has *waited* some seconds."""
        self._began = time.monotonic()
        self._number, self._node, self._waited = number, node_rank, self._waited + waited
        for pace in self._paces.values():
            pace.again()

    def look(self, ranks: Ranks | None, *, now: bool = False) -> None:
        """Where it is time, or it has to be *now*, for their last, see how far the ranks are; None between two
        rounds."""
        self._ranks = ranks or self._ranks
        at = time.monotonic()
        if now or at >= self._next:
            self._next = at + _EVERY
            if ranks is not None:
                for rank, page in ranks.pages.items():
                    self._paces[rank].see(page.steps.told[0], at)
            if self._measures:
                self._values = self._measured(ranks)
            if self._line is not None and ranks is not None and not now:
                self._line.draw(self._status(ranks))

    def close(self) -> None:
        """The job has ended here."""
        self.look(None, now=True)
        self._held.close()

    def _debugged(self) -> int:
        return 0 if self._ranks is None else sum(page.debugged for page in self._ranks.pages.values())

    def _status(self, ranks: Ranks) -> str:
        behind = min(ranks.pages, key=lambda rank: ranks.pages[rank].steps.step)
        page, seconds = ranks.pages[behind], time.monotonic() - self._began
        where = f"{PREFIX}{len(ranks.pages)} rank(s), round {self._number}: "
        return where + status(page.steps.step, page.steps_to_come, self._paces[behind].rate, seconds)

    def _measured(self, ranks: Ranks | None) -> Readings:
        steps: dict[int, float] = {}
        held: dict[int, float] = {}
        if ranks is not None:
            for pid, (order, page) in ranks.running.items():
                rank = order.context.rank
                held[rank] = memory.resident(pid)
                if page.steps.step >= 0:
                    steps[rank] = page.steps.step
        paces = {rank: pace for rank, pace in self._paces.items() if pace.steps}
        gpus = self._gpus.usage()
        numbered: dict[Instrument, Mapping[int, float]] = {
            instruments.STEP: steps,
            instruments.STEPS: {rank: pace.steps for rank, pace in paces.items()},
            instruments.STALLED: {rank: pace.stalled for rank, pace in paces.items()},
            instruments.MEMORY: held,
            instruments.GPU_BUSY: {gpu.index: gpu.busy / 100 for gpu in gpus if gpu.busy is not None},
            instruments.GPU_MEMORY: {gpu.index: gpu.memory for gpu in gpus if gpu.memory is not None},
        }
        return {
            **self._of_node(),
            **{each: {str(rank): value for rank, value in values.items()} for each, values in numbered.items()},
        }

    def _of_node(self) -> dict[Instrument, dict[str, float]]:
        books = self._policy.books
        files, size = amount(self._inputs)
        told = {instruments.RENDEZVOUS: self._waited, instruments.INPUT_FILES: files, instruments.INPUT_BYTES: size}
        if EARLIER.value is not None and "staging" in EARLIER.value:
            told[instruments.STAGING] = EARLIER.value["staging"][1]
        if self._node == 0:  # what all nodes know would count several times
            told |= {instruments.RESTARTS: len(books.restarts), instruments.LOSSES: len(books.losses)}
        return {instrument: {"": value} for instrument, value in told.items()}


def _about(job: Job) -> dict[str, str]:
    flyte, node = job.attempt.flyte, job.attempt.topology.node_rank
    about = {
        "service.name": job.call.name,
        "host.name": socket.gethostname(),
        "safedist.execution": flyte.execution_id[2],
        "safedist.task": job.call.name,
        "safedist.attempt": str(job.number),
    }
    return about if node is None else {**about, "safedist.node": str(node)}
