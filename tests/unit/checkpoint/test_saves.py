"""A manifest is whole or is refused; names of saves sort; the writing thread finds what its caller finds."""

from __future__ import annotations

import contextlib
import contextvars
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flytekitplugins_safedist.checkpoint import saves
from flytekitplugins_safedist.checkpoint.saves import DamagedError, Manifest
from flytekitplugins_safedist.checkpoint.store import Store
from flytekitplugins_safedist.checkpoint.writer import Writer

MADE = Manifest(
    step=120,
    world_size=4,
    names=["model"],
    per_rank=[],
    sizes={".metadata": 10},
    items={".metadata": [[0, 10, 7]]},
    versions={"torch": "2.13.0"},
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


def test_a_format_of_the_future_is_refused_by_its_name():
    fields = json.loads(MADE.to_bytes())["manifest"] | {"format": 99}
    text = json.dumps(fields, sort_keys=True)
    with pytest.raises(DamagedError, match="seen: 99; expected: 1"):
        Manifest.from_bytes(json.dumps({"manifest": fields, "sha256": saves._digest(text)}).encode())


def test_names_sort_by_step_and_then_by_time(tmp_path):
    early, late, higher = (
        "step-000000000009.1700000000001.00000000",
        "step-000000000009.1700000000002.00000000",
        "step-000000000010.1600000000000.00000000",
    )
    store = Store(str(tmp_path))
    for name in (late, higher, early, "step-10"):
        store.put(f"{name}/{saves.MANIFEST}", b"{}")
    assert saves.committed(store) == [higher, late, early]
    assert saves.step_of(higher) == 10
    assert saves.step_of(saves.new_name(7)) == 7
    assert saves.new_name(7) != saves.new_name(7)


WAY = contextvars.ContextVar("way", default="none")


def test_the_thread_finds_what_its_caller_finds_by_context():
    """flytekit's current context is a context variable: without this, the store's credentials are not found."""
    seen = []
    WAY.set("the caller's")
    writer = Writer()
    writer.start("step 1", lambda: seen.append(WAY.get()))
    writer.drain("the test")
    assert seen == ["the caller's"]
