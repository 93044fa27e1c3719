"""Each sample once per epoch, whatever the number of ranks before and after each resume."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from flytekitplugins_safedist.checkpoint.sampler import RandomNumbers, ResumableSampler
from flytekitplugins_safedist.errors import SafedistError


def samplers(size: int, world: int, **options: object) -> list[ResumableSampler]:
    return [ResumableSampler(range(size), rank=rank, world_size=world, **options) for rank in range(world)]


legs = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 5)), min_size=1, max_size=5)


@settings(deadline=None, max_examples=150)
@given(size=st.integers(0, 120), legs=legs, last=st.integers(1, 7), batch=st.integers(1, 9), drop=st.booleans())
def test_resumed_with_any_numbers_of_ranks_each_sample_comes_once_but_for_the_last_few(size, legs, last, batch, drop):
    seen: Counter[int] = Counter()
    state = samplers(size, 1, drop_last=drop)[0].state_dict()
    for world, batches in [*legs, (last, size + 1)]:
        ranks = samplers(size, world, drop_last=drop)
        epoch = state["epoch"]
        for rank in ranks:
            rank.load_state_dict(state)
        assert len({len(rank) for rank in ranks}) == 1, "ranks with different numbers of steps wait for each other"
        iterators = [rank.batches(DataLoader(range(size), batch_size=batch, sampler=rank)) for rank in ranks]
        for _ in range(batches):
            taken = [next(iterator, None) for iterator in iterators]
            if taken[0] is None:
                assert all(each is None for each in taken)
                break
            seen.update(int(index) for each in taken for index in each)
        states = [rank.state_dict() for rank in ranks]
        assert all(each == states[0] for each in states)
        state = states[0]
        if state["epoch"] != epoch:
            break
    assert state == {"epoch": 1, "taken": 0, "size": size, "seed": 0, "shuffle": True}
    if drop:
        assert set(seen.values()) <= {1}
        assert size - len(seen) < world
    else:
        assert set(seen) == set(range(size))
        assert sum(seen.values()) - size < max(leg[0] for leg in [*legs, (last, 0)])


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_loader_has_fetched_ahead_is_not_lost(workers):
    sampler = ResumableSampler(range(40), rank=0, world_size=1, seed=3)
    loader = DataLoader(range(40), batch_size=4, sampler=sampler, num_workers=workers)
    batches = sampler.batches(loader)
    first = [int(index) for _ in range(3) for index in next(batches)]
    again = ResumableSampler(range(40), rank=0, world_size=1, seed=3)
    again.load_state_dict(sampler.state_dict())
    rest = [
        int(index) for batch in again.batches(DataLoader(range(40), batch_size=4, sampler=again)) for index in batch
    ]
    assert len(first) == 12
    assert sorted(first + rest) == list(range(40))


def test_the_order_is_that_of_torchs_own_sampler():
    """Another one in each epoch, where it is shuffled."""
    cases = itertools.product([(24, False), (25, False), (25, True), (2, False)], [True, False])
    for (size, drop_last), shuffle in cases:
        given = {"shuffle": shuffle, "seed": 5, "drop_last": drop_last}
        for rank, ours in enumerate(samplers(size, 3, **given)):
            theirs = DistributedSampler(range(size), num_replicas=3, rank=rank, **given)
            for epoch in range(2):
                theirs.set_epoch(epoch)
                assert [size, *ours] == [size, *theirs], given
                ours.next_epoch()


def test_a_state_whose_samples_were_not_counted_is_refused():
    sampler = ResumableSampler(range(10), rank=0, world_size=1)
    loader = DataLoader(range(10), batch_size=2, sampler=sampler)
    next(iter(loader))
    with pytest.raises(SafedistError, match=r"sampler.batches\(loader\)"):
        sampler.state_dict()
    sampler.advance(2)
    assert sampler.state_dict()["taken"] == 2


def test_a_state_of_other_data_is_refused():
    state = ResumableSampler(range(10), rank=0, world_size=1).state_dict()
    for other in (
        ResumableSampler(range(11), rank=0, world_size=1),
        ResumableSampler(range(10), rank=0, world_size=1, seed=1),
        ResumableSampler(range(10), rank=0, world_size=1, shuffle=False),
    ):
        with pytest.raises(SafedistError, match="left out or repeated"):
            other.load_state_dict(state)
    with pytest.raises(SafedistError, match="left out or repeated"):
        ResumableSampler(range(10), rank=0, world_size=1).load_state_dict({"taken": 3})


def test_a_loader_with_another_sampler_is_refused():
    sampler = ResumableSampler(range(10), rank=0, world_size=1)
    with pytest.raises(ValueError, match="sampler="):
        next(sampler.batches(DataLoader(range(10), batch_size=2)))


def test_a_rank_that_is_not_of_the_job_is_refused():
    with pytest.raises(ValueError, match=r"rank=2 is not in 0..1"):
        ResumableSampler(range(10), rank=2, world_size=2)


@pytest.mark.parametrize("has_numpy", [True, False])
def test_random_numbers_go_on_where_they_were_be_it_before_numpy_was_imported(monkeypatch, has_numpy):
    def draw():
        return random.random(), float(np.random.rand()) if has_numpy else 0.0, float(torch.rand(1))

    with monkeypatch.context() as before:
        if not has_numpy:
            before.delitem(sys.modules, "numpy")
        state = RandomNumbers().state_dict()
    drawn = draw()
    assert draw() != drawn
    RandomNumbers().load_state_dict(state)
    assert draw() == drawn
