"""What both handlers share, for a fixed number of nodes and for a range: the job's rendezvous as an agent sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch.distributed.elastic.rendezvous import RendezvousHandler

from ..errors import RendezvousError, StoreLostError
from .carried import Carried
from .client import ReservedPort
from .heartbeat import Heartbeat
from .jobstore import JobStore
from .membership import Membership
from .outliving import Outliving
from .session import PrepareRound
from .settings import GroupSettings, RangeSettings

MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"


class Participant(Membership, Protocol):
    """A node's place among the others, as its handler needs it."""

    kept: Outliving

    @property
    def watch(self) -> Heartbeat | None:
        """What this node hears of the others while its ranks run; None before it has joined."""

    def outlive(self, error: StoreLostError) -> bool:
        """Let go of a lost store; see :class:`~.session.RendezvousSession`."""

    def move_on(self, round_no: int, /) -> None:
        """Ask every node to leave ``round_no``."""

    def leave(self) -> None:
        """Let go of every connection."""


class JobHandler(RendezvousHandler):  # type: ignore[misc]  # torch is Any to mypy here
    """A torch elastic handler that is a :class:`~.session.RendezvousSession` as well.

    Args:
        settings: who this node is, and how long it waits.
        prepare_round: called on node 0 with the round's number before each round; returns texts that every node finds
            in :attr:`values` once the round is complete, such as the address of Horovod's key-value server.
    """

    _group: Participant

    def __init__(self, settings: GroupSettings | RangeSettings, prepare_round: PrepareRound | None) -> None:
        self.settings = settings
        self.prepare_round = prepare_round
        self._reserved: ReservedPort | None = None
        self._round: int | None = None
        self._values: Mapping[str, str] = {}

    @property
    def round(self) -> int:
        """Number of the round this node is in: the same on every node, and never used twice in one job.

        It grows by one or more with each restart; a round that never came together is skipped.
        TORCHELASTIC_RESTART_COUNT is per agent and cannot serve for this.

        Raises:
            RendezvousError: there was no round yet.
        """
        if self._round is None:
            raise RendezvousError("no round has come together yet", where={"node": self._group.node_rank})
        return self._round

    @property
    def values(self) -> Mapping[str, str]:
        """What the ``prepare_round`` of the round's node 0 offered, with MASTER_ADDR and MASTER_PORT."""
        return self._values

    @property
    def node_rank(self) -> int:
        """This node; -1 where it has none before its first round."""
        return self._group.node_rank

    @property
    def max_replacements(self) -> int:
        """How often nodes may be lost in the whole job."""
        return self.settings.max_replacements

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
        """The store is lost, and with it the node that held it: see :class:`~.session.RendezvousSession`."""
        return self._group.outlive(error)

    def tell(self, say: Callable[[str], object]) -> None:
        """Where to tell who is waited for; default: this package's logger."""
        self._group.kept.say = say

    def get_run_id(self) -> str:
        """The job's id."""
        return self.settings.run_id

    @property
    def use_agent_store(self) -> bool:
        """False: ranks make a store of their own, on a fresh port for every round.

        Keys of dead ranks stay in a shared store, and after a pod was replaced agents would keep its old address.
        """
        return False

    def request_round(self) -> None:
        """Ask every node to restart, without joining the next round yet; once per round, however many ask."""
        self._group.move_on(self.round)

    def num_nodes_waiting(self) -> int:
        """1 when this round is to be left: someone asked for it, or (in a range) wants to join; else 0. Never blocks.

        Raises:
            GroupClosedError, RendezvousTimeoutError: the job has ended. Torch's agents ask only while their ranks
                run, and would otherwise let them run on.
            FencedError: another process took this node's place.
            StoreLostError: the store's host is gone or frozen.
        """
        watch = self._group.watch
        if watch is None:
            return 0
        watch.check()
        return 1 if watch.moved() else 0

    def leave(self) -> None:
        """Leave without ending the job: the place of this node stays free for a new process."""
        self._group.leave()
        self._let_go()

    def _offered(self, round_no: int, address: str) -> Mapping[str, str]:
        """What node 0 offers to a round: a port that is kept free for its ranks, and what ``prepare_round`` adds."""
        self._let_go()
        self._reserved = ReservedPort()
        further = dict(self.prepare_round(round_no)) if self.prepare_round is not None else {}
        return {MASTER_ADDR: address, MASTER_PORT: str(self._reserved.port), **further}

    def _let_go(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
