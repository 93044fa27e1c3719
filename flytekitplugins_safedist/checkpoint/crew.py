"""The ranks of the job, as checkpoints need them: who am I, and a way to hand bytes from rank 0 to the others.

The ways are the training's own libraries, torch.distributed (over a gloo group of our own: never the group that trains)
or Horovod. Bytes are handed over as they are and unpickled by nobody on the way.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from ..errors import CheckpointError
from ..fs.context import current_identity
from ..fs.identity import Identity

CHUNK = 64 << 20
_PATIENCE = timedelta(hours=6)
"""Of the group's collectives: the others wait while rank 0 fetches a save from its store."""


class Crew(Protocol):
    """All ranks. Each method is a collective, to be called by all, in the same order."""

    rank: int
    world_size: int

    def broadcast(self, data: bytes | None, size: int) -> bytes:
        """``size`` bytes of rank 0's, in every rank; ``data`` is given by rank 0 only."""


class Alone:
    """A job of one process."""

    rank, world_size = 0, 1

    def broadcast(self, data: bytes | None, size: int) -> bytes:
        assert data is not None and len(data) == size  # noqa: S101, PT018
        return data


class TorchCrew:
    """Over a gloo group that this makes: a collective of the default group."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def broadcast(self, data: bytes | None, size: int) -> bytes:
        import torch.distributed as dist

        tensor = _tensor(data, size)
        dist.broadcast(tensor, src=0, group=self.group)
        return _bytes(tensor)


class HorovodCrew:
    """Over Horovod, on the CPU."""

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd
        self.rank, self.world_size = hvd.rank(), hvd.size()

    def broadcast(self, data: bytes | None, size: int) -> bytes:
        return _bytes(self._hvd.broadcast(_tensor(data, size), root_rank=0, name="safedist.checkpoint"))


def assemble() -> Crew:
    """The ranks of this job, by whichever library it has initialised. A collective, under torch.

    Raises:
        CheckpointError: the environment names several ranks, and no library is initialised that joins them.
    """
    identity = current_identity()
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        _same(identity, dist.get_rank(), dist.get_world_size(), "torch.distributed")
        return TorchCrew()
    hvd = sys.modules.get("horovod.torch")
    if hvd is not None and hvd.is_initialized():
        _same(identity, hvd.rank(), hvd.size(), "Horovod")
        return HorovodCrew(hvd) if hvd.size() > 1 else Alone()
    if identity.single:
        return Alone()
    raise CheckpointError(
        "the ranks cannot agree on a checkpoint yet",
        seen=f"{identity}, and neither torch.distributed nor horovod.torch is initialised",
        hint="call torch.distributed.init_process_group() or hvd.init() before the first use of checkpoints",
    )


def _same(identity: Identity, rank: int, size: int, who: str) -> None:
    if not identity.single and (identity.rank, identity.world_size) != (rank, size):
        raise CheckpointError(
            f"{who} and the environment count different ranks",
            seen=f"rank {rank} of {size} by {who}, {identity} by the environment",
            hint="initialise one group of all ranks",
        )


def broadcast_json(crew: Crew, value: Any) -> Any:
    """Rank 0's value, in every rank; others give anything."""
    data = json.dumps(value).encode() if crew.rank == 0 else None
    head = crew.broadcast(len(data).to_bytes(8, "big") if data is not None else None, 8)
    return json.loads(crew.broadcast(data, int.from_bytes(head, "big")))


def broadcast_file(crew: Crew, path: Path, size: int) -> None:
    """Rank 0's file, in a new file at ``path`` of every other rank."""
    if crew.world_size == 1:
        return
    chunks = _chunks(path) if crew.rank == 0 else None
    with open(os.devnull if crew.rank == 0 else path, "wb") as file:
        for start in range(0, size, CHUNK):
            data = next(chunks) if chunks is not None else None
            file.write(crew.broadcast(data, min(CHUNK, size - start)))


def _chunks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while data := file.read(CHUNK):
            yield data


def _tensor(data: bytes | None, size: int) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(size, dtype=torch.uint8)


def _bytes(tensor: Any) -> bytes:
    return bytes(tensor.numpy())
