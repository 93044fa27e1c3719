"""The rendezvous of one job as agents use it, whether the number of nodes is fixed or a range."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..errors import StoreLostError
    from .carried import Carried
    from .jobstore import JobStore
    from .protocol import End

PrepareRound = Callable[[int], Mapping[str, str]]
"""Called on node 0 of a round with the round's number, before the round starts; returns what every node is to find in
:attr:`RendezvousSession.values`, such as the address of Horovod's key-value server."""


class RendezvousSession(Protocol):
    """A rendezvous handler, as agents and those around them need it."""

    prepare_round: PrepareRound | None

    def outlive(self, error: StoreLostError) -> bool:
        """The job's store is lost: let go of it, and keep what the job knows. The next rendezvous looks for the process
        that takes the place of the one that held it, for as long as a rendezvous may take.

        Returns False where there is nothing to look for: this node held it.
        """

    @property
    def searching(self) -> bool:
        """Whether the store is lost, and no round has come together since."""

    def tell(self, say: Callable[[str], object]) -> None:
        """Where to say who is waited for."""

    @property
    def known(self) -> Carried:
        """This node's copy of what the job knows."""

    @property
    def node_0_holds_store(self) -> bool:
        """Whether node 0 of every round is the one that holds the store: its loss is then known by the store's."""

    @property
    def holds_store(self) -> bool:
        """Whether this node holds the store: with it the job ends for every node."""

    @property
    def round(self) -> int:
        """Number of the round this node is in: the same on every node, and never used twice in one job."""

    @property
    def values(self) -> Mapping[str, str]:
        """What node 0's ``prepare_round`` offered to this round, with MASTER_ADDR and MASTER_PORT."""

    @property
    def node_rank(self) -> int:
        """This node in the current round; -1 when it is in none."""

    @property
    def nodes(self) -> int:
        """Nodes of the current round."""

    @property
    def max_replacements(self) -> int:
        """How often nodes may be lost in the whole job."""

    @property
    def uploads(self) -> bool:
        """Whether this is the one node that uploads how the job ended. Ask when it has ended."""

    @property
    def jobs(self) -> JobStore:
        """Counters and notes of the whole job."""

    def request_round(self) -> None:
        """Ask every node to restart, without joining the next round yet."""

    def refuse(self, text: str) -> End:
        """Instead of joining: reach the others and end the job as failed, with its outcome as text.

        Returns the end that counts: another node may have been first.

        Raises:
            NodeLostError: the job has begun without this process, and goes on without it.
            RendezvousTimeoutError, StoreLostError: the others cannot be told.
        """

    def num_nodes_waiting(self) -> int:
        """Torch elastic's question, whether ranks are to be restarted. Never blocks."""

    def step_down(self) -> None:
        """Give up this node's place among the others before its process ends, so that no new round waits for it."""

    def shutdown(self) -> bool:
        """Leave, at the end of the job."""

    def leave(self) -> None:
        """Leave, whatever becomes of the job."""
