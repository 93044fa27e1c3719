"""torch.distributed.checkpoint as we use it: its format and its planners, our files, and nothing is unpickled.

Each item (a tensor's part, a value) has a CRC-32, taken as it is written and compared as it is read, so nothing is read
twice. Imports torch: imported by functions, when there is something to save or to restore.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed.checkpoint as torchs
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from ..compat import torch as torch_inside
from ..errors import CheckpointError
from .group import JobRanks, failed_elsewhere
from .metadata import read_metadata
from .saves import MANIFEST, DamagedError, Manifest, read_manifest
from .store import Store, Written, crc32

METADATA = ".metadata"
Path = tuple[Any, ...]
"""Of a value in the tree that a state is: keys of dicts, indices of lists."""


def flat(path: Path) -> str:
    """The name that torch gives to a path."""
    return ".".join(map(str, path))


def is_part(value: Any) -> bool:
    """Whether it is this rank's part of a tensor."""
    return isinstance(value, (DTensor, ShardedTensor))


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor, or a part of one."""
    return isinstance(value, (torch.Tensor, ShardedTensor))


# --- save -------------------------------------------------------------------------------------------------------------
class Buffers:
    """The copies of one rank. What ``copy`` returned is overwritten by its next call."""

    def __init__(self) -> None:
        self._shapes: dict[str, tuple[Any, ...]] = {}
        self._copies: dict[str, Any] = {}

    def copy(self, values: Mapping[Path, Any]) -> dict[Path, Any]:
        """Copies on the CPU (pinned, where they come from a GPU), complete on return."""
        tensors = {flat(path): value for path, value in values.items() if is_tensor(value)}
        shapes = {name: (type(one), tuple(one.size()), one.dtype) for name, one in tensors.items()}
        if shapes != self._shapes:
            on_gpu = any(one.device.type != "cpu" for one in tensors.values() if isinstance(one, torch.Tensor))
            self._shapes, self._copies = shapes, torch_inside.buffers_for(tensors, pinned=on_gpu)
        copies = torch_inside.copy_state_dict(tensors, self._copies)
        return {path: copies[flat(path)] if is_tensor(one) else copy.deepcopy(one) for path, one in values.items()}


@dataclass
class Share:
    """What one rank writes of a save.

    Attributes:
        values: of this rank alone: its parts of tensors, tensors that other ranks leave to it, plain values.
        paths: of all values that this rank holds, in the order in which a restore gives them back.
        layout: a number for what the ranks have shared out among them, the same in all that hold the same tensors.
        failed: why this rank cannot do its part; it comes to the save all the same, so that none waits for it.
    """

    values: dict[Path, Any]
    paths: list[Path]
    layout: int = 0
    failed: BaseException | None = None


def save(share: Share, store: Store, name: str, group: JobRanks, made: Manifest) -> None:
    """Write this rank's share, and in rank 0 the metadata; then commit. A collective, where torch joins the ranks.

    Args:
        share: of this rank.
        store: where.
        name: of the save, the same in all ranks.
        group: all ranks.
        made: the manifest, but for what is known when all is written.

    Raises:
        CheckpointError: a rank could not do its part, or the save was not committed.
    """
    try:
        torch_inside.save_state_dict(
            {flat(path): value for path, value in share.values.items()},
            _Writer(store, name, group.rank, made),
            planner=_SavePlanner(share),
            process_group=group.writers,
            no_dist=group.writers is None,
        )
    except torchs.CheckpointException as error:
        raise _explained(error, group.rank if group.writers is not None else 0) from None


def _explained(error: Any, rank: int) -> BaseException:
    """What has failed: in this rank its own error, else that of the first other one, without the frames of torch's."""
    if rank in error.failures:
        own: BaseException = error.failures[rank][0]
        return own
    other, (cause, *_) = min(error.failures.items())
    return failed_elsewhere(other, f"{type(cause).__name__}: {cause}")


class _SavePlanner(torchs.DefaultSavePlanner):  # type: ignore[misc]  # torch is untyped to mypy here
    """Of values that are flat already; the paths go into the metadata, as torch's own flattening has them."""

    def __init__(self, share: Share) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._share = share

    def create_local_plan(self) -> Any:
        if self._share.failed is not None:
            raise self._share.failed
        paths = {flat(path): path for path in self._share.paths}
        return replace(super().create_local_plan(), planner_data=(self._share.layout, paths))

    def create_global_plan(self, all_plans: list[Any]) -> Any:
        layouts = [plan.planner_data[0] for plan in all_plans]
        others = [rank for rank, layout in enumerate(layouts) if layout != layouts[0]]
        if others:
            raise CheckpointError(
                "ranks hold different tensors under the names that are saved once: some would be lost",
                seen=f"other than rank 0's on ranks {', '.join(map(str, others[:10]))}",
                hint="give save() the same models and optimizers in every rank",
            )
        plans, metadata = super().create_global_plan(all_plans)
        merged = {name: path for plan in all_plans for name, path in plan.planner_data[1].items()}
        return plans, replace(metadata, planner_data=merged)


class _Writer(torchs.FileSystemWriter):  # type: ignore[misc]  # the same
    """One file of each rank, in our store; the manifest last."""

    def __init__(self, store: Store, name: str, rank: int, made: Manifest) -> None:
        super().__init__(name)
        self._store, self._name, self._part, self._made = store, name, f"__{rank}_0.distcp", made

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        self._store.make(self._name)
        return plans

    def write_data(self, plan: Any, planner: Any) -> Any:
        results = []
        if plan.items:
            self._store.make(self._name)  # rank 0 has made it, and this node may not see that yet
            with self._store.part(f"{self._name}/{self._part}") as file:
                results = [self._written(file, item, planner.resolve_data(item)) for item in plan.items]
        done: Any = torch.futures.Future()
        done.set_result(results)
        return done

    def _written(self, file: Written, item: Any, data: Any) -> Any:
        begin = file.size
        file.begin()
        if item.type == WriteItemType.BYTE_IO:
            file.write(data.getbuffer())
        else:
            tensor = data.detach().cpu()
            whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
            torch.save(tensor if whole else tensor.clone(), file)  # torch.save writes all of a view's storage
        info = torch_inside.storage_info(self._part, begin, file.size - begin)
        return WriteResult(index=item.index, size_in_bytes=info.length, storage_data=(info, file.crc))

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        written = [one for of_rank in results for one in of_rank]
        held = {one.index: one.storage_data[0] for one in written}
        data = pickle.dumps(replace(metadata, storage_data=held, storage_meta=None))
        with self._store.part(f"{self._name}/{METADATA}") as file:
            file.write(data)
        sizes, items = {METADATA: len(data)}, {METADATA: [[0, len(data), crc32(data)]]}
        for info, crc in (one.storage_data for one in written):
            sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
            items.setdefault(info.relative_path, []).append([info.offset, info.length, crc])
        made = replace(self._made, sizes=sizes, items=items, versions={"torch": torch.__version__})
        self._store.seal(self._name)
        self._store.put(f"{self._name}/{MANIFEST}", made.to_bytes())


# --- load -------------------------------------------------------------------------------------------------------------
class SavedFiles(torchs.FileSystemReader):  # type: ignore[misc]  # torch is untyped to mypy here
    """One save; each item is compared with its digest as it is read.

    Attributes:
        manifest: its own.
        metadata: as torch has it.

    Raises:
        DamagedError: it has no whole manifest or metadata.
    """

    def __init__(self, store: Store, name: str) -> None:
        super().__init__(name)
        self._store, self._name = store, name
        self.manifest = read_manifest(store, name)
        self._digests = {
            (part, offset, length): crc for part, items in self.manifest.items.items() for offset, length, crc in items
        }
        (data,) = self._read(METADATA, [(0, self.manifest.sizes[METADATA])])
        self.metadata = read_metadata(data)

    def load(self, templates: dict[str, Any]) -> None:
        """Read into ``templates``: tensors of any layout are overwritten, other values replaced. No collective.

        Raises:
            DamagedError: a file is missing or cut, or an item is not as it was written.
        """
        planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            torch_inside.load_state_dict(templates, self, planner=planner, no_dist=True)
        except torchs.CheckpointException as error:
            raise _explained(error, 0) from None

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        return self.metadata

    def read_data(self, plan: Any, planner: Any) -> Any:
        wanted: dict[str, dict[tuple[int, int], list[Any]]] = {}
        for request in plan.items:
            info = self.metadata.storage_data[request.storage_index]
            of_part = wanted.setdefault(info.relative_path, {})
            of_part.setdefault((info.offset, info.length), []).append(request)
        for part, items in wanted.items():
            for place, data in zip(sorted(items), self._read(part, sorted(items)), strict=True):
                _take(data, items[place], planner)
        done: Any = torch.futures.Future()
        done.set_result(None)
        return done

    def _read(self, part: str, items: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        where = {"save": f"{self._store.url}/{self._name}", "part": part}
        try:
            ranges = list(items)
            found = self._store.read(f"{self._name}/{part}", self.manifest.sizes[part], ranges)
            for (offset, length), data in zip(ranges, found, strict=True):
                if len(data) != length or crc32(data) != self._digests[part, offset, length]:
                    raise DamagedError("a part of a save is not as it was written", where={**where, "at": offset})
                yield data
        except (FileNotFoundError, KeyError) as error:
            raise DamagedError("a part of a save is missing or cut", where=where, seen=str(error)) from error


def _take(data: bytes, requests: list[Any], planner: Any) -> None:
    if requests[0].type == LoadItemType.BYTE_IO:
        for request in requests:
            planner.load_bytes(request, io.BytesIO(data))
        return
    tensor = loads(data)
    for request in requests:
        target = planner.resolve_tensor(request).detach()
        target.copy_(narrow_tensor_by_index(tensor, request.storage_offsets, request.lengths))
        planner.commit_tensor(request, target)


class _LoadPlanner(torchs.DefaultLoadPlanner):  # type: ignore[misc]  # torch is untyped to mypy here
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = loads(value.getvalue())


def dumps(value: Any) -> bytes:
    """A plain value, with the tensors in it, as bytes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def loads(data: bytes) -> Any:
    """The inverse of :func:`dumps`; nothing is unpickled."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
