"""What a job's coordinator goes by, and what it knows: failures, what was spent, how the job has ended. Values.

The two budgets, and what counts against them, are here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from mashumaro.mixins.dict import DataClassDictMixin

from ..config.options import Preflight

_WHY_CHARACTERS = 200
_WHYS = 8
"""Reasons that are kept, the latest. Every node gets all of them with each round."""

STANDSTILL = 3
"""Rounds in a row that fail without having come further, after which the job ends."""

RELAPSES = 3
"""Losses of one node that end the job, where the last ones follow each other closely."""

EndKind = Literal["done", "failed", "preflight", "timeout", "lost", "replacements"]
"""How a job ends. ``done``: every rank returned. ``failed``: a rank's failure, or a node that cannot begin. The others
are the platform's: a node was not fit, nodes never came, never came back, or were lost too often."""


@dataclass(frozen=True)
class Spent(DataClassDictMixin):
    """One restart, or one replacement, that was taken from the job's budget.

    Attributes:
        round: in which round.
        who: a restart: the rank; a loss: the id of the process that was lost and, as it may come back, the round in
            which it was; of a coordinator that is gone its id alone. Each is counted once, whoever says so. That of
            nodes which could not hear node 0, or all could not be heard by it, is node 0's: one for all of them.
        why: for logs and errors.
        node: a loss: whose place it was; a restart: the machine on which the rank was, as in :attr:`History.excluded`.
        lived: a loss: seconds from the process's hello to its loss; negative where nobody knows.
        error, step: a restart: the error that it was for, and where, as in :class:`Cause`.
    """

    round: int
    who: str
    why: str
    node: str = ""
    lived: float = -1.0
    error: str = ""
    step: int = -1

    @property
    def place(self) -> str:
        """A restart: as :attr:`Cause.place`."""
        return _place(self.who, self.error, self.step)


@dataclass(frozen=True)
class Cause(DataClassDictMixin):
    """A rank's failure, as far as the coordinator needs it to compare; its text is asked for afterwards.

    Attributes:
        echo: how far it is from a cause of its own (:attr:`..failures.EndOfRank.echo`): 0 for a cause.
        consequence: whether it may be only the echo of another rank's (:attr:`..failures.EndOfRank.is_echo`).
        time_ns, rank: when, by its node's clock, and where.
        name: of the exception or of the end, for logs.
        repeats: it would come again: no restart is spent on it.
        timed_out: a collective timed out.
        step: at which the rank was, where it saves by steps; -1 where nobody knows.
        broken: its machine is known to be: the next start of ranks there fails as well.
    """

    echo: int
    consequence: bool
    time_ns: int
    rank: int
    name: str
    repeats: bool = False
    timed_out: bool = False
    step: int = -1
    broken: bool = False

    @property
    def place(self) -> str:
        """The same for a failure that comes again: its rank, its error, and its step; "" where the step is unknown."""
        return _place(str(self.rank), self.name, self.step)


def _place(rank: str, error: str, step: int) -> str:
    return f"rank {rank} with {error} at step {step}" if step >= 0 else ""


@dataclass(frozen=True)
class End(DataClassDictMixin):
    """How the job has ended.

    Attributes:
        kind: see :data:`EndKind`.
        text: what happened, for errors.
        outcome: ``failed``: the root cause's outcome record, as JSON text; "" for the others.
        reason: ``failed``: why there is no further restart; ``preflight``: the error's code.
        disk: ``failed``: what scratch held on the root cause's node.
        returned: ``failed`` with an echo as cause: ranks that had returned before.
        missing: names of the nodes that were not there.
    """

    kind: EndKind
    text: str = ""
    outcome: str = ""
    reason: str = ""
    disk: str = ""
    returned: tuple[int, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class History(DataClassDictMixin):
    """What survives the coordinator: every node has a copy. One process writes it, so the highest version is the truth.

    Attributes:
        version: grows with each change.
        round: the last round that began; -1 before the first.
        nodes: how many took part in it.
        restarts, losses: what was taken from ``max_restarts`` and ``max_replacements``.
        excluded: machines that take no part any more: the Kubernetes node's name; of a node that does not know it, its
            host's name and its place.
        checked: the nodes were found fit, before the first rank.
        end: how the job has ended, while that is not known to be uploaded.
    """

    version: int = 0
    round: int = -1
    nodes: int = 0
    restarts: tuple[Spent, ...] = ()
    losses: tuple[Spent, ...] = ()
    excluded: tuple[str, ...] = ()
    checked: bool = False
    end: End | None = None


@dataclass(frozen=True)
class Rules:
    """What a job's coordinator goes by. Times are in seconds.

    Attributes:
        run: names the job.
        min_nodes, max_nodes: its size.
        fixed: whether each node has a node_rank of its own, and all are needed.
        max_restarts, max_replacements: the budgets of the whole job.
        timeout: for all nodes to arrive, for each round anew.
        heartbeat: of silence after which a node is lost.
        settle: that a node waits for the cause of what may be an echo.
        stop: that a node's ranks have to end by themselves.
        kill: that the kernel may take to end those that did not.
        last_call: that a range waits for further nodes when ``min_nodes`` are there.
        about: what else to say of a node that keeps dying: what its container is limited to.
        grace: that a lost connection may take to come back.
        short_life: a node that is lost three times, and lives shorter than this each time it is back, is not replaced
            again. The kubelet, too, forgets a container's crashes when it has run for ten minutes.
        preflight: what the nodes are checked for before the first rank; None: they are not.
    """

    run: str
    min_nodes: int
    max_nodes: int
    fixed: bool
    max_restarts: int = 0
    max_replacements: int = 10
    timeout: float = 900.0
    heartbeat: float = 60.0
    settle: float = 3.0
    stop: float = 5.0
    kill: float = 30.0
    last_call: float = 30.0
    about: str = ""
    grace: float = 3.0
    short_life: float = 600.0
    preflight: Preflight | None = None

    @property
    def patience(self) -> float:
        """How long the nodes of a round that is over may take to say how it ended there: all that may be waited for,
        one after the other. A silence that is a loss, a connection that comes back, an echo's cause, ranks that end,
        ranks that are killed."""
        return self.heartbeat + self.grace + self.settle + self.stop + self.kill

    @property
    def most_processes(self) -> int:
        """How many processes may ever join a range: its nodes, and for each of them all replacements."""
        return self.max_nodes * (1 + self.max_replacements)


def is_machines(history: History, rules: Rules, cause: Cause, machine: str) -> bool:
    """Whether the machine is most likely at fault: it is known to be; or every failure so far, of several nodes, was
    there, with different errors. What was on machines that take no part any more does not count."""
    others = [each for each in history.restarts if each.node not in history.excluded]
    differ = rules.max_nodes > 1 and any(each.error != cause.name for each in others)
    return cause.broken or (differ and all(each.node == machine for each in others))


def why_no_restart(
    history: History, rules: Rules, cause: Cause, where: tuple[str, str], *, goes_on: bool = False
) -> str:
    """Why no restart is spent on a failure; "" where one is.

    Args:
        history: the restarts that were spent.
        rules: of the job.
        cause: the failure.
        where: its machine, and the same with its node, for people.
        goes_on: the next round would be on other machines.
    """
    restarts = history.restarts
    steps = [*(each.step for each in restarts), cause.step][-STANDSTILL:]
    if cause.repeats and not (goes_on and cause.broken):
        why = f"the same {cause.name} would come again"
    elif rules.max_restarts == 0:
        why = "max_restarts=0"
    elif len(restarts) >= rules.max_restarts:
        why = f"all {rules.max_restarts} restart(s) of max_restarts are spent"
        if all(each.error == cause.name for each in restarts):
            why += f", and it was {cause.name} each time"
    elif cause.place and any(each.place == cause.place for each in restarts):
        why = f"{cause.place} has failed before: it is the code or the data, and a restart cannot help"
    elif len(steps) == STANDSTILL and min(steps) >= 0 and max(steps) == steps[0] and not goes_on:
        why = f"{STANDSTILL} rounds in a row have failed at or before step {steps[0]}: restarts bring no progress"
    else:
        return ""
    if cause.broken:
        why += f". It was on {where[1]}: keep the next attempt off that machine (kubectl cordon)"
    elif is_machines(history, rules, cause, where[0]):
        errors = list(dict.fromkeys([*(each.error for each in restarts), cause.name]))
        why += f". Every failure so far was on {where[1]}, with different errors ({', '.join(errors[:_WHYS])}): the"
        why += (
            " machine may be at fault; keep the next attempt off it (kubectl cordon) if they make no sense for the code"
        )
    return why


def earlier_rounds(history: History, round_no: int) -> list[str]:
    """How the latest rounds before that one ended, in a line each."""
    failed = [(each.round, f"rank {each.who} failed ({each.error})") for each in history.restarts]
    lost = [(each.round, each.why) for each in history.losses if each.why]
    ended = sorted({each for each in failed + lost if each[0] < round_no})
    return [f"round {number} ended: {why}" for number, why in ended[-_WHYS:]]


def with_loss(history: History, rules: Rules, loss: Spent) -> History | End:
    """The history with this loss, which is counted once; or the end of the job, where the budget is spent or a node
    dies in the same place again and again."""
    if rules.max_nodes == 1 or any(spent.who == loss.who for spent in history.losses):
        return history
    losses = with_one_more(history.losses, loss)
    if replacements(losses) > rules.max_replacements:
        return End("replacements", f"{loss.why}; and {rules.max_replacements} replacements are used up")
    lives = [spent.lived for spent in losses if spent.node == loss.node][-RELAPSES:]
    if rules.fixed and len(lives) == RELAPSES and all(0 <= life < rules.short_life for life in lives[1:]):
        text = (
            f"node {loss.node} was lost {RELAPSES} times, and lived less than {rules.short_life:g} s each time it was "
            f"back: it most likely runs out of memory or disk in the same place again, so it is not replaced any more "
            f"({loss.why}). {rules.about}"
        )
        return End("replacements", text.rstrip())
    return replace(history, version=history.version + 1, losses=losses)


def replacements(losses: Iterable[Spent]) -> int:
    """What losses come to: nodes lost in one round are one, however many a rack has; each further loss of the same
    node is another one."""
    most: dict[int, int] = {}
    for (round_no, _), times in Counter((loss.round, loss.node) for loss in losses).items():
        most[round_no] = max(times, most.get(round_no, 0))
    return sum(most.values())


def with_one_more(spent: tuple[Spent, ...], new: Spent) -> tuple[Spent, ...]:
    """What was spent of a budget, with its latest unit."""
    older = (replace(each, why="") for each in spent[: -_WHYS + 1])
    return (*older, *spent[-_WHYS + 1 :], replace(new, why=new.why[:_WHY_CHARACTERS]))
