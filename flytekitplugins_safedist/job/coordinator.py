"""Every decision of a job, in one object: who is in the round, restarts, budgets, root cause, save point, end.

``on(event, now)`` returns what is to be sent; there is no socket, thread or clock in it. It lives in node 0's agent;
when that is lost, the process in its place begins a new one with the history that the survivors bring.
``docs/rendezvous.md`` has a table of faults and what happens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..rank.outcome import RankOutcome
from . import messages as m
from .facts import Cause, End, Rules, Spent
from .hang_messages import Hung, Seen, Stalled
from .inquiry import Found, Inquiry
from .nodes import Key, Node
from .preflight_messages import Checked, Cleared
from .rounds import EXCLUDED, Failing, Rounds

_HAS_LEFT = "it has said that it leaves"
_WAIT_LINE_SECONDS = 30.0
_TROUBLE_CHARACTERS = 200
"""Of why a node cannot begin, in a line about who is missing."""

_PAUSE_SECONDS = 1.0
"""Between two events: the coordinator itself stood still, for it is told of time more often."""


@dataclass(frozen=True)
class Said:
    """A message of a process."""

    process: str
    message: m.Message


@dataclass(frozen=True)
class Disconnected:
    """The connection of a process is lost."""

    process: str


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Said | Disconnected | Tick


class Coordinator(Rounds):
    """One job: takes in what its nodes say, and answers with what is to be sent.

    Args:
        rules: of the job.
        process: the id of the process that this is in: node 0's.
        now: seconds, of a clock that only grows; as in :meth:`on`.
    """

    def __init__(self, rules: Rules, process: str, now: float) -> None:
        super().__init__(rules, process, now)
        self._last = now
        self._departed: dict[str, str] = {}  # processes that take no part any more, and why
        self._brought = 0  # the version of the history that was taken over
        self._on: dict[type, Callable[[Node, Any, float], None]] = {
            m.Returned: self._returned,
            m.Alarm: self._failed,
            m.Ended: self._ended,
            m.Told: self._heard_text,
            m.Leaves: self._leaving,
            m.CannotBegin: self._cannot_begin,
            m.Uploaded: self._note_upload,
            m.Listens: lambda node, said, _: self._saving(said.round, lambda save: save.listens(node.key)),
            m.Asks: lambda _, said, __: self._saving(said.round, lambda save: save.asks()),
            m.Preempted: lambda _, said, __: self._saving(said.round, lambda save: save.preempted()),
            m.Floor: lambda node, said, _: self._saving(said.round, lambda s: s.floor(node.key, said.call, said.step)),
            Stalled: lambda _, said, now: self._inquire(said.round, lambda about: about.stalled(said.is_urgent, now)),
            Seen: self._seen,
            Checked: self._checked,
            m.Saved: lambda node, said, _: self._saving(said.round, lambda save: save.saved(node.key, said.call)),
        }

    def on(self, event: Event, now: float) -> list[tuple[str, m.Message]]:
        """Take in what happened; what is to be sent, and to which process."""
        paused, self._last = now - self._last, now
        if paused > _PAUSE_SECONDS:
            self._rest(paused, now)
        if self._left:
            return []  # this process ends
        if isinstance(event, Tick):
            self._tick(now)
        elif isinstance(event, Disconnected):
            node = self._nodes.of_process(event.process)
            if node is not None:
                node.linked, node.heard = False, now
        elif isinstance(event.message, m.Hello):
            self._came(event.message, now)
        else:
            self._said(event.process, event.message, now)
        if not self._left and not self._is_idle(event):
            self._advance(now)
        sent, self._out = self._out, []
        return sent

    def _is_idle(self, event: Event) -> bool:
        """Whether nothing follows from it but by time: a sign of life of one of thousands; and who comes to a range
        that has not begun and is not full."""
        if isinstance(event, Said) and isinstance(event.message, m.Hello):
            return not self.rules.fixed and not self.history.nodes and len(self._nodes) < self.rules.max_nodes
        return isinstance(event, Said) and isinstance(event.message, m.Beat)

    def _rest(self, paused: float, now: float) -> None:
        """The coordinator itself stood still: nobody is blamed for that, and what was said meanwhile is heard first."""
        self._since += paused
        for node in self._nodes:
            node.heard += paused
        if paused > self.rules.grace:
            self._paused = now

    # --- who takes part ----------------------------------------------------------------------------------------------
    def _came(self, hello: m.Hello, now: float) -> None:
        if hello.process in self._departed:
            self._hear_late(hello, now)
            self._tell(hello.process, m.Refused("fenced", self._departed[hello.process]))
            return
        self._learn(hello)
        self._tell(hello.process, m.Welcome(self.process, self.history))
        if self.end is not None:
            self._tell_end(hello.process, self.end)
        node = self._nodes.of_process(hello.process)
        if node is not None:
            node.linked, node.heard = True, now
            if hello.alarm is not None:
                self._failed(node, hello.alarm, now)
            self._catch_up(node, hello)
            return
        key: Key = hello.process if hello.node is None else hello.node
        refused = self._refusal(hello, key)
        if refused is None:
            self._take_in(hello, key, now)
        else:
            self._hear_late(hello, now)
            self._tell(hello.process, refused)

    def _hear_late(self, hello: m.Hello, now: float) -> None:
        """What a process brings that was given up counts, also where another is in its place."""
        alarm, name = hello.alarm, f"node {hello.node}" if self.rules.fixed else f"the node on {hello.host}"
        if alarm is not None:
            who = hello.process, name, hello.ground, hello.where
            self._count_late(Failing(alarm.round, alarm.cause, *who, alarm.outcome), now)

    def _take_in(self, hello: m.Hello, key: Key, now: float) -> None:
        """Give its place to a new process."""
        before, members = self._nodes.get(key), self._round.members
        if before is not None:
            text = self._departed[before.process] = f"a newer process of {self._name(before)} has come"
            self._tell(before.process, m.Refused("fenced", text))
            self._gone(before, "a new process has taken its place", now)
        node = self._nodes.add(key, hello, now)
        self._hear_late(hello, now)
        if self._phase == "running" and key in members and key not in self._round.waits_for:
            node.state = "stands in"
            self._tell(node.process, m.Waits("this node's ranks had returned: waiting for those of the other nodes"))
        elif hello.state in ("running", "done"):
            node.state = "absent"
            why = "the job's coordinator was lost" if hello.lost else "this node was not heard for too long"
            self._tell(node.process, m.Stop(hello.round, why, self.history))
        elif hello.state == "cannot":
            node.state = "cannot"
        elif self._nodes.is_excluded(node):
            self._tell(node.process, m.Waits(EXCLUDED))
        elif self._phase == "running":
            self._tell(node.process, m.Waits(f"round {self.history.round} runs: this node takes part in the next one"))
            self._make_room(node, now)

    def _learn(self, hello: m.Hello) -> None:
        """Take over what a survivor brings: one process wrote it, so the highest version is the truth.

        Who comes when a round has begun here was cut off while the others began anew: only what it has lost counts.
        """
        theirs, losses = hello.history, hello.history.losses
        self._highest = max(self._highest, theirs.round, hello.round)
        if not self._round.members:
            if theirs.end is not None:
                self._finish(theirs.end)
            losses = ()
            if theirs.version > self._brought:
                self._brought, losses = theirs.version, self.history.losses
                version = max(theirs.version, self.history.version) + 1
                self.history = replace(theirs, version=version, round=self._highest, end=self.end)
        for loss in losses:
            self._lose(loss)
        for lost in hello.lost:
            if lost != self.process:
                self._lose(Spent(self.history.round, lost, "node 0 was lost", "0"))

    def _refusal(self, hello: m.Hello, key: Key) -> m.Refused | None:
        rules, before, came = self.rules, self._nodes.get(key), self._nodes.came
        if rules.fixed and not (isinstance(key, int) and 0 <= key < rules.max_nodes):
            return m.Refused("range", f"node {key} of {rules.max_nodes}: there is none")
        if key == 0 and hello.process != self.process:
            return m.Refused("fenced", "node 0 is the process that leads the job")
        # Always the new one where the older cannot be heard, for a clock may be wrong; else the one that started later.
        if before is not None and before.linked and hello.started_ns < before.started_ns:
            return m.Refused("fenced", f"a newer process of {self._name(before)} is there")
        if rules.fixed or hello.process in came or len(came) < rules.most_processes:
            return None
        most = f"it may have {rules.most_processes}, replacements included"
        if self._phase == "forming" and (count := len(self._nodes.take_part())) < rules.min_nodes:
            left = f"{count} of at least {rules.min_nodes} nodes are left"
            self._finish(End("replacements", f"{left}, and {len(came)} processes have joined this job: {most}"))
        return m.Refused("too many", f"{len(came) + 1} processes have joined this job; {most}")

    def _catch_up(self, node: Node, hello: m.Hello) -> None:
        """The same process on a new connection: say what it has not heard."""
        if node.state in ("running", "absent") and hello.round < node.round == self.history.round:
            self._tell_go(node)  # also where it is over: then it may have heard of the start, and not said so yet
        if self._phase == "stopping" and node.key in self._round.waits_for:
            self._tell_stop(node)
        elif node.state == "absent":
            self._tell(node.process, m.Stop(node.round, self._round.why, self.history))
        elif self._phase == "asking" and self._asked[0].process == node.process:
            self._tell(node.process, m.Tell(self._asked[0].round))
        self._saving(self.history.round, lambda save: save.again(partial(self._tell, node.process)))

    def _said(self, process: str, message: m.Message, now: float) -> None:
        node = self._nodes.of_process(process)
        if node is None:
            if isinstance(message, m.Leaves):
                self._departed[process] = _HAS_LEFT
            elif process not in self._departed:
                self._tell(process, m.Greet())  # it was given up meanwhile: it is to come anew
            return
        node.heard = now
        handler = self._on.get(type(message))
        if handler is not None:
            handler(node, message, now)

    # --- time ---------------------------------------------------------------------------------------------------------
    def _tick(self, now: float) -> None:
        if self.end is None:
            self._judge(now)
        self._inquire(self.history.round, lambda about: self._found(about.tick(now)))
        late = now - self._since
        if self._phase == "stopping" and late > self.rules.patience:
            self._settle_without(now)
        elif self._phase == "asking" and late > self.rules.patience:
            self._ask_no_longer(now)
        elif self._phase == "forming" and late > self.rules.timeout:
            self._too_few()
        elif self._phase == "forming" and now - self._told >= _WAIT_LINE_SECONDS:
            self._told = now
            self._say_who_is_missing(late)

    def _judge(self, now: float) -> None:
        """Who is lost? Where nobody else can be heard, most likely this node is cut off from all others."""
        rules = self.rules
        others = [node for node in self._nodes if node.process != self.process]
        due = rules.heartbeat / 3  # a sign of life is due more often
        is_alone = len(others) > 1 and all(not node.linked or now - node.heard > due for node in others)
        if self._was_alone and not is_alone:
            for node in others:
                node.heard = node.heard if node.linked else now  # those after the first have their time, too
        self._was_alone = is_alone
        lost = [node for node in others if now - node.heard > (rules.heartbeat if node.linked else rules.grace)]
        if is_alone and len(lost) < len(others):
            return  # all at once, and as one loss: where one comes back, it was this node's
        for node in lost:
            silent = f"no sign of life for {rules.heartbeat:g} s"
            gone = f"its connection was lost, and it did not come back within {rules.grace:g} s"
            self._gone(node, silent if node.linked else gone, now, is_cut=is_alone)

    # --- what nodes say -----------------------------------------------------------------------------------------------
    def _leaving(self, node: Node, leaving: m.Leaves, now: float) -> None:
        self._departed[node.process] = _HAS_LEFT
        if node.process != self.process:
            self._gone(node, leaving.why, now)
            return
        # With this process the job's coordinator goes; whoever hears this knows that it is counted already.
        self._left = True
        self._lose(self._loss_of(node, leaving.why, now))
        self._round.absent[node.key] = self._round.why = leaving.why
        if self.end is None:
            for each in self._nodes:
                self._tell_stop(each)

    def _returned(self, node: Node, returned: m.Returned, _now: float) -> None:
        if returned.round == self.history.round and node.state == "running":
            node.state = "done"
            if self._phase == "running":  # of a round that is over it has still to say how it ended
                self._round.waits_for.discard(node.key)
            self._saving(returned.round, lambda save: save.done(node.key))

    def _failed(self, node: Node, failure: m.Alarm, now: float) -> None:
        """Said at once: the others are stopped, whatever its node may need to end its ranks."""
        failing = self._failing(node, failure.round, failure.cause, failure.outcome)
        if self._is_of_this_round(node, failure):
            self._round.note(failing)
            if self._phase == "running":
                self._round.timed_out = failure.cause.timed_out
                self._stop(f"{self._name(node)}: rank {failure.cause.rank} failed ({failure.cause.name})", now)
        else:
            self._count_late(failing, now)

    def _failing(self, node: Node, round_no: int, cause: Cause, outcome: str = "") -> Failing:
        return Failing(round_no, cause, node.process, self._name(node), node.machine, node.where, outcome)

    def _is_of_this_round(self, node: Node, said: m.Alarm | m.Ended) -> bool:
        return said.round == self.history.round and node.state in ("running", "done")

    def _ended(self, node: Node, ended: m.Ended, now: float) -> None:
        if not self._is_of_this_round(node, ended):
            if ended.cause is not None:
                self._count_late(self._failing(node, ended.round, ended.cause), now)
            if node.state == "absent":
                node.state = "ready"  # its ranks were of a round that is counted no more
                self._make_room(node, now)
            return
        is_running, cause = self._phase == "running", ended.cause
        if is_running and ended.cut and node.state == "done":
            node.state = "stands in"
            return
        node.state = "ready"
        if is_running:
            self._round.timed_out = cause is not None and cause.timed_out
        self._round.heard(node, self._name(node), ended)
        if ended.cut or (is_running and cause is None):
            was_paused = now - self._paused < self.rules.heartbeat
            why = "it could not hear node 0, and has ended its ranks"
            self._miss(node, why, now, is_cut=True, is_counted=not was_paused)
        elif is_running and cause is not None:
            self._stop(f"{self._name(node)}: rank {cause.rank} failed ({cause.name})", now)

    def _heard_text(self, node: Node, told: m.Told, _now: float) -> None:
        if self._phase == "asking" and self._asked[0].process == node.process:
            self._fail(self._asked[0], told.outcome, told.disk)

    def _inquire(self, round_no: int, act: Callable[[Inquiry], None]) -> None:
        if self._round.inquiry is not None and self._phase == "running" and round_no == self.history.round:
            act(self._round.inquiry)

    def _seen(self, node: Node, seen: Seen, now: float) -> None:
        self._inquire(seen.round, lambda about: self._found(about.seen(node.key, seen.number, seen.snapshots, now)))

    def _found(self, found: Found | None) -> None:
        if found is None:
            return
        hang, node = found.hang, self._nodes.get(found.node)
        if found.is_news:
            text = f"the job does not move, for {hang.seconds:.0f} s now: {hang.why}\n{hang.picture}"
            self._tell_members(m.Waits(text))
        if node is not None:
            self._tell(node.process, Hung(self.history.round, hang))

    def _checked(self, node: Node, checked: Checked, _now: float) -> None:
        preflight = self.rules.preflight
        if preflight is None or checked.round != self.history.round or self._phase != "running":
            return
        judged = self._round.checked(node, f"{self._name(node)} ({node.where})", checked.report, preflight.slow)
        if judged is not None and judged.code and preflight.action == "fail":
            self._finish(End("preflight", judged.text, reason=judged.code))
        elif judged is not None:
            self._note(checked=True)
            self._tell_members(Cleared(self.history.round, judged.text))

    def _cannot_begin(self, node: Node, said: m.CannotBegin, _now: float) -> None:
        was_lost_before = any(spent.node == str(node.key) for spent in self.history.losses)
        if self.history.round < 0 and not was_lost_before:
            self._finish(End("failed", outcome=said.outcome, reason=said.reason))
            return
        self._nodes.remove(node)
        with suppress(ValueError):  # what it says is for a line of the log
            raised = RankOutcome.from_json(said.outcome).raised
            if raised is not None:
                self._troubles[self._name(node)] = f"{raised.type}: {raised.message[:_TROUBLE_CHARACTERS]}"
        self._tell(node.process, m.Refused("begun", f"the job is in round {self.history.round}"))

    def _note_upload(self, node: Node, uploaded: m.Uploaded, _now: float) -> None:
        if node.process != self.process:
            return
        self._uploaded = uploaded
        for each in self._nodes:
            if each.process != self.process:
                self._tell(each.process, m.Leave(uploaded.ok, uploaded.why))
