"""Every decision of a job, in one object: who is in a round, when it is over, what it costs, the end. Pure.

Nodes say what is (:class:`.messages.Status`), the coordinator says what should be (:class:`.messages.Want`). It lives
in node 0's process, which leads the job; what must survive that are the books. There is no socket, thread or clock
here. What becomes of each event is in the table of ``docs/rendezvous.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ..preflight.judge import Judged
from .books import NO_ROUND, Books, Loss, Outcome, Round, Verdict, is_suspect, judge
from .inquiry import Inquiry
from .messages import Course, HangNotice, Status, Want
from .rules import Rules
from .saves import RoundSaves
from .sign import PAUSE_SECONDS, Lead, StoreLook

FENCED = "another process has this place: "
"""Before why a process has no place any more, where another one has it."""

NEWS_SECONDS = 30.0
"""Between two lines about who is missing."""

_NAMES = 16
"""Nodes that are named in a line; the rest are counted."""


JudgeReports = Callable[[Mapping[int, str], Mapping[int, str]], Judged]
"""From the nodes' reports and names, by node_rank."""


@dataclass(slots=True)
class Seat:
    """A process that has a place in the job.

    Attributes:
        status: its latest.
        since: when it came.
        heard: when it was heard last, or when its connection was lost.
        is_new: it had been in no round when it came.
        is_linked: it is connected.
    """

    status: Status
    since: float
    heard: float
    is_new: bool
    is_linked: bool = True


@dataclass
class RoundState:
    """What becomes of the last round: it runs; it is over, and ranks end; or the next one forms.

    Attributes:
        since: when this phase began.
        ranks: the node_rank of each process that is known to take part.
        unheard: node_ranks of whom nobody knows the process, in a round that another leader has begun.
        returned: node_ranks whose ranks have all returned.
        unsettled: when it is over: node_ranks that may have ranks left.
        absent: node_ranks that are not there any more.
        free: it was ended for what costs nothing.
        joining: since when a node waits to join, and the call of the save that is made before.
    """

    phase: Literal["forming", "running", "ending"]
    since: float
    is_checks: bool = False
    ranks: dict[str, int] = field(default_factory=dict)
    unheard: set[int] = field(default_factory=set)
    returned: set[int] = field(default_factory=set)
    unsettled: set[int] = field(default_factory=set)
    absent: dict[int, Loss] = field(default_factory=dict)
    free: str = ""
    joining: tuple[float, int] | None = None
    offer: Mapping[str, str] = field(default_factory=dict)
    saves: RoundSaves = field(default_factory=lambda: RoundSaves(()))
    inquiry: Inquiry = field(default_factory=Inquiry)


class Coordinator:
    """One job. Each call takes what happened, and returns the wants that are to be sent, by process.

    Whoever calls it looks at the store where :attr:`lead` says that it is due, hands that to :meth:`on_look`, and then
    puts the sign there that :attr:`lead` gives out. It calls :meth:`on_tick` several times a second, after everything
    that has come meanwhile. A process that :attr:`is_retired` takes no connections any more.

    Args:
        rules: the job's.
        me: the process that this is in.
        now: seconds, of a clock that only grows; as in every call.
        judge_reports: judges the checks of the nodes.
    """

    def __init__(self, rules: Rules, me: str, now: float, judge_reports: JudgeReports | None = None) -> None:
        self.rules, self.me = rules, me
        self.lead = Lead(me, rules, now)
        self.books = Books()
        self.verdict: Verdict | None = None
        self.is_decided = False
        self._judge_reports = judge_reports
        self._seats: dict[str, Seat] = {}
        self._places: dict[int, str] = {}  # of a job of a fixed size: which process has which
        self._ready: dict[str, None] = {}  # seats that could begin the next round
        self._enough_since = float("inf")  # when the minimum of a range was ready
        self._outsiders: dict[str, str] = {}  # processes that take part in nothing any more, and why
        self._cannot: dict[str, None] = {}  # seats that can start no rank
        self._odd: dict[str, None] = {}  # seats of a range whose number of ranks is another than node 0's
        self._troubles: dict[str, str] = {}  # what those say that came and could not begin, by node
        self._state = RoundState("forming", now)
        self._news, self._news_at, self._waits = "", now, False
        self._count = 0  # processes that ever had a place
        self.course = Course(self.lead.leader)
        """What all nodes were told last."""
        self._unaware: list[str] = []  # who has not been told that it is gone
        self._judged: tuple[int, Books, Verdict | None] = (0, self.books, None)
        self._past: Books | None = None  # the edition of which earlier rounds were judged last
        self._last = float("inf")  # until it is called first: what its process has to do before is no pause
        self._paused = float("-inf")
        self._silence_due = float("inf")  # when somebody may have been silent for too long

    # --- what happens -------------------------------------------------------------------------------------------------
    def on(self, status: Status, now: float) -> dict[str, Want]:
        """A node says how it is."""
        self._wake(now)
        if not self.is_retired:
            self._hear(status, now)
        return self._answer(now, status.process)

    def on_beat(self, process: str, now: float) -> bool:
        """A sign of life. False: the process was given up, or never said how it is; its connection is to be closed, for
        then it says so on the next one."""
        self._wake(now)
        seat = self._seats.get(process)
        if seat is not None:
            seat.heard = now
        return seat is not None or process in self._outsiders

    def on_disconnect(self, process: str, now: float) -> dict[str, Want]:
        """The connection of a node is lost."""
        self._wake(now)
        seat = self._seats.get(process)
        if seat is not None:
            seat.is_linked, seat.heard = False, now
            self._silence_due = min(self._silence_due, now + self.rules.grace)
            self._update_readiness(seat)
        return self._answer(now)

    def on_tick(self, now: float) -> dict[str, Want]:
        """Time has passed."""
        self._wake(now)
        if self.lead.gives_up(now) and not self.is_retired:
            self._retire("the store is away, and nobody knows who leads this job", now)
        if now > self._silence_due:
            self._judge_silence(now)
        state = self._state
        if state.phase == "running" and not state.unheard and state.inquiry.is_due(now):
            # One whose connection is lost for now, too: all may wait for its ranks.
            state.inquiry.begin([process for process, rank in state.ranks.items() if rank not in state.absent], now)
        return self._answer(now)

    def on_look(self, look: StoreLook, now: float) -> dict[str, Want]:
        """The store was looked at."""
        self._wake(now)
        self.is_decided = self.is_decided or look.is_decided
        trouble = "cannot begin" if self.me in self._cannot else ""
        if self._paused > float("-inf"):  # who has led it meanwhile is perhaps the newer one, and is well
            trouble = trouble or "stood still before it began"
        if trouble and not self.lead.term and look.sign is not None:
            self._retire(f"node 0 {trouble}, and another process has led this job", now)
        elif not self.is_retired and (why := self.lead.on_look(look)):
            self._retire(why, now)
        return self._answer(now)

    def look_to_judge(self) -> int:
        """Number of a look at the last round of which all pictures are there, once; 0 where none is. What they show is
        handed to :meth:`on_hang`."""
        return self._state.inquiry.complete() if self._state.phase == "running" else 0

    @property
    def gone(self) -> list[int]:
        """Ranks of the last round that have returned, and whose node is not there any more to show them."""
        state, leads = self._state, self._seats.get(self.me)
        count = leads.status.ranks if leads is not None else 0
        return [node * count + place for node in sorted(state.returned & state.absent.keys()) for place in range(count)]

    def on_hang(self, round_: Round, hang: HangNotice | None, now: float) -> dict[str, Want]:
        """What the pictures of a round have shown; None where it moves, or nobody can say."""
        self._wake(now)
        if round_ == self.books.round:
            self._state.inquiry.on_hang(hang, now)
        return self._answer(now)

    @property
    def is_retired(self) -> bool:
        """Another process leads, or this one leaves."""
        return self.me in self._outsiders

    # --- what it means ------------------------------------------------------------------------------------------------
    def _wake(self, now: float) -> None:
        """Whoever stood still blames nobody for it, and does not know whether it still leads."""
        paused, self._last = now - self._last, now
        if paused <= PAUSE_SECONDS:
            return
        self._state.since += paused
        self._enough_since += paused
        for seat in self._seats.values():
            seat.heard += paused
        if paused > self.rules.grace:
            self.lead.doubt(now)
            self._paused = now

    def _judge_silence(self, now: float) -> None:
        """Who was not heard for too long is lost; and when somebody may be next."""
        self._silence_due = float("inf")
        for process, seat in list(self._seats.items()):
            limit = self.rules.heartbeat if seat.is_linked else self.rules.grace
            if process == self.me:
                continue
            if now - seat.heard <= limit:
                self._silence_due = min(self._silence_due, seat.heard + limit)
                continue
            lost = f"its connection was lost, and it did not come back within {limit:g} s"
            self._miss(process, f"no sign of life for {limit:g} s" if seat.is_linked else lost, now)

    def _hear(self, status: Status, now: float) -> None:
        self.lead.on_leader(status.leader, now)
        self._learn(status, now)  # also of a process that is gone: a late cause counts
        process = status.process
        if process in self._outsiders:
            return
        rank = self._state.ranks.get(process) if status.round == self.books.round else None
        if status.leaving:
            if process in self._seats:
                self._seats[process].status = status
            elif status.round == NO_ROUND:
                self._troubles[status.name] = status.leaving
            if rank is not None and status.phase == "returned":
                self._on_member(status, rank, now)  # it leaves with its part done
            self._dismiss(process, status.leaving, now, status)
            return
        if process not in self._seats and not self._seat(status, now):
            return
        seat = self._seats[process]
        seat.status, seat.heard, seat.is_linked = status, now, True
        self.is_decided = self.is_decided or (status.is_uploaded and process == self.me)
        if status.cannot is not None and process not in self._cannot:
            self._cannot[process] = None
            self._troubles[status.name] = f"{status.cannot.name}: {status.cannot.text[:200]}"
        self._update_readiness(seat)
        self._recognise(status)
        if process in self._state.ranks and status.round == self.books.round:
            self._on_member(status, self._state.ranks[process], now)

    def _on_member(self, status: Status, rank: int, now: float) -> None:
        """A member of the last round says how it is in it."""
        state = self._state
        if state.phase == "ending" and status.phase == "idle":
            state.unsettled.discard(rank)
        if state.phase != "running":
            return
        if status.phase == "returned":
            state.returned.add(rank)
            if status.is_preempted and status.process == self.me:
                state.saves.on_end()
            state.saves.on_leave(status.process)
        elif status.phase == "running":
            state.saves.on_status(status)
        else:
            ended, cause = "could not hear node 0" if status.is_cut else "has ended its ranks", self.books.last.cause
            is_explained = status.is_cut or (cause is not None and cause.echo > 0)
            paused = is_explained and now - self._paused < self.rules.heartbeat
            what = cause or f"{status.name} {ended}"
            self._end_round(str(what), now, free=_STOOD_STILL if paused else "")
        state.inquiry.on_status(status)

    def _learn(self, status: Status, now: float) -> None:
        """Take in what a node knows. A later round than ours was begun by another leader, and is over like it."""
        before = self.books
        if status.books is None:
            return
        self.books = before.merged(status.books)
        self._note_lost_leader(status.books.round)
        if self.books.round == before.round:
            return
        if self._state.phase == "running":
            why = Loss("node 0", "another leader has begun a later round")
            self.books = self.books.noting(Outcome(before.round, loss=why))
        knows = status.leader == self.books.round.leader
        lost = Loss("node 0", "it was lost", memory=status.leader_memory if knows else None)
        others = set(range(1, self.books.size))
        self._state = RoundState("ending", now, unheard=set(others), unsettled=others, absent={0: lost})
        self._say("another process led this job, and is lost: its last round is over", now)
        for seat in self._seats.values():
            self._update_readiness(seat)
            self._recognise(seat.status)

    def _note_lost_leader(self, round_: Round) -> None:
        """Who comes with an earlier leader's last round has lost that leader in it, though nobody has settled it: the
        books did not know of it as this leader began."""
        rounds = [each.round for each in self.books.outcomes if each.round.leader == round_.leader]
        is_earlier = NO_ROUND < round_ < self.books.round and round_.leader != self.books.round.leader
        if is_earlier and round_ == max([round_, *rounds]):
            self.books = self.books.noting(Outcome(round_, loss=Loss("node 0", "it was lost")))

    def _recognise(self, status: Status) -> None:
        """In a round that another leader has begun: who takes part in it, and whose place somebody else has now."""
        state, place = self._state, status.node
        if not state.unheard:
            return
        if status.round == self.books.round and status.node_rank in state.unheard:
            state.unheard.discard(status.node_rank)
            state.ranks[status.process] = status.node_rank
        elif place in state.unheard:  # also who has heard of that round from its leader, and had no part in it
            self._lose(place, Loss(status.name, "a new process has taken its place"))

    # --- places -------------------------------------------------------------------------------------------------------
    def _seat(self, status: Status, now: float) -> bool:
        """Give a new process its place, if it has one. Of two that are connected, the one that started later has it."""
        process, place, most = status.process, status.node, self.rules.max_nodes
        if self.rules.is_fixed:
            if place is None or not 0 <= place < most:
                return self._turn_away(process, f"the job has {most} nodes, and none is node {place}")
            holder = self._seats.get(self._places.get(place, ""))
            if holder is not None and holder.is_linked and holder.status.started > status.started:
                return self._turn_away(process, f"{FENCED}a newer process is {status.name}")
            if place == 0 and process != self.me:
                return self._turn_away(process, f"{FENCED}node 0 is the process that leads the job")
            if holder is not None:
                self._dismiss(holder.status.process, f"{FENCED}a new process has taken its place", now)
            self._places[place] = process
        self._seats[process] = Seat(status, now, now, status.round == NO_ROUND)
        self._count += 1
        self._silence_due = min(self._silence_due, now + self.rules.heartbeat)
        self._explain(status)
        for each in list(self._seats) if process == self.me else [process]:
            self._compare_ranks(each, now)
        return process in self._seats

    def _compare_ranks(self, process: str, now: float) -> None:
        """Ranks are numbered by how many each node has: one that has another number than node 0's would be in another
        world than the others. In a range it stays, idle: the operator counts how often its pod begins anew, and would
        end a job that goes on without it."""
        status, leads = self._seats[process].status, self._seats.get(self.me)
        if leads is None or not status.ranks or not leads.status.ranks or status.ranks == leads.status.ranks:
            return
        has = f"it has {status.ranks} rank(s), and node 0 has {leads.status.ranks}"
        why = f"{has}: all nodes of a job have the same number"
        if self.rules.is_fixed:
            self._dismiss(process, why, now)
        else:
            self._odd[process] = None
            self._ready.pop(process, None)
            self._say(f"{status.name} takes no part: {why}", now)
        self._troubles[status.name] = why

    def _explain(self, status: Status) -> None:
        """A process comes to the place of one that was lost, in the same container, and has found what that one's
        memory was at last: nobody was left to say it. Of a loss of its own that says nothing."""
        was_there = status.round == self.books.round and status.node_rank >= 0
        if status.ended is None or not status.ended.is_full or was_there:
            return
        for rank, loss in self._state.absent.items():
            if loss.node == status.name:
                self._state.absent[rank] = replace(loss, memory=status.ended)
        last = self.books.last
        if last.loss is not None and last.loss.node == status.name:
            self.books = self.books.noting(replace(last, loss=replace(last.loss, memory=status.ended)))

    def _turn_away(self, process: str, why: str) -> bool:
        """It takes part in nothing any more, and is told so."""
        self._outsiders[process] = why
        self._unaware.append(process)
        return False

    def _dismiss(self, process: str, why: str, now: float, status: Status | None = None) -> None:
        """A process takes part in nothing any more. With node 0's, nobody leads here."""
        if process == self.me:
            if status is not None and self.books.round != NO_ROUND:  # the others tell the next leader
                loss = Loss("node 0", why, memory=status.memory)
                self.books = self.books.noting(Outcome(self.books.round, loss=loss))
            self._retire(why if status is None else f"{status.name} has left: {why}", now)
        else:
            self._turn_away(process, why)
            self._miss(process, why, now, status)

    def _miss(self, process: str, why: str, now: float, status: Status | None = None) -> None:
        """A process is not there any more: it is lost, or says itself that it leaves (*status*). If its ranks had
        returned, its part in the round is done."""
        has_left = status is not None
        seat = self._seats.pop(process, None)
        for each in (self._ready, self._cannot, self._odd):
            each.pop(process, None)
        state, status = self._state, seat.status if seat is not None else status
        if status is not None and status.node is not None and self._places.get(status.node) == process:
            del self._places[status.node]
        if process not in state.ranks or status is None:
            return
        life = round(now - seat.since, 1) if seat is not None and seat.is_new else -1.0
        loss, rank = Loss(status.name, why, life, status.memory), state.ranks[process]
        self._lose(rank, loss)
        state.saves.on_leave(process)
        state.inquiry.on_leave(process)
        if state.is_checks:
            state.returned.discard(rank)  # whoever comes in its place is to be checked, and its word is gone with it
        if state.phase == "running" and rank not in state.returned:
            self._end_round(f"{status.name} has left: {why}" if has_left else str(loss), now)
        elif state.phase == "running":
            self._say(f"{status.name} lost after its ranks had succeeded: the round goes on", now)

    def _lose(self, rank: int, loss: Loss) -> None:
        """A member of the last round is not there any more."""
        state = self._state
        state.absent.setdefault(rank, loss)
        state.unheard.discard(rank)
        state.unsettled.discard(rank)

    def _retire(self, why: str, now: float) -> None:
        self._turn_away(self.me, why)
        self._end_round(why, now)

    # --- who could begin ----------------------------------------------------------------------------------------------
    def _update_readiness(self, seat: Seat) -> None:
        status = seat.status
        has_heard = seat.is_linked and status.round == self.books.round
        could = has_heard and status.phase == "idle" and status.cannot is None
        if status.process == self.me:
            could = could and status.offer is not None and status.offer.after == self.books.round
        elif self._takes_no_part(status):
            could = False
        if could:
            self._ready.setdefault(status.process)
        else:
            self._ready.pop(status.process, None)

    def _are_enough(self, now: float) -> bool:
        """Whether a round begins with those who are ready; never without node 0, which has what ranks meet at."""
        rules, state, count = self.rules, self._state, len(self._ready)
        if count < rules.min_nodes or self.me not in self._ready:
            return False
        if rules.is_fixed or count >= rules.max_nodes:
            return count >= rules.max_nodes
        if len(self._ready) == len(self._seats) - self._left_out() and not state.unheard:
            others = [process for process, rank in state.ranks.items() if rank not in state.absent]
            if others and all(process in self._ready for process in others):
                return True  # those of the round before are all back
        # Where another leader may have been, others may still wait for it.
        knows_others = self.lead.is_first or self.books.round != NO_ROUND
        patience = rules.last_call + (0.0 if knows_others else rules.heartbeat + rules.grace)
        return now - max(state.since, self._enough_since) >= patience

    def _left_out(self) -> int:
        """How many nodes that are there take no part, for their machine or their number of ranks."""
        if not self.books.without and not self._odd:
            return 0
        return sum(self._takes_no_part(seat.status) for seat in self._seats.values())

    def _takes_no_part(self, status: Status) -> bool:
        return status.ground in self.books.without or status.process in self._odd

    def _has_room(self) -> bool:
        """Whether a range stops for a node that joins: nobody has returned or leaves, and not again and again."""
        rules, state = self.rules, self._state
        if rules.is_fixed or state.is_checks or state.returned or len(state.ranks) >= rules.max_nodes:
            return False
        if state.saves.is_awaited:
            return False  # what is done since the last save would be lost
        return len(self.books.costing("nothing")) < rules.most_free

    def _may_join(self, now: float) -> bool:
        """Whether a node joins now: what is done since the last save would be lost, so all save first, who would."""
        state = self._state
        if not self._ready or not self._has_room():
            state.joining = None
            return False
        if state.joining is None:
            state.joining = now, state.saves.ask()
        since, call = state.joining
        return state.saves.have_saved(call) or now - since >= self.rules.rendezvous

    # --- what follows -------------------------------------------------------------------------------------------------
    def _advance(self, now: float) -> None:
        self._judge_again()
        are_there = len(self._ready) >= self.rules.min_nodes
        self._enough_since = min(self._enough_since, now) if are_there else float("inf")
        state = self._state
        if self.is_retired or self.is_decided or self.lead.in_doubt or self.verdict is not None:
            state.joining = None  # what is saved meanwhile is not the last that ranks have done when a node may join
            return
        if state.phase == "running" and len(state.returned) == self.books.size:
            self._return(now)
        elif state.phase == "running" and self._may_join(now):
            self._end_round("a node joins", now, free="a node joins")
        elif state.phase == "running" and (late := self._judge_past()) is not None:
            self._end_round(f"{late.cause}, in an earlier round, and {late.text}", now, free=_LATE)
        elif state.phase == "ending" and (self._is_settled or now - state.since > self.rules.patience):
            self._settle(now)
        if self._state.phase == "forming" and not self.lead.in_doubt:
            self._form(now)

    def _judge(self, term: int) -> Verdict | None:
        """What the books come to; read once for each of their editions."""
        if self._judged[:2] != (term, self.books):
            self._judged = (term, self.books, judge(self.books, term, self.rules))
        return self._judged[2]

    def _judge_past(self) -> Verdict | None:
        """Whether a round before the one that runs is known by now to have been the last."""
        if self._past is self.books:
            return None
        self._past = self.books
        past = tuple(each for each in self.books.outcomes if each.round < self.books.round)
        verdict = judge(replace(self.books, outcomes=past), 1, self.rules)
        return verdict if verdict is not None and verdict.kind == "failed" else None

    def _judge_again(self) -> None:
        """Until the upload begins, a cause that comes late counts; the more, one of its own in place of an echo."""
        verdict = self.verdict
        if verdict is None or verdict.kind in ("success", "unfit") or (verdict.cause and not verdict.cause.echo):
            return
        late = self._judge(1)
        if late is not None and late.kind == "failed":
            self.verdict = late

    def _return(self, now: float) -> None:
        """Every rank of the round has returned."""
        if not self._state.is_checks:
            self.verdict = Verdict("success", round=self.books.round)
            return
        seats = {rank: self._seats.get(process) for process, rank in self._state.ranks.items()}
        members = {rank: seat.status for rank, seat in sorted(seats.items()) if seat is not None}
        reports = {rank: status.report for rank, status in members.items() if status.report}
        names = {rank: f"{status.name} ({status.where})" for rank, status in members.items()}
        fitness = self._judge_reports(reports, names) if self._judge_reports is not None else Judged("", "")
        if fitness.code:
            self.verdict = Verdict("unfit", fitness.text, self.books.round, code=fitness.code)
            return
        self.books = replace(self.books, checks=self.books.round.number + 1)
        self._state.phase, self._state.since = "forming", now
        self._say(f"preflight: {fitness.text}", now)

    def _end_round(self, why: str, now: float, *, free: str = "") -> None:
        """The ranks of the last round are to end."""
        state = self._state
        if state.phase == "running":
            self._say(f"round {self.books.number} is over: {why}", now)
        state.phase, state.since, state.free = "ending", now, free
        state.unsettled = {rank for process, rank in state.ranks.items() if not self._is_quiet(process)}
        state.unsettled |= state.unheard
        state.unsettled -= state.absent.keys()

    def _is_quiet(self, process: str) -> bool:
        """Whether a process is known to have no rank left, and to have heard that the round is over."""
        seat = self._seats.get(process)
        return seat is not None and seat.status.phase == "idle" and seat.status.round == self.books.round

    @property
    def _is_settled(self) -> bool:
        """Whether it is known who is left. Who has lost its connection is back, or lost, in a moment."""
        return not self._state.unsettled and all(seat.is_linked for seat in self._seats.values())

    def _settle(self, now: float) -> None:
        """A round is over, and no rank of it is left: what it costs."""
        state, key = self._state, self.books.round
        for process, rank in list(state.ranks.items()):
            if rank in state.unsettled:
                self._dismiss(process, "it did not end its ranks, or did not come back, in time", now)
        for rank in sorted(state.unsettled):
            self._lose(rank, Loss(f"node {rank} of that round", "it did not come back in time"))
        if self.is_retired:
            return
        for seat in self._seats.values():
            self._explain(seat.status)
        has_failed = self.books.last.cause is not None
        lost = [loss for rank, loss in state.absent.items() if has_failed or rank not in state.returned]
        loss = lost[0] if lost else None
        if loss is not None and len(lost) > 1:  # of all others at once node 0's own network may be the cause
            loss = replace(loss, why=f"{loss.why}; with it {len(lost) - 1} more of {self.books.size} nodes")
        statuses = [seat.status for seat in self._seats.values() if seat.status.round == key]
        deaf = [status.name for status in statuses if status.is_cut]
        if loss is None and not state.free and deaf:  # of one alone it is rather that node's own network
            of_one = Loss(deaf[0], "it could not hear node 0")
            loss = of_one if len(deaf) == 1 else Loss("node 0", "other nodes could not hear it")
        returned = sorted(rank for status in statuses for rank in status.ranks_returned)
        self.books = self.books.noting(Outcome(key, loss=loss, free=state.free, returned=tuple(returned)))
        self._leave_out_machine()
        state.phase, state.since = "forming", now
        self._say(self._what_it_costs(), now)
        if loss is not None and not self.rules.is_fixed:
            self.lead.doubt(now)  # a range goes on without its lost nodes: they may have gone to another leader

    def _leave_out_machine(self) -> None:
        """In a range that has nodes enough elsewhere, node 0's among them: go on without a machine that is most likely
        at fault. Its nodes stay, idle, so that no other pod comes to the same machine."""
        last, state = self.books.last, self._state
        if self.rules.is_fixed or last.costs != "restart" or last.cause is None or not last.cause.machine:
            return
        machine = last.cause.machine
        before = [each for each in self.books.costing("restart") if each.round < last.round]
        here = {process: seat.status.ground for process, seat in self._seats.items()}
        fit = {process: place for process, place in here.items() if process not in self._odd}
        others = [process for process, place in fit.items() if place not in (machine, *self.books.without)]
        are_enough = len(others) >= self.rules.min_nodes and self.me in others
        if not are_enough or not is_suspect(before, last.cause, self.rules):
            return
        self.books = self.books.noting(replace(last, without=machine))
        for process in [each for each, place in here.items() if place == machine]:
            self._ready.pop(process, None)
            if process in state.ranks:
                state.absent.setdefault(state.ranks[process], Loss("", "its machine takes no part any more"))

    def _what_it_costs(self) -> str:
        last, number = self.books.last, self.books.number
        if self._judge(1) is not None:
            return f"round {number} is over: {last.why}"  # in the words of _end_round: news is told once
        if last.costs == "restart":
            return self.books.restart_text(last, self.rules.max_restarts)
        return f"round {number} is over ({last.why}); the next begins when every node is there"

    def _form(self, now: float) -> None:
        """No rank is left: the end, the next round, or a wait for those who are missing."""
        are_enough = self._are_enough(now)  # and then whoever knows of earlier rounds has been heard
        self.verdict = self._judge(self.lead.term if are_enough else 1)
        if self.verdict is None and self._cannot:
            self._refuse(now)
        if self.verdict is not None or self.is_retired:
            return
        if are_enough:
            self._begin(now)
        elif now - self._state.since > self.rules.rendezvous:
            self.verdict = self._missing_verdict()
        elif now - max(self._news_at, self._state.since) >= NEWS_SECONDS:
            self._say(self._wait_line(now - self._state.since), now)
            self._waits = True

    def _refuse(self, now: float) -> None:
        """A node that cannot begin ends a job of which nothing has begun; else another is to take its place."""
        for process in list(self._cannot):
            status = self._seats[process].status
            if self.lead.is_first and self.books.round == NO_ROUND:
                self.verdict = Verdict("failed", "no rank was started", cause=status.cannot)
                return
            self._dismiss(process, "it cannot begin, and the job goes on without it", now)

    def _begin(self, now: float) -> None:
        rules, seats = self.rules, {process: self._seats[process] for process in self._ready}
        places = {process: (process != self.me, seat.status.node or 0, seat.since) for process, seat in seats.items()}
        first = sorted(places, key=places.__getitem__)[: rules.max_nodes]
        ranks = {process: rank for rank, process in enumerate(first)}
        offer = seats[self.me].status.offer
        self.books = self.books.beginning(Round(self.lead.leader, self.books.following), len(ranks))
        self._state = RoundState(
            "running",
            now,
            is_checks=rules.checks and not self.books.checks,
            ranks=ranks,
            offer=offer.values if offer is not None else {},
            saves=RoundSaves(ranks),
        )
        self._ready.clear()
        self._troubles.clear()
        if self._waits:  # else why the round before is over may not have been said yet
            self._say("", now)

    # --- words --------------------------------------------------------------------------------------------------------
    def _wait_line(self, waited: float) -> str:
        left = max(0.0, self.rules.rendezvous - waited)
        who = f"{self._who_is_missing()} for {waited:.0f} s, {left:.0f} s more at most{self._trouble()}"
        awaits = "a machine with room for the pod, its image, or the end of the pod before it"
        return f"waiting for {who}; Kubernetes may be waiting for {awaits}"

    def _missing_verdict(self) -> Verdict:
        rules, seconds = self.rules, f"{self.rules.rendezvous:g} s"
        if rules.is_fixed:
            text = f"{self._who_is_missing()} of {rules.max_nodes} did not arrive within {seconds}"
        else:
            came = f"{self._count} process(es) have joined"
            text = f"fewer than {rules.min_nodes} nodes came together within {seconds}: {came}"
        names = self._missing_nodes()
        away = [each for each in (*self._state.absent.values(), self.books.last.loss) if each is not None and each.node]
        lost = [each for each in away if not rules.is_fixed or each.node in [f"node {name}" for name in names]]
        loss = next((each for each in lost if each.is_explained), lost[0] if lost else None)
        text = (f"{loss}; " if loss is not None else "") + text + self._trouble()
        kind: Literal["memory", "missing"] = "memory" if loss is not None and loss.is_explained else "missing"
        return Verdict(kind, text, self.books.round, nodes=tuple(names))

    def _missing_nodes(self) -> list[str]:
        if not self.rules.is_fixed:
            return [f"{max(1, self.rules.min_nodes - len(self._ready))} more"]
        return [str(place) for place in range(self.rules.max_nodes) if self._places.get(place) not in self._ready]

    def _who_is_missing(self) -> str:
        names = self._missing_nodes()
        more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        return f"node{'s' if len(names) > 1 else ''} {', '.join(names[:_NAMES])}{more}"

    def _trouble(self) -> str:
        some = list(self._troubles.items())[:4]
        return "".join(f"; {name} came, and could not begin ({text})" for name, text in some)

    def _say(self, text: str, now: float) -> None:
        self._news, self._news_at, self._waits = text, now, False

    # --- what is said -------------------------------------------------------------------------------------------------
    def _answer(self, now: float, sender: str = "") -> dict[str, Want]:
        """The sender's want; everybody's, where what all are to know has changed."""
        self._advance(now)
        course, processes = self._new_course(), [sender] if sender else []
        if course != self.course:
            self.course, processes = course, [*self._seats, *self._outsiders]
        processes += self._unaware
        self._unaware.clear()
        if not self.lead.term:  # nobody knows this leader yet, and it may not be one
            processes = [self.me] if self.me in self._outsiders else []
        return {process: self._want(process) for process in processes}

    def _new_course(self) -> Course:
        state, leads = self._state, self._seats.get(self.me)
        runs = state.phase == "running" and self.verdict is None and not self.is_decided and not self.is_retired
        return Course(
            self.lead.leader,
            self.books.round,
            runs=runs,
            is_checks=state.is_checks,
            ran_before=not self.lead.is_first,
            size=self.books.size,
            offer=state.offer,
            save=state.saves.save,
            look=state.inquiry.look,
            hang=state.inquiry.hang,
            verdict=self.verdict,
            is_decided=self.is_decided,
            news=self._news,
            memory=leads.status.memory if leads is not None else None,
            books=self.books,
        )

    def _want(self, process: str) -> Want:
        if process in self._outsiders:
            return Want(self.course, leave=self._outsiders[process])
        return Want(self.course, self._state.ranks.get(process, -1))


_STOOD_STILL = "node 0 stood still"
_LATE = "an earlier round had failed, as was said late"
