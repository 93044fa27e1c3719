"""Every decision of a job, in one object: who is in the round, restarts, budgets, root cause, save point, end.

``on(event, now)`` returns what is to be sent; there is no socket, thread or clock in it. It lives in node 0's agent;
when that is lost, the process in its place begins a new one with the history that the survivors bring.
``docs/rendezvous.md`` has a table of faults and what happens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from . import settling
from .facts import End, Spent
from .membership import Key, Node, overdue
from .messages import (
    Asks,
    CannotBegin,
    Ended,
    Floor,
    Greet,
    Hello,
    Leave,
    Leaves,
    Listens,
    Message,
    Preempted,
    Refused,
    Returned,
    Saved,
    Stop,
    Tell,
    TheEnd,
    Told,
    Uploaded,
    Waits,
    Welcome,
)
from .rounds import Rounds
from .rules import Disconnected, Event, Rules, Sent, Tick
from .savepoint import SavePoint

_HAS_LEFT = "it has said that it leaves"
_WAIT_LINE_SECONDS = 30.0
_PAUSE_SECONDS = 1.0
"""Between two events: the coordinator itself stood still, for it is told of time more often."""


class Coordinator(Rounds):
    """One job: takes in what its nodes say, and answers with what is to be sent.

    Args:
        rules: of the job.
        process: the id of the process that this is in: node 0's.
        now: seconds, of a clock that only grows; as in :meth:`on`.
    """

    def __init__(self, rules: Rules, process: str, now: float) -> None:
        super().__init__(rules, process, now)
        self._on: dict[type, Callable[[Node, Any, float], None]] = {
            Returned: self._done,
            Ended: self._ended,
            Told: self._heard_text,
            Leaves: self._leaving,
            CannotBegin: self._cannot_begin,
            Uploaded: self._note_upload,
            Listens: lambda node, said, _: self._saving(said.round, lambda save: save.listens(node.key)),
            Asks: lambda _, said, __: self._saving(said.round, SavePoint.asks),
            Preempted: lambda _, said, __: self._saving(said.round, SavePoint.preempted),
            Floor: lambda node, said, _: self._saving(said.round, lambda s: s.floor(node.key, said.call, said.step)),
            Saved: lambda node, said, _: self._saving(said.round, lambda save: save.saved(node.key, said.call)),
        }

    def on(self, event: Event, now: float) -> list[Sent]:
        """Take in what happened; what is to be sent."""
        if now - self._last > _PAUSE_SECONDS:
            self._nodes.rest(now - self._last)
            self._since += now - self._last  # what was said meanwhile is heard first
            self._paused = now if now - self._last > self.rules.grace else self._paused
        self._last = now
        if self._left:
            return []  # this process ends
        if isinstance(event, Tick):
            self._tick(now)
        elif isinstance(event, Disconnected):
            node = self._nodes.of_process(event.process)
            if node is not None:
                node.linked, node.heard = False, now
        elif isinstance(event.message, Hello):
            self._came(event.message, now)
        else:
            self._said(event.process, event.message, now)
        if not self._left:
            self._advance(now)
        sent, self._out = self._out, []
        return sent

    # --- who takes part ----------------------------------------------------------------------------------------------
    def _came(self, hello: Hello, now: float) -> None:
        if hello.process in self._departed:
            self._tell(hello.process, Refused("fenced", self._departed[hello.process]))
            return
        self._learn(hello)
        self._tell(hello.process, Welcome(self.process, self.history))
        if self.end is not None:
            self._tell(hello.process, TheEnd(self.end, uploads=hello.process == self.process, history=self.history))
            if self._uploaded is not None:
                self._tell(hello.process, Leave(self._uploaded.ok, self._uploaded.why))
        node = self._nodes.of_process(hello.process)
        if node is not None:
            node.linked, node.heard = True, now
            self._catch_up(node, hello)
            return
        key: Key = hello.process if hello.node is None else hello.node
        if self._refused(hello, key):
            return
        before = self._nodes.get(key)
        if before is not None:
            text = self._departed[before.process] = f"a newer process of {self._name(before)} has come"
            self._tell(before.process, Refused("fenced", text))
            self._gone(before, "a new process has taken its place", now)
        stands_in = key in self._nodes  # the place is kept where the ranks of the one before had returned
        node = self._nodes.add(key, hello, now)
        self._somebody_came = True
        if stands_in:
            node.state, node.stands_in = "done", True
            self._tell(hello.process, Waits("this node's ranks had returned: waiting for those of the other nodes"))
        elif hello.state in ("running", "done"):
            node.state = "absent"
            self._tell(hello.process, Stop(hello.round, "the job's coordinator was lost", self.history))
        elif hello.state == "cannot":
            node.state = "cannot"
        elif self._phase == "running":
            self._tell(hello.process, Waits(f"round {self.history.round} runs: this node takes part in the next one"))

    def _learn(self, hello: Hello) -> None:
        """Take over what a survivor brings: one process wrote it, so the highest version is the truth.

        Who comes when a round has begun here was cut off while the others began anew: only what it has lost counts.
        """
        theirs, losses = hello.history, hello.history.losses
        self._highest = max(self._highest, theirs.round, hello.round)
        if not self._members:
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

    def _refused(self, hello: Hello, key: Key) -> bool:
        if self.rules.fixed and not (isinstance(key, int) and 0 <= key < self.rules.max_nodes):
            self._tell(hello.process, Refused("range", f"node {key} of {self.rules.max_nodes}: there is none"))
            return True
        if key == 0 and hello.process != self.process:
            self._tell(hello.process, Refused("fenced", "node 0 is the process that leads the job"))
            return True
        before = self._nodes.get(key)
        if before is not None and not before.is_older_than(hello):
            self._tell(hello.process, Refused("fenced", f"a newer process of {self._name(before)} is there"))
            return True
        most = self.rules.max_nodes * (1 + self.rules.max_replacements)
        came = self._nodes.came
        if not self.rules.fixed and hello.process not in came and len(came) >= most:
            text = f"{len(came) + 1} processes have joined this job; it may have {most}, replacements included"
            self._tell(hello.process, Refused("too many", text))
            return True
        return False

    def _catch_up(self, node: Node, hello: Hello) -> None:
        """The same process on a new connection: say what it has not heard."""
        if node.state in ("running", "absent") and hello.round < node.round == self.history.round:
            self._tell_go(node)  # also where it is over: then it may have heard of the start, and not said so yet
        if node.key in self._unheard:
            self._tell_stop(node)
        elif node.state == "absent":
            self._tell(node.process, Stop(node.round, self._why, self.history))
        elif self._question is not None and self._question.asked == node.process:
            self._tell(node.process, Tell(self.history.round))
        self._saving(self.history.round, lambda save: save.again(partial(self._tell, node.process)))

    def _said(self, process: str, message: Message, now: float) -> None:
        node = self._nodes.of_process(process)
        if node is None:
            if isinstance(message, Leaves):
                self._departed[process] = _HAS_LEFT
            elif process not in self._departed:
                self._tell(process, Greet())  # it was given up meanwhile: it is to come anew
            return
        node.heard = now
        handler = self._on.get(type(message))
        if handler is not None:
            handler(node, message, now)

    def _tick(self, now: float) -> None:
        if self.end is None:
            self._judge(now)
        late = now - self._since
        if self._phase == "stopping" and late > self.rules.patience:
            self._settle_without(now)
        elif self._phase == "asking" and late > self.rules.patience:
            self._ask_next(now)
        elif self._phase == "forming" and late > self.rules.timeout:
            self._too_few()
        elif self._phase == "forming" and now - self._told >= _WAIT_LINE_SECONDS:
            self._told = now
            self._say_who_is_missing(late)

    def _judge(self, now: float) -> None:
        """Who is lost? Where nobody else can be heard, most likely this node is cut off from all others."""
        others = [node for node in self._nodes if node.process not in ("", self.process)]
        due = self.rules.heartbeat / 3  # a sign of life is due more often
        is_alone = len(others) > 1 and all(not node.linked or now - node.heard > due for node in others)
        if self._was_alone and not is_alone:
            for node in others:
                node.heard = node.heard if node.linked else now  # those after the first have their time, too
        self._was_alone = is_alone
        grace = self.rules.heartbeat if is_alone else self.rules.grace
        late = overdue(others, now, grace=grace, heartbeat=self.rules.heartbeat)
        if not is_alone or len(late) == len(others):
            for node, why in late:
                self._gone(node, why, now, is_cut=is_alone)

    def _leaving(self, node: Node, leaving: Leaves, now: float) -> None:
        self._departed[node.process] = _HAS_LEFT
        if node.process != self.process:
            self._gone(node, leaving.why, now)
            return
        # With this process the job's coordinator goes; whoever hears this knows that it is counted already.
        self._left = True
        self._lose(self._loss_of(node, leaving.why, now))
        self._absent[node.key] = self._why = leaving.why
        if self.end is None:
            for each in self._nodes:
                self._tell_stop(each)

    def _done(self, node: Node, done: Returned, _now: float) -> None:
        if done.round == self.history.round and node.state == "running":
            node.state = "done"
            self._undone.discard(node.key)
            self._saving(done.round, lambda save: save.done(node.key))

    def _ended(self, node: Node, ended: Ended, now: float) -> None:
        if node.state == "absent":
            node.state, self._somebody_came = "ready", True  # of a round that is counted no more
            return
        if node.key not in self._places or ended.round != self.history.round or node.state not in ("running", "done"):
            return  # said twice
        is_running, cause = self._phase == "running", ended.cause
        if is_running and ended.cut and node.state == "done":
            node.stands_in = True  # its part is done
            return
        node.state = "ready"
        self._unheard.discard(node.key)
        self._returned.update(ended.returned)
        if cause is not None:
            self._failures[node.key] = settling.Failing(cause, node.process, self._name(node))
            self._timed_out = self._timed_out or (is_running and cause.timed_out)
        if ended.cut or (is_running and cause is None):
            was_paused = now - self._paused < self.rules.heartbeat
            why = "it could not hear node 0, and has ended its ranks"
            self._miss(node, why, now, is_cut=True, is_counted=not was_paused)
        elif is_running and cause is not None:
            self._stop(f"{self._name(node)}: rank {cause.rank} failed ({cause.name})", now)

    def _heard_text(self, node: Node, told: Told, _now: float) -> None:
        question = self._question
        if self._phase == "asking" and question is not None and question.asked == node.process:
            self._finish(question.end(told))

    # --- budgets, and the end ----------------------------------------------------------------------------------------
    def _cannot_begin(self, node: Node, said: CannotBegin, now: float) -> None:
        was_lost_before = any(spent.node == str(node.key) for spent in self.history.losses)
        if self.history.round < 0 and not was_lost_before:
            self._finish(End("failed", outcome=said.outcome, reason=said.reason))
            return
        self._nodes.remove(node.key)
        self._tell(node.process, Refused("begun", f"the job is in round {self.history.round}"))

    def _note_upload(self, node: Node, uploaded: Uploaded, _now: float) -> None:
        if node.process != self.process:
            return
        self._uploaded = uploaded
        for each in self._nodes:
            if each.process != self.process:
                self._tell(each.process, Leave(uploaded.ok, uploaded.why))
