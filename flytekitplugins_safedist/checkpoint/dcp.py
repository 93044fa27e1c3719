"""A save's files: torch.distributed.checkpoint's own format, written and read by us, and nothing in it is unpickled.

Each rank writes its pieces into one file (plain values as JSON, and once more as torch's tools want them), with a table
of what is in it at the end. Rank 0 reads these tables from the place, which shows that it sees what all have written,
and makes the manifest of them; and ``.metadata``, which torch's tools want. Each item has a CRC-32, taken as it is
written and compared as it is read. Imports torch, as :mod:`.pieces`.
"""

from __future__ import annotations

import json
import logging
import math
import pickle
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..compat import torch as torch_inside
from ..errors import CheckpointError
from .group import JobRanks, of_rank
from .pieces import Path, Piece, dtype_of, flat, parts, without_autograd
from .saves import METADATA, DamagedError, Manifest, not_shared, read_manifest
from .state import is_trained, path_of, targets, tree_of
from .store import Store, crc32
from .values import from_bytes

logger = logging.getLogger(__name__)


def part_of(rank: int) -> str:
    """The file of a rank."""
    return f"__{rank}_0.distcp"


@without_autograd
def copied(pieces: Sequence[Piece], before: Sequence[Piece]) -> list[Piece]:
    """The pieces, with copies on the CPU in the place of their tensors (pinned, where they come from a GPU); complete
    on return.

    Args:
        pieces: of this rank.
        before: the copies of the save before, whose memory is used again.
    """
    memory, copies, devices = {piece.name: piece.data for piece in before}, [], set()
    for piece in pieces:
        data = piece.data
        if piece.size is not None:
            copy, pinned = memory.get(piece.name), data.device.type == "cuda"
            if copy is None or (copy.shape, copy.dtype) != (data.shape, data.dtype):
                copy = torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=pinned)
            devices.add(data.device)
            data = copy.copy_(data, non_blocking=True)
        copies.append(replace(piece, data=data))
    for device in devices - {torch.device("cpu")}:
        torch.get_device_module(device).synchronize(device)
    return copies


# --- save -------------------------------------------------------------------------------------------------------------
def write(pieces: Sequence[Piece], store: Store, save: str, part: str) -> list[int]:
    """Write one rank's pieces; where their table is: the file's size, where in it the table begins, its CRC-32. []
    where there are none."""
    if not pieces:
        return []
    table = []
    store.make(save)  # another rank may have made it, and this node may not see that yet
    with store.part(f"{save}/{part}") as file:
        for piece in pieces:
            at, kind = file.begin(), list[Any]((None, None, [], []))
            torch.save(from_bytes(piece.data) if piece.size is None else piece.data, file)
            for_tools = at, file.size - at
            if piece.size is None:
                at = file.begin()
                file.write(piece.data)
            else:
                kind = [piece.size, str(piece.data.dtype), piece.offsets, [*piece.data.shape]]
            table.append([piece.path, *kind, at, file.size - at, file.crc, for_tools])
        at = file.begin()
        file.write(json.dumps(table).encode())
        return [file.size, at, file.crc]


def manifest_of(store: Store, save: str, draft: Manifest, tables: Mapping[str, list[int]]) -> Manifest:
    """In rank 0: the manifest of what all have written, which torch's tools need no more of.

    Args:
        store: where.
        save: its directory.
        draft: the manifest, but for what is in the files; of its items the paths, in the order of the state's own.
        tables: by file, what :func:`write` has returned.

    Raises:
        CheckpointError: rank 0 does not see a file; or the pieces do not make up the tensors.
    """
    sizes = {part: size for part, (size, _, _) in tables.items()}
    items: dict[str, dict[str, Any]] = {json.dumps(item["path"]): {} for item in draft.items}
    for_tools = dict[tuple[str, int], Any]()
    for part, table in zip(tables, _read_tables(store, save, tables), strict=True):
        for path, size, dtype, offsets, shape, at, length, crc, torchs in table:
            item = items.setdefault(json.dumps(path), {})
            item.update({} if item else {"path": path, "size": size, "dtype": dtype, "chunks": []})
            if (size, dtype) != (item["size"], item["dtype"]):
                raise CheckpointError("ranks hold tensors of different sizes under one name", where={"state": path})
            item["chunks"].append([offsets, shape, part, at, length, crc])
            for_tools[part, at] = torchs
    store.make(save)  # of nothing at all no rank has written
    with store.part(f"{save}/{METADATA}") as file:
        file.write(_for_torchs_tools([*items.values()], for_tools))
    return replace(draft, sizes={**sizes, METADATA: file.size}, items=[*items.values()], torch=torch.__version__)


def _read_tables(store: Store, save: str, tables: Mapping[str, list[int]]) -> list[Any]:
    sizes = {part: size for part, (size, _, _) in tables.items()}
    try:
        found = [*store.read(save, sizes, [(part, at, size - at) for part, (size, at, _) in tables.items()])]
        wrong = [part for data, (part, (*_, crc)) in zip(found, tables.items(), strict=True) if crc32(data) != crc]
        seen = f"other bytes: {', '.join(wrong)}" if wrong else ""
    except FileNotFoundError as error:
        seen = str(error)
    if seen:
        raise not_shared(store, seen)
    return [json.loads(data) for data in found]


def _for_torchs_tools(items: Sequence[Mapping[str, Any]], where: Mapping[tuple[str, int], Any]) -> bytes:
    """torch's own record of a save. Made by its planner, which sees to it that the chunks make up the tensors.

    Args:
        items: as in the manifest.
        where: what torch is to read for the chunk at this place of this file: offset and length.
    """
    writes, stored, paths = [], {}, {}
    for item in items:
        path = path_of(item["path"])
        name, size = flat(path), item["size"]
        paths[name] = tuple(
            (int if key[0] == "tuple" else str)(key[1]) if isinstance(key, tuple) else key for key in path
        )
        for offsets, sizes, part, at, *_ in item["chunks"]:
            index = MetadataIndex(name, offsets if size is not None else None)
            data, kind = None, WriteItemType.BYTE_IO
            if size is not None:
                kind = WriteItemType.TENSOR if sizes == size else WriteItemType.SHARD
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                data = TensorWriteData(chunk, TensorProperties(dtype=dtype_of(item["dtype"])), torch.Size(size))
            if index in stored:
                raise CheckpointError("two ranks have written one piece", where={"state": name})
            writes.append(WriteItem(index, kind, tensor_data=data))
            stored[index] = torch_inside.storage_info(part, *where[part, at])
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _, metadata = planner.create_global_plan([SavePlan(writes), SavePlan([])])  # of one plan torch does not count
    return pickle.dumps(replace(metadata, planner_data=paths, storage_data=stored))


# --- load -------------------------------------------------------------------------------------------------------------
class SavedFiles:
    """One save; each item is compared with its digest as it is read.

    Args:
        store: where.
        save: its directory.
        state: what is restored of it.
        ranks: that restore.

    Attributes:
        manifest: its own.
        items: by path.

    Raises:
        DamagedError: it has no whole manifest.
        CheckpointError: it is whole, and not of this state.
    """

    def __init__(self, store: Store, save: str, state: Mapping[str, Any], ranks: JobRanks) -> None:
        self._store, self._save, self._state = store, save, state
        self.manifest = read_manifest(store, save)
        self.items: dict[Path, dict[str, Any]] = {path_of(item["path"]): item for item in self.manifest.items}
        self._heads = self._names_here(ranks)

    def load(self, targets: Mapping[Path, Any]) -> dict[Path, Any]:
        """The values at these paths: tensors are read into what is given here, of others the value is returned.

        Raises:
            DamagedError: a file is missing or cut, or an item is not as it was written.
        """
        values = dict(targets)
        requests: list[Any] = []  # where an item lies, its CRC-32, and what takes it
        for path, target in targets.items():
            item = self.items[path]
            if item["size"] is None:
                ((_, _, *where),) = item["chunks"]
                requests.append((*where, lambda data, path=path: values.update({path: from_bytes(data)})))
            else:
                requests += self._of_tensor(path, item, target)
        requests.sort(key=lambda request: request[:2])
        for (*_, take), data in zip(requests, self._read([request[:4] for request in requests]), strict=True):
            take(data)
        return values

    def _of_tensor(self, path: Path, item: Mapping[str, Any], target: Any) -> Iterator[Any]:
        dtype = dtype_of(item["dtype"])
        for begins, part in parts(target):
            count = 0
            for offsets, sizes, *where in item["chunks"]:
                dims = zip(begins, part.shape, offsets, sizes, strict=True)
                both = [(max(b, o), min(b + n, o + m)) for b, n, o, m in dims]
                if all(first < last for first, last in both):
                    count += math.prod(last - first for first, last in both)
                    here = tuple(slice(first - b, last - b) for (first, last), b in zip(both, begins, strict=True))
                    there = tuple(slice(first - o, last - o) for (first, last), o in zip(both, offsets, strict=True))
                    yield *where, lambda data, p=part, h=here, t=there, s=sizes: p[h].copy_(_tensor(data, dtype, s)[t])
            if count != part.numel():
                raise DamagedError("a save does not hold all of a tensor", where={"state": flat(path)})

    def _read(self, items: Sequence[tuple[str, int, int, int]]) -> Iterator[bytes]:
        where = {"save": f"{self._store.url}/{self._save}"}
        found = self._store.read(self._save, self.manifest.sizes, [item[:3] for item in items])
        try:
            for (part, at, length, crc), data in zip(items, found, strict=True):
                if len(data) != length or crc32(data) != crc:
                    where.update(part=part, at=str(at))
                    raise DamagedError("a part of a save is not as it was written", where=where)
                yield data
        except FileNotFoundError as error:
            raise DamagedError("a part of a save is missing or cut", where=where, seen=str(error)) from error

    def trees(self) -> dict[str, Any]:
        """What it holds of the names in the state, for this rank; its own tensors are overwritten. A collective for
        FSDP1.

        Raises:
            DamagedError: it is not whole.
            CheckpointError: it is whole, and not of this state.
        """
        heads = self._heads
        items = {path: item for path, item in self.items.items() if path[0] in heads.values()}
        values = self.load(targets(self._state, heads, items))
        found = tree_of(values) if values else {}
        return {name: found[head] for name, head in heads.items()}

    def _names_here(self, ranks: JobRanks) -> dict[str, str]:
        """Of the state's names those that are restored, with their names in the save."""
        manifest, state = self.manifest, self._state
        if missing := {*state} - {*manifest.names}:
            raise CheckpointError(
                "the save does not hold what is to be resumed",
                where={"missing": ", ".join(sorted(missing))},
                seen=f"saved: {', '.join(sorted(manifest.names)) or 'nothing'}",
                expected=", ".join(sorted(state)),
                hint="give restore() names that save() was given; add new ones after it",
            )
        own = [name for name in state if name in manifest.per_rank]
        if not own or manifest.world_size == ranks.size:
            whose = {name: each.rank for name, each in state.items() if isinstance(each, of_rank)}
            return {name: f"{name}@{whose.get(name, ranks.rank)}" if name in own else name for name in state}
        seen = f"{manifest.world_size} ranks have saved their own, and there are {ranks.size} now"
        if trained := [name for name in own if is_trained(state[name])]:
            raise CheckpointError(
                "models and optimizers of which each rank has its own fit as many ranks as have saved them",
                where={"state": ", ".join(trained)},
                seen=seen,
                hint="resume with as many ranks, or leave these names out of the state to begin them anew",
            )
        if ranks.rank == 0:
            logger.warning(f"{', '.join(own)}: not restored, for {seen}")
        return {name: name for name in state if name not in own}


def _tensor(data: bytes, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
    """The tensor that torch.save has written: its memory as it lies in the archive."""
    with zipfile.ZipFile(BytesIO(data)) as archive:
        (info,) = (each for each in archive.infolist() if each.filename.endswith("/data/0"))
    begin = info.header_offset + 30 + sum(struct.unpack_from("<HH", data, info.header_offset + 26))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of memory that is not to be written to; it is not
        return torch.frombuffer(data, dtype=dtype, count=math.prod(sizes), offset=begin).view(sizes)
