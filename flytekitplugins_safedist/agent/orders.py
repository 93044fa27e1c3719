"""From the start of a round to what each rank of this node is told. Starts nothing."""

from __future__ import annotations

from .. import envvars
from ..fs.identity import Identity
from ..rank import debugger
from ..rank.backends.torch import LOOPBACK, TorchBackend
from ..rank.context import RankContext
from ..rank.order import RankOrder
from . import scratch
from .actions import StartRanks
from .prepare import NodePlan


def orders(start: StartRanks, plan: NodePlan) -> list[RankOrder]:
    """One for each rank of this node, by local rank; makes their directories.

    Raises:
        ScratchError: these cannot be made.
    """
    contexts = [_context(start, plan, local_rank) for local_rank in range(plan.settings.nproc_per_node)]
    terminal = debugger.terminal()
    look = plan.settings.profile
    return [
        RankOrder(
            context=context,
            environment=_environment(start, plan, context),
            files=plan.scratch.files(context.round, context.rank),
            log=plan.scratch.log(context.round, context.rank),
            errors=plan.scratch.errors(context.round, context.rank) if plan.order.source.is_script else None,
            terminal=terminal,
            profile=look.steps if look is not None and (look.ranks is None or context.rank in look.ranks) else None,
            ran_before=start.ran_before or start.number > 0,
        )
        for context in contexts
    ]


def _context(start: StartRanks, plan: NodePlan, local_rank: int) -> RankContext:
    nproc = plan.settings.nproc_per_node
    rank = start.node_rank * nproc + local_rank
    return RankContext(
        rank=rank,
        local_rank=local_rank,
        node_rank=start.node_rank,
        world_size=start.size * nproc,
        local_world_size=nproc,
        nnodes=start.size,
        round=start.number,
        attempt=plan.job.number,
        job=plan.job.name,
        scratch=scratch.make_rank(plan.scratch, start.number, rank).path,
        node_dir=plan.scratch.node,
    )


def _environment(start: StartRanks, plan: NodePlan, context: RankContext) -> dict[str, str]:
    own = plan.scratch.rank(context.round, context.rank).environment(plan.settings.scratch.shared_caches)
    place = meeting(start, plan, context, plan.job.backend, context.round)
    # The user's word beats everything but a rank's identity, which config has refused already.
    return {**plan.job.ranks_environment, **own, **place, **plan.job.call.variables}


def meeting(start: StartRanks, plan: NodePlan, at: Identity, backend: TorchBackend, round_: int) -> dict[str, str]:
    """The variables by which a rank of a round, or what checks its node, meets the others; *round_* names it there."""
    offered = dict(start.offer) if start.size > 1 else {**start.offer, envvars.MASTER_ADDR: LOOPBACK}
    run_id, timeout = plan.job.attempt.run_id, plan.settings.timeouts.rendezvous
    place = {**backend.environment(at, offered, run_id=run_id, timeout=timeout), envvars.ROUND: str(round_)}
    return place if plan.meeting is None else {**place, envvars.MEETING: str(plan.meeting)}
