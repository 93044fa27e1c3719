"""A manifest is whole or is refused."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flytekitplugins_safedist.checkpoint import manifest
from flytekitplugins_safedist.checkpoint.manifest import Manifest, Part
from flytekitplugins_safedist.errors import CheckpointError

MADE = Manifest(
    step=120,
    kind=manifest.FULL,
    world_size=4,
    parts=(Part("state.pt", 10, "ab" * 32),),
    attempt=1,
    round=2,
    written_at=1.5,
    weights_only=True,
    versions={"torch": "2.13.0"},
)


def test_it_is_read_as_it_was_written():
    assert Manifest.from_bytes(MADE.to_bytes()) == MADE
    assert MADE.size == 10


@given(st.integers(min_value=0, max_value=len(MADE.to_bytes()) - 1))
def test_a_cut_one_is_refused(length):
    with pytest.raises(CheckpointError):
        Manifest.from_bytes(MADE.to_bytes()[:length])


@given(st.integers(min_value=0, max_value=len(MADE.to_bytes()) - 1), st.integers(min_value=1, max_value=255))
def test_a_changed_byte_is_refused_or_changes_nothing(place, change):
    data = bytearray(MADE.to_bytes())
    data[place] ^= change
    with contextlib.suppress(CheckpointError):
        assert Manifest.from_bytes(bytes(data)) == MADE  # white space may change


def test_a_format_of_the_future_is_refused_by_its_name():
    fields = json.loads(MADE.to_bytes())["manifest"] | {"format": 99}
    text = json.dumps(fields, sort_keys=True)
    with pytest.raises(CheckpointError, match="seen: 99; expected: 1"):
        Manifest.from_bytes(json.dumps({"manifest": fields, "sha256": manifest._digest(text)}).encode())


def test_a_name_that_the_save_lacks_is_told():
    with pytest.raises(CheckpointError, match=r"lacks a part \[part=x\]"):
        MADE.part("x")


def test_names_sort_by_step_and_then_by_time():
    early, late, higher = (
        "step-000000000009.1700000000001.00000000",
        "step-000000000009.1700000000002.00000000",
        "step-000000000010.1600000000000.00000000",
    )
    assert manifest.newest_first([late, higher, "safedist-checkpoints.json", early]) == [higher, late, early]
    assert manifest.step_of(higher) == 10
    assert manifest.step_of("step-10") is None
    assert manifest.step_of(manifest.new_name(7)) == 7
    assert manifest.new_name(7) != manifest.new_name(7)
