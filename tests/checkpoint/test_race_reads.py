"""What a restore reads and writes: each rank what it loads, once, and nothing into scratch."""

from __future__ import annotations

import functools
import os
import resource
from itertools import pairwise
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from flytekitplugins_safedist.checkpoint import Checkpoints, per_rank
from tests.checkpoint.saving import reach_stores
from tests.fs.ranks import outcomes_of

SIDE, LAYERS = 512, 8
BYTES = SIDE * SIDE * 4 * LAYERS
"""Of the model. Its optimizer has as much again, and little else is in a save."""
LITTLE = 200_000


class Requested(AbstractBufferedFile):
    """An object that is read as those of real stores are: through fsspec's cache, which asks for more than it must."""

    def _fetch_range(self, start, end):
        return self.fs.cat_file(self.path, start, end)


class CountingStore(AbstractFileSystem):
    """An object store over a directory; notes what is requested of it in ``$TEST_REQUESTS``, a directory, by rank."""

    protocol = "counting"
    cachable = False

    def ls(self, path, detail=True, **_):
        found = [{"name": str(one), "size": one.stat().st_size, "type": kind(one)} for one in Path(path).glob("*")]
        if not found and not Path(path).is_dir():
            raise FileNotFoundError(path)
        return found if detail else [one["name"] for one in found]

    def info(self, path, **_):
        return {"name": path, "size": Path(path).stat().st_size, "type": kind(Path(path))}

    def _open(self, path, mode="rb", **options):
        if mode == "rb":
            return Requested(self, path, mode, **options)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return Path(path).open(mode)

    def cat_file(self, path, start=None, end=None, **_):
        with Path(path).open("rb") as file:
            file.seek(start or 0)
            data = file.read() if end is None else file.read(end - (start or 0))
        with Path(os.environ["TEST_REQUESTS"], os.environ["RANK"]).open("a") as notes:
            notes.write(f"{path} {start or 0} {len(data)}\n")
        return data


def kind(path):
    return "directory" if path.is_dir() else "file"


def ranks(count, work, *arguments):
    for one in outcomes_of(count, work, *arguments):
        one.get()


def begin(sharded):
    fsspec.register_implementation("counting", CountingStore, clobber=True)
    reach_stores()
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(*(torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.Adagrad(model.parameters())
    return {"model": model, "optimizer": optimizer, "own": per_rank(dist.get_rank()), "epoch": 3}


def save(place, sharded):
    state = begin(sharded)
    with Checkpoints(place, every=None) as ckpt:
        ckpt.save(4, state, force=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where there is a save, which all tests restore from: of four ranks where it is sharded, else of two."""

    @functools.cache
    def of(sharded):
        place = tmp_path_factory.mktemp("saved") / "place"
        ranks(4 if sharded else 2, save, place, sharded)
        return place

    return of


def requested(directory):
    """By rank, the bytes that it asked for in files of tensors; fails where it asked for one twice."""
    sums = []
    for notes in sorted(directory.iterdir()):
        asked = sorted((path, int(at), int(size)) for path, at, size in map(str.split, notes.read_text().splitlines()))
        asked = [one for one in asked if one[0].endswith(".distcp")]
        for (path, at, size), (other, begins, _) in pairwise(asked):
            assert path != other or at + size <= begins, f"rank {notes.name} read {path} at {begins} twice"
        sums.append(sum(size for _, _, size in asked))
    return sums


PARTS = {"all": None, "model": ["model"]}


def restore(place, sharded, notes):
    """All and a part of it, and then all where no file takes a byte."""
    state = begin(sharded)
    for part, names in PARTS.items():
        os.environ["TEST_REQUESTS"] = str(notes / part)
        assert Checkpoints(f"counting://{place}").restore({name: state[name] for name in names or state}) == 5
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    assert Checkpoints(place).restore(state) == 5


@pytest.mark.parametrize(
    ("sharded", "count"),
    [
        pytest.param(False, 2, id="replicated"),
        pytest.param(True, 4, id="by as many ranks as saved"),
        pytest.param(True, 2, id="by fewer ranks"),
    ],
)
def test_each_rank_reads_what_it_loads_and_reads_it_once_and_writes_nothing(saved, tmp_path, sharded, count):
    for part in PARTS:
        (tmp_path / part).mkdir()
    ranks(count, restore, saved(sharded), sharded, tmp_path)
    for part, loaded in (("all", 2 * BYTES), ("model", BYTES)):
        wanted, sums = loaded // count if sharded else loaded, requested(tmp_path / part)
        assert len(sums) == count
        assert all(wanted <= one < wanted + LITTLE for one in sums), (part, wanted, sums)
