"""The values: a node's place in its job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..errors import TopologyError

DEFAULT_PORT = 23456
"""The port that Kubeflow's and Volcano's operators open in a pod; ours too where no operator names one."""


class Asked(Protocol):
    """What the configuration asks for; :class:`~flytekitplugins_safedist.config.options.Resolved` is one."""

    @property
    def min_nodes(self) -> int: ...
    @property
    def max_nodes(self) -> int: ...
    @property
    def nproc_per_node(self) -> int: ...


@dataclass(frozen=True)
class Endpoint:
    """Where node 0 is met.

    Attributes:
        host: a DNS name or an address.
        port: a TCP port.
        moved: the file that names another address once node 0 has moved there; "" where the host is a name.
    """

    host: str
    port: int
    moved: str = ""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class Topology:
    """This node's place in the job.

    Attributes:
        node_rank: 0 to max_nodes-1; None in an elastic range, where only the rendezvous can tell.
        min_nodes, max_nodes: equal for a fixed size.
        nproc_per_node: ranks on each node.
        endpoint: where node 0 is met; None where there is nobody else to meet.
        source: who said so ("PyTorchJob", "local run", ...), for start lines and errors.
        alone: no operator knows this process, and so nobody replaces it: a local run, or the one pod of ``nodes=1``.
        notes: what the user should know about how this was decided; one sentence each, to be logged as warnings.
    """

    node_rank: int | None
    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    endpoint: Endpoint | None
    source: str
    alone: bool = False
    notes: tuple[str, ...] = ()

    @property
    def is_elastic(self) -> bool:
        """The number of nodes is a range: rendezvous decides who takes part and with which rank."""
        return self.min_nodes != self.max_nodes

    @property
    def nnodes(self) -> str:
        """The number of nodes as users write it: ``"4"`` or ``"2:4"``."""
        return f"{self.min_nodes}:{self.max_nodes}" if self.is_elastic else str(self.max_nodes)

    @property
    def world_size(self) -> int:
        """Ranks of the job when every node is there."""
        return self.max_nodes * self.nproc_per_node

    def ranks(self) -> range:
        """The ranks that run on this node.

        Raises:
            TopologyError: in an elastic range, where they are known only after the rendezvous.
        """
        if self.node_rank is None:
            raise TopologyError(
                "the ranks on a node of an elastic job are not known before its rendezvous",
                where={"source": self.source},
            )
        first = self.node_rank * self.nproc_per_node
        return range(first, first + self.nproc_per_node)
