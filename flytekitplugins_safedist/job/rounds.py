"""The rounds of a job: when one begins, why it is over, what it comes to, and the end. Pure.

The state of a job is here; what its nodes say comes in through :class:`~.deciding.Coordinator`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from . import budgets, forming, settling
from .facts import End, History, Spent
from .membership import Key, Node, Nodes
from .messages import Again, Go, Message, Stop, Tell, TheEnd, Uploaded, Waits
from .rules import Rules, Sent
from .savepoint import SavePoint

_NAMED_RANKS = 256
"""Of those that had returned: the first of a very large job say as much as all."""

_NAMED_HOSTS = 64
"""Of a larger job nobody reads them."""


class Rounds:
    """A job's state, and what follows from it.

    Args:
        rules: of the job.
        process: the id of the process that this is in: node 0's.
        now: seconds, of a clock that only grows; as everywhere here.
    """

    def __init__(self, rules: Rules, process: str, now: float) -> None:
        self.rules = rules
        self.process = process
        self.history = History()
        self.end: End | None = None
        self._nodes = Nodes()
        self._members: tuple[Key, ...] = ()
        self._phase = "forming"  # running, stopping, asking (for the root cause's text), over
        self._since = self._told = self._last = now
        self._absent: dict[Key, str] = {}
        self._unheard: set[Key] = set()  # members that have not said yet how the round ended there
        self._joining = self._somebody_came = self._timed_out = self._left = False
        self._why = ""
        self._brought = 0  # the version of the history that was taken over
        self._departed: set[str] = set()  # processes that have said that they leave
        self._gone_names: dict[Key, str] = {}
        self._undone: set[Key] = set()  # members whose ranks have not returned
        self._places: dict[Key, int] = {}  # members' node_rank in the round
        self._save: SavePoint | None = None
        self._question: settling.Question | None = None
        self._uploaded: Uploaded | None = None
        self._out: list[Sent] = []

    # --- a round ----------------------------------------------------------------------------------------------------
    def _advance(self, now: float) -> None:
        if self._phase == "running":
            if not self._undone:
                self._finish(End("done"))
            elif self._somebody_came and self._newcomer():
                self._joining = True
                self._stop("a node joins", now)
        if self._phase == "stopping" and not self._unheard:
            self._settle(now)
        if self._phase == "forming" and len(self._nodes) >= self.rules.min_nodes:
            here = forming.here(self.rules, self._nodes, self.process)
            hoped = self.history.nodes - len(self._absent)
            if forming.is_enough(self.rules, self._nodes, here, hoped=hoped, waited_since=self._since, now=now):
                self._start(here)

    def _newcomer(self) -> bool:
        """Whether a process waits for a place in a range that has room."""
        self._somebody_came = False
        if self.rules.fixed or len(self._members) >= self.rules.max_nodes:
            return False
        if any(self._nodes[key].state == "done" for key in self._members if key in self._nodes):
            return False
        return any(node.state == "ready" and node.linked and node.key not in self._places for node in self._nodes)

    def _start(self, here: list[Node]) -> None:
        self._members = tuple(node.key for node in here)
        self._places = {key: place for place, key in enumerate(self._members)}
        self._undone = set(self._members)
        self._note(round=self.history.round + 1, nodes=len(here))
        self._phase, self._joining = "running", False
        self._absent.clear()
        self._gone_names.clear()
        self._save = SavePoint(self.history.round, self._members, self._tell_members)
        for node in here:
            node.state, node.stands_in, node.cause, node.returned = "running", False, None, ()
        for node in here:
            self._tell_go(node)

    def _tell_go(self, node: Node) -> None:
        hosts = () if len(self._members) > _NAMED_HOSTS else tuple(self._nodes[key].host for key in self._members)
        self._tell(
            node.process, Go(self.history.round, self._places[node.key], len(self._members), self.history, hosts)
        )

    def _stop(self, why: str, now: float) -> None:
        self._phase, self._since, self._why, self._save = "stopping", now, why, None
        self._unheard = set()
        for key in self._members:
            node = self._nodes.get(key)
            if node is None or node.state not in ("running", "done"):
                continue
            if node.stands_in:  # it has no ranks to end, and may be nobody
                node.state = "ready"
                if not node.process:
                    self._nodes.remove(key)
                continue
            self._unheard.add(key)
            self._tell_stop(node)

    def _tell_stop(self, node: Node) -> None:
        left = {self._name_of(key): why for key, why in self._absent.items()}
        self._tell(node.process, Stop(self.history.round, self._why, self.history, self._timed_out, left))

    # --- how it is settled -----------------------------------------------------------------------------------------
    def _settle_without(self, now: float) -> None:
        """Some have not said how the round ended there. With a cause that speaks for itself they are only slow."""
        found = settling.root(self._causes())
        for key in list(self._unheard):
            node = self._nodes.get(key)
            if node is None:
                continue
            if found is None or found.cause.consequence:
                self._gone(node, "no word from it when the round was over", now)
            else:
                node.state = "absent"
        self._unheard.clear()
        if self._phase == "stopping":
            self._settle(now)

    def _settle(self, now: float) -> None:
        causes = self._causes()
        verdict = settling.settle(
            causes,
            is_excused=bool(self._absent) or self._joining,
            restarts=len(self.history.restarts),
            max_restarts=self.rules.max_restarts,
            returned=self._returned(),
        )
        if isinstance(verdict, settling.Restart):
            self._note(restarts=(*self.history.restarts, Spent(self.history.round, str(verdict.rank), verdict.why)))
            self._again(verdict.why, now)
        elif isinstance(verdict, settling.Free):
            lost = "; ".join(f"{self._name_of(key)}: {why}" for key, why in self._absent.items())
            self._again(f"the round is over ({lost or self._why}); the next begins when every node is there", now)
        else:
            self._phase, self._since, self._question = "asking", now, verdict
            self._ask_next(now)

    def _causes(self) -> list[settling.Failing]:
        nodes = [self._nodes[key] for key in self._members if key in self._nodes]
        return [
            settling.Failing(node.cause, node.process, self._name(node)) for node in nodes if node.cause is not None
        ]

    def _returned(self) -> tuple[int, ...]:
        nodes = [self._nodes[key] for key in self._members if key in self._nodes]
        return tuple(sorted(rank for node in nodes for rank in node.returned))[:_NAMED_RANKS]

    def _again(self, why: str, now: float) -> None:
        self._phase, self._since, self._told, self._timed_out = "forming", now, now, False
        for node in self._nodes:
            node.cause = None
            self._tell(node.process, Again(why, self.history))

    def _ask_next(self, now: float) -> None:
        question = self._question
        if question is None:
            return
        self._since = now
        found = question.next(lambda process: self._nodes.of_process(process) is not None)
        if found is None:
            self._finish(End("lost", question.unanswered()))
        else:
            self._tell(found.process, Tell(self.history.round))

    # --- losses, and the end ----------------------------------------------------------------------------------------
    def _gone(self, node: Node, why: str, now: float) -> None:
        """A process is lost, or leaves."""
        if self.end is not None:
            self._nodes.remove(node.key)
            return
        is_member = node.key in self._places and self._phase in ("running", "stopping")
        if is_member and self._phase == "running" and node.state == "done" and node.process != self.process:
            if self._save is not None:
                self._save.done(node.key)
            self._tell(self.process, Waits(f"{self._name(node)} lost after its ranks had succeeded: the round goes on"))
            self._nodes.vacate(node)
            return
        self._nodes.remove(node.key)
        text = f"{self._name(node)}: {why}"
        if is_member:
            self._absent[node.key] = why
            self._gone_names[node.key] = self._name(node)
            self._unheard.discard(node.key)
        goes_on = self._lose(self._loss_of(node, f"{node.process}/{self.history.round}", text, now))
        if goes_on and is_member and self._phase == "running":
            self._stop(text, now)

    def _loss_of(self, node: Node, who: str, why: str, now: float) -> Spent:
        return Spent(self.history.round, who, why, str(node.key), round(now - node.since, 1))

    def _lose(self, loss: Spent) -> bool:
        """Count a loss, once; False where it ends the job."""
        if self.end is not None:
            return False
        counted = budgets.with_loss(self.history, self.rules, loss)
        if isinstance(counted, End):
            self._finish(counted)
            return False
        self.history = counted
        return True

    def _too_few(self) -> None:
        self._finish(forming.too_few(self.rules, self._nodes, self.history))

    def _say_who_is_missing(self, waited: float) -> None:
        line = forming.wait_line_of(self.rules, self._nodes, waited)
        for node in self._nodes:
            self._tell(node.process, Waits(line))

    def _finish(self, end: End) -> None:
        if self.end is not None:
            return
        self.end, self._phase = end, "over"
        if end.kind == "failed":
            self._note(end=end)
        for node in self._nodes:
            self._tell(node.process, TheEnd(end, uploads=node.process == self.process, history=self.history))

    # --- small things ------------------------------------------------------------------------------------------------
    def _saving(self, round_no: int, act: Callable[[SavePoint], None]) -> None:
        if self._save is not None and self._phase == "running" and round_no == self.history.round:
            act(self._save)

    def _note(self, **changes: Any) -> None:
        self.history = replace(self.history, version=self.history.version + 1, **changes)

    def _name(self, node: Node) -> str:
        return f"node {node.key}" if self.rules.fixed else f"the node on {node.host}"

    def _name_of(self, key: Key) -> str:
        node = self._nodes.get(key)
        return self._gone_names.get(key, f"node {key}") if node is None else self._name(node)

    def _tell(self, process: str, message: Message) -> None:
        if process:
            self._out.append((process, message))

    def _tell_members(self, message: Message) -> None:
        for key in self._members:
            node = self._nodes.get(key)
            if node is not None:
                self._tell(node.process, message)
