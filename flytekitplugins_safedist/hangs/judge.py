"""From what all ranks of a job do at one moment to who holds up whom. Pure.

A rank waits where a library has recorded that it has begun something with others that has not ended, or where its stack
says so and nothing is recorded; it is held up where that has lasted for too long. Whom it waits for are those members
of the group that have not come. Of a rank that has not said what it waits in, nothing is concluded.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config.options import Hangs
from . import stacks
from .evidence import ranks_of
from .picture import clause, listed
from .snapshot import Snapshot
from .waits import CALL, HOROVOD, STEP, Wait


@dataclass(frozen=True)
class HangKind:
    """Of a hang; docs/hangs.md has what each means.

    Attributes:
        says: what is seen of one rank, as a sentence.
        hint: what to do.
        may_come: waiting longer may help.
    """

    says: str
    hint: str
    may_come: bool = False


KINDS = {
    "gpu": HangKind(
        "{who} has a GPU that has failed: {fault}; {why}",
        "drain that node (kubectl cordon, kubectl drain) until the GPU is reset or replaced",
    ),
    "frozen": HangKind(
        "{who} is {process}{gpu}",
        "look at who stops it (a debugger, SIGSTOP), or at its node's disk, file server or device",
    ),
    "returned": HangKind(
        "{who} has returned from the task's function",
        "let every rank take part in the same number of collectives (uneven data: drop the last batch, or torch's "
        "Join), or end the function with a barrier",
    ),
    "slow": HangKind(
        "{who} is {where}, and {works} ({used}): slow, or an endless loop{gpu}",
        "if that line is an evaluation or a save of one rank, raise Hangs(ceiling=...) above its time",
        may_come=True,
    ),
    "gil": HangKind(
        "{who} is {where}, in native code that holds Python's lock ({process}){gpu}",
        "look at the native call that does not come back, and have it release Python's lock while it waits",
    ),
    "input": HangKind(
        "{who} waits for input {where} ({process}){child}{gpu}",
        "look at where its data come from (a file server, a DataLoader's worker), and give reads a deadline",
    ),
    "missing": HangKind(
        "{who} is {where}, and does nothing ({process}){child}{gpu}",
        "look at the line where it stands: what it waits for, and whether all ranks call the same collectives",
    ),
    "mismatch": HangKind(
        "{why}", "let all ranks call the same collectives, with the same shapes, in the same order, in every branch"
    ),
    "unnamed": HangKind("{why}", "give the tensors of that line a name (name=...), the same on every rank"),
    "symmetric": HangKind(
        "{why}",
        "look at the network between the nodes (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), and at whether ranks wait for "
        "each other in two groups",
    ),
}
"""By name, the most certain first: it decides where several ranks are missing. One that may come yet is waited for,
whatever idle ranks there are beside it: they may wait for it in a way that nobody sees."""

_UNSURE = ("gil", "input", "missing", "symmetric")
"""What may be for a rank that does not say what it waits in, and computes: that is waited for as well."""

_BUSY = 0.1
"""Cores that a rank uses which computes, with all that it has started, rather than waits. Horovod's thread, which wakes
each millisecond, may use twice as many: a rank that others wait for is busy with up to so many more than they use."""

_WAKING = ("/horovod/common/basics.py", "/horovod/torch/mpi_ops.py")
"""Who stands in a call of these waits there, by waking each millisecond, too: what it uses tells nothing."""

_LOADS = ("/torch/utils/data/", "/torchdata/", "/multiprocessing/queues.py", "/multiprocessing/connection.py")
_BETWEEN = re.compile(r"(?:send|recv) (\d+)(->|<-)(\d+)")
_UNEVEN = re.compile(r"^(all_?to_?all\w*|scatter|\w+_oop) of \w+\[.*")
"""Operations to which each rank may bring another amount."""
_MESSAGE = re.compile(r"^(send|recv)(_object_list)?$")
"""What is recorded of none: each may be the other end of another."""
_NAMED = 3
"""Operations that ranks wait in, in a sentence."""


@dataclass(frozen=True)
class Hang:
    """Who holds up the others.

    Attributes:
        kind: a key of :data:`KINDS`.
        culprits: ranks.
        waiting: ranks that wait for them.
        why: what is seen, as a sentence.
        key: the same for the same hang at a later look.
        rank: that is to fail for it: the first culprit, or the first that waits where nobody is one.
        what: has not ended: ``a collective``, ``a step``.
        seconds: for so long, the oldest one.
        is_endless: nobody but us would ever end it.
        may_come: waiting longer may help.
        goes_on: a step is old, in which ranks begin one operation after the other: that is only told.
        step: that the job is in: its last rank's; -1 where nobody knows.
        picture: of all ranks, as text for a screen.
    """

    kind: str
    culprits: tuple[int, ...]
    waiting: tuple[int, ...]
    why: str
    key: str
    rank: int
    what: str
    seconds: float
    is_endless: bool
    may_come: bool
    goes_on: bool = False
    step: int = -1
    picture: str = ""

    def may_end(self, hangs: Hangs) -> bool:
        """Whether the job is to be ended for it. Where the user has not said after how long, only what a library would
        end by itself a moment later."""
        if hangs.action == "report" or self.goes_on:
            return False
        if hangs.floor is None:
            return not self.is_endless and not self.may_come
        return not self.may_come or self.seconds >= hangs.ceiling


def judge(snapshots: Sequence[Snapshot]) -> Hang | None:
    """Who holds up the others; None where nobody does, or a person looks at a rank with a debugger.

    Args:
        snapshots: of all ranks of the job.
    """
    if any(each.process.state == "t" or each.debugged or stacks.asks_a_person(each.threads) for each in snapshots):
        return None
    job = _Job(snapshots)
    hang = job.by_waits() or job.by_steps()
    return hang and job.by_gpus(hang)


class _Job:
    """All ranks: who waits in which group, and who has not come."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self.ranks = {each.rank: each for each in snapshots}
        self.waits: dict[str, dict[int, Wait]] = {}  # by key and rank
        stand = list(filter(_stands, snapshots))
        self.recorded = {each.rank: each.recorded for each in stand if each.recorded}
        for wait in (wait for each in stand for wait in each.waits if wait.source != STEP):
            self.waits.setdefault(wait.key, {})[wait.rank] = wait
        late = [wait for some in self.waits.values() for wait in some.values() if wait.is_late]
        recorded = [wait for wait in late if wait.source != CALL and not _has_joined(wait)]
        self.late = recorded or [wait for wait in late if self._is_quiet(wait.limit / 2)]

    def _is_quiet(self, seconds: float) -> bool:
        """Whether nothing has gone on for so long. Who takes part in an unrecorded call nobody knows: all may; and who
        has joined waits for all to end."""
        return all(each.returned or each.quiet >= seconds for each in self.ranks.values())

    # --- who is missing ----------------------------------------------------------------------------------------------
    def first(self, key: str) -> Wait:
        """The earliest that somebody waits in: who has called something else in its place may be further by now."""
        return min(self.waits[key].values(), key=lambda wait: wait.number)

    def others(self, key: str) -> list[Snapshot]:
        """Members of a group that do not wait in it; where nobody knows who they are, those who have used it."""
        named = ranks_of(self.first(key).members) or [rank for rank, each in self.ranks.items() if key in each.begun]
        return [self.ranks[rank] for rank in named if rank in self.ranks and rank not in self.waits[key]]

    def missing(self, key: str) -> list[int]:
        """Members that have not come to the earliest operation."""
        first, others = self.first(key), self.others(key)
        behind = [each.rank for each in others if _is_behind(each, first)]
        is_loose = first.source == HOROVOD  # it has one count for all process sets
        return [each.rank for each in others] if is_loose and not behind else behind

    def silent(self) -> list[int]:
        """Members that do not say whether they have come."""
        keys = {wait.key for wait in self.late if wait.key in self.waits}
        return sorted({each.rank for key in keys for each in self.others(key) if _is_silent(each, self.first(key))})

    def by_waits(self) -> Hang | None:
        """By what libraries have recorded; where nobody waits so for too long, by stacks."""
        if not self.late or len(self.ranks) < 2:
            return None
        keys, held = list(dict.fromkeys(wait.key for wait in self.late)), set[int]()
        for key in keys:  # grows: by the groups of whom somebody waits for, directly or not
            new = set(self.missing(key)) - held
            held |= new
            further = dict.fromkeys(wait.key for rank in sorted(new) for wait in self.recorded.get(rank, ()))
            keys += [each for each in further if each not in keys]
        apart = [self.ranks[rank] for rank in held if rank not in self.recorded]
        # Who stands in a library's call of which nothing is recorded is a victim, most likely.
        free = [each for each in apart if _is_out(each) or not each.waits_in] or apart
        if free:
            return self.held_up(free)
        if held and self.late[0].source != CALL:
            ring = [self.waits[key] for key in keys if self.missing(key) or held & self.waits[key].keys()]
            if not _have_both_ends(wait.operation for some in ring for wait in some.values()):
                return self.differing(ring)
        return self.all_there()

    def held_up(self, some: Sequence[Snapshot]) -> Hang:
        """By ranks that wait for nobody."""
        idle = min(self.ranks[wait.rank].cpu for wait in self.late)
        kinds = {each.rank: _kind(each, idle) for each in some}
        # Who takes part in a call that nothing records nobody knows: who may come is waited for, whoever will not.
        may_come = {rank: kind for rank, kind in kinds.items() if self.late[0].source == CALL and KINDS[kind].may_come}
        first, kind = _worst(may_come or kinds)
        waits = [wait for wait in self.late if wait.rank not in kinds]
        return self.hang(kind, kinds, f"{_sentence(self.ranks[first], kind)}; {_who(waits)}", rank=first)

    # --- where nobody is ---------------------------------------------------------------------------------------------
    def all_there(self) -> Hang:
        """Some have called something else, or the network does not carry it."""
        for key in dict.fromkeys(wait.key for wait in self.late):
            first, own = self.first(key), self.waits[key]
            called = own if first.source == HOROVOD or not first.number else self.called(first)
            called = {rank: wait for rank, wait in called.items() if not _has_joined(wait)}
            parts: dict[str, dict[int, Wait]] = {}
            for rank, wait in called.items():
                parts.setdefault(_matched(wait.operation), {})[rank] = wait
            if len(parts) > 1:
                return self.differing(list(parts.values()), now=own)
            counts = {wait.number for wait in called.values()}
            is_named = any(" of " in wait.operation for wait in called.values())
            if first.source == HOROVOD and not is_named and len(counts) > 1:
                return self.hang("unnamed", (), f"{_who(own.values())}: tensors without a name, which each rank counts")
        silent = self.silent()
        doubt = f"; nobody knows what rank {listed(silent)} waits in" if silent else ""
        first, is_all = self.late[0], len({wait.rank for wait in self.late}) == len(self.ranks)
        where = f", rank {first.rank} {self.ranks[first.rank].where}" if first.source == CALL else ""
        who = f"all ranks wait in {first}" if is_all and len({*map(str, self.late)}) == 1 else _who(self.late)
        return self.hang("symmetric", (), f"{who}{where}: the network between them, or a library, stands still{doubt}")

    def called(self, first: Wait) -> dict[int, Wait]:
        """What each member has called as that operation of the group."""
        found: dict[int, Wait] = {}
        for rank in [*self.waits[first.key], *(each.rank for each in self.others(first.key))]:
            for key, number, operation in self.ranks[rank].latest:
                if (key, number) == (first.key, first.number):
                    found[rank] = replace(first, rank=rank, operation=operation)
        return found

    def differing(self, parts: Sequence[Mapping[int, Wait]], *, now: Mapping[int, Wait] | None = None) -> Hang:
        """Parts of the ranks that wait in different things, or have called them and wait in what they do *now*: the
        least is to blame."""
        few = min(parts, key=lambda some: (len(some), -min(some)))
        many = max((some for some in parts if some is not few), key=lambda some: (len(some), -min(some)))
        verbs, link = (("waits in", "wait in"), "and") if now is None else (("has called", "have called"), "where")
        why = f", {link} ".join(f"{clause(some, *verbs)} {some[min(some)]}" for some in (few, many))
        further = [now[rank] for rank in few if rank in now] if now is not None else []
        why += f"; now {_who(further)}" if further else ""
        handles = [f"; rank {rank} handles {text}" for rank in sorted(few) if (text := self.ranks[rank].handles)]
        # Where others than those who wait for too long go on, it is another one at the next look.
        beside = [wait for some in (parts if now is None else [now]) for wait in some.values()]
        key = _digest(sorted(few), _places(self.late), _places(beside))
        return self.hang("mismatch", few, why + "".join(handles[:1]), key=key)

    # --- by steps, and GPUs ------------------------------------------------------------------------------------------
    def by_steps(self) -> Hang | None:
        """In a job whose ranks tell their steps: who is in one for too long, and behind those who go on; or all are."""
        some = list(self.ranks.values())
        steps = {each.rank: wait for each in some for wait in each.waits if wait.source == STEP}
        longest = max((wait.age for wait in steps.values() if wait.is_late), default=math.inf)
        # Nodes are used to different times: half as long is far more than a step takes, too.
        stand = [each for each in some if each.rank in steps and steps[each.rank].age >= longest / 2]
        save = [each for each in some if each.steps.is_saving]
        told = [each for each in some if any(each.steps.told) and not each.steps.is_over]
        go_on = [each for each in told if each not in stand and each not in save]
        least = min((each.steps.step for each in stand), default=-1)
        if not stand or any(each.steps.step <= least for each in go_on):
            return None
        behind = [each for each in stand if each.steps.step == least]
        silent = [each for each in some if each not in told]
        # Whoever stands in a library's collective (a barrier of fs is in no record) waits for another.
        apart = [[each for each in few if not each.waits_in] for few in (behind, silent)]
        culprits = save or apart[0] or apart[1]
        kinds = {each.rank: _kind(each) for each in culprits}
        first, kind = _worst(kinds or {stand[0].rank: "symmetric"})
        seen = f"all ranks wait, rank {behind[0].rank} {behind[0].where}"
        seen = _sentence(self.ranks[first], kind) if culprits else seen
        which = f"step {least} has not ended" if least >= 0 else "no step has ended"
        on = f", and {len(go_on)} rank(s) go on" if go_on else ""
        self.late = [steps[each.rank] for each in stand]
        goes_on = all(each.quiet < steps[each.rank].limit / 2 for each in behind)
        why = f"{seen}; {which} for {longest:.0f} s{on}" + ("; operations with others go on" if goes_on else "")
        # They may wait for one that works, and tells no steps, in a way that nobody sees.
        is_unsure = kind in _UNSURE and any(_kind(each) == "slow" for each in apart[1])
        may_come = KINDS[kind].may_come or is_unsure
        return self.hang(kind, kinds, why, rank=first, step=least, may_come=may_come, goes_on=goes_on)

    def by_gpus(self, hang: Hang) -> Hang:
        """The same; of a culprit whose GPU has failed, or of a rank that waits where nobody is one, for that."""
        some = [self.ranks[rank] for rank in hang.culprits or hang.waiting]
        faults = {each.rank: fault for each in some for fault in reversed(each.faults) if fault.stays}
        if not faults:
            return hang
        first = next(iter(faults))
        why = _sentence(self.ranks[first], "gpu", fault=str(faults[first]), why=hang.why)
        return self.hang("gpu", faults, why, step=hang.step, key=_digest("gpu", list(faults), hang.step))

    def hang(self, kind: str, culprits: Iterable[int], why: str, **facts: Any) -> Hang:
        """A value; *facts* where they are others than usual."""
        who = tuple(sorted(culprits))
        waiting = tuple(sorted({wait.rank for wait in self.late}.difference(who)))
        usual = {
            "key": _digest(kind, who, _places(self.late)),
            "rank": (who or waiting)[0],
            "what": "a step" if self.late[0].source == STEP else "a collective",
            "seconds": max(wait.age for wait in self.late),
            "is_endless": all(math.isinf(wait.timeout) for wait in self.late),
            "may_come": KINDS[kind].may_come or (kind in _UNSURE and bool(self.silent())),
            "step": min((each.steps.step for each in self.ranks.values() if each.steps.step >= 0), default=-1),
        }
        return Hang(kind, who, waiting, why, **{**usual, **facts})


def _has_joined(wait: Wait) -> bool:
    """Whether it is for the others to come to their end, by Horovod: their collectives go on without that rank."""
    return wait.source == HOROVOD and wait.operation == "join"


def _stands(one: Snapshot) -> bool:
    return not one.moved and one.process.state not in ("T", "t") and not one.returned


def _is_out(one: Snapshot) -> bool:
    """Whether it comes to nothing as it is: it has returned, is stopped, or is in the kernel with all its threads."""
    return one.returned or one.process.state == "T" or (one.stays == "D" and not one.threads)


def _is_behind(one: Snapshot, first: Wait) -> bool:
    if _is_out(one):
        return True
    if first.source == CALL:
        return bool(one.threads)
    begun = _begun(one, first)
    return one.is_whole if begun is None else not first.number or begun < first.number


def _is_silent(one: Snapshot, first: Wait) -> bool:
    """Whether it does not say what it waits in; Horovod's waits the rank's page has."""
    return not one.is_whole and first.source != HOROVOD and _begun(one, first) is None


def _begun(one: Snapshot, first: Wait) -> int | None:
    """How many it has begun in a group; also where it could not note who else is in that."""
    return one.begun.get(first.key, one.begun.get(f"{first.source} {first.group} "))


def _worst(kinds: Mapping[int, str]) -> tuple[int, str]:
    """The first rank of the most certain kind."""
    return min(kinds.items(), key=lambda each: (list(KINDS).index(each[1]), each[0]))


def _kind(one: Snapshot, idle: float = 0.0) -> str:
    if one.process.state == "T" or (one.stays == "D" and not one.works):
        return "frozen"
    if one.returned:
        return "returned"
    # On a machine with too few cores all use little of one, who computes and who only wakes.
    computes = one.stays == "R" or one.cpu > _BUSY + min(2 * _BUSY, idle)
    computes = computes and not (one.stack and one.stack[0].file.endswith(_WAKING))
    if computes or one.works:
        return "slow"
    if one.holds_gil:
        return "gil"
    is_loading = any(place in frame.file for frame in one.stack for place in _LOADS)
    return "input" if is_loading or "pipe" in one.process.wchan else "missing"


def _sentence(one: Snapshot, kind: str, **facts: str) -> str:
    busy = [gpu.busy for gpu in one.gpus if gpu.busy is not None]
    seen = {
        "who": f"rank {one.rank}",
        "where": one.where,
        "process": str(one.process),
        "works": one.works or "computes",
        "used": f"{one.cpu:.1f} core(s) in use",
        "child": "".join(f"; its child process {pid} has ended or is stopped" for pid in one.process.children[:1]),
        "gpu": f"; its GPU is {max(busy)}% busy" if busy else "",
    }
    return KINDS[kind].says.format(**{**seen, **facts})


def _places(waits: Iterable[Wait]) -> list[tuple[int, str, int]]:
    return sorted((wait.rank, wait.key, wait.number) for wait in waits)


def _digest(*facts: object) -> str:
    """Short, however many ranks there are."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _matched(operation: str) -> str:
    """The same for both ends of a message, and for what ranks do together, each with its own amount."""
    ways = [(one, other) if way == "->" else (other, one) for one, way, other in _BETWEEN.findall(operation)]
    return str(sorted(ways)) if ways else _UNEVEN.sub(r"\1", _MESSAGE.sub("message", operation))


def _have_both_ends(operations: Iterable[str]) -> bool:
    """Whether operations are messages alone, and each is sent, and received."""
    ends = [_BETWEEN.findall(operation) for operation in operations]
    sent = sorted((one, other) for some in ends for one, way, other in some if way == "->")
    received = sorted((other, one) for some in ends for one, way, other in some if way == "<-")
    return all(ends) and sent == received


def _who(waits: Iterable[Wait]) -> str:
    """``ranks 0-1 wait in all_reduce (#51 of group 1), rank 3 waits in …``"""
    same: dict[str, list[int]] = {}
    for wait in waits:
        same.setdefault(str(wait), []).append(wait.rank)
    most = sorted(same.items(), key=lambda each: (-len(each[1]), each[1]))
    shown = [f"{clause(ranks, 'waits in', 'wait in')} {what}" for what, ranks in most[:_NAMED]]
    return ", ".join(shown) + (f", and others in {len(most) - _NAMED} more" if len(most) > _NAMED else "")
