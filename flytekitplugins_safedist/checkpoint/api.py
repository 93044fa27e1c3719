"""``checkpoints(...)``: what a task's own code calls."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import CheckpointError, NotInTaskError
from ..fs.context import current_identity
from ..ranks import context
from . import due, facts, leaving, modes, places, saves, trees
from .crew import Crew, assemble
from .finding import Found, find, sources
from .saver import Saver
from .saves import Author, Order, Save
from .staging import Buffers
from .stores import Store, open_store
from .together import Holding, Together

logger = logging.getLogger(__name__)


def checkpoints(
    where: str | os.PathLike[str] | None = None,
    *,
    keep: int | None = 3,
    every: int | timedelta | None = timedelta(minutes=10),
    sharded: bool | None = None,
    asynchronous: bool = True,
    weights_only: bool = True,
    resume_from: str | None = None,
    local: str | os.PathLike[str] | None = None,
) -> Checkpoints:
    """Checkpoints of this task: complete or not there, and found again by whatever comes after.

    Every rank calls it, and the methods of what it returns, in the same order.

    Args:
        where: a directory that all nodes share, or an address that fsspec knows (``s3://bucket/run-7``): one place for
            all attempts. None: Flyte's checkpoint prefix; attempts then find what those before them saved.
        keep: how many of this place's saves stay; older ones go once a newer one is committed. None: all.
        every: save after this many steps, or this much time. None: only ``save()``.
        sharded: True: each rank saves its part of the model and the optimizer; False: rank 0 saves everything. None:
            sharded where the model is (FSDP2, FSDP1, tensor parallel).
        asynchronous: copy the state and write it by a thread beside the training; else the caller waits.
        weights_only: load without unpickling, and refuse at the save what would need it. False: trust whoever can
            write to the place.
        resume_from: where to look if this execution has saved nothing yet: another execution of this workflow by its
            name, or the address of a place.
        local: a directory on the node's own disk, for a first copy of the newest save, from which ranks that start
            again in place resume without the store.

    Raises:
        ConfigError: an argument cannot work.
        CheckpointError: there is no place to save to.
    """
    due.check(keep, every)
    try:
        rank = context.current_rank()
        attempt, round_, scratch = rank.attempt, rank.round, rank.scratch
    except NotInTaskError:  # under torchrun, horovodrun, or in a single process
        identity = current_identity()
        attempt, round_, scratch = identity.attempt, identity.round, None
    return Checkpoints(
        facts.gather(where, attempt=attempt),
        keep=keep,
        every=every,
        sharded=sharded,
        saver=Saver(asynchronous=asynchronous),
        weights_only=weights_only,
        resume_from=resume_from,
        local=Path(local) if local is not None else None,
        round_=round_,
        scratch=scratch,
    )


class Checkpoints:
    """Made by :func:`checkpoints`. Collective: every rank calls the same methods in the same order."""

    def __init__(
        self,
        place: places.Facts,
        *,
        keep: int | None,
        every: int | timedelta | None,
        sharded: bool | None,
        saver: Saver,
        weights_only: bool,
        resume_from: str | None,
        local: Path | None,
        round_: int,
        scratch: Path | None,
    ) -> None:
        self._facts, self._keep, self._weights_only = place, keep, weights_only
        self._resume_from, self._round, self._scratch = resume_from, round_, scratch
        self._by_steps = due.EverySteps(every) if isinstance(every, int) else None
        self._by_time = due.EverySeconds(every.total_seconds()) if isinstance(every, timedelta) else None
        self._sharded, self._saver = sharded, saver
        self._buffers = Buffers()
        self._mode: modes.Mode | None = None
        self._store: Store = open_store(place.own)
        self._near = saves.near(local, self._store) if local is not None else None
        self._assembled: Crew | None = None
        self._recorded = False
        self._begun_step: int | None = None
        self.last_committed: int | None = None
        """The last step that this process knows to be in a committed save, its own or the one it resumed from."""
        self._together = Together(leaving.Leaving(self._store))
        self._progress = due.StepProgress()
        context.at_end(self.wait)

    # --- what a training loop calls -----------------------------------------------------------------------------------
    def resume(self, state: MutableMapping[str, Any]) -> int:
        """Load the newest complete save into ``state``; return the step to begin with, 0 where nothing was saved.

        Saves that fail their digests are passed over, saying so.

        Args:
            state: by name, anything with ``state_dict`` and ``load_state_dict``, and plain values, which are replaced.

        Raises:
            CheckpointError: there are saves and none of them is whole; the store does not answer; or the save and the
                state have different names.
        """
        trees.require_names(state)
        crew = self._crew()
        began = time.monotonic()
        with _Room(self._scratch) as room:
            found = find(crew, self._sources, room)
            if found is None:
                if crew.rank == 0:
                    logger.info(f"nothing to resume from; saves go to {self._store.url}")
                return 0
            modes.load(found, state, crew, weights_only=self._weights_only)
        return self._resumed(found, crew, time.monotonic() - began)

    def _resumed(self, found: Found, crew: Crew, seconds: float) -> int:
        made = found.save.manifest
        step = made.step
        self._begun(step)
        if self._by_time is not None:
            self._by_time.begun()
        self.last_committed = self._progress.last = step
        if crew.rank == 0:
            logger.info(
                f"resumed from {found.save} ({made.size} bytes) in {seconds:.1f} s; saves go to {self._store.url}"
            )
        return step + 1

    def step(self, step: int, state: MutableMapping[str, Any]) -> None:
        """Say that ``step`` is done; save where that is due, or where a pod of the job is told to stop.

        Then all ranks save at the same step, and this does not return before they are ended to go on elsewhere.

        Raises:
            CheckpointError: the state holds something that could not be loaded again; ``step`` falls.
        """
        self._progress.reach(step)
        if self._mode is None:
            self._settle(state)
        if not self._together.at(step, lambda urgent: self._save(step, state, wait=urgent)) and self._due(step):
            self.save(step, state)

    def wanted(self, step: int) -> bool:
        """Instead of :meth:`step`, for a trainer that makes its own files first: say that ``step`` is done.

        Returns whether all ranks save after it, because a pod of the job is told to stop: then call :meth:`save`.
        """
        self._progress.reach(step)
        return self._together.wanted(step)

    def holding(self, step: int, state: MutableMapping[str, Any]) -> Holding:
        """Around what takes long and changes nothing of the state, such as an evaluation, after :meth:`step`.

        ::

            ckpt.step(step, state)
            with ckpt.holding(step, state):
                evaluate(model)

        A pod that is told to stop meanwhile need not wait for the end of it: ``state`` is saved, as it is after
        ``step``, by a thread. Where not every rank holds that step, the next one is saved.
        """
        self._progress.reach(step)
        if self._mode is None:
            self._settle(state)  # collectives, which the thread must not come to
        return self._together.holding(step, lambda urgent: self._save(step, state, wait=urgent))

    def _settle(self, state: Mapping[str, Any]) -> modes.Mode:
        trees.require_names(state)
        self._mode = modes.mode_for(state, self._crew(), self._sharded)
        if self._mode.joint and self._by_time is not None and not self._together.possible:
            raise CheckpointError(
                "sharded saves cannot come due by time here: the ranks' clocks do not agree on a step, and there is no "
                "agent to ask",
                hint="give a number of steps: checkpoints(every=1000); in a task, a time is fine",
            )
        if self._mode.joint and self._near is not None and current_identity().nnodes > 1:
            logger.warning("local= is not used: parts of sharded saves would be on the disks of several nodes")
            self._near = None
        return self._mode

    def _due(self, step: int) -> bool:
        if self._by_steps is not None:
            return self._by_steps.due(step)
        if self._by_time is None or not self._by_time.passed() or self._crew().rank != 0:
            return False
        if self._saver.busy:  # by time: not while the one before is being written, but as soon as it is
            return False
        if self._mode is not None and self._mode.joint:
            self._together.ask()  # only rank 0 knows the time, and all save
            return False
        return True

    def save(self, step: int, state: MutableMapping[str, Any], *, wait: bool = False) -> None:
        """Save after ``step`` whether or not that is due.

        Args:
            step: the last step that is in ``state``.
            state: as for :meth:`resume`.
            wait: return when it is committed.

        Raises:
            CheckpointError: the state holds something that could not be loaded again; with ``wait``, the save failed.
        """
        self._progress.reach(step)
        if not self._together.fulfil(lambda urgent: self._save(step, state, wait=wait or urgent)):
            self._save(step, state, wait=wait)

    def _save(self, step: int, state: MutableMapping[str, Any], *, wait: bool) -> None:
        crew = self._crew()
        mode = self._mode or self._settle(state)
        if not self._is_saved(step) and (mode.joint or crew.rank == 0):
            self._begin(step, state, crew, mode)
        self._begun(step)
        if wait:
            self.wait()

    def _begun(self, step: int) -> None:
        self._begun_step = step
        if self._by_steps is not None:  # whatever the save was for
            self._by_steps.done = step + 1

    def _is_saved(self, step: int) -> bool:
        if self._begun_step == step:
            self._saver.drain(f"step {step}")  # it may fail yet
        return self.last_committed == step

    def wait(self) -> None:
        """Return when no save is in flight. Called by the rank itself when the task's function has returned.

        Raises:
            Exception: what the last save failed with.
        """
        self._saver.wait()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()

    # --- inside -------------------------------------------------------------------------------------------------------
    def _crew(self) -> Crew:
        if self._assembled is None:
            self._assembled = assemble()
        return self._assembled

    def _sources(self) -> list[list[Store]]:
        first, *others = sources(self._facts, self._store, self._resume_from)
        if leaving.waited_for(first):
            first, *others = sources(self._facts, self._store, self._resume_from)
        return [[self._near, *first] if self._near is not None else first, *others]

    def _begin(self, step: int, state: MutableMapping[str, Any], crew: Crew, mode: modes.Mode) -> None:
        picked = mode.pick(state, crew, weights_only=self._weights_only)
        # The buffers are of the save in flight until it has ended.
        self._saver.drain(f"step {step}")
        began = time.monotonic()
        write = picked.copied(self._buffers)
        copied = time.monotonic() - began
        if self._by_time is not None:
            self._by_time.begun()
        self._saver.start(f"step {step}", lambda: self._write(write, step, crew, copied))

    def _write(self, write: modes.Write, step: int, crew: Crew, copied: float) -> None:
        began = time.monotonic()
        author = Author(crew.world_size, self._facts.attempt, self._round)
        with _Room(self._scratch) as room:
            order = Order(self._store, step, author, self._weights_only, room, self._leave_record)
            self._first_copy(write, order)
            made = write(order)
        self.last_committed = step
        if made is not None:
            self._committed(made, began, copied)

    def _first_copy(self, write: modes.Write, order: Order) -> None:
        if self._near is None:
            return
        try:
            made = write(replace(order, store=self._near, prepare=lambda: None))
            if made is not None:
                saves.prune(self._near, made, keep=1)
        except Exception as error:  # the store's is the one that counts
            logger.warning(f"step {order.step} has no first copy in {self._near.url}: {type(error).__name__}: {error}")

    def _leave_record(self) -> None:
        if not self._recorded:
            places.leave_record(self._facts, places.known_before(self._facts))
            self._recorded = True

    def _committed(self, made: Save, began: float, copied: float) -> None:
        logger.info(
            f"{made} is committed: {made.manifest.size} bytes; training stood still for {copied:.3f} s, "
            f"written in {time.monotonic() - began:.1f} s"
        )
        if self._keep is not None:
            saves.prune(made.store, made, self._keep)


class _Room:
    """A directory for parts on their way from a store, gone afterwards."""

    def __init__(self, scratch: Path | None) -> None:
        self._path = Path(tempfile.mkdtemp(prefix="safedist-checkpoint-", dir=scratch))

    def __enter__(self) -> Path:
        return self._path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


__all__ = ["CheckpointError", "Checkpoints", "checkpoints"]
