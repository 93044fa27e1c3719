"""What ranks hold of their own, and errors that one of them has alone: nothing is lost, and nobody waits for ever."""

from __future__ import annotations

import re
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from flytekitplugins_safedist.checkpoint import Checkpoints, per_rank
from flytekitplugins_safedist.errors import CheckpointError
from tests.checkpoint import points
from tests.checkpoint.saving import reach_stores
from tests.fs.ranks import agents_store, meeting_point, processes, rank_env
from tests.harness.product import agreement, group, saves
from tests.harness.product import store as stores


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
    torch.manual_seed(0)
    return dist.get_rank(), {"model": sharded_model() if kind == "sharded" else torch.nn.Linear(4, 4)}


def ranks(work, *arguments, count=2, meeting=None):
    meeting = meeting or meeting_point()
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
def test_each_rank_gets_its_own_back_and_other_numbers_of_ranks_leave_theirs_as_it_is(tmp_path, kind):
    drawn = values(ranks(save_own, tmp_path, kind))
    assert values(ranks(restore_own, tmp_path, kind)) == [(100, drawn[0]), (101, drawn[1])]
    assert drawn[0] != drawn[1]
    if kind == "plain":
        assert values(ranks(restore_own, tmp_path, kind, count=3)) == [(0, None)] * 3


def save_own_model(place):
    begin()
    with Checkpoints(place, every=None) as ckpt:
        ckpt.save(0, {"expert": per_rank(torch.nn.Linear(2, 2))}, force=True)


def restore_own_model(place):
    begin()
    try:
        return Checkpoints(place).restore({"expert": per_rank(torch.nn.Linear(2, 2))})
    except Exception as error:
        return str(error)


def test_a_model_of_each_ranks_own_is_not_begun_anew_by_other_numbers_of_ranks(tmp_path):
    values(ranks(save_own_model, tmp_path))
    for text in values(ranks(restore_own_model, tmp_path, count=3)):
        assert re.search(r"fit as many ranks as have saved them .*state=expert.*2 ranks .* there are 3 now", text)


def in_its_order(place):
    rank, _ = begin()
    names = [f"layer{number}" for number in (3, 1, 4, 0, 2)]
    with Checkpoints(place, every=None) as ckpt:
        held = {name: torch.ones(2 + index % 2) if index else 1 for index, name in enumerate(names)}
        empty = per_rank([torch.empty(0), torch.full((2,), float(rank))])
        ckpt.save(0, {"shadow": held, "own": per_rank(dict(held)), "empty": empty}, force=True)
    shadow, own, empty = dict.fromkeys(sorted(names)), per_rank(None), per_rank(None)
    ckpt.restore({"shadow": shadow, "own": own, "empty": empty})
    return [*shadow] == [*own.value] == names, [each.tolist() for each in empty.value]


def test_what_several_ranks_write_of_one_dict_comes_back_in_its_order_and_tensors_of_nothing_in_their_places(tmp_path):
    """Who goes through it beside model.parameters(), as averaged weights are, relies on it."""
    assert values(ranks(in_its_order, tmp_path)) == [(True, [[], [0.0, 0.0]]), (True, [[], [1.0, 1.0]])]


class Fails(torch.nn.Module):
    """A model that a rank cannot save, or an object that it cannot load."""

    def __init__(self, to):
        super().__init__()
        self.to_do = to

    def get_extra_state(self):
        return threading.Lock() if self.to_do == "save" else 1

    def set_extra_state(self, state):
        if self.to_do == "load":
            raise ValueError("cannot load")


def one_fails_beside_fsdp1(place, where):
    from torch.distributed.fsdp import FullyShardedDataParallel

    rank, _ = begin()
    model = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    ckpt, get = Checkpoints(place, every=None), stores.Store.get
    try:
        state = {"other": Fails(where if rank else ""), "model": model, "optimizer": optimizer}
        ckpt.save(0, state, force=True)
        ckpt.wait()
        if where == "read" and rank:
            stores.Store.get = lambda self, name: None if name.endswith(saves.MANIFEST) else get(self, name)
        ckpt.restore(state)
    except Exception as error:
        return str(error)
    return "restored"


@pytest.mark.parametrize(
    ("where", "said"), [("save", "cannot be saved"), ("read", "has no manifest"), ("load", "cannot load")]
)
def test_who_fails_beside_a_model_of_fsdp1s_leaves_no_other_in_a_collective(tmp_path, where, said):
    for text in values(ranks(one_fails_beside_fsdp1, tmp_path, where)):
        assert said in text


def save_where_only_this_rank_sees(place, force):
    rank, state = begin()
    stores.LATE_SECONDS = 0.1
    ckpt = Checkpoints(f"{place}/{rank}", every=None)
    try:
        ckpt.save(0, state, force=bool(int(force)))
        ckpt.wait()
    except Exception as error:
        return str(error)


@pytest.mark.parametrize(("force", "file"), [(1, "__1_0.distcp"), (0, "/1")], ids=["a save", "a step before it"])
def test_a_place_that_is_not_shared_is_an_error_of_every_rank_at_once_and_nothing_is_left_in_it(tmp_path, force, file):
    for text in values(ranks(save_where_only_this_rank_sees, tmp_path, force)):
        assert re.search(rf"the nodes do not share the place \[place=.*/0\] \(seen: .*{file} ", text), text
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def save_refused(place, kind):
    rank, state = begin(kind)
    said = []
    meta = {"of": torch.ones(1, device="meta" if rank else "cpu")}
    for loader in (Loader(100 + rank), {"of": object()} if rank else {"of": 1}, meta, {"of": object()}):
        try:
            Checkpoints(f"{place}/{len(said)}", every=timedelta(microseconds=1)).save(0, {**state, "loader": loader})
        except CheckpointError as error:
            said.append(str(error))
        else:
            said.append("saved")
    return said


@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_what_differs_or_one_rank_or_none_can_save_is_an_error_in_every_rank_at_once(tmp_path, kind):
    for differs, one_cannot, one_cannot_read, none_can in values(ranks(save_refused, tmp_path, kind)):
        assert re.search(r"state=loader.*other than rank 0's on ranks 1.*per_rank", differs), differs
        assert re.search(r"state=loader.of.*object", one_cannot), one_cannot
        assert re.search(r"state=loader.of.*on meta", one_cannot_read), one_cannot_read
        assert re.search(r"state=loader.of.*object", none_can), none_can


def save_to_a_store_that_fails(place, of_rank):
    rank, state = begin("sharded")

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


@pytest.mark.parametrize("of_rank", [0, 1])
def test_a_save_that_fails_in_one_rank_is_an_error_of_every_rank_at_the_end(tmp_path, of_rank):
    for text in values(ranks(save_to_a_store_that_fails, tmp_path, of_rank)):
        assert "No space left on device" in text


def save_that_is_there_all_the_same(place):
    """The store has the manifest, says that it has not, and is away for rank 0 from then on."""
    rank, state = begin()
    put, remove = stores.Store.put, stores.Store.remove

    def put_and_fail(self, name, data):
        put(self, name, data)
        stores.Store.remove = away
        away(self, name)

    def away(self, name):
        raise OSError(5, "Input/output error")

    if rank == 0:
        stores.Store.put = put_and_fail
    ckpt = Checkpoints(place, every=None)
    ckpt.save(0, state, force=True)
    with pytest.raises((OSError, CheckpointError), match="Input/output error"):
        ckpt.wait()
    dist.barrier()
    stores.Store.put, stores.Store.remove = put, remove
    return Checkpoints(place).restore(state)


def test_a_save_that_a_store_has_and_denies_is_removed_whole_or_stays_whole(tmp_path):
    assert values(ranks(save_that_is_there_all_the_same, tmp_path)) == [1, 1]


def save_that_is_committed_late(place):
    """Rank 1 has waited for rank 0's word for too long as that one commits."""
    rank, state = begin()
    state["own"] = per_rank(Loader(rank))
    put = stores.Store.put

    def put_late(self, name, data):
        stores.Store.put = put
        dist.barrier()
        put(self, name, data)

    if rank == 0:
        stores.Store.put = put_late
    else:
        group.WORD_SECONDS, group.WRITE_SECONDS = 0.1, 0.2
    ckpt = Checkpoints(place, every=None)
    ckpt.save(0, state, force=True)
    if rank:
        with pytest.raises(CheckpointError, match="did not come"):
            ckpt.wait()
        dist.barrier()
    else:
        ckpt.wait()
    dist.barrier()
    return Checkpoints(place).restore(state)


def test_who_gives_up_waiting_for_the_commit_leaves_its_part_of_the_save(tmp_path):
    assert values(ranks(save_that_is_committed_late, tmp_path)) == [1, 1]


def save_normed(place):
    """A model with buffers that differ between ranks, as running means do."""
    rank, _ = begin()
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)), torch.nn.BatchNorm1d(64))
    means = [model[4].running_mean, model[4].running_var]
    for one in means:
        one.fill_(rank)
    with Checkpoints(place, every=None) as ckpt:
        ckpt.save(0, {"model": model}, force=True)
    for one in means:
        one.fill_(-1)
    Checkpoints(place).restore({"model": model})
    return torch.cat(means).unique().tolist()


def test_what_ranks_hold_alike_is_written_by_all_and_running_means_are_rank_0s(tmp_path):
    assert values(ranks(save_normed, tmp_path)) == [[0.0], [0.0]]
    sizes = [path.stat().st_size for path in tmp_path.rglob("*.distcp")]
    assert len(sizes) == 2
    assert max(sizes) < 1.3 * min(sizes)


def due_by_time(place):
    _, state = begin()
    now = [0.0]
    agreement.time = SimpleNamespace(monotonic=lambda: now[0])
    ckpt = Checkpoints(place, every=timedelta(seconds=10))
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


# --- alike, or refused ------------------------------------------------------------------------------------------------
class Experts(torch.nn.Module):
    """Each rank's own, as tensors that nobody calls sharded."""

    def __init__(self, value):
        super().__init__()
        self.router = torch.nn.Parameter(torch.zeros(3))
        self.expert = torch.nn.Parameter(torch.zeros(5000))
        self.register_buffer("bias", torch.zeros(3))
        with torch.no_grad():
            self.expert[2500] = value  # in the middle, where only the sum sees it


def on_mesh(values, mesh, *placements):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(torch.tensor(values), mesh, placements)


def sharded(values):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    return on_mesh(values, init_device_mesh("cpu", (dist.get_world_size(),)), Shard(0))


def of_own_mesh(value):
    """A tensor that is sharded over one of two meshes of two ranks, of four."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("apart", "along"))
    return on_mesh([value, value], mesh["along"], Shard(0))


def sharded_adam():
    model = sharded_model()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


class Both:
    """Optimizers in an object of the user's own."""

    def __init__(self, optimizer):
        self._optimizer = optimizer

    def state_dict(self):
        return {"adam": self._optimizer.state_dict()}

    def load_state_dict(self, state):
        raise AssertionError(state)


def own_buffer(value, wrap=lambda model: model):
    model = Experts(0.0)
    model.bias.fill_(value)
    return wrap(model)


def differing(what, rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import DTensor, Partial
    from torch.nn.parallel import DistributedDataParallel

    mesh = lambda: init_device_mesh("cpu", (dist.get_world_size(),))  # noqa: E731
    return {
        "a parameter of each rank's own": lambda: {"model": Experts(float(rank))},
        "the same parameters": lambda: {"model": Experts(1.0)},
        "a buffer": lambda: {"model": own_buffer(float(rank))},
        "a buffer that DDP hands on": lambda: {"model": own_buffer(float(rank), DistributedDataParallel)},
        "a large tensor": lambda: {"ema": torch.full((1 << 20,), float(rank))},
        "text": lambda: {"told": f"rank {rank}"},
        "equal lists of other objects": lambda: {"told": ["".join("ab")] * 2 if rank else ["ab", "".join("ab")]},
        "a name more": lambda: {"told": 1} | ({"more": 2} if rank else {}),
        "a layer more": lambda: {"model": torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(1 + rank)))},
        "meshes of their own": lambda: {"x": of_own_mesh(float(rank // 2))},
        "meshes that hold the same": lambda: {"x": of_own_mesh(1.0)},
        "sharded and replicated": lambda: {"x": sharded([1.0, 2.0, 3.0])},
        "sums": lambda: {"x": DTensor.from_local(torch.ones(2), mesh(), [Partial()])},
        "sharded, in what one rank saves": lambda: {"x": per_rank([sharded([1.0, 2.0])])},
        "an optimizer's own state": lambda: {"opt": sharded_adam()[1].state_dict()},
        "an object with optimizers": lambda: {"opt": Both(sharded_adam()[1])},
        "an optimizer alone": lambda: {"opt": sharded_adam()[1]},
        "zero": lambda: {"opt": ZeroRedundancyOptimizer(torch.nn.Linear(4, 4).parameters(), torch.optim.Adam)},
        "zero, of each rank": lambda: {
            "opt": per_rank(ZeroRedundancyOptimizer(torch.nn.Linear(4, 4).parameters(), torch.optim.Adam))
        },
        "zero's own": lambda: {
            "opt": per_rank(ZeroRedundancyOptimizer(torch.nn.Linear(4, 4).parameters(), torch.optim.Adam).optim)
        },
    }[what]()


def save_differing(place, *names):
    """What comes of each of these, one after the other."""
    rank, _ = begin()
    return {what: save_one(f"{place}/{what}", differing(what, rank)) for what in names}


def save_one(place, state):
    try:
        with Checkpoints(place, every=None) as ckpt:
            ckpt.save(0, state, force=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


REFUSED = {
    "a parameter of each rank's own": r"state=model.expert\].*other than rank 0's on ranks 1.*per_rank",
    "a buffer": r"state=model.bias\].*other than rank 0's on ranks 1.*DistributedDataParallel",
    "a large tensor": r"state=ema\].*other than rank 0's on ranks 1.*\"ema\": per_rank",
    "text": r"state=told\].*other than rank 0's on ranks 1",
    "a name more": r"state=more\].*other than rank 0's on ranks 1",
    "a layer more": r"ranks hold different content under one name.*state=model.1.bias\] \(seen: other than rank 0's",
    "meshes of their own": r"state=x\].*other than rank 0's on ranks 2",
    "sums": r"state=x\].*DTensor of which this rank holds a part",
    "sharded, in what one rank saves": r"state=x@\d.0\].*DTensor of which this rank holds a part",
    "an optimizer's own state": r"state=opt\].*put the optimizers themselves",
    "an object with optimizers": r"state=opt\].*put the optimizers themselves",
    "an optimizer alone": r"state=opt\].*put the model",
    "zero": r"state=opt\].*per_rank\(optimizer.optim\)",
    "zero, of each rank": r"state=opt\].*per_rank\(optimizer.optim\)",
}
TAKEN = (
    "the same parameters",
    "a buffer that DDP hands on",
    "equal lists of other objects",
    "meshes that hold the same",
    "sharded and replicated",
    "zero's own",
)


@pytest.mark.parametrize("count", [2, 4])
def test_what_ranks_hold_differently_is_refused_by_its_name_on_every_rank_and_what_they_hold_alike_is_saved(
    tmp_path, count
):
    names = [what for what in (*REFUSED, *TAKEN) if ("meshes" in what) == (count == 4)]
    for found in values(ranks(save_differing, tmp_path, *names, count=count)):
        said = {what: REFUSED.get(what, "^saved$") for what in names}
        assert {what: text for what, text in found.items() if not re.search(said[what], text)} == {}
    assert {path.parents[1].name for path in tmp_path.rglob("manifest.json")} == {*names} & {*TAKEN}


def save_nested(place):
    begin()
    tree = {7: (sharded([0.0, 1.0, 2.0]), [sharded([3.0])]), "odd": {"x": (torch.ones(2),)}}
    with Checkpoints(place, every=None) as ckpt:
        ckpt.save(0, {"tree": tree}, force=True)


def restore_nested(place):
    begin()
    tree = {7: (sharded([9.0, 9.0, 9.0]), [sharded([9.0])]), "odd": {"x": (torch.zeros(2),)}}
    state, parts = {"tree": tree}, (tree[7][0], tree[7][1][0])
    Checkpoints(place).restore(state)
    assert state["tree"] is tree
    assert (tree[7][0], tree[7][1][0]) == parts
    return [one.full_tensor().tolist() for one in parts], tree["odd"]["x"][0].tolist()


def test_sharded_tensors_are_found_in_dicts_by_numbers_and_in_tuples(tmp_path):
    values(ranks(save_nested, tmp_path))
    for count in (1, 2, 3):
        assert values(ranks(restore_nested, tmp_path, count=count)) == [([[0.0, 1.0, 2.0], [3.0]], [1.0, 1.0])] * count


# --- who comes, and who does not --------------------------------------------------------------------------------------
def alone(place, restores):
    rank, state = begin()
    said = []
    group.logger.warning = said.append
    ckpt = Checkpoints(place, every=None)
    if int(restores):
        ckpt.restore(state)
    group.WORD_SECONDS, group.PATIENCE_SECONDS = 0.2, 1.0
    if rank:
        return dist.barrier()
    try:
        ckpt.save(0, state, force=True)
    except Exception as error:
        dist.barrier()
        return [said[0], f"{type(error).__name__}: {error}"], len(said), error.of_another


@pytest.mark.parametrize("restores", [0, 1], ids=["at its first call", "after a restore"])
def test_a_rank_that_saves_alone_says_for_whom_it_waits_and_gives_up(tmp_path, restores):
    with agents_store() as meeting:  # in a store of its own rank 0 would wait for the other to have read its answer
        first, _ = values(ranks(alone, tmp_path, restores, meeting=meeting))
    whom = "rank 0 has waited for rank 1" if restores else "ranks did not come to their first meeting: 1: waited"
    texts, times, is_of_another = first
    assert times > 1, "the first time it goes on waiting"
    assert is_of_another, "no cause, where that rank fails later"
    for text in texts:
        assert re.search(rf"{whom} for \d+ s", text)
        assert "Checkpoints.save" in text
        assert "every rank" in text


def ask_alone(place):
    _, state = begin()
    ckpt = Checkpoints(place, every=None)
    ckpt.save(3, state, force=True)
    ckpt.wait()
    return ckpt.latest, Checkpoints(place).steps()


def test_each_rank_may_wait_by_itself_until_the_save_is_committed_and_ask_for_steps(tmp_path):
    assert values(ranks(ask_alone, tmp_path)) == [(3, [3])] * 2


class Refuses(Loader):
    """Loads in rank 0 alone."""

    def load_state_dict(self, state):
        if dist.get_rank():
            raise ValueError("not this one")


def load_in_one(place):
    _, state = begin()
    state["loader"] = Refuses(1)
    with Checkpoints(place, every=None) as ckpt:
        ckpt.save(0, state, force=True)
    try:
        return Checkpoints(place).restore(state)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_what_one_rank_cannot_load_is_an_error_of_every_rank(tmp_path):
    one, other = values(ranks(load_in_one, tmp_path))
    assert "could not do its part of a checkpoint [rank=1] (seen: ValueError: not this one)" in one
    assert other == "ValueError: not this one"


class MuteError(Exception):
    """Says nothing of itself, and counts as nothing."""

    def __str__(self):
        raise AttributeError("no text")

    def __len__(self):
        return 0


class RefusesWithoutWords(Loader):
    """In rank 1 alone."""

    def state_dict(self):
        if dist.get_rank():
            raise MuteError
        return super().state_dict()


def save_in_one(place):
    _, state = begin()
    state["loader"] = RefusesWithoutWords(1)
    try:
        Checkpoints(place, every=None).save(0, state, force=True)
    except Exception as error:
        return type(error).__name__, getattr(error, "seen", "")


def test_an_error_that_cannot_say_what_it_is_is_an_error_of_every_rank_as_well(tmp_path):
    told = "MuteError: <no message: str() of it raised AttributeError: no text>"
    assert values(ranks(save_in_one, tmp_path)) == [("CheckpointError", told), ("MuteError", "")]


def evaluate_and_save(place):
    begin()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with Checkpoints(place, every=None) as ckpt:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.ones(1, 4))
        ckpt.save(0, state, force=True)
        ckpt.wait()
        with torch.inference_mode():
            model(torch.ones(1, 4))
            ckpt.save(1, state, force=True)
        with torch.no_grad():
            model(torch.ones(1, 4))
        return ckpt.restore(state)


def test_after_an_evaluation_a_sharded_model_is_saved_and_restored(tmp_path):
    assert values(ranks(evaluate_and_save, tmp_path)) == [2, 2]


def two_trainers(scratch):
    from flytekitplugins_safedist.checkpoint.transformers import SafedistCallback

    rank, _ = begin()
    for name in ("first", "second"):
        callback = SafedistCallback(f"{scratch}/{name}", every=1)
        if rank == 0:
            Path(scratch, f"of-{name}", "checkpoint-1").mkdir(parents=True)
            Path(scratch, f"of-{name}", "checkpoint-1", name).write_text(name)
        of = SimpleNamespace(output_dir=f"{scratch}/of-{name}", process_index=rank, world_size=2)
        callback.on_save(of, SimpleNamespace(global_step=1, best_model_checkpoint=None), None)
        callback.checkpoints.wait()
    newest = [SafedistCallback(f"{scratch}/{name}").newest() for name in ("first", "second")]
    return [sorted(path.name for path in Path(each).iterdir()) for each in newest]


def test_two_trainers_of_one_process_resume_from_files_of_their_own_alone(tmp_path):
    assert values(ranks(two_trainers, tmp_path)) == [[["first"], ["second"]]] * 2
