"""How often nodes may be lost: one history for all losses, whoever says so. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from .facts import End, History, Spent
from .rules import Rules

_WHY_CHARACTERS = 200
_WHYS = 8
"""Reasons that are kept, the latest. Every node gets all of them with each round."""

RELAPSES = 3
"""Losses of one node that end the job, where the last ones follow each other closely."""


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
        return End("replacements", _relapse(rules, loss))
    return replace(history, version=history.version + 1, losses=losses)


def replacements(losses: Iterable[Spent]) -> int:
    """What losses come to: nodes lost in one round are one, however many a rack has; each further loss of the same
    node is another one."""
    of_node = Counter((loss.round, loss.node) for loss in losses)
    most: dict[int, int] = {}
    for (round_no, _), times in of_node.items():
        most[round_no] = max(times, most.get(round_no, 0))
    return sum(most.values())


def with_one_more(spent: tuple[Spent, ...], new: Spent) -> tuple[Spent, ...]:
    """What was spent of a budget, with its latest unit."""
    older = (replace(each, why="") for each in spent[: -_WHYS + 1])
    return (*older, *spent[-_WHYS + 1 :], replace(new, why=new.why[:_WHY_CHARACTERS]))


def _relapse(rules: Rules, loss: Spent) -> str:
    return (
        f"node {loss.node} was lost {RELAPSES} times, and lived less than {rules.short_life:g} s each time it was "
        f"back: it most likely runs out of memory or disk in the same place again, so it is not replaced any more "
        f"({loss.why}). {rules.about}"
    ).rstrip()
