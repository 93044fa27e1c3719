"""``Checkpoints``: what a task's own code calls."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import MutableMapping
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, NotInTaskError
from ..fs.identity import current_identity
from ..ranks import context
from ..ranks.shared_page import AgreedSave
from ..record.writer import RECORDER
from . import due, places, preemption, saves
from .group import JobRanks, assemble, failure_of, per_rank
from .saves import DamagedError, Manifest
from .store import Store
from .writer import Writer

if TYPE_CHECKING:
    from .dcp import Buffers, Share

logger = logging.getLogger(__name__)


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
        due.check(keep, every)
        try:
            rank: Any = context.current_rank()
        except NotInTaskError:  # under torchrun, horovodrun, or in a single process
            rank = current_identity()
        self._facts = places.gather(where, attempt=rank.attempt)
        self._keep, self._resume_from = keep, resume_from
        self._every = every
        self._by_time = due.EverySeconds(every.total_seconds()) if isinstance(every, timedelta) else None
        self._last = -1  # the step that training has told last, or resumed
        self._writer = Writer()
        self._buffers: Buffers | None = None
        self._ranks: JobRanks | None = None
        self._place: Store | None = None
        self._pointed = not self._facts.given
        self._checked = False
        self._asked: tuple[int, bool] | None = None
        self._agreed: AgreedSave | None = None
        self._point = preemption.Preemption(lambda: self._settled()[1])
        self.latest: int | None = None
        """The step of the newest save that this process knows to be committed, its own or the one it restored."""
        context.at_end(self.wait)

    # --- what a training loop calls -----------------------------------------------------------------------------------
    @context.saving()
    def restore(self, state: MutableMapping[str, Any], step: int | None = None) -> int:
        """Load the newest complete save into ``state``; return the step to begin with, 0 where nothing was saved.

        Saves that fail their digests are passed over, saying so. A collective.

        Args:
            state: by name, anything with ``state_dict`` and ``load_state_dict``, and plain values, which are replaced;
                all that was saved, or a part of it.
            step: load the save of this step, and no other.

        Raises:
            CheckpointError: there are saves and none of them is whole, or not of that step; the store does not answer;
                the save does not hold what is to be restored; or the state holds what could not be saved.
        """
        group = self._group()
        self._check(state)
        _, store = self._settled()
        began, passed_over = time.monotonic(), []
        self._writer.drain("restoring")
        for source, name in self._found(step):
            damage = self._loaded(source, name, state)
            if damage is None:
                self.latest = self._last = saves.step_of(name)
                if self._by_time is not None:
                    self._by_time.begin()
                if group.rank == 0:
                    seconds = time.monotonic() - began
                    logger.info(f"resumed from {source.url}/{name} in {seconds:.1f} s; saves go to {store.url}")
                return saves.step_of(name) + 1
            passed_over.append(f"{name}: {damage}")
            if group.rank == 0:
                logger.warning(f"{source.url}/{name} is passed over: {damage}")
        if passed_over or step is not None:
            raise CheckpointError(
                "there are checkpoints, but none of them is complete" if passed_over else "there is no such checkpoint",
                where={} if step is None else {"step": step},
                seen="; ".join(passed_over) or f"steps {self.steps()} in {store.url}",
                hint="restore one of them, or remove them (or save at another place) to begin anew",
            )
        if group.rank == 0:
            logger.info(f"nothing to resume from; saves go to {store.url}")
        return 0

    def should_save(self, step: int) -> bool:
        """Say that ``step`` is done; whether all ranks save after it: because that is due, or a pod is told to stop.

        For a trainer that makes its own files first; :meth:`save` asks by itself. No collective and no system call, but
        at few steps where saves are due by time.

        Raises:
            CheckpointError: ``step`` falls. The highest one is resumed: steps that begin again with each epoch would
                bring back the end of the first one.
        """
        if type(step) is not int or step < max(self._last, 0):
            raise CheckpointError(
                "a step is a number from 0 that never falls",
                where={"step": repr(step)},
                seen=f"the one before was {self._last}" if self._last >= 0 else type(step).__name__,
                hint="count steps over all epochs, and begin with what restore() returns",
            )
        before, self._last = self._last, step
        if self._asked is None or self._asked[0] != step:
            self._agreed = self._point.at(step)
            self._asked = step, self._due(before, step) or self._agreed is not None
        return self._asked[1]

    def save(self, step: int, state: MutableMapping[str, Any], force: bool = False) -> None:  # noqa: FBT001, FBT002
        """Say that ``step`` is done, and is in ``state``; save if that is due, or where a pod is told to stop.

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
            self._check(state)
        if not (wanted or force):
            return
        agreed, self._agreed, self._asked = self._agreed, None, (step, False)
        try:
            self._begin(step, state)
            if agreed is not None and agreed.urgent:
                self.wait()
        except Exception as error:
            if agreed is None or not agreed.urgent:
                raise
            logger.warning(f"the last save before the pod leaves failed: {type(error).__name__}: {error}")
        finally:
            if agreed is not None:
                self._point.over(agreed)

    @context.saving()
    def wait(self) -> None:
        """Return when no save is in flight. A collective; called by the rank itself when the task's function has
        returned.

        Raises:
            CheckpointError: in every rank: the last save failed.
        """
        self._writer.drain("the end")
        failed = self._writer.taken_failure()
        if self._ranks is None or not self._ranks.alive:
            if failed is not None:
                raise failed
            return
        self._together({"error": failed})

    def steps(self) -> list[int]:
        """The steps of the saves that are in the place, the lowest first."""
        _, store = self._settled()
        return sorted({saves.step_of(name) for name in saves.committed(store)})

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()

    # --- among ranks --------------------------------------------------------------------------------------------------
    def _group(self) -> JobRanks:
        if self._ranks is None:
            self._ranks = assemble()
        return self._ranks

    def _together(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        told = self._group().together({**mine, "latest": self.latest})
        self.latest = told[0]["latest"]  # rank 0 commits
        return told

    def _settled(self) -> tuple[JobRanks, Store]:
        group = self._group()
        if self._place is None:
            mine: dict[str, Any] = {}
            if group.rank == 0:
                mine["error"] = failure_of(lambda: mine.update(place=places.settle(self._facts)))
            place = self._together(mine)[0]["place"]
            # A user's own place may have another path on each node.
            self._place = Store(self._facts.own if self._facts.given else place)
        return group, self._place

    # --- save ---------------------------------------------------------------------------------------------------------
    @context.saving()
    def _check(self, state: MutableMapping[str, Any]) -> None:
        from . import state as states

        self._together({"error": failure_of(lambda: states.check(state))})
        self._checked = True

    def _due(self, before: int, step: int) -> bool:
        if isinstance(self._every, int):
            return (step + 1) // self._every > (before + 1) // self._every
        if self._by_time is None or (self._by_time.look is not None and step < self._by_time.look):
            return False
        mine: dict[str, Any] = {}
        if self._group().rank == 0:
            mine["now"], mine["look"] = self._by_time.judge(step, busy=self._writer.busy)
        first = self._together(mine)[0]
        self._by_time.look = first["look"]
        return bool(first["now"])

    @context.saving()
    def _begin(self, step: int, state: MutableMapping[str, Any]) -> None:
        """Copy the state, and have it written. A collective; an error in one rank is an error in all."""
        from . import dcp
        from . import state as states

        group, _ = self._settled()
        self._writer.drain(f"step {step}")  # the buffers are of the save in flight until it has ended
        mine: dict[str, Any] = {"step": step, "name": saves.new_name(step)}

        def tell() -> None:
            states.check(state)
            mine.update(states.told(state))

        mine["error"] = failure_of(tell)
        told = self._together(mine)
        if len({one["step"] for one in told}) > 1:
            raise CheckpointError(
                "the ranks save different steps together",
                seen=", ".join(f"rank {rank}: {one['step']}" for rank, one in enumerate(told)),
                hint="call save() with the same numbers in every rank",
            )
        states.refuse_different([one["marks"] for one in told])
        if self.latest == step:
            return
        began = time.monotonic()
        self._buffers = self._buffers or dcp.Buffers()
        share = states.share_of(state, [one["own"] for one in told], group, self._buffers)
        still = time.monotonic() - began
        if RECORDER.value is not None:
            RECORDER.value.saved(step, began, still)
        own = [name for name, value in state.items() if isinstance(value, per_rank)]
        made = Manifest(step, group.world_size, names=list(state), per_rank=own)
        if self._by_time is not None:
            self._by_time.begin()
        if group.writers is not None or group.rank == 0:
            self._writer.start(f"step {step}", lambda: self._write(share, told[0]["name"], made, still))

    def _write(self, share: Share, name: str, made: Manifest, still: float) -> None:
        from . import dcp

        began = time.monotonic()
        group, store = self._settled()
        if group.rank == 0 and not self._pointed:
            failed = failure_of(lambda: places.leave_pointer(self._facts, store.url))
            self._pointed = failed is None
            share.failed = share.failed or failed  # told in the save: else the others would wait for this rank there
        dcp.save(share, store, name, group, made)
        self.latest = made.step
        if group.rank == 0:
            logger.info(
                f"step {made.step} in {store.url}/{name} is committed; training stood still for {still:.3f} s, "
                f"written in {time.monotonic() - began:.1f} s"
            )
            if self._keep is not None:
                saves.prune(store, name, self._keep)

    # --- restore ------------------------------------------------------------------------------------------------------
    def _found(self, step: int | None) -> list[tuple[Store, str]]:
        """The saves that rank 0 sees, newest first: of this place, or of the one that the user named. A collective."""
        group, store = self._settled()
        mine: dict[str, Any] = {}

        def look() -> None:
            preemption.wait_for_others(store)
            mine["url"], mine["names"] = None, saves.committed(store)
            if not mine["names"] and self._resume_from is not None:
                mine["url"] = places.named(self._facts, self._resume_from)
                mine["names"] = saves.committed(Store(mine["url"]))
                if not mine["names"]:
                    raise CheckpointError(
                        "nothing was saved where to resume from",
                        where={"resume_from": mine["url"]},
                        hint="see whether the address is right, or leave out resume_from to begin anew",
                    )

        if group.rank == 0:
            mine["error"] = failure_of(look)
        told = self._together(mine)[0]
        source = store if told["url"] is None else Store(told["url"])
        return [(source, name) for name in told["names"] if step is None or saves.step_of(name) == step]

    def _loaded(self, store: Store, name: str, state: MutableMapping[str, Any]) -> str | None:
        """Load one save; what is wrong with it, in any rank. A collective.

        Raises:
            CheckpointError: it is whole, and cannot be loaded here.
        """
        from . import dcp, restoring

        trees: dict[str, Any] = {}
        group = self._group()
        error = failure_of(lambda: trees.update(restoring.read(dcp.SavedFiles(store, name), state, group)))
        damage = f"{error}" if isinstance(error, DamagedError) else None
        told = self._together({"error": None if damage else error, "damage": damage})
        damages = [str(one["damage"]) for one in told if one["damage"] is not None]
        if not damages:
            restoring.distribute(state, trees)
        return damages[0] if damages else None
