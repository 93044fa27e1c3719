"""The metadata of a sharded save is a pickle; what it may name is listed, and nothing else is looked up."""

from __future__ import annotations

import enum
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as torchs

from flytekitplugins_safedist.checkpoint import dcp, metadata
from flytekitplugins_safedist.checkpoint.group import JobRanks
from flytekitplugins_safedist.checkpoint.saves import Manifest
from flytekitplugins_safedist.checkpoint.store import Store
from flytekitplugins_safedist.errors import CheckpointError


class AsPython3112(pickle.Pickler):
    """Pickles an enum's member as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, found: Any) -> Any:
        return (getattr, (type(found), found.name)) if isinstance(found, enum.Enum) else NotImplemented


class Gives:
    """Pickles as a call."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call[0], self._call[1:]


@pytest.fixture
def saved(tmp_path):
    made = Manifest(step=1, world_size=1, names=["weight"], per_rank=[])
    dcp.save(dcp.Share({("weight",): torch.ones(3)}, [("weight",)]), Store(str(tmp_path)), "step-1", JobRanks(), made)
    return tmp_path / "step-1" / dcp.METADATA


def test_it_is_read_as_it_was_written(saved):
    assert list(metadata.read_metadata(saved.read_bytes()).state_dict_metadata) == ["weight"]


def test_members_of_enums_are_read_as_any_python_pickles_them(saved):
    made = metadata.read_metadata(saved.read_bytes())
    with open(saved, "wb") as file:
        AsPython3112(file).dump(made)
    assert b"getattr" in saved.read_bytes()
    assert metadata.read_metadata(saved.read_bytes()) == made


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (Gives(print, "anything"), "builtins.print"),
        (Gives(getattr, torchs.Metadata, "__init__"), "getattr of .*Metadata"),
        (Gives(getattr, torchs._MEM_FORMAT_ENCODING, "__init__"), "getattr of .*_MEM_FORMAT_ENCODING"),
        (Gives(getattr, "text", "format"), "getattr of text"),
    ],
)
def test_what_does_not_belong_there_is_refused(given, named):
    with pytest.raises(CheckpointError, match=rf"does not belong there.*{named}"):
        metadata.read_metadata(pickle.dumps(given))
