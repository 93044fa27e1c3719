"""From the start of a round, as the coordinator tells it, to what each rank of this node is told. Starts nothing."""

from __future__ import annotations

from .. import envvars
from ..agent import scratch
from ..rank import debugger
from ..rank.context import RankContext
from ..rank.order import RankOrder
from .messages import Go
from .prepare import NodePlan


def orders(go: Go, plan: NodePlan) -> list[RankOrder]:
    """One for each rank of this node, by local rank; makes their directories.

    Raises:
        ScratchError: these cannot be made.
    """
    contexts = [_context(go, plan, local_rank) for local_rank in range(plan.settings.nproc_per_node)]
    terminal = debugger.terminal()
    look = plan.settings.profile
    return [
        RankOrder(
            context=context,
            environment=_environment(go, plan, context),
            files=plan.scratch.files(context.round, context.rank),
            log=plan.scratch.log(context.round, context.rank),
            errors=plan.scratch.errors(context.round, context.rank) if plan.order.source.is_script else None,
            terminal=terminal,
            profile=look.steps if look is not None and (look.ranks is None or context.rank in look.ranks) else None,
        )
        for context in contexts
    ]


def _context(go: Go, plan: NodePlan, local_rank: int) -> RankContext:
    nproc = plan.settings.nproc_per_node
    rank = go.node_rank * nproc + local_rank
    return RankContext(
        rank=rank,
        local_rank=local_rank,
        node_rank=go.node_rank,
        world_size=go.nnodes * nproc,
        local_world_size=nproc,
        nnodes=go.nnodes,
        round=go.round,
        attempt=plan.job.number,
        job=plan.job.name,
        scratch=scratch.make_rank(plan.scratch, go.round, rank).path,
        node_dir=plan.scratch.node,
    )


def _environment(go: Go, plan: NodePlan, context: RankContext) -> dict[str, str]:
    settings, attempt = plan.settings, plan.job.attempt
    own = plan.scratch.rank(context.round, context.rank).environment(settings.scratch.shared_caches)
    place = plan.job.backend.environment(
        context, go.values, run_id=attempt.run_id, timeout=settings.timeouts.rendezvous
    )
    place[envvars.ROUND] = str(context.round)
    if envvars.MEETING in go.values:
        place[envvars.MEETING] = go.values[envvars.MEETING]
    # The user's word beats everything but a rank's identity, which config has refused already.
    return {**plan.job.ranks_environment, **own, **place, **plan.job.call.variables}
