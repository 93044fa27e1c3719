"""The handler that torch elastic's agents talk to when the number of nodes is a range."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from ..errors import RendezvousError, StoreLostError
from .addresses import own_address
from .carried import Carried
from .client import ReservedPort
from .handler import MASTER_ADDR, MASTER_PORT
from .jobstore import JobStore
from .protocol import End
from .range import RangeGroup
from .refusing import refuse_range
from .session import PrepareRound
from .settings import RangeSettings

LOOPBACK = "127.0.0.1"


class ElasticHandler(RendezvousHandler):  # type: ignore[misc]  # torch is Any to mypy here
    """Rendezvous for a range of nodes: a :class:`~.session.RendezvousSession`, on torch elastic's c10d rendezvous.

    Args:
        settings: the range, where it meets, and how long it waits.
    """

    def __init__(self, settings: RangeSettings) -> None:
        self.settings = settings
        self.prepare_round: PrepareRound | None = None
        self._group = RangeGroup(settings, self._offer)
        self._reserved: ReservedPort | None = None
        self._round: int | None = None
        self._nodes = 0
        self._values: Mapping[str, str] = {}

    @property
    def node_0_holds_store(self) -> bool:
        """False: torch elastic ranks the nodes of each round anew; the store stays where it is."""
        return False

    @property
    def holds_store(self) -> bool:
        """Whether this node holds the store, whatever its rank is."""
        return self._group.holds_store

    @property
    def round(self) -> int:
        """Number of the round this node is in: the same on every node, and never used twice in one job.

        Raises:
            RendezvousError: there was no round yet.
        """
        if self._round is None:
            raise RendezvousError("this node has not been in a round yet")
        return self._round

    @property
    def values(self) -> Mapping[str, str]:
        """What the ``prepare_round`` of the round's node 0 offered, with MASTER_ADDR and MASTER_PORT."""
        return self._values

    @property
    def node_rank(self) -> int:
        """This node in its latest round; -1 before its first."""
        return self._group.node_rank

    @property
    def nodes(self) -> int:
        """Nodes of the latest round; for ``prepare_round``, those of the round that is about to start."""
        return self._nodes

    @property
    def max_replacements(self) -> int:
        """How often nodes may be lost in the whole job."""
        return self.settings.max_replacements

    @property
    def uploads(self) -> bool:
        """Whether this is the one node that uploads how the job ended.

        Raises:
            StoreLostError: the store's host is gone or frozen.
        """
        return self._group.uploads

    @property
    def jobs(self) -> JobStore:
        """Counters and notes of the whole job, on the same store. Usable after the first round, until shutdown."""
        return JobStore(self._group)

    @property
    def known(self) -> Carried:
        """This node's copy of what the job knows of its restarts and losses."""
        return self._group.kept.carried

    @property
    def searching(self) -> bool:
        """Whether the store is lost, and no round has come together since."""
        return self._group.kept.vigil is not None

    def outlive(self, error: StoreLostError) -> bool:
        """The store is lost, and with it its host: see :class:`~.session.RendezvousSession`."""
        return self._group.outlive(error)

    def tell(self, say: Callable[[str], object]) -> None:
        """Where to tell who is waited for; default: this package's logger."""
        self._group.kept.say = say

    def get_backend(self) -> str:
        """Name in torch elastic's registry."""
        return "c10d"

    def get_run_id(self) -> str:
        """The job's id."""
        return self.settings.run_id

    @property
    def use_agent_store(self) -> bool:
        """False: ranks make a store of their own, on a fresh port for every round.

        Torch's own handler shares one, and after a pod was replaced the surviving agents keep its old address.
        """
        return False

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

    def request_round(self) -> None:
        """Ask every node to restart, without joining the next round yet; once per round, however many ask."""
        self._group.move_on(self.round)

    def step_down(self) -> None:
        """Give up this node's place among the others before its process ends, so that no new round waits for it."""
        self._group.step_down()

    def refuse(self, text: str) -> End:
        """Instead of joining, end the job as failed: see :class:`~.session.RendezvousSession`."""
        return refuse_range(self._group, text)

    def num_nodes_waiting(self) -> int:
        """1 when this round is to be left: someone asked for it, or wants to join; else 0. Never blocks.

        Raises:
            GroupClosedError, RendezvousTimeoutError: the job has ended.
            StoreLostError: the store's host is gone or frozen.
        """
        watch = self._group.watch
        if watch is None:
            return 0
        watch.check()
        return 1 if watch.moved() else 0

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

    def leave(self) -> None:
        """Leave without ending the job."""
        self._group.leave()
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    def _offer(self, number: int, nodes: int) -> Mapping[str, str]:
        if self._reserved is not None:
            self._reserved.close()
        self._reserved, self._nodes = ReservedPort(), nodes
        address = LOOPBACK if nodes == 1 else own_address(self.settings.host, self.settings.port)
        offered = dict(self.prepare_round(number)) if self.prepare_round is not None else {}
        return {MASTER_ADDR: address, MASTER_PORT: str(self._reserved.port), **offered}
