"""From the start of a round, as the coordinator tells it, to what each rank of this node is told. Starts nothing."""

from __future__ import annotations

from .. import envvars
from ..ranks import debugger, scratch
from ..ranks.backends import RoundGroup
from ..ranks.context import RankContext
from ..ranks.orders import RankOrder, plan_orders
from .messages import Go
from .prepare import NodePlan


def group_of(go: Go, plan: NodePlan) -> RoundGroup:
    """The round as this node's ranks see it."""
    return RoundGroup(
        round=go.round,
        node_rank=go.node_rank,
        nnodes=go.nnodes,
        nproc_per_node=plan.settings.nproc_per_node,
        address=go.values[envvars.MASTER_ADDR],
        port=int(go.values[envvars.MASTER_PORT]),
        run_id=plan.job.attempt.run_id,
        timeout=plan.settings.timeouts.rendezvous,
        offered=go.values,
    )


def orders(group: RoundGroup, plan: NodePlan) -> list[RankOrder]:
    """One for each rank of this node, by local rank; makes their directories.

    Raises:
        ScratchError: these cannot be made.
    """
    contexts = [_context(group, plan, local_rank) for local_rank in range(group.nproc_per_node)]
    environments = [_environment(group, plan, context) for context in contexts]
    return plan_orders(contexts, environments, plan.scratch, plan.job_order, terminal=debugger.terminal())


def _context(group: RoundGroup, plan: NodePlan, local_rank: int) -> RankContext:
    rank = group.rank(local_rank)
    return RankContext(
        rank=rank,
        local_rank=local_rank,
        node_rank=group.node_rank,
        world_size=group.world_size,
        local_world_size=group.nproc_per_node,
        nnodes=group.nnodes,
        round=group.round,
        attempt=plan.job.number,
        scratch=scratch.make_rank(plan.scratch, group.round, rank).path,
    )


def _environment(group: RoundGroup, plan: NodePlan, context: RankContext) -> dict[str, str]:
    settings = plan.settings
    own = plan.scratch.rank(context.round, context.rank).environment(settings.scratch.shared_caches)
    place = {**plan.job.backend.environment(group, context.local_rank), envvars.ROUND: str(context.round)}
    if envvars.MEETING in group.offered:
        place[envvars.MEETING] = group.offered[envvars.MEETING]
    # The user's word beats everything but a rank's identity, which config has refused already.
    return {**plan.job.ranks_environment, **own, **place, **dict(settings.environment)}
