"""torch.distributed.checkpoint as we use it: its format and its planners, our files, and nothing is unpickled.

Each item (a tensor's part, a value) has a CRC-32, taken as it is written and compared as it is read, so nothing is read
twice.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from ..compat import torch as torch_inside
from ..errors import CheckpointError
from .metadata import read_metadata
from .saves import DamagedError, Manifest
from .store import Store, Written, crc32

_FILES = 2
"""Of one rank, at most, written side by side: on a disk 1 GB took half as long as in one file, and with 4 no less."""

_FILE_BYTES = 32 << 20
"""Of a file, before there is another one."""

METADATA = ".metadata"
Path = tuple[Any, ...]
"""Of a value in the tree that a state is: keys of dicts, indices of lists."""

Commit = Callable[[dict[str, int], dict[str, list[list[int]]]], object]
"""Takes the sizes of all files and the digests of their items; called in rank 0, last."""


def flat(path: Path) -> str:
    """The name that torch gives to a path."""
    return ".".join(map(str, path))


@dataclass(frozen=True)
class Files:
    """Where one rank writes.

    Attributes:
        store: where.
        save: its name, the same in all ranks.
        rank: this one.
        commit: makes it a save.
    """

    store: Store
    save: str
    rank: int
    commit: Commit


def save(values: Mapping[Path, Any], files: Files, group: Any, failed: BaseException | None = None) -> None:
    """Write this rank's part, and in rank 0 the metadata; then commit. A collective, where there is a group.

    Args:
        values: tensors, parts of them, and values that load without unpickling; in rank 0 also what all ranks share.
        files: where.
        group: torch's process group of all ranks; None: this rank writes alone.
        failed: why this rank cannot do its part; then all ranks fail by that, and none waits for it.

    Raises:
        CheckpointError: a rank could not do its part, or the save was not committed.
    """
    import torch.distributed.checkpoint as torch_dcp

    _alone()
    planner = _save_planner({flat(path): path for path in values}, failed)
    state = {flat(path): value for path, value in values.items()}
    try:
        torch_dcp.save(
            state, storage_writer=_writer(files), planner=planner, process_group=group, no_dist=group is None
        )
    except torch_dcp.CheckpointException as error:
        raise _explained(error, files.rank if group is not None else 0) from None


def _alone() -> None:
    """Have torch not warn that it works alone: that is what it was asked for."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _explained(error: Any, rank: int) -> BaseException:
    """What has failed: in this rank its own error, else that of the first other one, without the frames of torch's."""
    if rank in error.failures:
        own: BaseException = error.failures[rank][0]
        return own
    other, (cause, *_) = min(error.failures.items())
    return CheckpointError(
        "a rank could not do its part of a checkpoint", where={"rank": other}, seen=f"{type(cause).__name__}: {cause}"
    ).echoing()


def _save_planner(paths: dict[str, Path], failed: BaseException | None) -> Any:
    from torch.distributed.checkpoint import DefaultSavePlanner

    class Planner(DefaultSavePlanner):  # type: ignore[misc]  # torch is untyped to mypy here
        """Of values that are flat already; the paths go into the metadata, as torch's own flattening has them."""

        def create_local_plan(self) -> Any:
            if failed is not None:
                raise failed
            return replace(super().create_local_plan(), planner_data=paths)

        def create_global_plan(self, all_plans: list[Any]) -> Any:
            merged = {name: path for plan in all_plans for name, path in plan.planner_data.items()}
            plans, metadata = super().create_global_plan(all_plans)
            return plans, replace(metadata, planner_data=merged)

    return Planner(flatten_state_dict=False, flatten_sharded_tensors=False)


def _written(file: Written, item: Any, planner: Any, part: str) -> Any:
    import torch
    from torch.distributed.checkpoint.planner import WriteItemType
    from torch.distributed.checkpoint.storage import WriteResult

    data, begin = planner.resolve_data(item), file.size
    file.begin()
    if item.type == WriteItemType.BYTE_IO:
        file.write(data.getbuffer())
    else:
        tensor = data.detach().cpu()
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
        torch.save(tensor if whole else tensor.clone(), file)  # torch.save writes all of a view's storage
    info = torch_inside.storage_info(part, begin, file.size - begin)
    return WriteResult(index=item.index, size_in_bytes=info.length, storage_data=(info, file.crc))


def _write(files: Files, items: list[Any], planner: Any) -> list[Any]:
    """Write this rank's part. The first file in this thread, another one beside it."""

    def write(index: int, items: list[Any]) -> list[Any]:
        part = f"__{files.rank}_{index}.distcp"
        with files.store.part(f"{files.save}/{part}") as file:
            return [_written(file, item, planner, part) for item in items]

    if not items:
        return []
    files.store.make(files.save)  # rank 0 has made it, and this node may not see that yet
    first, *rest = _shared_out(items)
    with ThreadPoolExecutor() as threads:
        beside = [threads.submit(write, index, items) for index, items in enumerate(rest, 1)]
        return [*write(0, first), *(result for one in beside for result in one.result())]


def _shared_out(items: list[Any]) -> list[list[Any]]:
    """What goes into each file of a rank."""
    sizes = [_bytes_of(item) for item in items]
    most = max(sum(sizes) / _FILES, _FILE_BYTES)
    files: dict[int, list[Any]] = {}
    for item, size, end in zip(items, sizes, accumulate(sizes), strict=True):
        files.setdefault(min(int((end - size / 2) // most), _FILES - 1), []).append(item)
    return list(files.values())


def _bytes_of(item: Any) -> int:
    tensor = item.tensor_data
    return 0 if tensor is None else tensor.chunk.sizes.numel() * tensor.properties.dtype.itemsize


def _finish(files: Files, metadata: Any, results: list[Any]) -> None:
    sizes: dict[str, int] = {}
    items: dict[str, list[list[int]]] = {}
    for info, crc in (result.storage_data for result in results):
        sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
        items.setdefault(info.relative_path, []).append([info.offset, info.length, crc])
    held = {result.index: result.storage_data[0] for result in results}
    data = pickle.dumps(replace(metadata, storage_data=held, storage_meta=None))
    with files.store.part(f"{files.save}/{METADATA}") as file:
        file.write(data)
    sizes[METADATA], items[METADATA] = len(data), [[0, len(data), crc32(data)]]
    files.commit(sizes, items)


def _writer(files: Files) -> Any:
    import torch
    from torch.distributed.checkpoint import FileSystemWriter

    class Writer(FileSystemWriter):  # type: ignore[misc]  # the same
        def prepare_local_plan(self, plan: Any) -> Any:
            return plan

        def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
            files.store.make(files.save)
            return plans

        def write_data(self, plan: Any, planner: Any) -> Any:
            done: Any = torch.futures.Future()
            done.set_result(_write(files, plan.items, planner))
            return done

        def finish(self, metadata: Any, results: list[list[Any]]) -> None:
            _finish(files, metadata, [one for of_rank in results for one in of_rank])

    return Writer(files.save)


# --- load -------------------------------------------------------------------------------------------------------------
class SavedFiles:
    """The files of one save, each item compared with its digest as it is read."""

    def __init__(self, store: Store, name: str, manifest: Manifest) -> None:
        self._store, self.name, self.manifest = store, name, manifest
        self._digests = {
            (part, offset, length): crc for part, items in manifest.items.items() for offset, length, crc in items
        }
        (of_metadata,) = self.read(METADATA, [(0, manifest.sizes[METADATA])])
        self.metadata = read_metadata(of_metadata)
        self.paths: dict[str, Path] = self.metadata.planner_data

    def read(self, part: str, items: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Items of one file, by offset and length.

        Raises:
            DamagedError: the file is missing or cut, or an item is not as it was written.
        """
        where = {"save": f"{self._store.url}/{self.name}", "part": part}
        try:
            ranges = list(items)
            found = self._store.read(f"{self.name}/{part}", self.manifest.sizes[part], ranges)
            for (offset, length), data in zip(ranges, found, strict=True):
                if len(data) != length or crc32(data) != self._digests[part, offset, length]:
                    raise DamagedError("a part of a save is not as it was written", where={**where, "at": offset})
                yield data
        except (FileNotFoundError, KeyError) as error:
            raise DamagedError("a part of a save is missing or cut", where=where, seen=str(error)) from error

    def load(self, templates: dict[str, Any]) -> None:
        """Read into ``templates``: tensors of any layout are overwritten, other values replaced. No collective.

        Raises:
            DamagedError: as :meth:`read`.
        """
        import torch.distributed.checkpoint as torch_dcp

        _alone()
        try:
            torch_dcp.load(templates, storage_reader=_reader(self), planner=_load_planner(), no_dist=True)
        except torch_dcp.CheckpointException as error:
            raise _explained(error, 0) from None


def _take(data: bytes, requests: list[Any], planner: Any) -> None:
    import torch
    from torch.distributed._shard._utils import narrow_tensor_by_index
    from torch.distributed.checkpoint.planner import LoadItemType

    if requests[0].type == LoadItemType.BYTE_IO:
        for request in requests:
            planner.load_bytes(request, io.BytesIO(data))
        return
    tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    for request in requests:
        target = planner.resolve_tensor(request).detach()
        target.copy_(narrow_tensor_by_index(tensor, request.storage_offsets, request.lengths))
        planner.commit_tensor(request, target)


def _reader(saved: SavedFiles) -> Any:
    import torch
    from torch.distributed.checkpoint import FileSystemReader

    class Reader(FileSystemReader):  # type: ignore[misc]  # torch is untyped to mypy here
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return saved.metadata

        def read_data(self, plan: Any, planner: Any) -> Any:
            wanted: dict[str, dict[tuple[int, int], list[Any]]] = {}
            for request in plan.items:
                info = saved.metadata.storage_data[request.storage_index]
                of_part = wanted.setdefault(info.relative_path, {})
                of_part.setdefault((info.offset, info.length), []).append(request)
            for part, items in wanted.items():
                for place, data in zip(sorted(items), saved.read(part, sorted(items)), strict=True):
                    _take(data, items[place], planner)
            done: Any = torch.futures.Future()
            done.set_result(None)
            return done

    return Reader(saved.name)


def _load_planner() -> Any:
    import torch
    from torch.distributed.checkpoint import DefaultLoadPlanner

    class Planner(DefaultLoadPlanner):  # type: ignore[misc]  # torch is untyped to mypy here
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)

    return Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
