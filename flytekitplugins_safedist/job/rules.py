"""What a job's coordinator goes by: the size, the times, and the two budgets with what counts against them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .facts import End, History, Spent

_WHY_CHARACTERS = 200
_WHYS = 8
"""Reasons that are kept, the latest. Every node gets all of them with each round."""

RELAPSES = 3
"""Losses of one node that end the job, where the last ones follow each other closely."""


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
        stop: that ending a node's ranks may take.
        last_call: that a range waits for further nodes when ``min_nodes`` are there.
        about: what else to say of a node that keeps dying: what its container is limited to.
        grace: that a lost connection may take to come back.
        short_life: a node that is lost three times, and lives shorter than this each time it is back, is not replaced
            again. The kubelet, too, forgets a container's crashes when it has run for ten minutes.
    """

    run: str
    min_nodes: int
    max_nodes: int
    fixed: bool
    max_restarts: int = 0
    max_replacements: int = 10
    timeout: float = 900.0
    heartbeat: float = 60.0
    stop: float = 5.0
    last_call: float = 30.0
    about: str = ""
    grace: float = 3.0
    short_life: float = 600.0

    @property
    def patience(self) -> float:
        """How long the nodes of a round that is over may take to say how it ended there."""
        return self.stop + max(5.0, min(15.0, self.heartbeat))

    @property
    def most_processes(self) -> int:
        """How many processes may ever join a range: its nodes, and for each of them all replacements."""
        return self.max_nodes * (1 + self.max_replacements)


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
