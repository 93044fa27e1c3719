"""What each rank of a round is told: a value, computed before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .context import RankContext
from .records import Record
from .scratch import JobScratch


@dataclass(frozen=True)
class RankOrder(Record):
    """All that a rank needs, as the agent wrote it.

    Attributes:
        context: identity and scratch directory.
        environment: the rank's whole environment; nothing else is inherited.
        job: file with the :class:`~flytekitplugins_safedist.ranks.payload.JobOrder` that all ranks share.
        file: where the agent leaves this order.
        log: file for standard output and error.
        page: the memory that it shares with its agent, where it says how it ended.
        result: where rank 0 leaves its outputs.
        records: the socket at which torch tells of the rank's collectives.
        terminal: at which the job was started, for ``breakpoint()``; "": none.
    """

    context: RankContext
    environment: dict[str, str]
    job: Path
    file: Path
    log: Path
    page: Path
    result: Path
    records: Path
    terminal: str = ""

    @property
    def stacks(self) -> Path:
        """Where the rank writes the stacks of its threads when it is asked to."""
        return self.file.with_suffix(".stacks")


def plan_orders(
    contexts: Sequence[RankContext],
    environments: Sequence[Mapping[str, str]],
    job: JobScratch,
    job_order: Path,
    *,
    terminal: str = "",
) -> list[RankOrder]:
    """What each rank of a round is told. Pure."""
    orders = []
    for context, environment in zip(contexts, environments, strict=True):
        name = f"round-{context.round}-rank-{context.rank}"
        orders.append(
            RankOrder(
                context=context,
                environment=dict(environment),
                job=job_order,
                file=job.orders / f"{name}.json",
                log=job.log(context.round, context.rank),
                page=job.orders / f"{name}.page",
                result=job.orders / f"{name}.result.pb",
                records=job.short / job.orders.name / f"{name}.fr",
                terminal=terminal,
            )
        )
    return orders
