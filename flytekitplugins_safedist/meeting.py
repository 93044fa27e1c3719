"""Where the nodes of a job meet: a rendezvous handler from torch elastic's registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import rendezvous
from .backends import RankBackend

if TYPE_CHECKING:
    from .agent import NodePlan
    from .rendezvous.handler import SafedistHandler


def open_handler(plan: NodePlan, backend: RankBackend) -> SafedistHandler:
    """This node's handler; before each round, node 0 opens there what the backend's ranks meet at.

    Raises:
        ConfigError: the topology and the rendezvous contradict each other.
    """
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    rendezvous.register()
    place, settings = plan.topology, plan.settings
    handler: SafedistHandler = get_rendezvous_handler(
        RendezvousParameters(
            backend=rendezvous.BACKEND,
            endpoint=str(place.endpoint) if place.endpoint is not None else "127.0.0.1:0",
            run_id=plan.run_id,
            min_nodes=place.min_nodes,
            max_nodes=place.max_nodes,
            node_rank=place.node_rank,
            timeout=settings.timeouts.rendezvous,
            silence=settings.timeouts.heartbeat,
        )
    )
    handler.lead = lambda _round: backend.open_round(nnodes=place.max_nodes, nproc_per_node=settings.nproc_per_node)
    return handler
