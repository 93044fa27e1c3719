"""The values: a node's place in its job."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.options import nodes_text


@dataclass(frozen=True)
class Endpoint:
    """Where node 0 is met.

    Attributes:
        host: a DNS name or an address.
        port: a TCP port.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Topology:
    """This node's place in the job.

    Attributes:
        node_rank: 0 to max_nodes-1; None in an elastic range, where only the rendezvous can tell.
        min_nodes, max_nodes: equal for a fixed size.
        nproc_per_node: ranks on each node.
        endpoint: where node 0 is met; None where there is nobody else to meet.
        source: who said so ("PyTorchJob", "local run", ...), for start lines and errors.
        alone: no operator knows this process, and so nobody replaces it: a local run, or the one pod of ``nnodes=1``.
        machine: the Kubernetes node that this is on; "" where nobody says.
        notes: what the user should know about how this was decided; one sentence each, to be logged as warnings.
    """

    node_rank: int | None
    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    endpoint: Endpoint | None
    source: str
    alone: bool = False
    machine: str = ""
    notes: tuple[str, ...] = ()

    @property
    def is_elastic(self) -> bool:
        """The number of nodes is a range: rendezvous decides who takes part and with which rank."""
        return self.min_nodes != self.max_nodes

    @property
    def nnodes(self) -> str:
        """The number of nodes as users write it: ``"4"`` or ``"2:4"``."""
        return nodes_text(self.min_nodes, self.max_nodes)

    @property
    def world_size(self) -> int:
        """Ranks of the job when every node is there."""
        return self.max_nodes * self.nproc_per_node
