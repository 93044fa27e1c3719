"""Bytes that change where they lie, and parts that are cut: seen in each part, on a disk and on S3."""

from __future__ import annotations

import random

import pytest

from flytekitplugins_safedist.checkpoint import Checkpoints
from tests.checkpoint.saving import one_value, plain_state, reach_stores
from tests.fs.ranks import Process
from tests.harness.moto_s3 import BUCKET
from tests.harness.product import Store, saves
from tests.harness.product import store as stores

FLIPS = {"disk": 10, "s3": 1}
"""What is read is compared by the same code: on S3 each kind of damage once."""


def flipped(data, ranges, die):
    """One bit of it is another, in what a restore reads: beside that there is a copy for torch's own tools."""
    begin, length = die.choice(ranges)
    at = begin + die.randrange(length)
    return data[:at] + bytes([data[at] ^ (1 << die.randrange(8))]) + data[at + 1 :]


def all_that_is_damaged_is_passed_over(place, flips):
    """Save two, damage each part of the newer one in turn, and resume; returns how often the older one was found."""
    stores.LATE_SECONDS = 0.1
    reach_stores()
    ckpt = Checkpoints(place, every=None)
    for step in (1, 2):
        ckpt.save(step, plain_state(step), force=True)
    ckpt.wait()
    store, die = Store(place), random.Random(place)
    newest = saves.committed(store)[0]
    manifest = saves.read_manifest(store, newest)
    parts = [part for part in manifest.sizes if part.endswith(".distcp")]
    chunks = [chunk for item in manifest.items for chunk in item["chunks"]]
    passed_over = 0
    for part in [f"{newest}/{part}" for part in (*parts, saves.MANIFEST)]:
        whole = store.get(part)
        ranges = [(at, length) for _, _, name, at, length, _ in chunks if part.endswith(name)] or [(0, len(whole))]
        damages = [flipped(whole, ranges, die) for _ in range(flips)] + [
            whole[: die.randrange(len(whole))],
            b"",
            whole + b"\0",
        ]
        for damaged in damages:
            store.put(part, damaged)
            state = plain_state(-1)
            assert (Checkpoints(place).restore(state), one_value(state)) == (2, 1.0)
            passed_over += 1
        store.put(part, whole)
    state = plain_state(-1)
    assert (Checkpoints(place).restore(state), one_value(state)) == (3, 2.0)
    return passed_over, len(parts)


@pytest.mark.parametrize("where", ["disk", "s3"])
def test_all_that_is_damaged_is_passed_over(tmp_path, request, where):
    server = request.getfixturevalue("s3") if where == "s3" else None
    place = f"s3://{BUCKET}/damaged" if server else str(tmp_path / "place")
    env = server.environment if server else None
    process = Process(all_that_is_damaged_is_passed_over, place, FLIPS[where], env=env)
    assert process.outcome().get() == (2 * (FLIPS[where] + 3), 1)
