"""The pieces that a state is saved in: which ranks hold which, that who hold one hold it alike, and who writes it.

A piece is a part of a tensor, or a plain value. What several ranks hold is proven alike by a mark of its content, or
refused. Imports torch: imported by functions, when there is something to save or to restore.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError
from .group import JobRanks, failure_of
from .store import crc32

Path = tuple[Any, ...]
"""Of a value in the tree that a state is: text for a key of a dict, a number for an index of a list, and ("tuple", n)
or ("key", n) for the index of a tuple and for a key that is a number."""

_WORDS = 1024
"""Of 8 bytes: the length of the rows that a tensor is laid out in to be summed."""


F = TypeVar("F", bound=Callable[..., Any])


def without_autograd(work: F) -> F:
    """``work``, done so that nothing of it is recorded, and nothing that it makes is of inference mode alone."""
    done: F = torch.inference_mode(mode=False)(torch.no_grad()(work))
    return done


def flat(path: Path) -> str:
    """The name of a path, as torch gives it."""
    return ".".join(str(key[1] if isinstance(key, tuple) else key) for key in path)


def dtype_of(text: str) -> torch.dtype:
    """torch's type of that name.

    Raises:
        CheckpointError: this torch has none.
    """
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(
            "this torch does not know a type that was saved", seen=f"{text}; torch {torch.__version__}"
        )
    return found


@dataclass(frozen=True)
class Piece:
    """What one rank holds of one value.

    Attributes:
        path: of the value.
        data: a tensor, or a value as bytes.
        holders: all ranks that hold this very piece; () where no rank knows the others.
        size: of the whole tensor; None of a value.
        offsets: of the part in it.
    """

    path: Path
    data: Any
    holders: tuple[int, ...]
    size: tuple[int, ...] | None = None
    offsets: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Of the value and the part of it, the same in every rank."""
        return flat(self.path) + ("" if self.size is None else f" {[*self.offsets]} of {[*self.size]}")


def is_part(value: Any) -> bool:
    """Whether it is a tensor of which this rank holds a part."""
    return isinstance(value, (DTensor, ShardedTensor))


def is_tensor(value: Any) -> bool:
    """Whether it is saved as a tensor: as torch itself makes them, a block of memory, or this rank's part of one."""
    if is_part(value):
        is_sum = isinstance(value, DTensor) and any(each.is_partial() for each in value.placements)
        return not is_sum and all(is_tensor(part) for _, part in parts(value))
    is_torchs = isinstance(value, torch.Tensor) and type(value.detach()) is torch.Tensor
    return is_torchs and value.layout == torch.strided and not value.is_quantized and not value.is_meta


def parts(value: Any) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """The parts of a tensor that this rank holds: where each begins, and the part itself."""
    if not is_part(value):
        yield (0,) * value.dim(), value.detach()
        return
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({"": value}, None, False)  # noqa: FBT003
    for item in planner.create_local_plan().items:
        yield tuple(item.tensor_data.chunk.offsets), planner.resolve_data(item).detach()


def pieces_of(path: Path, value: Any, ranks: JobRanks, holders: tuple[int, ...]) -> Iterator[Piece]:
    """The pieces of a tensor that this rank holds; of one of nothing its size is all there is, and one rank says it."""
    size = tuple(value.size())
    if math.prod(size):
        yield from (Piece(path, part, holders, size, at) for at, part in parts(value) if part.numel())
    elif ranks.rank == (0 if is_part(value) else holders[0]):
        yield Piece(path, torch.empty(size, dtype=value.dtype, device="cpu"), (ranks.rank,), size, (0,) * len(size))


def holders_of(value: Any, ranks: JobRanks) -> tuple[int, ...]:
    """The ranks that hold what this one holds of a tensor; () where only all of them together know."""
    if isinstance(value, DTensor):
        mesh, at = value.device_mesh, value.device_mesh.get_coordinate()
        if at is None or mesh.size() != ranks.size:
            return ()  # ranks outside the mesh may hold another tensor of this name
        alike = [slice(None) if each.is_replicate() else at[dim] for dim, each in enumerate(value.placements)]
        return tuple(sorted(mesh.mesh[tuple(alike)].flatten().tolist()))
    if isinstance(value, ShardedTensor):
        owners = {shard.placement.rank() for shard in value.metadata().shards_metadata}
        return (ranks.rank,) if len(owners) == ranks.size else ()
    return tuple(range(ranks.size))


# --- alike ------------------------------------------------------------------------------------------------------------
def marks(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A number for the content of each: of its type, and of its bytes, or of their :func:`sums`."""
    numbers = [zlib.crc32(str(tensor.dtype).encode()) for tensor in tensors]
    samples = {index: _sample(tensor) for index, tensor in enumerate(tensors)}
    for device in {sample.device for sample in samples.values()} - {torch.device("cpu")}:
        here = [index for index, sample in samples.items() if sample.device == device]
        lengths = [len(samples[index]) for index in here]
        fetched = torch.cat([samples[index] for index in here]).cpu()  # one wait for the device
        samples.update(zip(here, fetched.split(lengths), strict=True))
    return [crc32(samples[index].numpy(), number) for index, number in enumerate(numbers)]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    octets = tensor.detach().resolve_conj().contiguous().flatten().view(torch.uint8)
    return octets if octets.device.type == "cpu" else sums(octets)


def sums(octets: torch.Tensor) -> torch.Tensor:
    """What is fetched from a device for the bytes of a tensor: the sums of its rows of 8 KiB and of their columns,
    which show the places of its numbers, too; and what fills no row."""
    end = len(octets) // (_WORDS * 8) * _WORDS * 8
    if not end:
        return octets
    rows = (octets.clone() if octets.storage_offset() % 8 else octets)[:end].view(torch.int64).view(-1, _WORDS)
    return torch.cat([rows.sum(0).view(torch.uint8), rows.sum(1).view(torch.uint8), octets[end:]])


def to_write(pieces: Sequence[Piece], ranks: JobRanks, call: str, failure: BaseException | None) -> list[Piece]:
    """Of the pieces that this rank holds, those that it is to write. A collective.

    Raises:
        CheckpointError: two values have one name; ranks hold different content under one; or one has failed.
    """
    sets: dict[str, list[Any]] = {}
    if failure is None:
        failure = failure_of(lambda: sets.update(_sets(pieces, ranks.rank)))
    word = {key: zlib.crc32(repr(held).encode()) if key else held for key, held in sets.items()}
    writers = ranks.agree(call, word, _writers, failure=failure)
    if writers is None:
        ranks.agree(call, sets, _refuse)
    for key, held in sets.items():
        writers.update(_spread(held, [*map(int, key.split(","))]) if key else {})
    return [piece for piece in pieces if piece.holders == (ranks.rank,) or writers[piece.name] == ranks.rank]


def see_names(pieces: Sequence[Piece]) -> None:
    """Look whether each value has a name of its own.

    Raises:
        CheckpointError: two have one.
    """
    paths: dict[str, Path] = {}
    for piece in pieces:
        if paths.setdefault(flat(piece.path), piece.path) != piece.path:
            raise CheckpointError("two values have one name, joined by dots", where={"state": flat(piece.path)})


def _sets(pieces: Sequence[Piece], me: int) -> dict[str, list[Any]]:
    """For each set of ranks what they hold together: its names, marks, and sizes in bytes, in one order."""
    see_names(pieces)
    common = [piece for piece in pieces if piece.holders != (me,)]
    numbers = iter(marks([piece.data for piece in common if piece.size is not None]))
    sets: dict[str, list[Any]] = {}
    for piece in common:
        of_value = piece.size is None
        number, size = (zlib.crc32(piece.data), len(piece.data)) if of_value else (next(numbers), piece.data.nbytes)
        sets.setdefault(",".join(map(str, piece.holders)), []).append([piece.name, number, size])
    return {key: sorted(held) for key, held in sets.items()}


def _writers(words: Sequence[dict[str, Any]]) -> dict[str, int] | None:
    """In rank 0: who writes what is held by nobody knows whom; None where something is not alike."""
    for key in {key for word in words for key in word if key}:
        if len({words[int(rank)].get(key) for rank in key.split(",")}) > 1:
            return None
    sets: dict[tuple[int, ...], list[Any]] = {}
    for name, by in _by_name([word.get("", []) for word in words]).items():
        if len({number for number, _ in by.values()}) > 1:
            return None
        sets.setdefault(tuple(by), []).append([name, *next(iter(by.values()))])
    return {name: rank for holders, held in sets.items() for name, rank in _spread(held, holders).items()}


def _by_name(held_by: Sequence[Iterable[Any]]) -> dict[str, dict[int, tuple[int, int]]]:
    names: dict[str, dict[int, tuple[int, int]]] = {}
    for rank, held in enumerate(held_by):
        for name, number, size in held:
            names.setdefault(name, {})[rank] = number, size
    return names


def _spread(held: Iterable[Sequence[Any]], holders: Sequence[int]) -> dict[str, int]:
    """A writer for each piece, such that all have about as much to write; the same wherever it is asked."""
    loads, writer = [(0, rank) for rank in holders], {}
    for name, _, size in sorted(held, key=lambda each: (-each[2], each[0])):
        load, writer[name] = loads[0]
        heapq.heapreplace(loads, (load + size, writer[name]))
    return writer


def _refuse(sets_by: Sequence[dict[str, Any]]) -> None:
    """In rank 0: raise CheckpointError that names what ranks hold differently."""
    for key in sorted({key for sets in sets_by for key in sets}):
        for name, by in _by_name([sets.get(key, []) for sets in sets_by]).items():
            holders = sorted(by) if not key else [*map(int, key.split(","))]
            others = [rank for rank in holders if by.get(rank) != by.get(holders[0])]
            if others:
                top = name.partition(" ")[0].partition(".")[0]
                raise CheckpointError(
                    "ranks hold different content under one name: all but one rank's would be lost",
                    where={"state": name.partition(" ")[0]},
                    seen=f"other than rank {holders[0]}'s on ranks {', '.join(map(str, others[:10]))}",
                    hint=f"have it alike on all ranks (a model: in DistributedDataParallel, which also makes rank 0's "
                    f'buffers right); what each rank has of its own is {{"{top}": per_rank(...)}}, or a DTensor',
                )
    raise AssertionError("all that the ranks hold is alike, and their sums differ")
