"""A manifest is whole or is refused."""

from __future__ import annotations

import contextlib
import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flytekitplugins_safedist.checkpoint import saves
from flytekitplugins_safedist.checkpoint.saves import DamagedError, Manifest

MADE = Manifest(
    step=120,
    world_size=4,
    names=["model"],
    per_rank=[],
    sizes={".metadata": 10},
    items=[{"path": ["model", "weight"], "size": [2], "dtype": "torch.float32", "chunks": [[[0], [2], "a", 0, 8, 7]]}],
    torch="2.13.0",
)


def test_it_is_read_as_it_was_written():
    assert Manifest.from_bytes(MADE.to_bytes()) == MADE


@given(st.integers(min_value=0, max_value=len(MADE.to_bytes()) - 1))
def test_a_cut_one_is_refused(length):
    with pytest.raises(DamagedError):
        Manifest.from_bytes(MADE.to_bytes()[:length])


@given(st.integers(min_value=0, max_value=len(MADE.to_bytes()) - 1), st.integers(min_value=1, max_value=255))
def test_a_changed_byte_is_refused_or_changes_nothing(place, change):
    data = bytearray(MADE.to_bytes())
    data[place] ^= change
    with contextlib.suppress(DamagedError):
        assert Manifest.from_bytes(bytes(data)) == MADE  # white space may change


def sealed(fields):
    text = json.dumps(fields, sort_keys=True)
    return json.dumps({"manifest": fields, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()


def test_a_format_of_the_future_is_refused_by_its_name():
    with pytest.raises(DamagedError, match="seen: 99; expected: 1"):
        Manifest.from_bytes(sealed(json.loads(MADE.to_bytes())["manifest"] | {"format": 99}))


def test_a_field_of_the_future_is_passed_over():
    assert Manifest.from_bytes(sealed(json.loads(MADE.to_bytes())["manifest"] | {"more": 1})) == MADE


def test_the_last_save_of_this_life_stays_however_little_of_it_a_store_lists():
    name = saves.new_name(1)
    assert saves.surplus([(name, set())], 1, [name], before=0) == []
