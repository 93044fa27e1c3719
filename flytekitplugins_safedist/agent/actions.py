"""What a node's agent is to do, as values: :mod:`.policy` decides, the agent's loop carries out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..coordinator.books import Round, Verdict
from ..coordinator.messages import HangNotice


class Action:
    """One thing to do."""


@dataclass(frozen=True)
class MakeOffer(Action):
    """Have ready what the ranks of the next round meet at (ports that are kept free): the fact ``offer``."""

    after: Round


@dataclass(frozen=True)
class StartRanks(Action):
    """Those of this node, in a round; or its checks.

    Attributes:
        round: which.
        number: of the round, as ranks and people count.
        node_rank, size: this node's place, of how many.
        offer: what they find at the leader's node.
        is_checks: the node is to be checked instead: ``on_return`` with the report.
        ran_before: ranks may have run in this attempt in rounds that nobody knows of any more.
    """

    round: Round
    number: int
    node_rank: int
    size: int
    offer: Mapping[str, str]
    is_checks: bool = False
    ran_before: bool = False


@dataclass(frozen=True)
class EndRanks(Action):
    """Those of this node; ``on_quiet`` when none is left. ``shows_stacks``: a collective has timed out elsewhere, and
    one of these may be the rank that was waited for."""

    shows_stacks: bool = False


@dataclass(frozen=True)
class CallRanks(Action):
    """For a save: each says the first step that it has not passed, and does not pass it: ``floor``."""

    call: int


@dataclass(frozen=True)
class SaveAt(Action):
    """All ranks save at this step: ``saved``; -1: none saves by steps. ``is_urgent``: a node is told to stop;
    ``is_forced``: one joins, and they save whether or not that is due."""

    call: int
    step: int
    is_urgent: bool
    is_forced: bool = False


@dataclass(frozen=True)
class TakePicture(Action):
    """Of this node's ranks, for a look at a job that may hang; put it where the coordinator is: ``looked``."""

    look: int


@dataclass(frozen=True)
class Blame(Action):
    """The job does not move: show it; and if the rank is of this node, and the task's settings say so, it fails."""

    hang: HangNotice


@dataclass(frozen=True)
class LookAtStore(Action):
    """Read the leader's sign, and whether the attempt's verdict is there: ``on_look``; nothing where that cannot be
    read."""


@dataclass(frozen=True)
class Upload(Action):
    """End this process by putting the verdict, unless one is there: exit 0, or undecided where the store does not take
    it. No rank is left then."""

    verdict: Verdict


@dataclass(frozen=True)
class DropLink(Action):
    """Look for the leader anew: this one is not the job's any more."""


@dataclass(frozen=True)
class Say(Action):
    """A sentence for the node's log."""

    text: str


@dataclass(frozen=True)
class Exit(Action):
    """End this process; no rank is left. ``code`` 0: the attempt's verdict is in the store; the leader tells the others
    before it is gone."""

    code: int
    why: str
