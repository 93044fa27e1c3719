"""What ranks hold of their own, and errors that one of them has alone: nothing is lost, and nobody waits for ever."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from flytekitplugins_safedist.checkpoint import Checkpoints, per_rank
from tests.checkpoint import points
from tests.checkpoint.saving import reach_stores
from tests.fs.ranks import meeting_point, processes, rank_env
from tests.harness.product import CHECKPOINTS_RECORD, Store


class Loader:
    """Where a rank is in its data."""

    def __init__(self, at):
        self.at = at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def sharded_model():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def begin(kind="plain"):
    reach_stores()
    dist.init_process_group("gloo")
    return dist.get_rank(), {"model": sharded_model() if kind == "sharded" else torch.nn.Linear(4, 4)}


def ranks(work, *arguments, count=2):
    meeting = meeting_point()
    envs = [{**rank_env(rank, count), **meeting} for rank in range(count)]
    with processes([(work, *map(str, arguments))] * count, envs) as started:
        return [one.outcome() for one in started]


def values(outcomes):
    return [one.get() for one in outcomes]


def save_own(place, kind):
    rank, state = begin(kind)
    torch.manual_seed(rank)
    state |= {"loader": per_rank(Loader(100 + rank)), "random": per_rank(torch.get_rng_state())}
    with Checkpoints(place, every=None) as ckpt:
        ckpt.save(3, state, force=True)
    return torch.rand(1).item()


def restore_own(place, kind):
    _, state = begin(kind)
    loader, random = Loader(0), per_rank(None)
    assert Checkpoints(place).restore({**state, "loader": per_rank(loader), "random": random}) == 4
    if random.value is None:
        return loader.at, None
    torch.set_rng_state(random.value)
    return loader.at, torch.rand(1).item()


@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_each_rank_gets_its_own_back(tmp_path, kind):
    drawn = values(ranks(save_own, tmp_path, kind))
    assert values(ranks(restore_own, tmp_path, kind)) == [(100, drawn[0]), (101, drawn[1])]
    assert drawn[0] != drawn[1]


def test_other_numbers_of_ranks_leave_what_each_has_of_its_own_as_it_is(tmp_path):
    values(ranks(save_own, tmp_path, "plain"))
    assert values(ranks(restore_own, tmp_path, "plain", count=3)) == [(0, None)] * 3


def save_refused(place, kind, what):
    rank, state = begin(kind)
    ckpt = Checkpoints(place, every=timedelta(microseconds=1))
    state["loader"] = {
        "differs": Loader(100 + rank),
        "one cannot": {"of": object()} if rank else {"of": 1},
        "none can": {"of": object()},
    }[what]
    try:
        ckpt.save(0, state)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize("kind", ["plain", "sharded"])
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("differs", r"state=loader.*other than rank 0's on ranks 1.*per_rank"),
        ("one cannot", r"state=loader.of.*object"),
        ("none can", r"state=loader.of.*object"),
    ],
)
def test_what_cannot_be_saved_is_an_error_in_every_rank_at_once(tmp_path, kind, what, said):
    import re

    for text in values(ranks(save_refused, tmp_path, kind, what)):
        assert re.search(rf"CheckpointError: .*{said}", text), text


def save_to_a_store_that_fails(place, kind, of_rank):
    rank, state = begin(kind)

    def full(point):
        if point == points.PART_OPENED:
            raise OSError(28, "No space left on device")

    points.on_point = full if rank == int(of_rank) else None
    ckpt = Checkpoints(place, every=None)
    ckpt.save(0, state, force=True)
    try:
        ckpt.wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize(("kind", "of_rank"), [("plain", 0), ("sharded", 0), ("sharded", 1)])
def test_a_save_that_fails_in_one_rank_is_an_error_of_every_rank_at_the_end(tmp_path, kind, of_rank):
    for text in values(ranks(save_to_a_store_that_fails, tmp_path, kind, of_rank)):
        assert "No space left on device" in text


def save_normed(place, layers):
    """A model with buffers that differ between ranks, as running means do; in rank 1 perhaps with another layer."""
    rank, _ = begin()
    torch.manual_seed(0)
    more = [torch.nn.Linear(64, 64)] if rank and layers == "other" else []
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)), torch.nn.BatchNorm1d(64), *more)
    means = [model[4].running_mean, model[4].running_var]
    for one in means:
        one.fill_(rank)
    ckpt = Checkpoints(place, every=None)
    ckpt.save(0, {"model": model}, force=True)
    try:
        ckpt.wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for one in means:
        one.fill_(-1)
    Checkpoints(place).restore({"model": model})
    return torch.cat(means).unique().tolist()


def test_what_ranks_hold_alike_is_written_by_all_and_running_means_are_rank_0s(tmp_path):
    assert values(ranks(save_normed, tmp_path, "same")) == [[0.0], [0.0]]
    sizes = [path.stat().st_size for path in tmp_path.rglob("*.distcp")]
    assert len(sizes) == 2
    assert max(sizes) < 1.3 * min(sizes)


def test_models_of_different_tensors_are_an_error_of_every_rank(tmp_path):
    for text in values(ranks(save_normed, tmp_path, "other")):
        assert "ranks hold different tensors" in text


def wait_for_commit(place):
    rank, state = begin()
    ckpt = Checkpoints(place, every=None)
    ckpt.save(0, state, force=True)
    ckpt.wait()
    return rank, ckpt.latest, any(files for _, _, files in os.walk(place) if "manifest.json" in files)


def test_wait_returns_on_every_rank_when_the_save_is_committed(tmp_path):
    assert values(ranks(wait_for_commit, tmp_path)) == [(0, 0, True), (1, 0, True)]


def due_by_time(place):
    _, state = begin()
    now = [0.0]
    ckpt = Checkpoints(place, every=timedelta(seconds=10))
    ckpt._by_time.clock = lambda: now[0]
    ckpt._by_time.begun = 0.0
    ckpt.restore(state)
    saved = []
    for step in range(40):
        now[0] += 1.0 if dist.get_rank() == 0 else 3.0  # the ranks' clocks do not agree
        if ckpt.should_save(step):
            saved.append(step)
        ckpt.save(step, state)
        ckpt.wait()
    return saved


def test_what_is_due_by_time_is_saved_by_all_at_rank_0s_step(tmp_path):
    one, other = values(ranks(due_by_time, tmp_path))
    assert one == other == [9, 19, 29, 39]


def save_without_a_pointer(place, kind):
    rank, state = begin(kind)
    put = Store.put

    def refused(self, name, data):
        if rank == 0 and name == CHECKPOINTS_RECORD:
            raise OSError(5, "Input/output error")
        put(self, name, data)

    Store.put = refused
    ckpt = Checkpoints(place, every=None)
    ckpt.save(0, state, force=True)
    try:
        ckpt.wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_a_pointer_that_rank_0_cannot_leave_is_an_error_of_every_rank(tmp_path, kind):
    """Rank 0 alone writes it: the others must not wait for rank 0 in the save that follows."""
    for text in values(ranks(save_without_a_pointer, tmp_path, kind)):
        assert "Input/output error" in text
