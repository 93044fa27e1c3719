"""What nodes and the coordinator of a job say to each other: plain values, as JSON on the wire.

A node says what it is and what has become of its ranks; the coordinator decides everything (:mod:`.coordinator`).
``docs/rendezvous.md`` has the states, and a table of faults with what happens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from mashumaro.mixins.dict import DataClassDictMixin

from .facts import Cause, End, History

PROTOCOL = 1
"""Version of these messages; a node of another version is turned away."""


@dataclass(frozen=True)
class Message(DataClassDictMixin):
    """One message; its ``kind`` on the wire is the name of its class."""

    kinds: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Message.kinds[cls.__name__] = cls

    def dump(self) -> bytes:
        """As a frame's content."""
        return json.dumps({"kind": type(self).__name__, **self.to_dict()}, ensure_ascii=False).encode(
            "utf-8", "backslashreplace"
        )


def parse(frame: bytes) -> Message:
    """Read a frame's content.

    Raises:
        ValueError: it is no message of this version.
    """
    try:
        data = json.loads(frame)
        kind = Message.kinds[data.pop("kind")]
        known = {entry.name for entry in fields(kind)}
        return kind.from_dict({name: value for name, value in data.items() if name in known})
    except Exception as error:  # mashumaro's, json's, of any type that the sender made up
        raise ValueError(f"not a message: {type(error).__name__}: {error}") from error


# --- a node says --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alarm(Message):
    """A rank here has failed. Said at once: to end the others may take a while, and :class:`Ended` follows then.

    Attributes:
        cause: the failure.
        outcome: of one that speaks for itself: its outcome record as JSON, shortened; should this node be lost before
            it is asked for the whole (:class:`Tell`). "" for an echo.
    """

    round: int
    cause: Cause
    outcome: str = ""


@dataclass(frozen=True)
class Hello(Message):
    """The first message on each connection.

    Attributes:
        run: names the job.
        process: a random id of the node's process.
        node: its node_rank where the job's size is fixed; None in a range.
        started_ns: when the process started, by its own clock.
        host: its host name, for messages.
        machine: the Kubernetes node that it is on; "" where it has not been told.
        history: its copy.
        lost: ids of coordinators that it has left, as they were lost.
        round: the round that its ranks run in, or have ended in; -1 for none.
        state: ``new``: no rank runs; ``running``; ``done``: its ranks have returned; ``ended``: its ranks have ended
            otherwise; ``cannot``: it can start none, and will say why; ``looks``: this is no node, it only asks who
            coordinates.
        alarm: of its ranks in that round.
        protocol: :data:`PROTOCOL`.
        clock: the sender's monotonic clock as it is sent, in seconds.
    """

    run: str
    process: str
    node: int | None
    started_ns: int
    host: str
    history: History = field(default_factory=History)
    lost: tuple[str, ...] = ()
    round: int = -1
    state: Literal["new", "running", "done", "ended", "cannot", "looks"] = "new"
    alarm: Alarm | None = None
    protocol: int = PROTOCOL
    clock: float = 0.0
    machine: str = ""

    @property
    def ground(self) -> str:
        """The machine, to tell it from others; without a name for it, each node is as good as alone on its own."""
        return self.machine or f"{self.host}/{self.process if self.node is None else self.node}"

    @property
    def where(self) -> str:
        """The same, for people."""
        return f"host {self.host}" + (f", Kubernetes node {self.machine}" if self.machine else "")


@dataclass(frozen=True)
class Returned(Message):
    """All ranks of this node have returned from the function."""

    round: int


@dataclass(frozen=True)
class Ended(Message):
    """All ranks of this node have ended otherwise, none is left, and it is ready for another round.

    Attributes:
        cause: the first failure here, or None where the ranks were only ended by this node.
        returned: ranks here that had returned before.
        cut: they were ended because the coordinator could not be heard: others may have lost their peers by that.
    """

    round: int
    cause: Cause | None = None
    returned: tuple[int, ...] = ()
    cut: bool = False


@dataclass(frozen=True)
class Told(Message):
    """The text that :class:`Tell` asked for: an outcome record as JSON, and what scratch holds."""

    round: int
    outcome: str
    disk: str = ""


@dataclass(frozen=True)
class Leaves(Message):
    """This process was told to stop: it takes part in no further round. Its ranks are ended after this."""

    why: str


@dataclass(frozen=True)
class CannotBegin(Message):
    """Instead of taking part: this node can start no rank. ``outcome`` is the error as an outcome record."""

    outcome: str
    reason: str


@dataclass(frozen=True)
class Listens(Message):
    """A rank here would save when the job is preempted."""

    round: int


@dataclass(frozen=True)
class Asks(Message):
    """A rank here wants all ranks of the job to save at one step."""

    round: int


@dataclass(frozen=True)
class Preempted(Message):
    """This node is told to stop, and stays for a moment so that all ranks of the job can save."""

    round: int


@dataclass(frozen=True)
class Floor(Message):
    """The answer to :class:`Gather`: the first step that no rank here has passed; None where none saves by steps."""

    round: int
    call: int
    step: int | None


@dataclass(frozen=True)
class Saved(Message):
    """Every rank here has done what :class:`Answer` asked for."""

    round: int
    call: int


@dataclass(frozen=True)
class Uploaded(Message):
    """Node 0: the job's outputs or its one error are uploaded; or ``ok`` is False, and ``why`` says why not."""

    ok: bool
    why: str = ""


@dataclass(frozen=True)
class Noted(Message):
    """Before the ranks' end is said: the record of this node's part in the run, as JSON; none of the coordinator's.

    Attributes:
        text: a :class:`..record.events.NodePart`.
        behind: by how many seconds, at most, this node's clock is ahead of what the coordinator's beats said.
    """

    text: str
    behind: float | None = None


@dataclass(frozen=True)
class Beat(Message):
    """A sign of life, in both directions; ``clock`` as in :class:`Hello`."""

    clock: float = 0.0


# --- the coordinator says -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Welcome(Message):
    """The first answer to a hello: who coordinates, and what it knows."""

    coordinator: str
    history: History


@dataclass(frozen=True)
class Refused(Message):
    """This process has no part in the job.

    Attributes:
        why: ``stranger`` (another job's), ``version``, ``fenced`` (a newer process is in its place), ``range`` (no such
            node), ``too many``, ``begun`` (it cannot begin, and the job goes on without it), ``relapse`` (its place was
            lost again and again).
        text: in words.
    """

    why: Literal["stranger", "version", "fenced", "range", "too many", "begun", "relapse"]
    text: str


@dataclass(frozen=True)
class Go(Message):
    """A round begins.

    Attributes:
        round: its number, never used twice in one job.
        node_rank, nnodes: this node's place.
        values: what node 0 offers to this round, MASTER_ADDR and MASTER_PORT among it; filled in by the server.
        history: as of now.
        checks: before ranks start, this node is to be checked, and the coordinator to be told
            (:mod:`.preflight_messages`).
    """

    round: int
    node_rank: int
    nnodes: int
    history: History
    checks: bool = False
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Greet(Message):
    """This process has no place any more: it was not heard for too long. It is to say hello again."""


@dataclass(frozen=True)
class Stop(Message):
    """Leave the round: end the ranks, and say :class:`Ended`.

    Attributes:
        why: for the log.
        timed_out: a collective timed out: the ranks' stacks say where they wait.
        left: nodes that have left or were lost, with why: for the log; what fails now is an echo.
    """

    round: int
    why: str
    history: History
    timed_out: bool = False
    left: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tell(Message):
    """Send the outcome record of this round's failure here: it is the root cause."""

    round: int


@dataclass(frozen=True)
class Again(Message):
    """The round is settled, and there will be another: ``why`` for the log."""

    why: str
    history: History


@dataclass(frozen=True)
class Waits(Message):
    """Nobody is needed now, or others are missing: ``why`` for the log, every 30 s."""

    why: str


@dataclass(frozen=True)
class Gather(Message):
    """All ranks are to save at one step: say your :class:`Floor`."""

    round: int
    call: int


@dataclass(frozen=True)
class Answer(Message):
    """The step at which all ranks save; None where none saves by steps. ``urgent``: because the job is preempted."""

    round: int
    call: int
    step: int | None
    urgent: bool


@dataclass(frozen=True)
class AllSaved(Message):
    """Every rank of the job has saved; a node that is told to stop may go."""

    round: int
    call: int
    urgent: bool


@dataclass(frozen=True)
class TheEnd(Message):
    """The job has ended. Node 0 uploads; the others wait for :class:`Leave`, and bring the ``history`` to the next
    node 0 where this one is lost before."""

    end: End
    uploads: bool
    history: History = field(default_factory=History)


@dataclass(frozen=True)
class Leave(Message):
    """Node 0 has uploaded (``ok``), or could not."""

    ok: bool
    why: str = ""
