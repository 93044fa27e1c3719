"""Where the nodes of a job meet: a rendezvous handler, for a fixed number of nodes or for a range."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .. import rendezvous
from ..errors import TopologyError
from ..ranks import memory
from ..ranks.backends import RankBackend
from ..ranks.scratch import human
from ..rendezvous.client import Server
from .node_plan import STORE_PORT, NodePlan

if TYPE_CHECKING:
    from ..config.options import Timeouts
    from ..rendezvous.session import RendezvousSession
    from ..topology import Topology

_BEATS = 6
"""Signs of life within the time after which their absence counts."""

_LAST_CALL = 30.0
"""Seconds, at most, that an elastic round waits for further nodes when the minimum is there: torch elastic's default
(torch/distributed/elastic/rendezvous/dynamic_rendezvous.py)."""


def open_handler(plan: NodePlan, backend: RankBackend, say: Callable[[str], object]) -> RendezvousSession:
    """This node's handler; before each round, node 0 opens there what the ranks meet at.

    Raises:
        ConfigError, TopologyError: the topology and the rendezvous contradict each other.
    """
    settings = plan.settings
    handler = handler_for(plan.topology, settings.timeouts, plan.run_id, max_replacements=settings.max_replacements)
    held: list[Server] = []

    def prepare_round(_round: int) -> Mapping[str, str]:
        offered = backend.open_round(nnodes=handler.nodes, nproc_per_node=plan.settings.nproc_per_node)
        for store in held:
            store.close()
        if handler.nodes * plan.settings.nproc_per_node == 1:
            return offered
        host = "127.0.0.1" if plan.topology.endpoint is None else plan.topology.endpoint.host
        # Fresh for each round, like all that ranks meet at: what ranks agreed on is void when they start again.
        held[:] = [Server(host, 0)]
        return {**offered, STORE_PORT: str(held[0].port)}

    handler.prepare_round = prepare_round
    handler.tell(say)
    return handler


def handler_for(place: Topology, timeouts: Timeouts, run_id: str, *, max_replacements: int) -> RendezvousSession:
    """A handler for this place in the job, which nobody has joined yet.

    Raises:
        ConfigError, TopologyError: the topology and the rendezvous contradict each other.
    """
    opened = _range if place.is_elastic else _fixed
    return opened(place, timeouts, run_id, max_replacements)


def _fixed(place: Topology, timeouts: Timeouts, run_id: str, max_replacements: int) -> RendezvousSession:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    rendezvous.register()
    handler: RendezvousSession = get_rendezvous_handler(
        RendezvousParameters(
            backend=rendezvous.BACKEND,
            endpoint=str(place.endpoint) if place.endpoint is not None else "127.0.0.1:0",
            run_id=run_id,
            min_nodes=place.min_nodes,
            max_nodes=place.max_nodes,
            node_rank=place.node_rank,
            timeout=timeouts.rendezvous,
            heartbeat_timeout=timeouts.heartbeat,
            max_replacements=max_replacements,
            about=_limits(),
            moved=place.endpoint.moved if place.endpoint is not None else "",
        )
    )
    return handler


def _limits() -> str:
    """What this node's container may use, for whoever reads that it keeps dying."""
    group = memory.cgroup()
    limit = None if group is None else group.limit
    return "" if limit is None else f"Its container's memory is limited to {human(limit)}."


def _range(place: Topology, timeouts: Timeouts, run_id: str, max_replacements: int) -> RendezvousSession:
    from ..rendezvous.elastic import ElasticHandler
    from ..rendezvous.settings import RangeSettings

    if place.endpoint is None:
        raise TopologyError("the address where the nodes of this job meet is not set", where={"source": place.source})
    return ElasticHandler(
        RangeSettings(
            run_id=run_id,
            min_nodes=place.min_nodes,
            max_nodes=place.max_nodes,
            host=place.endpoint.host,
            port=place.endpoint.port,
            timeout=timeouts.rendezvous,
            heartbeat_timeout=timeouts.heartbeat,
            heartbeat_interval=min(1.0, timeouts.heartbeat / _BEATS),
            last_call=min(_LAST_CALL, timeouts.heartbeat / 2),
            max_replacements=max_replacements,
        )
    )
