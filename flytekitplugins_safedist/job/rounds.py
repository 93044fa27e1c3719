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

_DONE_LOST = "lost after its ranks had returned"


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
        self._failures: dict[Key, settling.Failing] = {}  # that members have reported, also of those that are gone
        self._returned: set[int] = set()  # ranks that had returned when the round ended otherwise
        self._done_lost: dict[Key, Spent] = {}  # lost after their ranks had returned: not paid for unless others fail
        self._joining = self._somebody_came = self._timed_out = self._left = False
        self._why = ""
        self._brought = 0  # the version of the history that was taken over
        self._highest = -1  # the highest round that anybody has been in
        self._paused = float("-inf")  # when this process had stood still for longer than the others wait for it
        self._departed: dict[str, str] = {}  # processes that take no part any more, and why
        self._was_alone = False
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
            hoped = self.history.nodes - len(self._absent.keys() | self._done_lost.keys())
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
        self._note(round=max(self.history.round, self._highest) + 1, nodes=len(here))
        self._phase, self._joining, self._timed_out = "running", False, False
        for facts in (self._absent, self._gone_names, self._failures, self._returned, self._done_lost):
            facts.clear()
        self._save = SavePoint(self.history.round, self._members, self._tell_members)
        for node in here:
            node.state, node.stands_in, node.round = "running", False, self.history.round
        for node in here:
            self._tell_go(node)

    def _tell_go(self, node: Node) -> None:
        place, nnodes = self._places[node.key], len(self._members)
        self._tell(node.process, Go(self.history.round, place, nnodes, self.history))

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
        found = settling.root(list(self._failures.values()))
        for key in list(self._unheard):
            node = self._nodes.get(key)
            if node is None:
                continue
            if found is None or found.cause.consequence:
                self._gone(node, "no word from it when the round was over", now, is_cut=self._was_alone)
            else:
                node.state = "absent"
        self._unheard.clear()
        if self._phase == "stopping":
            self._settle(now)

    def _settle(self, now: float) -> None:
        failures = list(self._failures.values())
        first = settling.root(failures)
        if first is not None and first.cause.consequence and not self._absent and not self._joining:
            # They may be echoes of a loss that had cost nothing so far.
            self._absent.update((key, _DONE_LOST) for key, loss in self._done_lost.items() if self._lose(loss))
        if self.end is not None:
            return
        verdict = settling.settle(
            failures,
            is_excused=bool(self._absent) or self._joining,
            restarts=len(self.history.restarts),
            max_restarts=self.rules.max_restarts,
            returned=tuple(sorted(self._returned))[:_NAMED_RANKS],
        )
        if isinstance(verdict, settling.Restart):
            spent = Spent(self.history.round, str(verdict.rank), verdict.why)
            self._note(restarts=budgets.with_one_more(self.history.restarts, spent))
            self._again(verdict.why, now)
        elif isinstance(verdict, settling.Free):
            lost = "; ".join(f"{self._name_of(key)}: {why}" for key, why in self._absent.items())
            self._again(f"the round is over ({lost or self._why}); the next begins when every node is there", now)
        else:
            self._phase, self._since, self._question = "asking", now, verdict
            self._ask_next(now)

    def _again(self, why: str, now: float) -> None:
        self._phase, self._since, self._told = "forming", now, now
        for node in self._nodes:
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
    def _gone(self, node: Node, why: str, now: float, *, is_cut: bool = False) -> None:
        """A process is lost, or leaves; ``is_cut``: most likely it is node 0 that nobody can reach."""
        if self.end is not None:
            self._nodes.remove(node.key)
            return
        if self._phase == "asking" and self._question is not None:  # the job has failed, and ends for that alone
            self._nodes.remove(node.key)
            if self._question.asked == node.process:
                self._ask_next(now)
            return
        if self._phase == "running" and node.state == "done":
            if node.process:
                self._done_lost.setdefault(node.key, self._loss_of(node, why, now))
                text = f"{self._name(node)} lost after its ranks had succeeded: the round goes on"
                self._tell(self.process, Waits(text))
            self._nodes.vacate(node)
            return
        self._nodes.remove(node.key)
        self._miss(node, why, now, is_cut=is_cut)

    def _miss(self, node: Node, why: str, now: float, *, is_cut: bool, is_counted: bool = True) -> None:
        """A node is not there any more, or not in its round: such a round is over, and that is counted."""
        is_member = node.key in self._places
        if is_member:
            self._absent[node.key] = why
            self._gone_names[node.key] = self._name(node)
            self._unheard.discard(node.key)
        loss = self._loss_of(node, why, now)
        if is_cut:
            loss = replace(loss, who=f"{self.process}/{self.history.round}", lived=-1.0)
        goes_on = self._lose(loss) if is_counted else self.end is None
        if goes_on and is_member and self._phase == "running":
            self._stop(loss.why, now)

    def _loss_of(self, node: Node, why: str, now: float) -> Spent:
        # The others tell of a coordinator that they have left; and of it alone.
        who = node.process if node.process == self.process else f"{node.process}/{self.history.round}"
        lived = round(now - node.since, 1) if node.is_new else -1.0
        return Spent(self.history.round, who, f"{self._name(node)}: {why}", str(node.key), lived)

    def _lose(self, loss: Spent) -> bool:
        """Count a loss, once; False where it ends the job."""
        if self.end is not None:
            return False
        counted = budgets.with_loss(self.history, self.rules, loss)
        if isinstance(counted, End):
            if not self._left:  # nobody would upload it: the next coordinator comes to the same end
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
