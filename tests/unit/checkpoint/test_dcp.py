"""What a rank writes is what rank 0 makes a save of; and nothing of a save is unpickled."""

from __future__ import annotations

import os
import pickle

import pytest
import torch

from flytekitplugins_safedist.checkpoint import dcp, saves
from flytekitplugins_safedist.checkpoint.group import JobRanks
from flytekitplugins_safedist.checkpoint.pieces import Piece
from flytekitplugins_safedist.checkpoint.saves import Manifest
from flytekitplugins_safedist.checkpoint.store import Store
from flytekitplugins_safedist.errors import CheckpointError

DRAFT = Manifest(step=1, world_size=1, names=["weight"], per_rank=[])


def half(offset: int, size: int = 2, of: int = 4) -> Piece:
    return Piece(("weight",), torch.arange(float(offset), offset + size), (0,), (of,), (offset,))


def written(store: Store, *pieces_of: list[Piece]) -> dict[str, list[int]]:
    tables = {}
    for rank, pieces in enumerate(pieces_of):
        table = dcp.write(pieces, store, "step-1", f"__{rank}_0.distcp")
        assert table is not None
        tables[f"__{rank}_0.distcp"] = table
    return tables


def commit(store: Store, tables: dict[str, list[int]]) -> None:
    saves.commit(store, "step-1", dcp.manifest_of(store, "step-1", DRAFT, tables))


def test_what_ranks_have_written_is_read_as_one_tensor(tmp_path):
    store = Store(str(tmp_path))
    commit(store, written(store, [half(0)], [half(2)]))
    target = torch.empty(4)
    saved = dcp.SavedFiles(store, "step-1", {"weight": target}, JobRanks("a test"))
    assert saved.load({("weight",): target}) == {("weight",): target}
    assert target.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        pytest.param(([half(0)], [half(1, 3)]), "validate", id="overlapping"),
        pytest.param(([half(0)], [half(3, 1)]), "validate", id="with a gap"),
        pytest.param(([half(0)], [half(0), half(2)]), "one piece", id="the same twice"),
        pytest.param(([half(0)], [half(2, 2, of=5)]), "different sizes", id="of two tensors"),
    ],
)
def test_pieces_that_do_not_make_up_a_tensor_are_no_save(tmp_path, pieces, said):
    store = Store(str(tmp_path))
    tables = written(store, *pieces)
    with pytest.raises((CheckpointError, ValueError), match=said):
        commit(store, tables)
    assert not (tmp_path / "step-1" / "manifest.json").exists()


def test_rank_0_commits_what_it_sees_alone(tmp_path):
    store = Store(str(tmp_path))
    tables = written(store, [half(0)], [half(2)])
    path = tmp_path / "step-1" / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"the nodes do not share the place .*seen: .*__1_0.distcp"):
        commit(store, tables)


class Calls:
    """Pickles as a call."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self._path,)


def test_torchs_own_record_is_for_torchs_tools_and_is_not_unpickled(tmp_path):
    store = Store(str(tmp_path))
    commit(store, written(store, [half(0), half(2)]))
    (tmp_path / "step-1" / saves.METADATA).write_bytes(pickle.dumps(Calls(str(tmp_path / "called"))))
    dcp.SavedFiles(store, "step-1", {"weight": 0}, JobRanks("a test")).load({("weight",): torch.empty(4)})
    assert not (tmp_path / "called").exists()


def test_copies_are_of_that_moment_and_made_in_the_memory_of_the_save_before():
    tensor, scalar = torch.arange(6.0).reshape(2, 3).t(), torch.tensor(1.0)
    pieces = [Piece(("a",), tensor, (0,), (3, 2)), Piece(("b",), scalar, (0,), ()), Piece(("c",), b"x", (0,))]
    with torch.inference_mode():
        copies = dcp.copied(pieces, [])
    scalar.fill_(2.0)
    first = [piece.data for piece in copies]
    assert [first[0].tolist(), first[1].item(), first[2]] == [[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], 1.0, b"x"]
    with torch.device("meta"):
        again = [piece.data for piece in dcp.copied(pieces, copies)]
    assert again[1].item() == 2.0
    assert again[0].data_ptr() == first[0].data_ptr()
