"""What each rank of a round is told: a value, computed before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .context import RankContext
from .scratch import JobScratch
from .worker import RankOrder


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
                log=job.log(context.round, context.rank),
                page=job.orders / f"{name}.page",
                outcome=job.orders / f"{name}.outcome.json",
                result=job.orders / f"{name}.result.pb",
                terminal=terminal,
            )
        )
    return orders
