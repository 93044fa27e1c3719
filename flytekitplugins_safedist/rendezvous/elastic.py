"""The handler that torch elastic's agents talk to when the number of nodes is a range."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from .addresses import own_address
from .base import MASTER_ADDR, MASTER_PORT, JobHandler
from .protocol import End
from .range import RangeGroup
from .refusing import refuse_range
from .settings import RangeSettings

LOOPBACK = "127.0.0.1"


class ElasticHandler(JobHandler):
    """Rendezvous for a range of nodes: a :class:`~.session.RendezvousSession`, on torch elastic's c10d rendezvous.

    Args:
        settings: the range, where it meets, and how long it waits.
    """

    settings: RangeSettings
    _group: RangeGroup

    def __init__(self, settings: RangeSettings) -> None:
        super().__init__(settings, None)
        self._group = RangeGroup(settings, self._offer)
        self._nodes = 0

    @property
    def node_0_holds_store(self) -> bool:
        """False: torch elastic ranks the nodes of each round anew; the store stays where it is."""
        return False

    @property
    def holds_store(self) -> bool:
        """Whether this node holds the store, whatever its rank is."""
        return self._group.holds_store

    @property
    def nodes(self) -> int:
        """Nodes of the latest round; for ``prepare_round``, those of the round that is about to start."""
        return self._nodes

    @property
    def uploads(self) -> bool:
        """Whether this is the one node that uploads how the job ended.

        Raises:
            StoreLostError: the store's host is gone or frozen.
        """
        return self._group.uploads

    def get_backend(self) -> str:
        """Name in torch elastic's registry."""
        return "c10d"

    def next_rendezvous(self) -> RendezvousInfo:
        """Take part in the next round; whoever runs in the current one is asked to leave it.

        Raises:
            RendezvousTimeoutError: too few nodes came in time.
            GroupClosedError, NodeLostError, StoreLostError: see :mod:`flytekitplugins_safedist.errors`.
        """
        formed = self._group.join()
        self._round, self._values, self._nodes = formed.round, formed.values, len(formed.members)
        bootstrap = RendezvousStoreInfo(formed.values[MASTER_ADDR], int(formed.values[MASTER_PORT]))
        return RendezvousInfo(formed.store, self._group.node_rank, self._nodes, bootstrap)

    def step_down(self) -> None:
        """Give up this node's place among the others before its process ends, so that no new round waits for it."""
        self._group.step_down()

    def refuse(self, text: str) -> End:
        """Instead of joining, end the job as failed: see :class:`~.session.RendezvousSession`."""
        return refuse_range(self._group, text)

    def is_closed(self) -> bool:
        """Whether the job has ended."""
        return self._group.read_end() is not None

    def set_closed(self) -> None:
        """End the job for every node, if this node is in the current round."""
        self._group.close("done", "the job is over")

    def shutdown(self) -> bool:
        """Leave. The job is ended by its agents' decision alone: a node that is told to stop does not end it."""
        self.leave()
        return True

    def _offer(self, number: int, nodes: int) -> Mapping[str, str]:
        self._nodes = nodes
        address = LOOPBACK if nodes == 1 else own_address(self.settings.host, self.settings.port)
        return self._offered(number, address)
