"""The ranks of the job, as checkpoints need them: which one this is, and how they come to one answer.

They meet where ``fs`` has them meet, which needs no process group of theirs: a save in flight outlives
``destroy_process_group()``. What they exchange is small, and JSON; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import CheckpointError, FsError, FsTimeoutError
from ..fs import store as places
from ..fs.collective import see_off
from ..meeting import end_of
from ..texts import named

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""After so long a wait for another rank this one looks whether that has ended."""
WORD_SECONDS = 60.0
"""After so long a wait the log says for whom."""
PATIENCE_SECONDS = 1800.0
"""For a rank that does not come to a call. As torch's own for a collective, by default."""
WRITE_SECONDS = 6 * 3600.0
"""For a rank that writes its part of a large state."""
_FAILED = "a rank could not do its part of a checkpoint"


class per_rank:
    """Marks a value of which each rank has its own: a loader's state, random numbers.

    Args:
        value: with ``state_dict`` and ``load_state_dict``, or a plain value, which a restore replaces.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


class of_rank_0(per_rank):
    """Marks a value that rank 0 alone has, and that every rank gets back that asks for it."""


class of_rank(per_rank):
    """Marks a value for a restore: what the rank of that number has saved there, as its own.

    Args:
        rank: its number.
        value: as of :class:`per_rank`.
    """

    def __init__(self, rank: int, value: Any) -> None:
        super().__init__(value)
        self.rank = rank


class JobRanks:
    """All ranks of this life of the job. Made by each of them, in the same order.

    Attributes:
        rank: this process.
        size: how many there are.

    Raises:
        FsError: the ranks have nothing to meet over yet.
    """

    def __init__(self, call: str) -> None:
        began = time.monotonic()
        while True:
            try:
                group = places.ranks(min(WORD_SECONDS, PATIENCE_SECONDS))
                break
            except FsTimeoutError as error:
                _missed(call, f"{error.what}: waited", time.monotonic() - began, PATIENCE_SECONDS)
        self.rank, self.size = (group.rank, group.size) if group is not None else (0, 1)
        self._group = group
        self._meeting: Any = group and group.meeting
        self._place = f"checkpoint/{group.turn('checkpoint')}" if group is not None else ""
        self._turns: Counter[str] = Counter()

    def agree(
        self,
        call: str,
        mine: Any = None,
        decide: Callable[[Sequence[Any]], Any] = lambda _: None,
        *,
        failure: BaseException | None = None,
        writing: bool = False,
    ) -> Any:
        """Hand ``mine`` to rank 0, and return what it decides for all ranks. A collective.

        A rank that has failed comes, too, with its error: so all fail alike, and none waits for ever.

        Args:
            call: that the ranks are in, for messages.
            mine: a value that is JSON.
            decide: run in rank 0, with every rank's value; returns JSON. What it raises is every rank's error.
            failure: this rank's.
            writing: by the threads that write, which have turns of their own.

        Raises:
            CheckpointError: in every rank, where one has failed or has not come; who has failed raises its own error.
            FsError: the place where the ranks meet is gone.
        """
        lane, value = f"{self._place}/{'write' if writing else 'call'}", None
        turn, self._turns[lane] = self._turns[lane], self._turns[lane] + 1
        key, word = f"{lane}/{turn}", [mine, None if failure is None else named(failure)]
        if self.rank == 0:
            try:
                others = (self._wait(f"{key}/{rank}", rank, call, writing) for rank in range(1, self.size))
                values, failures = zip(word, *others, strict=True)
                failed = next(([rank, text] for rank, text in enumerate(failures) if text), None)
                value = decide(values) if failed is None else None
            except Exception as error:
                failure, failed = error if failure is None else failure, [0, named(error)]
            self._answer(lane, turn, [value, failed])
        else:
            self._meeting.set(f"{key}/{self.rank}", json.dumps(word).encode())
            value, failed = self._wait(f"{key}/all", 0, call, writing)
        if self._group is not None and self._group.ends_with_rank_0:
            see_off(self._group, f"{key}/read", self.size)
        if failure is not None:
            raise failure
        if failed is not None:
            raise failed_elsewhere(*failed)
        return value

    def _answer(self, lane: str, turn: int, answer: Any) -> None:
        """In rank 0: tell the others, and forget the turn before, which all of them have left."""
        if self.size == 1:
            return
        self._meeting.set(f"{lane}/{turn}/all", json.dumps(answer).encode())
        with contextlib.suppress(FsError):
            for name in ("all", "read", *range(1, self.size)) if turn else ():
                self._meeting.delete(f"{lane}/{turn - 1}/{name}")

    def _wait(self, key: str, rank: int, call: str, writing: bool) -> Any:  # noqa: FBT001
        patience = WRITE_SECONDS if writing else PATIENCE_SECONDS
        began = said = time.monotonic()
        whom = f"rank {self.rank} has waited for rank {rank}"
        while (value := self._meeting.wait(key, min(LOOK_SECONDS, WORD_SECONDS, patience))) is None:
            now = time.monotonic()
            if self._meeting.wait(end_of(rank), 0) is not None:
                value = self._meeting.wait(key, 0)  # it may have come just before it ended
                if value is None:
                    raise _missing(call, f"{whom}, which has ended")
                break
            is_late = now - began >= patience
            if is_late or (not writing and now - said >= WORD_SECONDS):
                said = now
                _missed(call, whom, now - began, patience)
        return json.loads(value)


def _missed(call: str, seen: str, waited: float, patience: float) -> None:
    """Say that a rank has not come so far.

    Raises:
        CheckpointError: it is too late.
    """
    logger.warning(f"{seen} for {waited:.0f} s in {call}, which every rank has to call")
    if waited >= patience:
        raise _missing(call, f"{seen} for {waited:.0f} s")


def _missing(call: str, seen: str) -> CheckpointError:
    return CheckpointError(
        f"a rank did not come to {call}",
        seen=seen,
        hint=f"call {call} in every rank (not under `if rank == 0:`), with the same steps; or see what that rank does "
        "instead",
        of_another=True,
    )


def failed_elsewhere(rank: int, seen: str) -> CheckpointError:
    """The error of a rank that fails because another one has."""
    return CheckpointError(_FAILED, where={"rank": rank}, seen=seen, of_another=True)


def is_told(error: BaseException) -> bool:
    """Whether it is one of :func:`failed_elsewhere`: of a rank that has not come nobody knows what it has done."""
    return isinstance(error, CheckpointError) and error.what == _FAILED


def failure_of(work: Callable[[], object]) -> BaseException | None:
    """What ``work`` fails with, to be told to the others, who wait for an answer whatever it is."""
    try:
        work()
    except Exception as error:
        return error
    return None
