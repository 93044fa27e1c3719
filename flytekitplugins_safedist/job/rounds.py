"""The rounds of a job: when one begins, why it is over, what it comes to, and the end. Pure.

The state of a job is here; what its nodes say comes in through :class:`~.coordinator.Coordinator`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..preflight.judge import Judged, NodeReport, judge
from . import messages as m
from .facts import Cause, End, EndKind, History, Rules, Spent, is_machines, why_no_restart, with_loss, with_one_more
from .inquiry import Inquiry
from .nodes import Key, Node, Nodes, listed, wait_line
from .saving import SavePoint

_NAMED_RANKS = 256
"""Of those that had returned: the first of a very large job say as much as all."""

_NAMED_TROUBLES = 4

_DONE_LOST = "lost after its ranks had returned"

EXCLUDED = "this node takes no part any more: its machine is most likely at fault, and the job goes on without it"


@dataclass(frozen=True)
class Failing:
    """The first failure on one node.

    Attributes:
        round: in which.
        cause: as it is compared.
        process: which.
        node: how it is called.
        machine, where: its machine, as in :class:`Node`.
        outcome: its record, where it was told at once; "" where only the node itself has it.
    """

    round: int
    cause: Cause
    process: str
    node: str
    machine: str
    where: str
    outcome: str = ""

    @property
    def order(self) -> tuple[int, int, int]:
        """The smallest is the root cause: a failure that speaks for itself, the earliest, the lowest rank."""
        return (self.cause.echo, self.cause.time_ns, self.cause.rank)


@dataclass
class Round:
    """What is known of one round.

    Attributes:
        members: its nodes, in the order of their places, and how each is called.
        waits_for: members whose ranks have not returned; when it is over, those that have not said how it ended there.
        absent: members that are lost or have left, and why.
        done_lost: members that were lost after their ranks had returned: not paid for unless others fail.
        failures: that members have reported, also of those that are gone; by process.
        returned: ranks that had returned when it ended otherwise.
        why: it is over.
        timed_out: a collective timed out.
        is_joined: it is over because a node joins.
        reports, names: of the checks before the first rank, and how a node is called then, by node_rank.
        save: where all ranks save, while it runs.
        inquiry: whether its ranks hang.
    """

    members: dict[Key, str] = field(default_factory=dict)
    waits_for: set[Key] = field(default_factory=set)
    absent: dict[Key, str] = field(default_factory=dict)
    done_lost: dict[Key, Spent] = field(default_factory=dict)
    failures: dict[str, Failing] = field(default_factory=dict)
    returned: set[int] = field(default_factory=set)
    why: str = ""
    timed_out: bool = False
    is_joined: bool = False
    reports: dict[int, NodeReport] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    save: SavePoint | None = None
    inquiry: Inquiry | None = None

    @property
    def root(self) -> Failing | None:
        """The root cause, as far as it is known; None where nothing failed."""
        return min(self.failures.values(), key=lambda each: each.order, default=None)

    @property
    def is_paid(self) -> bool:
        """A node was lost or has left, or the round made room for one that joins: what then only says that a peer was
        lost is an echo of that."""
        return bool(self.absent) or self.is_joined

    @property
    def who_may_say(self) -> list[Failing]:
        """Who is asked for the text, the nearest to the root cause first. An echo is never called the cause where a
        failure that speaks for itself is known, though its text be lost."""
        real = [each for each in self.failures.values() if not each.cause.consequence]
        return sorted(real or self.failures.values(), key=lambda each: each.order)

    def heard(self, node: Node, name: str, ended: m.Ended) -> None:
        """How it has ended on a node."""
        self.waits_for.discard(node.key)
        self.returned.update(ended.returned)
        if ended.cause is not None:
            self.note(Failing(ended.round, ended.cause, node.process, name, node.machine, node.where))

    def note(self, failing: Failing) -> None:
        """A failure on a node. Of what it says at once and at the end, the nearer to a root cause counts."""
        before = self.failures.get(failing.process)
        if before is None or failing.order < before.order:
            self.failures[failing.process] = failing

    def checked(self, node: Node, name: str, report: NodeReport, slow: float) -> Judged | None:
        """What a node's checks have found; what all have, with the last."""
        self.reports[node.place], self.names[node.place] = report, name
        return judge(self.reports, self.names, slow) if len(self.reports) == len(self.members) else None


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
        self._nodes = Nodes(rules, process, lambda: self.history.excluded)
        self._round = Round()
        self._phase: Literal["forming", "running", "stopping", "asking", "over"] = "forming"
        self._since = self._told = now
        self._highest = -1  # the highest round that anybody has been in
        self._asked: Sequence[Failing] = ()  # for the root cause's text: the first of them now
        self._reason = ""  # why there is no other round
        self._left = False  # this process ends
        self._was_alone = False
        self._paused = float("-inf")  # when this process had stood still for longer than the others wait for it
        self._uploaded: m.Uploaded | None = None
        self._troubles: dict[str, str] = {}  # of nodes that came and could not begin, since the last round began
        self._out: list[tuple[str, m.Message]] = []

    # --- a round ----------------------------------------------------------------------------------------------------
    def _advance(self, now: float) -> None:
        if self._phase == "running" and not self._round.waits_for:
            self._finish(End("done"))
        if self._phase == "stopping" and not self._round.waits_for:
            self._settle(now)
        if self._phase == "forming" and len(self._nodes) >= self.rules.min_nodes:
            ready, gone = self._nodes.ready(), self._round.absent.keys() | self._round.done_lost.keys()
            if self._nodes.are_enough(ready, hoped=self.history.nodes - len(gone), since=self._since, now=now):
                self._start(ready)

    def _make_room(self, node: Node, now: float) -> None:
        """A process waits for a place: in a range that has room, and where nobody is done, the next round has it."""
        members = self._round.members
        if self._phase != "running" or self.rules.fixed or len(members) >= self.rules.max_nodes:
            return
        if self._nodes.is_excluded(node):
            return
        if len(self._round.waits_for) == len(members):
            self._round.is_joined = True
            self._stop("a node joins", now)

    def _start(self, here: list[Node]) -> None:
        self._note(round=max(self.history.round, self._highest) + 1, nodes=len(here))
        self._phase, self._round = "running", Round({node.key: self._name(node) for node in here})
        self._round.waits_for.update(self._round.members)
        self._troubles.clear()
        self._round.save = SavePoint(self.history.round, self._round.members, self._tell_members)
        self._round.inquiry = Inquiry(self.history.round, self._round.members, self._tell_members)
        for place, node in enumerate(here):
            node.state, node.round, node.place = "running", self.history.round, place
            self._tell_go(node)

    def _tell_go(self, node: Node) -> None:
        checks = self.rules.preflight is not None and not self.history.checked
        size = len(self._round.members)
        self._tell(node.process, m.Go(self.history.round, node.place, size, self.history, checks))

    def _stop(self, why: str, now: float) -> None:
        self._phase, self._since = "stopping", now
        self._round.why, self._round.waits_for = why, set()
        for key in self._round.members:
            node = self._nodes.get(key)
            if node is not None and node.state == "stands in":
                node.state = "ready"
            elif node is not None and node.state in ("running", "done"):
                self._round.waits_for.add(key)
                if node.process not in self._round.failures:  # which ends its ranks by itself
                    self._tell_stop(node)

    def _tell_stop(self, node: Node) -> None:
        over = self._round
        left = {self._name_of(key): why for key, why in over.absent.items()}
        self._tell(node.process, m.Stop(self.history.round, over.why, self.history, over.timed_out, left))

    # --- how it is settled -----------------------------------------------------------------------------------------
    def _settle_without(self, now: float) -> None:
        """Some have not said how the round ended there. With a cause that speaks for itself they are only slow."""
        root = self._round.root
        for key in list(self._round.waits_for):
            node = self._nodes.get(key)
            if node is None:
                continue
            if root is None or root.cause.consequence:
                self._gone(node, "no word from it when the round was over", now, is_cut=self._was_alone)
            else:
                node.state = "absent"
        self._round.waits_for.clear()  # and then it is settled

    def _settle(self, now: float) -> None:
        """Decide about a round that is over: another one, and what it costs; or the end."""
        over, rules = self._round, self.rules
        root, spent = over.root, self.history.restarts
        if root is not None and root.cause.consequence and not over.is_paid:
            # They may be echoes of a loss that had cost nothing so far.
            over.absent.update((key, _DONE_LOST) for key, loss in over.done_lost.items() if self._lose(loss))
        if self.end is not None:
            return
        if root is None or (root.cause.consequence and over.is_paid):
            lost = "; ".join(f"{self._name_of(key)}: {why}" for key, why in over.absent.items())
            self._again(f"the round is over ({lost or over.why}); the next begins when every node is there", now)
            return
        cause, excluded = root.cause, self.history.excluded
        goes_on = is_machines(self.history, rules, cause, root.machine) and self._can_do_without(root)
        self._reason = self._why_no_restart(root, goes_on=goes_on)
        if self._reason:
            self._ask(over.who_may_say, now)
            return
        which = f"restart {len(spent) + 1} of {rules.max_restarts}"
        why = f"rank {cause.rank} failed ({cause.name}); all ranks start again: {which}"
        if goes_on:
            excluded = (*excluded, root.machine)
            over.absent.update((node.key, "excluded") for node in self._nodes if node.machine == root.machine)
            why += f", without {root.node} ({root.where}), whose machine is most likely at fault"
        self._spend(root, why)
        self._note(excluded=excluded)
        self._again(why, now)

    def _why_no_restart(self, root: Failing, *, goes_on: bool = False) -> str:
        where = root.machine, f"{root.node} ({root.where})"
        return why_no_restart(self.history, self.rules, root.cause, where, goes_on=goes_on)

    def _spend(self, root: Failing, why: str) -> None:
        """A restart."""
        cause = root.cause
        unit = Spent(root.round, str(cause.rank), why, root.machine, error=cause.name, step=cause.step)
        self._note(restarts=with_one_more(self.history.restarts, unit))

    def _count_late(self, late: Failing, now: float) -> None:
        """A node was given up before it could say what had failed there, and says it now. One round costs one thing:
        where that was no restart yet, it is the restart that it would have been, or the end."""
        if late.cause.consequence or any(spent.round == late.round for spent in self.history.restarts):
            return
        if late.round == self.history.round and self._phase in ("running", "stopping"):
            self._round.note(late)  # it is not settled yet
            return
        if self.end is not None or (self._phase == "asking" and not self._asked[0].cause.consequence):
            return
        self._reason = self._why_no_restart(late)
        if self._reason:
            self._ask([late], now)
        else:
            self._spend(late, f"rank {late.cause.rank} failed ({late.cause.name}), as was said late")

    def _can_do_without(self, root: Failing) -> bool:
        """Whether a range has nodes enough on other machines, node 0 among them."""
        others = [node for node in self._nodes.take_part() if node.machine != root.machine]
        leads = any(node.process == self.process for node in others)
        return not self.rules.fixed and leads and len(others) >= self.rules.min_nodes

    def _again(self, why: str, now: float) -> None:
        self._phase, self._since, self._told = "forming", now, now
        for node in self._nodes:
            self._tell(node.process, m.Again(why, self.history))

    def _ask(self, who: Sequence[Failing], now: float) -> None:
        """The first of them who is there, for the text of its failure, with which the job ends; where it is gone, what
        it had said at once."""
        self._phase, self._since, self._asked = "asking", now, []
        for at, each in enumerate(who):
            if self._nodes.of_process(each.process) is not None:
                self._asked = who[at:]
                self._tell(each.process, m.Tell(each.round))
                return
            if each.outcome:
                self._fail(each, each.outcome)
                return
        self._finish(self._without_words(who[0]))

    def _ask_no_longer(self, now: float) -> None:
        """Who was asked does not answer."""
        slow, *others = self._asked
        if slow.outcome:
            self._fail(slow, slow.outcome)
        elif others:
            self._ask(others, now)
        else:
            self._finish(self._without_words(slow))

    def _without_words(self, root: Failing) -> End:
        text = f"rank {root.cause.rank} on {root.node} failed ({root.cause.name}), and that node was lost before it"
        return End("lost", f"{text} could say more; not restarted in place: {self._reason}")

    def _fail(self, failing: Failing, outcome: str, disk: str = "") -> None:
        """The job ends with a failure, in its node's own words."""
        returned = tuple(sorted(self._round.returned))[:_NAMED_RANKS] if failing.cause.consequence else ()
        self._finish(End("failed", outcome=outcome, reason=self._reason, disk=disk, returned=returned))

    # --- losses ------------------------------------------------------------------------------------------------------
    def _gone(self, node: Node, why: str, now: float, *, is_cut: bool = False) -> None:
        """A process is lost, or leaves; ``is_cut``: most likely it is node 0 that nobody can reach."""
        self._nodes.remove(node)
        if self.end is not None or self._nodes.is_excluded(node):
            return
        if self._phase == "asking":  # the job has failed, and ends for that alone
            if self._asked[0].process == node.process:
                self._ask(self._asked, now)
        elif self._phase == "running" and node.state in ("done", "stands in"):
            self._round.done_lost.setdefault(node.key, self._loss_of(node, why, now, is_cut=is_cut))
            text = f"{self._name(node)} lost after its ranks had succeeded: the round goes on"
            self._tell(self.process, m.Waits(text))
        else:
            self._miss(node, why, now, is_cut=is_cut)

    def _miss(self, node: Node, why: str, now: float, *, is_cut: bool, is_counted: bool = True) -> None:
        """A node is not there any more, or not in its round: such a round is over, and that is counted."""
        is_member = node.key in self._round.members
        if is_member:
            self._round.absent[node.key] = why
            self._round.waits_for.discard(node.key)
        loss = self._loss_of(node, why, now, is_cut=is_cut)
        goes_on = self._lose(loss) if is_counted else self.end is None
        if goes_on and is_member and self._phase == "running":
            self._stop(loss.why, now)

    def _loss_of(self, node: Node, why: str, now: float, *, is_cut: bool = False) -> Spent:
        lost = self.process if is_cut else node.process
        # The others tell of a coordinator that they have left; and of it alone.
        who = lost if node.process == self.process else f"{lost}/{self.history.round}"
        lived = round(now - node.since, 1) if node.is_new and not is_cut else -1.0
        return Spent(self.history.round, who, f"{self._name(node)}: {why}", str(node.key), lived)

    def _lose(self, loss: Spent) -> bool:
        """Count a loss, once; False where it ends the job."""
        if self.end is not None:
            return False
        counted = with_loss(self.history, self.rules, loss)
        if isinstance(counted, End):
            if not self._left:  # nobody would upload it: the next coordinator comes to the same end
                self._finish(counted)
            return False
        self.history = counted
        return True

    # --- the end -----------------------------------------------------------------------------------------------------
    def _too_few(self) -> None:
        rules, missing, seconds = self.rules, self._nodes.missing(), f"{self.rules.timeout:g} s"
        if rules.fixed:
            which = "node" if len(missing) == 1 else "nodes"
            text = f"{which} {listed(missing)} of {rules.max_nodes} did not arrive within {seconds}"
        else:
            came = f"{len(self._nodes.came)} process(es) have joined since the job began"
            text = f"fewer than {rules.min_nodes} nodes came together within {seconds}: {came}"
        kind: EndKind = "lost" if self.history.round >= 0 else "timeout"
        self._finish(End(kind, text + self._trouble(), missing=tuple(missing)))

    def _say_who_is_missing(self, waited: float) -> None:
        awaits = "a machine with room for the pod, its image, or the end of the pod before it"
        who = f"node(s) {listed(self._nodes.missing())}"
        line = wait_line(who, waited=waited, limit=self.rules.timeout, seen="not there yet", awaits=awaits)
        line += self._trouble()
        for node in self._nodes:
            self._tell(node.process, m.Waits(line))

    def _trouble(self) -> str:
        some = list(self._troubles.items())[-_NAMED_TROUBLES:]
        return "".join(f"; {name} came, and could not begin ({text})" for name, text in some)

    def _finish(self, end: End) -> None:
        if self.end is not None:
            return
        self.end, self._phase = end, "over"
        if end.kind == "failed":
            self._note(end=end)
        for node in self._nodes:
            self._tell_end(node.process, end)

    def _tell_end(self, process: str, end: End) -> None:
        self._tell(process, m.TheEnd(end, uploads=process == self.process, history=self.history))
        if self._uploaded is not None:
            self._tell(process, m.Leave(self._uploaded.ok, self._uploaded.why))

    # --- small things ------------------------------------------------------------------------------------------------
    def _saving(self, round_no: int, act: Callable[[SavePoint], None]) -> None:
        if self._round.save is not None and self._phase == "running" and round_no == self.history.round:
            act(self._round.save)

    def _note(self, **changes: Any) -> None:
        self.history = replace(self.history, version=self.history.version + 1, **changes)

    def _name(self, node: Node) -> str:
        return f"node {node.key}" if self.rules.fixed else f"the node on {node.host}"

    def _name_of(self, key: Key) -> str:
        return self._round.members.get(key, f"node {key}")

    def _tell(self, process: str, message: m.Message) -> None:
        self._out.append((process, message))

    def _tell_members(self, message: m.Message) -> None:
        for key in self._round.members:
            node = self._nodes.get(key)
            if node is not None:
                self._tell(node.process, message)
