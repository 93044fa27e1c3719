"""The books of a job: what its rounds have come to, what that costs, and the end that follows. Values and pure
functions.

Every node has a copy, and merging two is a union: whoever leads next comes to the same end (:func:`judge`). One round
costs one thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mashumaro.mixins.dict import DataClassDictMixin

from ..texts import human
from .rules import Rules

_STANDSTILL = 3
"""Rounds in a row that fail without having come further, after which the job ends."""

_RELAPSES = 3
"""Losses of one node that end the job, where the last ones follow each other closely."""

_WHY_CHARACTERS = 200

_EARLIER = 8
"""Rounds before the last one that a verdict has a line of."""

_RANKS = 256
"""Ranks that are named as those that had returned: the first of a very large job say as much as all."""


@dataclass(frozen=True, order=True)
class Leader(DataClassDictMixin):
    """Who leads a job: the term, which grows with each leader, and the process. Of two, the greater one leads."""

    term: int
    process: str


@dataclass(frozen=True, order=True)
class Round(DataClassDictMixin):
    """Which round: its leader, and its number. The later one is the greater; none is ever used twice."""

    leader: Leader
    number: int

    def __str__(self) -> str:
        return f"{self.leader.term}/{self.leader.process}/{self.number}"


NO_LEADER = Leader(0, "")
NO_ROUND = Round(NO_LEADER, -1)


@dataclass(frozen=True)
class Memory(DataClassDictMixin):
    """What a node's container uses of its memory, and its limit; in bytes."""

    used: int
    limit: int

    @property
    def is_full(self) -> bool:
        """A node that is gone now was most likely ended for it. The kernel charges by pages in batches."""
        return self.limit > 0 and self.used >= 0.95 * self.limit

    def __str__(self) -> str:
        return f"{human(self.used)} of {human(self.limit)} in use"


@dataclass(frozen=True)
class Cause(DataClassDictMixin):
    """The first failure on a node.

    Attributes:
        round: in which; :data:`NO_ROUND` where the node can start no rank at all.
        rank: of the job; -1 for the node itself.
        name: of the exception, or of the end.
        text: all that is to be said of it, as the node's agent has written it; at most :attr:`.Rules.text_bytes`. ""
            in the books of a job that has begun another round since.
        time_ns: when, in nanoseconds since the epoch, by its node's clock.
        echo: how far it is from a cause of its own; 0 for one.
        repeats: it would come again: no restart is spent on it.
        is_timeout: a collective timed out.
        step: at which the rank was, where it saves by steps; -1 where nobody knows.
        machine: that it was on.
        is_machines: that is known to be broken: the next start of ranks there fails as well.
        where: its node and machine, for people.
    """

    round: Round
    rank: int
    name: str
    text: str
    time_ns: int
    echo: int = 0
    repeats: bool = False
    is_timeout: bool = False
    step: int = -1
    machine: str = ""
    is_machines: bool = False
    where: str = ""

    @property
    def order(self) -> tuple[int, int, int]:
        """The smallest of a round is its root cause: an own cause before every echo, then the earliest."""
        return (self.echo, self.time_ns, self.rank)

    @property
    def place(self) -> str:
        """The same for a failure that comes again: its rank, its error, its step; "" where the step is unknown."""
        return f"rank {self.rank} with {self.name} at step {self.step}" if self.step >= 0 else ""

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.rank >= 0 else "a node"
        return f"{who} failed ({self.name})" + (f" on {self.where}" if self.where else "")


@dataclass(frozen=True)
class Loss(DataClassDictMixin):
    """A node that was lost in a round.

    Attributes:
        node: which, for people, and to tell it from others.
        why: what was seen.
        life: seconds from its first word until then, where it had been in no round before; -1 where nobody knows.
        memory: its last word on that.
    """

    node: str
    why: str
    life: float = -1.0
    memory: Memory | None = None

    @property
    def is_explained(self) -> bool:
        """Its container was most likely ended for its memory."""
        return self.memory is not None and self.memory.is_full

    def __str__(self) -> str:
        full = f"; its memory was full ({self.memory})" if self.is_explained else ""
        return f"{self.node}: {self.why}{full}"


@dataclass(frozen=True)
class Outcome(DataClassDictMixin):
    """How a round ended.

    Attributes:
        round: which.
        cause: the nearest to its root cause that is known.
        loss: a node was lost in it.
        free: what ended it, and costs nothing.
        without: a machine that takes no part any more, from here on.
        returned: ranks that had returned by then; the first ones.
    """

    round: Round
    cause: Cause | None = None
    loss: Loss | None = None
    free: str = ""
    without: str = ""
    returned: tuple[int, ...] = ()

    @property
    def costs(self) -> Literal["restart", "replacement", "nothing"]:
        """One round costs one thing. An echo is explained by what was lost, or by what ended the round."""
        if self.cause is not None and self.cause.echo == 0:
            return "restart"
        if self.loss is not None:
            return "replacement"
        return "nothing" if self.cause is None or self.free else "restart"

    @property
    def why(self) -> str:
        """What ended it, in a few words."""
        if self.costs == "restart":
            return str(self.cause)
        return str(self.loss) if self.loss is not None else self.free

    def merged(self, other: Outcome) -> Outcome:
        """What both know. Of one cause in two wordings, the longer one stays; ours, where its text is gone; and of two
        losses that are explained."""
        ours, theirs = self.cause, other.cause
        is_theirs = theirs is not None and (
            ours is None
            or theirs.order < ours.order
            or (theirs.order == ours.order and 0 < len(ours.text) < len(theirs.text))
        )
        return replace(
            self,
            cause=theirs if is_theirs else ours,
            loss=max(filter(None, (self.loss, other.loss)), key=lambda loss: loss.is_explained, default=None),
            free=self.free or other.free,
            without=self.without or other.without,
            returned=tuple(sorted({*self.returned, *other.returned}))[:_RANKS],
        )

    def of_the_past(self) -> Outcome:
        """Without the texts, which are not needed any more: it was restarted."""
        cause, loss = self.cause, self.loss
        cause = cause and replace(cause, text="")
        loss = loss and replace(loss, why=loss.why[:_WHY_CHARACTERS])
        return replace(self, cause=cause, loss=loss, returned=())


@dataclass(frozen=True)
class Books(DataClassDictMixin):
    """What a job knows of itself.

    Attributes:
        round: the last one that began.
        size: how many nodes take part in it.
        checks: how many rounds were checks of the nodes, and found them fit; 0 where they are not checked, or not yet.
        outcomes: of rounds that are over, and of the last one as soon as anything is known; in order.
    """

    round: Round = NO_ROUND
    size: int = 0
    checks: int = 0
    outcomes: tuple[Outcome, ...] = ()

    @property
    def number(self) -> int:
        """Of the last round, as ranks and people count: the checks before the first rank are none."""
        return self.round.number - self.checks

    @property
    def following(self) -> int:
        """Number of the next round: of no round that anybody has been in, whoever led it."""
        return 1 + max(each.number for each in (self.round, *(outcome.round for outcome in self.outcomes)))

    @property
    def last(self) -> Outcome:
        """Of the last round."""
        return self.outcome(self.round)

    @property
    def without(self) -> frozenset[str]:
        """Machines that take no part any more."""
        return frozenset(each.without for each in self.outcomes if each.without)

    def outcome(self, round_: Round) -> Outcome:
        """Of a round; an empty one where nothing is known."""
        return next((each for each in self.outcomes if each.round == round_), Outcome(round_))

    def costing(self, what: Literal["restart", "replacement", "nothing"]) -> list[Outcome]:
        """Outcomes that cost this, in order."""
        return [each for each in self.outcomes if each.costs == what]

    @property
    def restarts(self) -> list[Outcome]:
        """After which ranks were started again."""
        return [each for each in self.costing("restart") if each.round < self.round]

    def restart_text(self, outcome: Outcome, most: int) -> str:
        """That ranks start again after a round, with how many restarts of *most* are spent by then."""
        count = sum(each.round <= outcome.round for each in self.costing("restart"))
        who = replace(outcome.cause, where="") if outcome.cause is not None else outcome.why
        without = outcome.cause.where if outcome.cause is not None and outcome.without else ""
        out = f", without {without}, whose machine is most likely at fault" if without else ""
        return f"{who}; all ranks start again: restart {count} of {most}{out}"

    @property
    def losses(self) -> list[Outcome]:
        """In which a node was lost, and that cost a replacement."""
        return self.costing("replacement")

    def earlier(self, round_: Round) -> list[str]:
        """How the latest rounds before one ended, in a line each."""
        ended = [each for each in self.outcomes if each.round < round_ and each.why]
        return [f"round {each.round.number - self.checks} ended: {each.why}" for each in ended[-_EARLIER:]]

    def noting(self, outcome: Outcome) -> Books:
        """With what is known of a round; the same object where it was known."""
        before = self.outcome(outcome.round)
        after = before.merged(outcome)
        if after == before:
            return self
        others = [each for each in self.outcomes if each.round != outcome.round]
        return replace(self, outcomes=tuple(sorted([*others, after], key=lambda each: each.round)))

    def merged(self, other: Books) -> Books:
        """What both know; the same object where that is nothing new."""
        if other is self or other == self:
            return self
        books = self
        if other.round > self.round or other.checks > self.checks:
            last = max(self, other, key=lambda each: each.round)
            books = replace(self, round=last.round, size=last.size, checks=max(self.checks, other.checks))
        for outcome in other.outcomes:
            books = books.noting(outcome)
        return books

    def beginning(self, round_: Round, size: int) -> Books:
        """With a new round."""
        return replace(self, round=round_, size=size, outcomes=tuple(each.of_the_past() for each in self.outcomes))


# --- the end ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Verdict(DataClassDictMixin):
    """How the job ends.

    Attributes:
        kind: ``success``: every rank of a round has returned. ``failed``: for a cause, of a rank or of a node that
            cannot begin. The others are the platform's: ``unfit``: a node was not found fit; ``missing``: nodes did not
            come together; ``lost``: nodes were lost too often; ``memory``: either, and the memory of the one that was
            lost last was full; ``stopped``: the only pod of the job was told to stop.
        text: what happened; of a cause, why there is no further restart.
        round: the last one.
        cause: of ``failed``.
        code: of ``unfit``: the error's.
        returned: ranks that had returned before, where the cause is only an echo.
        nodes: that did not come.
    """

    kind: Literal["success", "failed", "unfit", "missing", "lost", "memory", "stopped"]
    text: str = ""
    round: Round = NO_ROUND
    cause: Cause | None = None
    code: str = ""
    returned: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()


def judge(books: Books, term: int, rules: Rules) -> Verdict | None:
    """The end that the books come to under the leader of a term; None where another round may begin.

    Whoever has the same books says the same. A leader that was lost before it began any round costs a replacement, too:
    its term is in no outcome. Where nobody knows yet whether all outcomes are there, the term is 1.
    """
    restarts = books.costing("restart")
    for count, outcome in enumerate(restarts):
        why = why_no_restart(restarts[:count], outcome, rules)
        if why:
            whole = [each for each in (outcome, *reversed(restarts)) if each.cause is not None and each.cause.text]
            last = whole[0] if whole else outcome  # the text of one that was restarted is gone: another came late
            returned = last.returned if last.cause is not None and last.cause.echo else ()
            return Verdict("failed", why, books.round, last.cause, returned=returned)
    return None if rules.is_alone else _too_many_losses(books, term, rules)


def why_no_restart(before: Sequence[Outcome], outcome: Outcome, rules: Rules) -> str:
    """Why no restart is spent on a round that failed for a cause, after the restarts before; "" where one is."""
    cause, goes_on = outcome.cause, bool(outcome.without)
    if cause is None:
        return ""
    causes = [each.cause for each in before if each.cause is not None]
    steps = [each.step for each in (*causes, cause)][-_STANDSTILL:]
    if cause.repeats and not (goes_on and cause.is_machines):
        why = f"the same {cause.name} would come again"
    elif rules.max_restarts == 0:
        why = "max_restarts=0"
    elif len(before) >= rules.max_restarts:
        why = f"all {rules.max_restarts} restart(s) of max_restarts are spent"
        if all(each.name == cause.name for each in causes):
            why += f", and it was {cause.name} each time"
    elif cause.place and any(each.place == cause.place for each in causes):
        why = f"{cause.place} has failed before: it is the code or the data, and a restart cannot help"
    elif len(steps) == _STANDSTILL and min(steps) >= 0 and max(steps) == steps[0] and not goes_on:
        why = f"{_STANDSTILL} rounds in a row have failed at or before step {steps[0]}: restarts bring no progress"
    else:
        return ""
    if cause.is_machines:
        return f"{why}. It was on {cause.where}: keep the next attempt off that machine (kubectl cordon)"
    if not is_suspect(before, cause, rules):
        return why
    errors = ", ".join(list(dict.fromkeys(each.name for each in (*causes, cause)))[:8])
    return (
        f"{why}. Every failure so far was on {cause.where}, with different errors ({errors}): the machine may be at "
        "fault; keep the next attempt off it (kubectl cordon) if they make no sense for the code"
    )


def is_suspect(before: Sequence[Outcome], cause: Cause, rules: Rules) -> bool:
    """Whether the machine of a cause is most likely at fault: it is known to be; or every failure so far, of several
    nodes, was there, with different errors. What was on machines that take no part any more does not count."""
    gone = {each.without for each in before}
    others = [each.cause for each in before if each.cause is not None and each.cause.machine not in gone]
    differ = not rules.is_alone and any(each.name != cause.name for each in others)
    return cause.is_machines or (differ and all(each.machine == cause.machine for each in others))


def _too_many_losses(books: Books, term: int, rules: Rules) -> Verdict | None:
    losses = [each.loss for each in books.costing("replacement") if each.loss is not None]
    terms = {each.round.leader.term for each in books.outcomes} | {books.round.leader.term}
    idle = sum(each not in terms for each in range(1, term))
    free = max(0, len(books.costing("nothing")) - rules.most_free)
    last = losses[-1] if losses else Loss("node 0", "it was lost before a round began")
    kind: Literal["memory", "lost"] = "memory" if last.is_explained else "lost"
    lives = [each.life for each in losses if each.node == last.node][-_RELAPSES:]
    if rules.is_fixed and len(lives) == _RELAPSES and all(0 <= life < rules.short_life for life in lives[1:]):
        short = f"{rules.short_life:g} s"
        text = (
            f"{last.node} was lost {_RELAPSES} times, and lived less than {short} each time it was back: "
            f"most likely it runs out of memory or disk in the same place again, and is not replaced any more ({last})"
        )
        if last.memory is not None:
            text += f". Its container's memory is limited to {human(last.memory.limit)}"
        return Verdict(kind, text, books.round)
    if len(losses) + idle + free <= rules.max_replacements:
        return None
    others = [f"node 0 was lost {idle} time(s) before it began a round"] if idle else []
    others += [f"{free} round(s) too many ended for nodes that joined, or node 0 that stood still"] if free else []
    text = "; ".join([str(last), *others, f"and max_replacements={rules.max_replacements} are used up"])
    return Verdict(kind, text, books.round)
