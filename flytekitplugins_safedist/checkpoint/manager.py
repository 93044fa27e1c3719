"""``Checkpoints``: what a task's own code calls."""

from __future__ import annotations

import contextvars
import logging
import os
import secrets
import time
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any
from weakref import ref

from ..compat import before_threads_end
from ..errors import CheckpointError, ConfigError, NotInTaskError, Problem
from ..fs.identity import known_identity
from ..rank import context
from ..record.writer import RECORDER
from ..texts import named
from . import agreement, places, saves
from .group import JobRanks, failed_elsewhere, failure_of, is_told, of_rank
from .saves import DamagedError, Manifest
from .store import Store

if TYPE_CHECKING:
    from .pieces import Piece

logger = logging.getLogger(__name__)

_SAY_AFTER_SECONDS = 1.0
"""A wait for the save before is said in the log from here on."""
_BEGUN: set[str] = set()
"""Saves that this process has begun, at all places."""
_TRIES = 3
"""How often a restore lists the saves: who saves there may have removed all of them meanwhile, for newer ones."""
_LAST_SECONDS = 10.0
"""How long a rank that raises lets its save in flight go on: the others write on as long, and then it is committed."""


class Checkpoints:
    """Checkpoints of this task: complete or not there, and found again by whatever comes after.

    Every rank makes one, and calls the same methods in the same order.

    Args:
        where: a directory that all nodes share, or an address that fsspec knows (``s3://bucket/run-7``). None: beside
            Flyte's checkpoint prefix; all attempts of a task then have one place.
        keep: how many saves stay; older ones go once a newer one is committed. None: all.
        every: save after this many steps, or this much time. None: only ``save(force=True)``.
        resume_from: where to look if nothing was saved yet: another execution of this workflow by its name, or the
            address of a place.

    Attributes:
        latest: the step of the newest save that this process knows to be committed, its own or the one it restored.

    Raises:
        ConfigError: an argument cannot work.
        CheckpointError: there is no place to save to.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | None = None,
        *,
        keep: int | None = 3,
        every: int | timedelta | None = timedelta(minutes=10),
        resume_from: str | None = None,
    ) -> None:
        _check_arguments(keep, every)
        try:
            rank = context.current_rank()
            self._job, self._attempt = rank.job, rank.attempt
        except NotInTaskError:  # under torchrun, horovodrun, or in a single process
            identity = known_identity()
            self._job, self._attempt = "", identity.attempt if identity is not None else 0
        self._facts = places.gather(where, attempt=self._attempt)
        self._keep, self._every, self._resume_from = keep, every, resume_from
        self._timer = agreement.Timer(every.total_seconds()) if isinstance(every, timedelta) else None
        self._agreement = agreement.of_rank()
        self._mark: agreement.Mark | None = None
        self._thread = ThreadPoolExecutor(1, "safedist-checkpoint")
        self._save: Future[None] | None = None  # the last one, written or being written
        self._copies: list[Piece] = []  # of what this rank writes of it; their memory is used again
        self._ranks: JobRanks | None = None
        self._place: Store | None = None
        self._checked = self._is_proven = False
        self._last = -1  # the step that training has told last, or resumed
        self._answer = (-1, False)  # to the last question whether to save
        self._count = 0  # saves that this process has committed
        self._saved: int | None = None  # the newest step in the own place, as far as is known
        self._mine: list[str] = []  # saves that this process has begun; rank 0's, as are
        self._newest = 0  # the latest time in a name in the place, as far as is known
        self._before: int | None = None  # the latest time of an earlier life's, once this one has looked
        self._damaged: set[str] = set()  # saves that it has passed over, and
        self._stranger = ""  # who else saves at this place meanwhile
        self._later = 0  # the attempt of this job that has saved there since, when this one is over
        self._back_to: int | None = None  # the step that the user has gone back to
        self.latest: int | None = None
        self._hear_of_the_end()

    # --- what a training loop calls -----------------------------------------------------------------------------------
    @context.saving()
    def restore(self, state: MutableMapping[str, Any], step: int | None = None) -> int:
        """Load the newest complete save into ``state``; return the step to begin with, 0 where nothing was saved.

        Saves that fail their digests are passed over, saying so. A collective.

        Args:
            state: by name, anything with ``state_dict`` and ``load_state_dict``, and plain values; all that was saved,
                or a part of it. Lists, dicts and tensors in it are filled in place, other plain values are replaced.
            step: load the save of this step. What is saved from then on is newer than what was saved after it before;
                where this very job starts its ranks again, it goes on from there.

        Raises:
            CheckpointError: there are saves and none of them is whole, or not of that step; the store does not answer;
                the save does not hold what is to be restored; or the state holds what could not be saved.
        """
        ranks, began, call = self._meet("Checkpoints.restore"), time.monotonic(), "Checkpoints.restore"
        self._drain("restoring")
        failure, damaged = failure_of(lambda: self._check(state)), dict[str, str]()
        for _ in range(_TRIES):
            found = ranks.agree(call, decide=lambda _: self._candidates(step), failure=failure)
            store = self._use(found["place"])
            source = store if found["source"] is None else Store(found["source"])
            names = [name for name in found["names"] if name not in damaged]
            for name in names:
                damage = self._load(source, name, state)
                if damage is None:
                    self._resume(name, step, is_here=source is store)
                    if not all(isinstance(value, of_rank) for value in state.values()):
                        took = f"{time.monotonic() - began:.1f} s"
                        self._say(f"resumed from {source.url}/{name} in {took}; saves go to {store.url}")
                    return saves.step_of(name) + 1
                damaged[name] = damage
                self._damaged.add(name)
                self._say(f"{source.url}/{name} is passed over: {damage}", logging.WARNING)
            if not names:
                break
        if damaged or step is not None:
            raise CheckpointError(
                "there are checkpoints, but none of them is complete" if damaged else "there is no such checkpoint",
                where={} if step is None else {"step": step},
                seen="; ".join(map(": ".join, damaged.items())) or f"steps {self.steps()} in {store.url}",
                hint="restore one of them, or remove them (or save at another place) to begin anew",
            )
        is_kept = self._facts.given or self._facts.outputs
        gone = "" if is_kept else ", and are gone when this local run is: name a place to keep them"
        self._say(f"nothing to resume from; saves go to {store.url}{gone}")
        return 0

    def should_save(self, step: int) -> bool:
        """Say that ``step`` is done; whether all ranks save after it: because that is due, or a pod is told to stop.

        For a trainer that makes its own files first; :meth:`save` asks by itself. In every rank. No system call, but
        outside a task at few steps where saves are due by time.

        Raises:
            CheckpointError: ``step`` falls.
        """
        if type(step) is not int or step < max(self._last, 0):
            rule = f" and must never be smaller than before ({self._last})" if self._last >= 0 else ""
            hint = "count steps over all epochs, starting with what restore() returns"
            raise CheckpointError(f"step must be a number, 0 or more{rule}", seen=repr(step), hint=hint)
        before, self._last = self._last, step
        if self._answer[0] != step:
            self._answer = step, self._is_agreed(step) or self._is_due(before, step)
        return self._answer[1]

    def save(self, step: int, state: MutableMapping[str, Any], force: bool = False) -> None:  # noqa: FBT001, FBT002
        """Say that ``step`` is done, and is in ``state``; save if that is due, or where a pod is told to stop. To be
        called by every rank.

        Training stands still while the state is copied; a thread writes and commits it. Where a pod is told to stop,
        this does not return before the ranks are ended to go on elsewhere.

        Args:
            step: the last step that is in ``state``; counted over all epochs.
            state: as for :meth:`restore`.
            force: save whether or not it is due. A step that is saved already is not saved again.

        Raises:
            CheckpointError: in every rank: the state holds something that could not be loaded again, or values that
                differ between ranks; ``step`` falls.
        """
        wanted = self.should_save(step)
        if not self._checked:
            with context.saving():
                self._meet().agree("Checkpoints.save", failure=failure_of(lambda: self._check(state)))
        if not (wanted or force):
            if not self._is_proven:
                self._prove()
            return
        self._answer = step, False
        agreed = self._agreement and self._agreement.open_for(self)
        try:
            self._begin(step, state)
            if agreed and agreed.is_last:
                self.wait()
        except Exception as error:
            if not agreed or not agreed.is_last:
                raise
            what = "the pod leaves" if agreed.urgent else "a node joins"
            logger.warning(f"the last save before {what} failed: {named(error)}")
        finally:
            if self._agreement:
                self._agreement.over(self)

    @context.saving()
    def wait(self) -> None:
        """Return when no save is in flight. Called by the rank itself when the task's function has returned.

        Raises:
            CheckpointError: in every rank: the last save failed.
        """
        self._drain("the end")
        save, self._save = self._save, None
        if save is not None:
            save.result()

    def steps(self) -> list[int]:
        """The steps of the saves that are in the place, the lowest first. Any rank may ask, by itself."""
        return sorted({saves.step_of(name) for name in saves.committed(self._find())})

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.wait()

    def _hear_of_the_end(self) -> None:
        if self._job:
            context.at_end(self._end)
            context.in_any_case(lambda: self._drain("the end", _LAST_SECONDS))
        # Else whoever drops this drops its copy of the state, too: a notebook makes many. What is in flight holds it.
        me = ref(self)
        before_threads_end(lambda: Checkpoints._drain(mine, "the end") if (mine := me()) is not None else None)

    def _end(self) -> None:
        """The task's function has returned."""
        self.wait()
        if self._every is not None and self.latest is None and self._last >= 0:
            self._say(
                f"no step was saved, up to step {self._last}: the first save is due after {self._every}"
                f"{' steps' if isinstance(self._every, int) else ''}; "
                "save(step, state, force=True) saves the last one in any case",
                logging.WARNING,
            )

    # --- among ranks --------------------------------------------------------------------------------------------------
    def _meet(self, call: str = "Checkpoints.save") -> JobRanks:
        self._ranks = self._ranks or JobRanks(call)
        return self._ranks

    def _find(self) -> Store:
        return self._place or Store(places.find(self._facts))

    def _use(self, url: str) -> Store:
        """The place of all attempts; the user's own may have another path on each node."""
        self._place = self._place or Store(self._facts.own if self._facts.given else url)
        return self._place

    def _check(self, state: MutableMapping[str, Any]) -> None:
        from . import pieces
        from . import state as states

        pieces.see_names(states.collect(state, self._meet(), of_models=False))
        self._checked = True

    @context.saving()
    def _prove(self) -> None:
        """See that saves can be made, where this life has not seen one here: not when hours of work are to be saved."""
        self._is_proven, ranks, call = True, self._meet(), "Checkpoints.save"
        names = ranks.agree(call, decide=lambda _: [self._find().url, f"safedist-probe-{secrets.token_hex(4)}"])
        saves.prove(self._use(names[0]), names[1], ranks, call)

    def _say(self, text: str, level: int = logging.INFO) -> None:
        if self._ranks is None or self._ranks.rank == 0:
            logger.log(level, text)

    def _drain(self, because: str, seconds: float | None = None) -> None:
        """Wait until nothing is in flight, whatever becomes of it; said in the log where it takes a while."""
        if self._save is not None and wait([self._save], _SAY_AFTER_SECONDS).not_done:
            self._say(f"{because} waits for the save before, which is still being written")
            wait([self._save], seconds)

    def _settle(self) -> None:
        """Return when nothing is in flight: this pod leaves, and nothing more will be saved."""
        self._drain("leaving")
        if self._mark is not None:
            self._mark.remove()

    # --- when ---------------------------------------------------------------------------------------------------------
    def _is_agreed(self, step: int) -> bool:
        """Whether the agents have agreed on a save after this step, or after one before that is still to be made."""
        if self._agreement is None:
            return False
        page, rank = self._agreement.page, context.current_rank()
        if self._mark is None and rank.rank == 0 and page.preemption_seconds:
            leave_pointer = partial(places.leave_pointer, self._facts)
            self._mark = agreement.Mark(page, self._find, self._life, leave_pointer)
        agreed = self._agreement.at(self, step, by_itself=self._every is not None, settle=self._settle)
        if agreed is None or agreed.is_last or self._ask_rank_0(step):
            return agreed is not None
        self._agreement.over(self)
        return False

    def _is_due(self, before: int, step: int) -> bool:
        if isinstance(self._every, int):
            return (step + 1) // self._every > (before + 1) // self._every
        if self._timer is None:
            return False
        if self._agreement is not None and context.current_rank().world_size > 1:
            if context.current_rank().rank == 0 and not self._is_busy and self._timer.asks():
                self._agreement.page.ask()
            return False  # the agents bring all ranks to one step, and there it is due
        return step >= self._timer.look and self._ask_rank_0(step)

    @property
    def _attempt_name(self) -> str:
        """How names of its lives begin."""
        return f"{self._job}-a{self._attempt}-"

    @property
    def _life(self) -> str:
        return f"{self._attempt_name}r{context.current_rank().round}"

    @property
    def _is_busy(self) -> bool:
        return self._save is not None and not self._save.done()

    @context.saving()
    def _ask_rank_0(self, step: int) -> bool:
        """Whether to save now, by rank 0's clock. A collective."""
        timer = self._timer
        if timer is None:
            return False
        decide = lambda _: timer.answer(step, is_busy=self._is_busy)  # noqa: E731
        is_due, look = self._meet().agree("Checkpoints.save", decide=decide)
        timer.look = look if self._meet().size > 1 else 0
        return bool(is_due)

    # --- restore ------------------------------------------------------------------------------------------------------
    def _candidates(self, step: int | None) -> dict[str, Any]:
        """In rank 0: the saves to try, the newest first, and where they are."""
        store, source = self._find(), None
        if self._agreement is not None:
            seconds = self._agreement.page.preemption_seconds
            agreement.wait_for_others(store, self._attempt_name, self._life, seconds)
        names = saves.whole(self._look(store))
        if not names:
            source, names = self._elsewhere()
        failure = failure_of(lambda: places.leave_trail(self._facts, source or store.url)) if names else None
        if failure is not None:
            logger.warning(f"an execution that recovers this one does not find what this one has saved: {failure}")
        if step is not None:
            # This job, started again, goes on with what it has saved since it went back.
            own = names if self._job and source is None else ()
            since = takewhile(lambda name: self._has_gone_back(store, name, step), own)
            names = [*since, *(name for name in names if saves.step_of(name) == step)]
        return {"place": store.url, "source": source, "names": names}

    def _elsewhere(self) -> tuple[str | None, list[str]]:
        """Where nothing was saved here: the place to resume from by Flyte's word, or else the user's; and its saves."""
        for place in places.before(self._facts):
            if names := saves.committed(Store(place)):
                return place, names
        if self._resume_from is None:
            return None, []
        source = places.of_execution(self._facts, self._resume_from)
        names = saves.committed(Store(source))
        if not names:
            hint = "see whether the address is right, or leave out resume_from to begin anew"
            raise CheckpointError("nothing was saved where to resume from", where={"resume_from": source}, hint=hint)
        return source, names

    def _has_gone_back(self, store: Store, name: str, step: int) -> bool:
        try:
            manifest = saves.read_manifest(store, name)
        except DamagedError:
            return True  # it is passed over when it is loaded; the one before may be of this branch
        return (manifest.job, manifest.back_to) == (self._job, step)

    def _load(self, source: Store, name: str, state: MutableMapping[str, Any]) -> str | None:
        """Load one save; what is wrong with it, in any rank. A collective.

        Raises:
            CheckpointError: it is whole, and cannot be loaded here.
        """
        from . import dcp
        from . import state as states

        saved, trees = list[dcp.SavedFiles](), dict[str, Any]()
        # All agree before each call of torch's that is a collective: who has failed alone would not come to it.
        damage = self._damage(lambda: saved.append(dcp.SavedFiles(source, name, state, self._meet())))
        damage = damage or self._damage(lambda: trees.update(saved[0].trees()))
        if damage is None:
            for part in states.hand_out(state, trees):
                self._meet().agree("Checkpoints.restore", failure=failure_of(part))
        return damage

    def _damage(self, work: Callable[[], object]) -> str | None:
        """What is wrong with a save as ``work`` finds it, in any rank. A collective."""
        failure = failure_of(work)
        damage = str(failure) if isinstance(failure, DamagedError) else None
        first: str | None = self._meet().agree(
            "Checkpoints.restore",
            damage,
            lambda each: next(filter(None, each), None),
            failure=None if damage else failure,
        )
        return first

    def _resume(self, name: str, step: int | None, *, is_here: bool) -> None:
        self.latest = self._last = saves.step_of(name)
        self._saved = self.latest if is_here else None
        self._is_proven = is_here
        self._back_to, self._answer = None if step is None else int(step), (-1, False)
        if self._timer is not None:
            self._timer.begin()

    # --- save ---------------------------------------------------------------------------------------------------------
    @context.saving()
    def _begin(self, step: int, state: MutableMapping[str, Any]) -> None:
        """Copy the state, and have it written. A collective; an error in one rank is an error in all."""
        from . import dcp, pieces
        from . import state as states

        ranks, call, began = self._meet(), "Checkpoints.save", time.monotonic()
        self._is_proven = True  # or this save will tell
        self._drain(f"step {step}")  # the copies are of the save in flight until it has ended
        mine: list[Piece] = []

        def collect(*, of_models: bool) -> BaseException | None:
            return failure_of(lambda: mine.extend(states.collect(state, ranks, of_models=of_models)))

        save = ranks.agree(call, step, self._open, failure=collect(of_models=False))
        if save is None:
            return
        failure = collect(of_models=True)
        items = [{"path": piece.path} for piece in mine]
        mine = pieces.to_write(mine, ranks, call, failure)
        copies: list[Piece] = []
        failure = failure_of(lambda: copies.extend(dcp.copied(mine, self._copies)))
        self._copies = copies
        still = time.monotonic() - began
        if RECORDER.value is not None:
            RECORDER.value.saved(step, began, still)
        if self._timer is not None:
            self._timer.begin()
        own = [name for name, value in state.items() if states.is_own(value)]
        draft = Manifest(step, ranks.size, [*state], own, self._job, self._attempt, self._back_to, items=items)
        store, name = self._use(save["place"]), save["name"]
        # In this context: flytekit's way to the store, credentials and all, is found through it.
        write = context.saving(background=True)(lambda: self._write(failure, store, name, draft, still))
        self._save = self._thread.submit(contextvars.copy_context().run, write)

    def _open(self, steps: Sequence[int]) -> dict[str, str] | None:
        """In rank 0: the name of a new save; None where that step is saved here already."""
        if len({*steps}) > 1:
            seen = ", ".join(f"rank {rank}: {step}" for rank, step in enumerate(steps))
            hint = "call save() with the same numbers in every rank"
            raise CheckpointError("the ranks save different steps together", seen=seen, hint=hint)
        if self._saved == steps[0]:
            return None
        store = self._find()
        if not self._mine:
            for name in saves.whole(self._look(store))[:1]:
                self._read_stranger(store, name)
        if self._later:
            raise CheckpointError(
                "a later attempt goes on with this training: this one saves nothing any more",
                where={"place": store.url},
                seen=f"saves of attempt {self._later}; this is attempt {self._attempt}, which Flyte has given up",
                hint="nothing is to be done: its pod stood still or was cut off, and will be removed",
            )
        if self._stranger:
            raise CheckpointError(
                "two save at one place: each removes the other's saves, and a restart goes on from either's",
                where={"place": store.url},
                seen=f"saves of {self._stranger}, since this one's first",
                hint='give each a place of its own: Checkpoints("s3://bucket/run-7/best", every=None)',
            )
        if self._count == 0:
            places.leave_pointer(self._facts, store.url)
        self._mine.append(saves.new_name(steps[0], after=self._newest))
        _BEGUN.add(self._mine[-1])
        self._newest = saves.time_of(self._mine[-1])
        return {"place": store.url, "name": self._mine[-1]}

    def _look(self, store: Store) -> saves.Directories:
        """In rank 0: what the place holds."""
        there = saves.directories(store)
        self._newest = max([self._newest, *(saves.time_of(name) for name, _ in there)])
        if not self._mine:
            self._before = saves.latest_before(there, self._before)
        return there

    def _meet_stranger(self, store: Store, name: str) -> None:
        """In rank 0: see whose save it is that was not there when this life began. One of an earlier attempt of this
        job, whose pod is cut off and goes on, is passed over: it is the same training. Where this is that pod, what it
        has saved after a later attempt did goes: as the newest it would hide how far that one has come."""
        job, attempt = self._read_stranger(store, name)
        if job and self._job and job != self._job:
            self._stranger = f"job {job}"
        elif self._later:
            for own in self._mine:
                if saves.time_of(own) > saves.time_of(name):
                    saves.discard(store, own)
        elif name in _BEGUN:
            self._stranger = "another Checkpoints of this task"
        elif self._is_to_say:
            why = "Each removes the other's saves"
            if job and job == self._job and attempt < self._attempt:
                why = "It is of this job: a pod of an earlier attempt still runs, and saves no more when it finds this"
            logger.warning(f"somebody else saves at {store.url}, too: {name}. {why}")

    def _read_stranger(self, store: Store, name: str) -> tuple[str, int]:
        """The job of a save, "" where nobody knows, and its attempt. Where that is a later one of this job, it is
        noted."""
        try:
            manifest = saves.read_manifest(store, name)
        except DamagedError:
            return "", 0
        if manifest.job and manifest.job == self._job and manifest.attempt > self._attempt:
            self._later = manifest.attempt
        return manifest.job, manifest.attempt

    def _write(self, failure: BaseException | None, store: Store, name: str, draft: Manifest, still: float) -> None:
        """Write this rank's part, and in rank 0 commit the save. A collective of the threads that write."""
        from . import dcp

        began, table = time.monotonic(), list[int]()
        if failure is None:
            part = dcp.part_of(self._meet().rank)
            failure = failure_of(lambda: table.extend(dcp.write(self._copies, store, name, part)))
        self._commit(table, failure, store, name, draft)
        self.latest = self._saved = draft.step
        self._count += 1
        if self._meet().rank == 0:
            took = f"training stood still for {still:.3f} s, written in {time.monotonic() - began:.1f} s"
            if self._is_to_say:
                logger.info(f"step {draft.step} in {store.url}/{name} is committed, save {self._count}; {took}")
            self._clear(lambda: self._prune(store))

    def _commit(
        self, table: list[int], failure: BaseException | None, store: Store, name: str, draft: Manifest
    ) -> None:
        """Have rank 0 commit what all have written; raise where it did not, or may not have."""
        from . import dcp

        ranks, puts, answer = self._meet(), list[BaseException | None](), list[str | None]()

        def commit(tables: Sequence[list[int]]) -> str | None:
            parts = {dcp.part_of(rank): each for rank, each in enumerate(tables) if each}
            manifest = dcp.manifest_of(store, name, draft, parts)
            puts.append(failure_of(lambda: saves.commit(store, name, manifest)))
            return named(puts[0]) if puts[0] is not None else None

        error = failure_of(lambda: answer.append(ranks.agree("the save", table, commit, failure=failure, writing=True)))
        if answer and answer[0] is not None:  # the manifest was put, and the store says that it was not
            error = puts[0] if puts else failed_elsewhere(0, answer[0])
        if error is None:
            return
        if ranks.rank == 0 and puts != [None]:
            self._say(
                f"the save of step {draft.step} failed, what was committed before stays: {error}", logging.WARNING
            )
            self._clear(lambda: saves.discard(store, name))
        # Whoever does not know that there is no manifest leaves its part: rank 0 may be gone, or cut off, after the
        # commit, or the store may have done what it denies; and the save is whole.
        knows = failure is not None or is_told(error)
        if ranks.rank != 0 and knows and not answer:
            self._clear(lambda: store.withdraw(name, dcp.part_of(ranks.rank)))
        raise error

    def _prune(self, store: Store) -> None:
        there, before = saves.directories(store), self._before or 0
        for name in saves.of_others(there, self._mine, before)[:1]:
            self._newest = max(self._newest, saves.time_of(name))
            self._meet_stranger(store, name)
        if self._later:
            return
        names = saves.surplus(
            there, self._keep, self._mine, before=before, back_to=self._back_to, damaged=self._damaged
        )
        saves.prune(store, names)

    @property
    def _is_to_say(self) -> bool:
        """Of a number of saves the first three, and then fewer and fewer."""
        return self._count <= 3 or self._count & (self._count - 1) == 0

    def _clear(self, away: Callable[[], None]) -> None:
        """Remove what is not needed, as far as that can be done: a save that is committed is none that failed."""
        failure = failure_of(away)
        if failure is not None and self._is_to_say:
            logger.warning(
                f"what is not needed stays in the place for checkpoints, and nothing else is wrong: {failure}"
            )


def _check_arguments(keep: object, every: object) -> None:
    """Raise ConfigError naming all that cannot work."""
    problems = []
    if keep is not None and (type(keep) is not int or keep < 1):
        problems.append(Problem("keep", keep, "is not a number of saves", "an int from 1; None keeps all"))
    is_time = isinstance(every, timedelta) and every > timedelta(0)
    if every is not None and not is_time and (type(every) is not int or every < 1):  # passed over, never due
        expected = "an int from 1, a timedelta of more than 0 seconds, or None"
        problems.append(Problem("every", every, "is neither a number of steps nor a time", expected))
    if problems:
        raise ConfigError(problems)
