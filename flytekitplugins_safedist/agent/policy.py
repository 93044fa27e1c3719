"""What one node of a job does, and how it says what it is: decisions as values. No socket, process, thread or clock.

Each call takes what happened and returns what is to be done, in order and once; :class:`.actions.Upload` or
:class:`.actions.Exit` is the last of it, and nothing is asked here after that. :attr:`NodePolicy.status` is what the
coordinator is to hear: whoever owns the link sends it whenever it has changed, and on every new connection, for which
:meth:`NodePolicy.on_disconnect` was called before. What comes over an older connection is not handed on.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

from ..coordinator.books import NO_ROUND, Books, Cause, Loss, Memory, Outcome, Verdict, judge
from ..coordinator.messages import Floor, HangNotice, Save, Status, Want
from ..coordinator.rules import Rules
from ..coordinator.sign import PAUSE_SECONDS, SignWatch, StoreLook
from .actions import (
    Action,
    Blame,
    CallRanks,
    DropLink,
    EndRanks,
    Exit,
    LookAtStore,
    MakeOffer,
    SaveAt,
    Say,
    StartRanks,
    TakePicture,
    Upload,
)

UNDECIDED = 137
"""The exit status of a process that leaves its job undecided: its pod is to be replaced."""

_LOOKS = 6
"""At the store, of a node that waits, in the time between two renewals of the leader's sign."""

_LOOKS_OF_ALL = 0.2
"""Seconds between two looks at the store of all nodes whose ranks run: thousands of them look the more seldom."""

TURN_SECONDS, _TURNS = 5.0, 12
"""Where no leader comes, nodes give up one after the other: the first uploads, and the others find that. Whoever
knows a cause of its own goes before all: the others know only that node 0 is lost."""

CUT_OFF = "the leader of this job cannot be reached from here"
"""Why a pod leaves whose leader's sign is renewed."""

DECIDED = "this attempt has ended, and its result is uploaded: nothing is left to do here"
"""Why a pod leaves that finds its attempt's verdict in the store, or hears of it."""


class NodePolicy:
    """One incarnation of a node.

    Args:
        rules: the job's.
        me: how it begins: which process, in which place; with ``cannot`` where it can start no rank.
        now: seconds, of a clock that only grows; as in every call.
        leads: the coordinator is in this process, whose link is never lost.
        is_replaced: an operator replaces this pod when it leaves undecided; else its end is the job's.
    """

    def __init__(self, rules: Rules, me: Status, now: float, *, leads: bool, is_replaced: bool = True) -> None:
        self.rules, self.status, self.leads = rules, me, leads
        self._is_replaced = is_replaced
        self.books = Books()
        """This node's copy."""
        self.end: Verdict | None = None
        """How the job ends, as the leader says that is heard."""
        self._ends_at = float("inf")  # when it is waited no more for the upload of that
        self._want: Want | None = None
        self._has_ranks = self._has_left = False
        self._stay: tuple[float, str] | None = None  # until when, for a save, and why this pod leaves then
        self._end_at: float | None = None  # when ranks are ended that may only have echoed
        self._exit: Exit | None = None
        self._cut: float | None = None if leads else now  # since when no leader is heard
        self._verdict: Verdict | None = None  # that this leader is to upload when it has looked at the store
        self._verdict_since = 0.0
        self._looked = self._woke = float("-inf")
        self._watch = SignWatch()
        self._last = now
        self._once: set[object] = set()  # what was handed out, where that is once in a round
        self._out: list[Action] = []
        turn = me.node if me.node is not None else zlib.crc32(me.process.encode()) % _TURNS
        self._turn = TURN_SECONDS * min(turn, _TURNS)

    # --- what the coordinator says ------------------------------------------------------------------------------------
    def on_want(self, want: Want, now: float) -> list[Action]:
        """The leader says what this node is to be."""
        self._wake(now)
        course = want.course
        if course.leader < self.status.leader:
            self._note(self.books.merged(course.books))  # what it knows is true all the same
            return self._acts(now, DropLink())
        is_news = self._want is None or self._want.course.news != course.news
        if course.news and is_news and not self.status.leaving:
            self._out.append(Say(course.news))
        self._want, self._cut = want, None
        if self.end is None:
            self._ends_at = now + self.rules.upload + self.rules.heartbeat
        self.end = course.verdict
        self._say(leader=course.leader, leader_memory=course.memory)
        self._note(course.books.merged(self.books))
        return self._acts(now)

    def on_disconnect(self, why: str, now: float) -> list[Action]:
        """The connection is lost, or was never made."""
        self._wake(now)
        if self._cut is None:
            self._cut = now
            self._watch.forget()  # what the leader renewed before it was lost is no sign that it lives
            self._out.append(Say(f"node 0 cannot be heard ({why}); waiting for its replacement"))
        self._want = None
        self._say(looked=0)  # the picture is perhaps lost with the connection: it is taken again
        self._once = {key for key in self._once if not (isinstance(key, tuple) and key[0] == "look")}
        if self._exit is None:
            self.end = None  # it may be lost before its upload, and others may give it up
        self._note(self.books)
        return self._acts(now)

    # --- what becomes of the ranks ------------------------------------------------------------------------------------
    def on_fact(self, now: float, **facts: Any) -> list[Action]:
        """What the coordinator alone acts on, as fields of the status: an offer; that a rank listens; the answer to
        :class:`.actions.CallRanks` (``floor``); the save that all ranks here have made, or have nothing to; the look of
        which the picture is where the coordinator is."""
        self._say(**facts)
        return self._acts(now)

    def on_failure(self, cause: Cause, now: float) -> list[Action]:
        """A rank has failed. It is said at once, before anything is ended or measured; what may only be an echo has a
        moment in which its cause may show."""
        phase = self.status.phase
        if (self._has_ranks or phase == "returned") and cause.round == self.status.round:
            self._note(self.books.noting(Outcome(cause.round, cause)))
            if phase == "returned":  # one that had returned holds up the others
                self._say(phase="idle")
            elif not cause.echo:
                self._end_ranks()
            elif self._end_at is None:
                self._end_at = now + self.rules.settle
        return self._acts(now)

    def on_left(self, now: float) -> list[Action]:
        """All ranks of this node have come back from the function, and are about to end."""
        self._has_left = True
        return self._acts(now)

    def on_return(self, ranks: tuple[int, ...], now: float, report: str = "") -> list[Action]:
        """All ranks of this node have returned; or its checks are done."""
        if self.status.phase == "running":
            self._has_ranks = self._has_left = False
            self._say(phase="returned", ranks_returned=ranks, report=report, stall=0.0)
        return self._acts(now)

    def on_quiet(self, ranks_returned: tuple[int, ...], now: float) -> list[Action]:
        """No rank is left here, after a failure or :class:`.actions.EndRanks`."""
        self._has_ranks, self._end_at = False, None
        self._say(phase="idle", ranks_returned=ranks_returned, stall=0.0)
        return self._acts(now)

    def on_ask(self, now: float) -> list[Action]:
        """A rank wants all ranks to save, or such a save is due: after the save that is being made, if one is."""
        save, answered = self._save, self.status.floor.call  # also while the leader is not heard
        self._say(asks=1 + max(answered, save.call if save is not None else 0))
        return self._acts(now)

    def on_stall(self, seconds: float, now: float, *, is_urgent: bool = True) -> list[Action]:
        """For so long a rank has waited, which is suspicious; 0.0: none does any more. ``is_urgent``: that wait will be
        ended, by a library or for the user."""
        if self.status.phase == "running":
            self._say(stall=seconds, is_urgent=is_urgent)
        return self._acts(now)

    def on_memory(self, memory: Memory, now: float) -> list[Action]:
        """What the container uses. It is said when it comes near its limit, or leaves that again."""
        before = self.status.memory
        if before is None or before.is_full != memory.is_full or before.limit != memory.limit:
            self._say(memory=memory)
        return self._acts(now)

    # --- signals and time ---------------------------------------------------------------------------------------------
    def on_stop(self, why: str, at: float, now: float, *, stays: bool) -> list[Action]:
        """This process was told to stop *at* some moment; ``stays``: for a save by all ranks, where they run. A leader
        that uploads does that first."""
        if self._verdict is not None:
            self._out.append(Say(f"{why}: the upload is finished first"))
        if self._verdict is not None or self._exit is not None or self._stay is not None:
            return self._acts(now)
        if stays and self._is_needed and self.rules.preemption > 0:
            self._stay = at + self.rules.preemption, why
            left = max(0.0, self._stay[0] - now)
            self._out.append(Say(f"{why}: this pod stays until all ranks have saved, for {left:.0f} s at most"))
            self._say(is_preempted=True)
        else:
            self._leave(why, now)
        return self._acts(now)

    def on_tick(self, now: float) -> list[Action]:
        """Time has passed; called several times a second."""
        self._wake(now)
        rules, status = self.rules, self.status
        cut = now - self._cut if self._cut is not None else 0.0
        if cut > rules.grace and status.phase == "running":
            self._out.append(Say("the ranks here are ended: node 0 is lost, and with it the round"))
            self._say(is_cut=True)
            self._end_ranks()
        elif self._end_at is not None and now >= self._end_at:
            self._end_ranks()
        if cut > rules.rendezvous + rules.upload:
            self._leave("neither the leader nor the store can be reached from here", now)
        if self._verdict is not None and now - self._verdict_since > rules.upload:
            self._leave_undecided("the verdict could not be uploaded: the store is away")
        elif self.end is not None and now > self._ends_at:
            self._leave_undecided("the leader has not uploaded the verdict in time")
        if now - self._looked > self._between_looks:
            self._look(now)
        return self._acts(now)

    # --- the store ----------------------------------------------------------------------------------------------------
    def on_look(self, look: StoreLook, now: float) -> list[Action]:
        """What the store says. A look that was begun before this process stood still says nothing."""
        self._wake(now)
        if look.since <= self._woke or self._exit is not None:
            return self._acts(now)
        if self._cut is not None and look.since >= self._cut:
            self._watch.on_look(look.sign, now)
        is_mine = look.sign is None or look.sign.leader <= self.status.leader
        cut = now - self._cut if self._cut is not None else 0.0
        if look.is_decided:
            self._exit_when_quiet(0, DECIDED)
        elif self._verdict is not None:
            if is_mine:
                self._upload(self._verdict)
            else:
                self._leave_undecided("another process leads this job")
        elif not is_mine and self._want is not None:
            self._out.append(DropLink())
        elif cut > self.rules.rendezvous + (0.0 if self._knows_cause else self._turn):
            self._give_up(now)
        return self._acts(now)

    # --- inside -------------------------------------------------------------------------------------------------------
    def _acts(self, now: float, *more: Action) -> list[Action]:
        self._obey(now)
        out, self._out = [*self._out, *more], []
        return out

    def _say(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)

    def _note(self, books: Books) -> None:
        """The copy of the books; the leader is told what it has not told itself."""
        self.books = books
        is_leaders = self._want is not None and self._want.course.books == books
        self._say(books=None if is_leaders else books)

    @property
    def _knows_cause(self) -> bool:
        cause = self.books.last.cause
        return cause is not None and not cause.echo

    @property
    def _between_looks(self) -> float:
        """Seconds, at the store. Who waits looks often; whose ranks run, seldom: whether its leader is still the job's,
        which that may not know where it cannot reach the store. A leader's coordinator looks for itself."""
        if self._verdict is not None or (not self.leads and self.status.phase != "running"):
            return self.rules.renew / _LOOKS
        return float("inf") if self.leads else max(self.rules.renew, _LOOKS_OF_ALL * self.rules.max_nodes)

    @property
    def _save(self) -> Save | None:
        return self._want.course.save if self._want is not None else None

    def _wake(self, now: float) -> None:
        """Whoever stood still does not know who leads, and blames nobody for that time."""
        paused, self._last = now - self._last, now
        if paused <= PAUSE_SECONDS:
            return
        self._verdict_since += paused
        self._ends_at += paused
        self._cut = self._cut + paused if self._cut is not None else None
        self._woke, self._looked = now, float("-inf")
        self._watch.forget()

    def _obey(self, now: float) -> None:
        want = self._want
        if self._exit is None and want is not None:
            if want.course.is_decided:
                self._exit_when_quiet(0, DECIDED)
            elif want.leave:
                self._exit_when_quiet(UNDECIDED, want.leave)
            else:
                self._follow(want, now)
        if self._stay and not (self._exit or self._verdict) and self._need_not_stay(now, self._stay[0]):
            why, self._stay = self._stay[1], None
            self._leave(why, now)
        if self._exit is None and self.leads and self.status.cannot is None and self._verdict is None:
            self._ask_for_offer()
        if self._exit is not None and not self._has_ranks:
            self._hand_out_once("exit", self._exit)

    def _need_not_stay(self, now: float, until: float) -> bool:
        """Whether all ranks have saved for this pod that leaves; or none can any more."""
        save = self._save
        has_saved = save is not None and save.is_urgent and save.is_done
        if self._has_left or (self.status.phase == "returned" and save is not None and save.is_empty):
            has_saved = False  # nobody would save any more; but all may return
        return has_saved or not self._is_needed or now >= until

    @property
    def _is_needed(self) -> bool:
        """Whether something of the round is lost without this node: its ranks, or, where these have returned, what the
        others still do at the leader's."""
        return self.status.phase == "running" or (self.leads and self.status.phase == "returned")

    def _follow(self, want: Want, now: float) -> None:
        course, status = want.course, self.status
        if course.verdict is not None:
            self._on_verdict(course.verdict, now)
        is_success = course.verdict is not None and course.verdict.kind == "success"
        is_other = not want.runs or course.round != status.round
        if self._has_ranks and is_other:
            cause = course.books.last.cause
            self._end_ranks(shows_stacks=cause is not None and cause.is_timeout)
        elif is_other and not is_success:
            self._say(phase="idle")
        if course.runs and want.node_rank < 0:
            self._hand_out_once(("waits", course.round), Say(self._why_it_waits(want)))
        status = self.status
        if status.phase == "idle" and course.round > status.round:
            if want.runs and status.cannot is None and self._verdict is None:
                self._start(want, now)
            elif not want.runs:  # what was said of the round before is nothing of this one
                self._say(round=course.round, node_rank=want.node_rank, is_cut=False, ranks_returned=())
        elif status.phase in ("running", "returned") and not is_other and self._end_at is None:
            if status.phase == "running":
                self._save_ranks(course.save)
            self._look_at_ranks(course.look, course.hang)

    def _why_it_waits(self, want: Want) -> str:
        if self.status.ground in want.course.books.without:
            return (
                "this node takes no part any more: its machine is most likely at fault, and the job goes on without it"
            )
        return f"round {want.course.books.number} runs: this node may take part in the next one"

    def _start(self, want: Want, now: float) -> None:
        course = want.course
        self._has_ranks, self._has_left, self._looked = True, False, now
        self._once.clear()
        self._say(round=course.round, node_rank=want.node_rank, phase="running", is_cut=False, ranks_returned=())
        self._say(listens=False, asks=0, floor=Floor(), saved=0, stall=0.0, looked=0, report="")
        place = (want.node_rank, course.size, course.offer)
        self._out.append(StartRanks(course.round, course.books.number, *place, course.is_checks, course.ran_before))

    def _save_ranks(self, save: Save | None) -> None:
        if save is None or save.is_done:
            return
        if save.step is None and self.status.floor.call < save.call:
            self._hand_out_once(("call", save.call), CallRanks(save.call))
        elif save.step is not None and self.status.saved < save.call:
            is_told = (save.is_urgent and not save.is_empty) or (save.is_forced and save.step >= 0)
            if is_told and ("save", save.call) not in self._once:
                at = "no rank saves by steps" if save.step < 0 else f"all ranks save at step {save.step}"
                self._out.append(Say(f"{'a node was told to stop' if save.is_urgent else 'a node joins'}: {at}"))
            self._hand_out_once(("save", save.call), SaveAt(save.call, save.step, save.is_urgent, save.is_forced))

    def _look_at_ranks(self, look: int, hang: HangNotice | None) -> None:
        if look > self.status.looked:
            self._hand_out_once(("look", look), TakePicture(look))
        if hang is not None:
            self._hand_out_once(("hang", hang.look), Blame(hang))

    def _hand_out_once(self, key: object, action: Action) -> None:
        if key not in self._once:
            self._once.add(key)
            self._out.append(action)

    def _ask_for_offer(self) -> None:
        status = self.status
        if status.phase == "idle" and (status.offer is None or status.offer.after != status.round):
            self._hand_out_once(("offer", status.round), MakeOffer(status.round))

    def _end_ranks(self, *, shows_stacks: bool = False) -> None:
        self._end_at = None
        if self._has_ranks and self.status.phase != "ending":
            self._say(phase="ending")
            self._out.append(EndRanks(shows_stacks))

    # --- the end ------------------------------------------------------------------------------------------------------
    def _on_verdict(self, verdict: Verdict, now: float) -> None:
        if not self.leads:
            self._hand_out_once("verdict", Say("done here; waiting until node 0 has uploaded"))
        elif verdict != self._verdict:
            self._decide(verdict, now)

    def _decide(self, verdict: Verdict, now: float) -> None:
        """This node is to upload it; but not before the store has said whose job this is."""
        if self._verdict is None:
            self._verdict_since = now
        self._verdict = verdict
        if self.rules.is_alone:
            self._upload(verdict)
        else:
            self._look(now)

    def _look(self, now: float) -> None:
        if self._exit is None and not self.rules.is_alone:
            self._looked = now
            self._out.append(LookAtStore())

    def _upload(self, verdict: Verdict) -> None:
        self._hand_out_once("upload", Upload(verdict))

    def _leave(self, why: str, now: float) -> None:
        """Take part in nothing any more. Where nobody replaces this pod, that is the job's end."""
        if self.rules.is_alone and not self._is_replaced:
            self._say(leaving=why)
            self._end_ranks()
            self._decide(Verdict("stopped", why, self.status.round), now)
        else:
            self._leave_undecided(why)

    def _leave_undecided(self, why: str) -> None:
        if self._exit is None:
            # The others need not learn it from an echo; nor is it the kernel that ends this process for its memory.
            self._say(leaving=why, memory=None)
            self._exit_when_quiet(UNDECIDED, why)

    def _exit_when_quiet(self, code: int, why: str) -> None:
        if self._exit is None:
            self._exit = Exit(code, why)
            self._end_ranks()

    def _give_up(self, now: float) -> None:
        """No leader was heard for too long. Where its sign is renewed, this pod has no say; nor where it cannot begin.
        A sign that has only not been watched for long enough is watched on."""
        is_fresh = self._watch.is_fresh(self.rules, now)
        # One that was renewed and is no more is of a leader that was lost as well: what this node knows counts.
        if (is_fresh and self._watch.has_changed(self._cut or 0.0)) or self.status.cannot is not None:
            self._leave_undecided(CUT_OFF)
            return
        if is_fresh:
            return
        has_begun, seconds = self.status.round != NO_ROUND, f"{self.rules.rendezvous:g} s"
        text = "was lost, and none took its place" if has_begun else "did not come"
        books, last = self.books, Loss("node 0", f"it {text} within {seconds}", memory=self.status.leader_memory)
        missing = Verdict("missing", f"node 0 {text} within {seconds}", books.round, nodes=("0",))
        if last.is_explained:
            missing = Verdict("memory", str(last), books.round)
        if has_begun:  # else what ranks lost with it would be told as theirs: nobody has settled that round
            books = books.noting(Outcome(books.round, loss=last))
        self._upload(judge(books, self.status.leader.term, self.rules) or missing)
