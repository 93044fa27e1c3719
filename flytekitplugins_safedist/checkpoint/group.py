"""The ranks of the job, as checkpoints need them: which one am I, and a way to exchange a few bytes.

Over the training's own library: torch.distributed (gloo groups of our own, never the group that trains) or Horovod.
What is exchanged is bytes that load without unpickling, so that no tensor comes to another rank's GPU.
"""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from ..errors import CheckpointError
from ..fs.identity import Identity, current_identity

_PATIENCE = timedelta(hours=6)
"""Of the collectives: the others wait while one rank writes its part of a large state."""


class JobRanks(Protocol):
    """All ranks.

    Attributes:
        rank: this process.
        world_size: how many there are.
        writers: torch's process group for the threads that write; None where torch has none.
        alive: whether the library still joins the ranks.
    """

    rank: int
    world_size: int
    writers: Any

    @property
    def alive(self) -> bool: ...

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in the order of ranks. A collective of the ranks' main threads."""


class Alone:
    """A job of one process."""

    rank, world_size, writers, alive = 0, 1, None, True

    def gather(self, data: bytes) -> list[bytes]:
        return [data]


class TorchRanks:
    """Over two gloo groups: exchanges of the main threads never meet those of the writing threads."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._trained_by = dist.group.WORLD
        self._front = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self.writers = dist.new_group(backend="gloo", timeout=_PATIENCE)

    @property
    def alive(self) -> bool:
        import torch.distributed as dist

        return bool(dist.is_initialized()) and dist.group.WORLD is self._trained_by

    def gather(self, data: bytes) -> list[bytes]:
        import torch.distributed as dist

        taken: list[Any] = [None] * self.world_size
        dist.all_gather_object(taken, data, group=self._front)
        return taken


class HorovodRanks:
    """Over Horovod, on the CPU. It finds what belongs together by name."""

    writers = None

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd
        self.rank, self.world_size = hvd.rank(), hvd.size()
        self._turns = itertools.count()

    @property
    def alive(self) -> bool:
        return bool(self._hvd.is_initialized())

    def gather(self, data: bytes) -> list[bytes]:
        taken: list[bytes] = self._hvd.allgather_object(data, name=f"safedist.checkpoint.{next(self._turns)}")
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
        return TorchRanks() if dist.get_world_size() > 1 else Alone()
    hvd = sys.modules.get("horovod.torch")
    if hvd is not None and hvd.is_initialized():
        _same(identity, hvd.rank(), hvd.size(), "Horovod")
        return HorovodRanks(hvd) if hvd.size() > 1 else Alone()
    if identity.single:
        return Alone()
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


# --- what is exchanged ------------------------------------------------------------------------------------------------
def together(group: JobRanks, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank gives, in the order of ranks: plain values by name. A collective.

    A rank that has failed comes, too, with its error, so that all fail alike and none waits for ever.

    Raises:
        CheckpointError: in every rank, if ``mine["error"]`` is an error in any; each rank that has one raises its own.
    """
    failure = mine.get("error")
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    told: list[dict[str, Any]] = [loads(data) for data in group.gather(dumps({**mine, "error": text}))]
    if failure is not None:
        raise failure
    for rank, one in enumerate(told):
        if one["error"] is not None:
            raise CheckpointError(
                "a rank could not do its part of a checkpoint", where={"rank": rank}, seen=one["error"]
            ).echoing()
    return told


def failure_of(work: Callable[[], object]) -> BaseException | None:
    """What ``work`` fails with, to be told to the others, who wait for an answer whatever it is."""
    try:
        work()
    except Exception as error:
        return error
    return None


def dumps(value: Any) -> bytes:
    """A plain value, with the tensors in it, as bytes."""
    import torch

    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def loads(data: bytes) -> Any:
    """The inverse of :func:`dumps`; nothing is unpickled."""
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
