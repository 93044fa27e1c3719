"""Who a node is among the others, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass

from . import relapses
from .protocol import describe_nodes

BACKEND = "safedist"
"""Name of the backend in torch elastic's registry (``torchrun --rdzv-backend safedist``)."""


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """Who this node is and how long it waits.

    Attributes:
        run_id: tells two jobs apart that meet on one address by mistake.
        nodes: size of the group.
        node_rank: index of this node, from 0; node 0 holds the store.
        host: how other nodes reach node 0.
        port: the store's port; 0 (any free one) only for ``nodes=1``.
        moved: the file that names node 0's address once it is another one, where ``host`` is no name; "" for none.
        timeout: seconds for all nodes to arrive, for each round anew.
        heartbeat_timeout: seconds without a reply after which the store counts as lost.
        heartbeat_interval: seconds between two heartbeats; also the delay of rare accidents' notice (a node that died
            between asking for a new round and waking the others).
        max_replacements: how often places of dead nodes may be taken, in the whole job.
        short_life: seconds; a node that is lost three times, and lives shorter than this each time it is back, is not
            replaced again. The kubelet, too, forgets a container's crashes when it has run for ten minutes.
        about: what else to say of such a node: what its container is limited to.
        shutdown_grace: seconds that node 0 stays at most after the end, so that others can read how it ended.
        raw_store: open a connection of its own for torch elastic's agent. Needed with torch's LocalElasticAgent,
            whose exit barrier occupies its connection for minutes.
        names: pod or host names by node rank, for messages.
    """

    run_id: str
    nodes: int
    node_rank: int
    host: str
    port: int
    timeout: float = 900.0
    heartbeat_timeout: float = 60.0
    heartbeat_interval: float = 5.0
    max_replacements: int = 10
    short_life: float = 600.0
    about: str = ""
    moved: str = ""
    shutdown_grace: float = 10.0
    raw_store: bool = True
    names: tuple[str, ...] = ()

    def describe(self, nodes: tuple[int, ...]) -> str:
        """Nodes as text, with their names where they are known."""
        return describe_nodes(nodes, self.names)

    def relapse(self) -> str:
        """Why this node is not replaced any more."""
        return (
            f"{self.describe((self.node_rank,))} was lost {relapses.TIMES} times, and lived less than "
            f"{self.short_life:g} s each time it was back: it most likely runs out of memory or disk in the same place "
            f"again, so it is not replaced any more. {self.about}"
        ).rstrip()


@dataclass(frozen=True, kw_only=True)
class RangeSettings:
    """Who this node is and how long it waits.

    Attributes:
        run_id: tells two jobs apart that meet on one address by mistake.
        min_nodes, max_nodes: the range.
        host, port: where the store is; the node whose address this is holds it.
        timeout: seconds for ``min_nodes`` nodes to arrive, for each round anew.
        heartbeat_timeout: seconds without a sign of life after which a node, or the store, counts as lost.
        heartbeat_interval: seconds between two heartbeats.
        last_call: seconds that a round waits for further nodes once ``min_nodes`` are there.
        max_replacements: how many processes may join beyond ``max_nodes``, in the whole job; and how often nodes may
            be lost.
        shutdown_grace: seconds that the store's host stays at most after the end, so that others can read how it ended.
    """

    run_id: str
    min_nodes: int
    max_nodes: int
    host: str
    port: int
    timeout: float = 900.0
    heartbeat_timeout: float = 60.0
    heartbeat_interval: float = 1.0
    last_call: float = 30.0
    max_replacements: int = 10
    shutdown_grace: float = 10.0
