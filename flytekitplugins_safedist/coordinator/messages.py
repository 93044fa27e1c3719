"""What nodes and the coordinator of a job say to each other: a node its status, the coordinator its want.

Both are whole: a later one replaces the one before, and nothing is ever said a second time. ``docs/rendezvous.md`` has
a table of all fields: who sets each, who keeps it, and what it survives. Large things (pictures of hangs, the record of
a run) are put as values beside them; a status only says that they are there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from mashumaro.config import BaseConfig
from mashumaro.mixins.dict import DataClassDictMixin

from .books import NO_LEADER, NO_ROUND, Books, Cause, Leader, Memory, Round, Verdict

PROTOCOL = 2
"""Version of these messages; a node of another version is turned away."""


@dataclass(frozen=True)
class Floor(DataClassDictMixin):
    """The answer to a call: the first step that no rank here has passed; -1 where none saves by steps."""

    call: int = 0
    step: int = -1


@dataclass(frozen=True)
class Save(DataClassDictMixin):
    """All ranks save at one step.

    Attributes:
        call: number of the agreement in its round, from 1.
        is_urgent: because a node is told to stop, which has not left with its part done.
        step: the one; None while floors are asked for; -1: no rank saves by steps.
        is_done: all have saved.
        is_empty: no rank would save, as all nodes have said when they were called.
        is_forced: whether or not a save is due, for a node that joins.
    """

    call: int
    is_urgent: bool
    step: int | None = None
    is_done: bool = False
    is_empty: bool = False
    is_forced: bool = False


@dataclass(frozen=True)
class HangNotice(DataClassDictMixin):
    """The job does not move, as two pictures have shown.

    Attributes:
        look: number of the second one.
        key: the same for the same hang at a later look.
        rank: that is to fail for it.
        text: what is known, for the agents.
        seconds: for so long already.
        is_news: it is to be shown: not again and again.
    """

    look: int
    key: str
    rank: int
    text: str
    seconds: float = 0.0
    is_news: bool = True


@dataclass(frozen=True)
class Offer(DataClassDictMixin):
    """What the leader's node has ready for the ranks of one round: addresses, and ports that are kept free.

    Attributes:
        after: the last round before: none is offered twice.
        values: by name.
    """

    after: Round
    values: Mapping[str, str]


@dataclass(frozen=True)
class Status(DataClassDictMixin):
    """A node, as it is.

    Attributes:
        job, protocol: which job, and which version of these messages.
        process: a random id of this incarnation.
        node: its place where the job's size is fixed; None in a range.
        started: when the process started, in seconds since the epoch, by its own clock.
        ranks: that it has; 0 where it can start none, or nobody says.
        host, machine: its host's name, and the Kubernetes node that it is on ("" where nobody says).
        leader: the greatest that it has obeyed.
        round: the last that it has obeyed a want of: its ranks run or ran in it, or it has ended what was before.
        node_rank: its place in that round; -1: it had none.
        phase: ``idle``: no rank is alive here; ``returned``: nor here, and all have returned from the function;
            ``ending``: they are being ended.
        cannot: why it can start no rank at all.
        leaving: why it takes part in no further round.
        is_cut: its ranks were ended because no leader could be heard.
        ranks_returned: of this round, here.
        listens: a rank would save when the pod is told to stop.
        is_preempted: the pod is told to stop, and stays for a save.
        asks: the call that a rank here wants; 0 for none.
        floor, saved: the answer to a call; the last call that all ranks here have saved for.
        stall: seconds for which a rank has waited, at the last look at it, where that is suspicious; 0.0 else.
        is_urgent: that wait will be ended, by a library or for the user; else it is only to be told.
        looked: the last look for which the picture of this node's ranks is there.
        report: of the checks in this round, as text.
        starts: how often its container was started before, in the same pod.
        ended: the memory of that at last, where it ended without a word.
        memory: of its container: a new word where it comes near the limit.
        leader_memory: the leader's, as it was heard.
        offer: see :class:`Offer`.
        is_uploaded: of the leader: the attempt's verdict is in the store.
        books: its copy; None where the leader has told it all that it knows.
    """

    job: str
    process: str
    node: int | None
    started: float
    host: str = ""
    machine: str = ""
    protocol: int = PROTOCOL
    leader: Leader = NO_LEADER
    round: Round = NO_ROUND
    node_rank: int = -1
    phase: Literal["idle", "running", "returned", "ending"] = "idle"
    cannot: Cause | None = None
    leaving: str = ""
    is_cut: bool = False
    ranks_returned: tuple[int, ...] = ()
    listens: bool = False
    is_preempted: bool = False
    asks: int = 0
    floor: Floor = field(default_factory=Floor)
    saved: int = 0
    stall: float = 0.0
    is_urgent: bool = True
    looked: int = 0
    report: str = ""
    starts: int = 0
    ended: Memory | None = None
    memory: Memory | None = None
    leader_memory: Memory | None = None
    offer: Offer | None = None
    is_uploaded: bool = False
    books: Books | None = None
    ranks: int = 0

    class Config(BaseConfig):
        """What is as at first is not sent: thousands of these are."""

        omit_default = True

    @property
    def ground(self) -> str:
        """The machine that the node is on, to tell them apart; without a name for it, each is alone on its own."""
        return self.machine or f"{self.host}/{self.process if self.node is None else self.node}"

    @property
    def where(self) -> str:
        """The machine, for people."""
        return f"host {self.host}" + (f", Kubernetes node {self.machine}" if self.machine else "")

    @property
    def name(self) -> str:
        """The node, for people."""
        return f"node {self.node}" if self.node is not None else f"the node on {self.host}"

    def dump(self) -> bytes:
        """As a frame's content."""
        return _packed({**self.to_dict(), "protocol": self.protocol})  # of which another version has another default

    @classmethod
    def parse(cls, content: bytes) -> Status:
        """The inverse.

        Raises:
            ValueError: it is none of this version.
        """
        try:
            return cls.from_dict({"protocol": 0, **json.loads(content)})
        except Exception as error:  # mashumaro's, json's, of any type
            raise ValueError(f"not a status: {type(error).__name__}: {error}") from error

    def refusal(self, job: str) -> str:
        """Why a job has no part for this process, whatever it is; "" where it may have one."""
        if self.job != job:
            return f"it is of job {self.job!r}, and this is job {job!r}"
        if self.protocol != PROTOCOL:
            return f"it speaks version {self.protocol} of the protocol, and node 0 {PROTOCOL}: other images"
        return ""


@dataclass(frozen=True)
class Course(DataClassDictMixin):
    """What all nodes of a job are to know and to do.

    Attributes:
        leader: who says so.
        round: the last one.
        runs: its ranks are to run; else none are, and it is over.
        is_checks: its ranks are the checks of the nodes.
        ran_before: another process has led this attempt: ranks may have run in rounds that nobody here has heard of.
        size: how many nodes take part in it.
        offer: what its ranks find at the leader's node.
        save: at which step all ranks save.
        look: number of the picture that all nodes are to take of their ranks; 0 for none.
        hang: the job does not move.
        verdict: the job has ended so: end the ranks; the leader's node uploads it.
        is_decided: the attempt's verdict is in the store: exit 0.
        news: for every node's log: why a round is over, who is waited for.
        memory: of the leader's container.
        books: as the leader has them.
    """

    leader: Leader
    round: Round = NO_ROUND
    runs: bool = False
    is_checks: bool = False
    ran_before: bool = False
    size: int = 0
    offer: Mapping[str, str] = field(default_factory=dict)
    save: Save | None = None
    look: int = 0
    hang: HangNotice | None = None
    verdict: Verdict | None = None
    is_decided: bool = False
    news: str = ""
    memory: Memory | None = None
    books: Books = field(default_factory=Books)

    class Config(BaseConfig):
        """What is as at first is not sent."""

        omit_default = True

    @cached_property
    def content(self) -> bytes:
        """As JSON; made once for thousands of nodes."""
        return _packed(self.to_dict())


@dataclass(frozen=True)
class Want:
    """What one node is to be.

    Attributes:
        course: what all nodes are to do.
        node_rank: its place in the round; -1: it has none.
        leave: why this process has no part in the job any more: exit undecided.
    """

    course: Course
    node_rank: int = -1
    leave: str = ""

    @property
    def runs(self) -> bool:
        """This node's ranks are to run."""
        return self.course.runs and self.node_rank >= 0

    def dump(self) -> bytes:
        """As a frame's content."""
        head = f'{{"node_rank": {self.node_rank}, "leave": {json.dumps(self.leave)}, "course": '
        return b"".join((head.encode(), self.course.content, b"}"))

    @classmethod
    def parse(cls, content: bytes) -> Want:
        """The inverse.

        Raises:
            ValueError: it is none of this version.
        """
        try:
            data = json.loads(content)
            return cls(Course.from_dict(data["course"]), int(data["node_rank"]), str(data["leave"]))
        except Exception as error:
            raise ValueError(f"not a want: {type(error).__name__}: {error}") from error


def _packed(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False).encode("utf-8", "backslashreplace")
