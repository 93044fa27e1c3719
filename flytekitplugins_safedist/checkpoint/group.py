"""The ranks of the job, as checkpoints need them: which one am I, a way to exchange a few values, and a mark for what
each has its own of.

Over the training's own library: torch.distributed (gloo groups of our own, never the group that trains) or Horovod.
Plain values only: a tensor that is exchanged comes to another rank's GPU.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ..errors import CheckpointError
from ..fs.identity import Identity, current_identity


class per_rank:
    """Marks a value of which each rank has its own: a loader's state, random numbers.

    Args:
        value: with ``state_dict`` and ``load_state_dict``, or a plain value, which a restore replaces.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


_PATIENCE = timedelta(hours=6)
"""Of the collectives: the others wait while one rank writes its part of a large state."""


class JobRanks:
    """All ranks; by itself, those of a job of one process.

    Attributes:
        rank: this process.
        world_size: how many there are.
        writers: torch's process group for the threads that write; None where torch has none, and rank 0 writes all.
    """

    rank = 0
    world_size = 1
    writers: Any = None

    @property
    def alive(self) -> bool:
        """Whether the library still joins the ranks."""
        return True

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks. A collective of the ranks' main threads."""
        return [value]

    def together(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """What each rank gives, in the order of ranks: plain values by name. A collective.

        A rank that has failed comes, too, with its error, so that all fail alike and none waits for ever.

        Raises:
            CheckpointError: in every rank, if ``mine["error"]`` is an error in any; each rank that has one raises its
                own.
        """
        failure = mine.get("error")
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        told: list[dict[str, Any]] = self.gather({**mine, "error": text})
        if failure is not None:
            raise failure
        for rank, one in enumerate(told):
            if one["error"] is not None:
                raise failed_elsewhere(rank, one["error"])
        return told


class TorchRanks(JobRanks):
    """Over two gloo groups: exchanges of the main threads never meet those of the writing threads."""

    def __init__(self, dist: Any) -> None:
        self._dist = dist
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._trained_by = dist.group.WORLD
        self._front = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self.writers = dist.new_group(backend="gloo", timeout=_PATIENCE)

    @property
    def alive(self) -> bool:
        return bool(self._dist.is_initialized()) and self._dist.group.WORLD is self._trained_by

    def gather(self, value: Any) -> list[Any]:
        taken: list[Any] = [None] * self.world_size
        self._dist.all_gather_object(taken, value, group=self._front)
        return taken


class HorovodRanks(JobRanks):
    """Over Horovod, on the CPU. It finds what belongs together by name."""

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd
        self.rank, self.world_size = hvd.rank(), hvd.size()
        self._turns = itertools.count()

    @property
    def alive(self) -> bool:
        return bool(self._hvd.is_initialized())

    def gather(self, value: Any) -> list[Any]:
        taken: list[Any] = self._hvd.allgather_object(value, name=f"safedist.checkpoint.{next(self._turns)}")
        return taken


def assemble() -> JobRanks:
    """The ranks of this job, by whichever library it has initialised. A collective, under torch.

    Raises:
        CheckpointError: the environment names several ranks, and no library is initialised that joins them.
    """
    identity = current_identity()
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        _same(identity, dist.get_rank(), dist.get_world_size(), "torch.distributed")
        return TorchRanks(dist) if dist.get_world_size() > 1 else JobRanks()
    hvd = sys.modules.get("horovod.torch")
    if hvd is not None and hvd.is_initialized():
        _same(identity, hvd.rank(), hvd.size(), "Horovod")
        return HorovodRanks(hvd) if hvd.size() > 1 else JobRanks()
    if identity.single:
        return JobRanks()
    raise CheckpointError(
        "the ranks cannot agree on a checkpoint yet",
        seen=f"{identity}, and neither torch.distributed nor horovod.torch is initialised",
        hint="call torch.distributed.init_process_group() or hvd.init() before the first use of Checkpoints",
    )


def _same(identity: Identity, rank: int, size: int, who: str) -> None:
    if not identity.single and (identity.rank, identity.world_size) != (rank, size):
        raise CheckpointError(
            f"{who} and the environment count different ranks",
            seen=f"rank {rank} of {size} by {who}, {identity} by the environment",
            hint="initialise one group of all ranks",
        )


def failed_elsewhere(rank: int, seen: str) -> CheckpointError:
    """The error of a rank that fails because another one has."""
    return CheckpointError("a rank could not do its part of a checkpoint", where={"rank": rank}, seen=seen).echoing()


def failure_of(work: Callable[[], object]) -> BaseException | None:
    """What ``work`` fails with, to be told to the others, who wait for an answer whatever it is."""
    try:
        work()
    except Exception as error:
        return error
    return None
