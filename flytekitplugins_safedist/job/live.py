"""What this node tells of the run while it goes on: looked at once a second, handed to whoever asks."""

from __future__ import annotations

import logging
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from ..handoff import HERE
from ..live import exporters, instruments
from ..live.instruments import Instrument, Readings
from ..live.pace import Pace
from ..ranks import memory
from ..ranks.rank_set import Ranks
from .membership import Membership
from .prepare import Job, NodePlan

logger = logging.getLogger(__name__)

_EVERY = 1.0
"""Seconds between two looks."""


class RunLive:
    """This node's part.

    Args:
        plan: what the agent begins with.
        job: this node in its job.
        scrub: takes secrets out of a text.
    """

    def __init__(self, plan: NodePlan, job: Membership, scrub: Callable[[str], str]) -> None:
        self._job, self._node, self._gpus = job, -1, plan.gpus
        self._next = self._waited = 0.0
        self._paces: dict[int, Pace] = defaultdict(Pace)
        self._values: Mapping[Instrument, Mapping[str, float]] = {}
        self._held = ExitStack()
        metrics = plan.settings.metrics
        self._is_wanted = metrics.otlp or metrics.prometheus is not None
        about = {name: scrub(value) for name, value in _about(plan.job).items()}
        exporters.begin(metrics, self._read, about, self._held, logger.warning)

    def _read(self) -> Readings:
        return self._values  # replaced as a whole: read by other threads

    def begins(self, node_rank: int, waited: float) -> None:
        """A round begins, for which this node has *waited* some seconds."""
        self._node, self._waited = node_rank, self._waited + waited
        for pace in self._paces.values():
            pace.again()

    def look(self, ranks: Ranks | None) -> None:
        """Where it is time, see how far the ranks are; None between two rounds."""
        now = time.monotonic()
        if self._is_wanted and now >= self._next:
            self._next = now + _EVERY
            self._see(ranks, now)

    def over(self, ranks: Ranks) -> None:
        """The ranks of the round have ended, for whatever they have done since the last look."""
        if self._is_wanted:
            self._see(ranks, time.monotonic())

    def close(self) -> None:
        """The job has ended here."""
        if self._is_wanted:
            self._see(None, time.monotonic())
            self._held.close()

    def _see(self, ranks: Ranks | None, now: float) -> None:
        steps: dict[int, float] = {}
        held: dict[int, float] = {}
        if ranks is not None:
            for rank, page in ranks.pages.items():
                self._paces[rank].see(page.steps.told[0], now)
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
        self._values = {
            **self._of_node(),
            **{each: {str(rank): value for rank, value in values.items()} for each, values in numbered.items()},
        }

    def _of_node(self) -> dict[Instrument, dict[str, float]]:
        history = self._job.me.history
        told = {instruments.RENDEZVOUS: self._waited}
        if HERE.staged is not None:
            told[instruments.STAGING] = HERE.staged[1]
        if self._node == 0:  # what all nodes know would count several times
            told |= {instruments.RESTARTS: len(history.restarts), instruments.LOSSES: len(history.losses)}
        return {instrument: {"": value} for instrument, value in told.items()}


def _about(job: Job) -> dict[str, str]:
    flyte, node = job.attempt.flyte, job.attempt.topology.node_rank
    about = {
        "service.name": job.task.name,
        "host.name": socket.gethostname(),
        "safedist.execution": flyte.execution_id[2],
        "safedist.task": job.task.name,
        "safedist.attempt": str(job.number),
    }
    return about if node is None else {**about, "safedist.node": str(node)}
