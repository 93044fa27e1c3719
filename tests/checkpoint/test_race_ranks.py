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
from tests.fs.ranks import agents_store, faults_of, outcomes_of
from tests.harness.product import agreement, group, saves
from tests.harness.product import store as stores
from tests.harness.shared import directory_of_all_workers, shared

WORKS = {2: {}, 3: {}, 4: {}}
"""By the number of ranks and its name, what they do one after the other in one process group; each is a test."""


def by_ranks(count):
    """Have so many ranks do it, in a directory, with a patch that ends with it. Whatever it asserts, each rank does."""

    def add(work):
        WORKS[count][work.__name__] = work
        return work

    return add


def join():
    reach_stores()
    dist.init_process_group("gloo")


def all_works(directory, count):
    join()
    return faults_of(WORKS[count], dist.barrier, directory)


@pytest.fixture(scope="session")
def wrong(tmp_path_factory):
    """By the number of ranks, what has gone wrong in each: done once for the tests of all workers. Three find what two
    have left."""
    directory = tmp_path_factory.mktemp("ranks")

    def make():
        return {count: [one.get() for one in outcomes_of(count, all_works, directory, count)] for count in WORKS}

    with shared(directory_of_all_workers(tmp_path_factory), "race-ranks", make) as found:
        yield found


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
    torch.manual_seed(0)
    return dist.get_rank(), {"model": sharded_model() if kind == "sharded" else torch.nn.Linear(4, 4)}


def save(place, state, step=0):
    with Checkpoints(place, every=None) as ckpt:
        ckpt.save(step, state, force=True)


def failure(work, *arguments, **options):
    """What it raises, as a text; else what it returns."""
    try:
        return work(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@by_ranks(2)
def each_rank_gets_its_own_back(directory, _):
    for kind in ("plain", "sharded"):
        rank, state = begin(kind)
        torch.manual_seed(rank)
        own = {"loader": per_rank(Loader(100 + rank)), "random": per_rank(torch.get_rng_state())}
        save(directory / f"own-{kind}", {**state, **own}, 3)
        drawn = torch.rand(1)
        loader, random = Loader(0), per_rank(None)
        state |= {"loader": per_rank(loader), "random": random}
        assert Checkpoints(directory / f"own-{kind}").restore(state) == 4
        torch.set_rng_state(random.value)
        assert (loader.at, torch.rand(1)) == (100 + rank, drawn)
    save(directory / "own-model", {"expert": per_rank(torch.nn.Linear(2, 2))})


@by_ranks(3)
def another_number_of_ranks_leaves_what_is_its_own_as_it_is(directory, _):
    loader, random = Loader(0), per_rank(None)
    state = {**begin()[1], "loader": per_rank(loader), "random": random}
    assert Checkpoints(directory / "own-plain").restore(state) == 4
    assert (loader.at, random.value) == (0, None)


@by_ranks(3)
def a_model_of_each_ranks_own_is_not_begun_anew_by_another_number_of_ranks(directory, _):
    text = failure(Checkpoints(directory / "own-model").restore, {"expert": per_rank(torch.nn.Linear(2, 2))})
    assert re.search(r"fit as many ranks as have saved them .*state=expert.*2 ranks .* there are 3 now", text)


@by_ranks(2)
def what_several_ranks_write_of_one_dict_comes_back_in_its_order_and_tensors_of_nothing_in_their_places(directory, _):
    """Who goes through it beside model.parameters(), as averaged weights are, relies on it."""
    rank, names = dist.get_rank(), [f"layer{number}" for number in (3, 1, 4, 0, 2)]
    held = {name: torch.ones(2 + index % 2) if index else 1 for index, name in enumerate(names)}
    empty = per_rank([torch.empty(0), torch.full((2,), float(rank))])
    save(directory / "order", {"shadow": held, "own": per_rank(dict(held)), "empty": empty})
    shadow, own, empty = dict.fromkeys(sorted(names)), per_rank(None), per_rank(None)
    Checkpoints(directory / "order").restore({"shadow": shadow, "own": own, "empty": empty})
    assert [*shadow] == [*own.value] == names
    assert [each.tolist() for each in empty.value] == [[], [float(rank)] * 2]


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


@by_ranks(2)
def who_fails_beside_a_model_of_fsdp1s_leaves_no_other_in_a_collective(directory, patch):
    from torch.distributed.fsdp import FullyShardedDataParallel

    rank, _ = begin()
    model = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    get = stores.Store.get

    def save_and_restore(where):
        state = {"other": Fails(where if rank else ""), "model": model, "optimizer": optimizer}
        save(directory / f"fsdp1-{where}", state)
        if where == "read" and rank:
            patch.setattr(
                stores.Store, "get", lambda self, name: get(self, name) if not name.endswith(saves.MANIFEST) else None
            )
        Checkpoints(directory / f"fsdp1-{where}").restore(state)

    for where, said in {"save": "cannot be saved", "load": "cannot load", "read": "has no manifest"}.items():
        assert said in failure(save_and_restore, where)


@by_ranks(2)
def a_place_that_is_not_shared_is_an_error_of_every_rank_at_once_and_nothing_is_left_in_it(directory, patch):
    rank, state = begin()
    patch.setattr(stores, "LATE_SECONDS", 0.1)

    def save_where_only_this_rank_sees(place, force):
        ckpt = Checkpoints(place / str(rank), every=None)
        ckpt.save(0, state, force=force)
        ckpt.wait()

    for force, file in ((True, "__1_0.distcp"), (False, "/1")):  # a save, and a step before it
        text = failure(save_where_only_this_rank_sees, directory / f"apart-{force}", force)
        assert re.search(rf"the nodes do not share the place \[place=.*/0\] \(seen: .*{file} ", text), text
        dist.barrier()
        assert [path for path in (directory / f"apart-{force}").rglob("*") if path.is_file()] == []


@by_ranks(2)
def what_differs_or_one_rank_or_none_can_save_is_an_error_in_every_rank_at_once(directory, _):
    for kind in ("plain", "sharded"):
        rank, state = begin(kind)
        refused = [
            (Loader(100 + rank), r"state=loader.*other than rank 0's on ranks 1.*per_rank"),
            ({"of": object()} if rank else {"of": 1}, r"state=loader.of.*object"),
            ({"of": torch.ones(1, device="meta" if rank else "cpu")}, r"state=loader.of.*on meta"),
            ({"of": object()}, r"state=loader.of.*object"),
        ]
        for number, (loader, said) in enumerate(refused):
            ckpt = Checkpoints(directory / f"refused-{kind}-{number}", every=timedelta(microseconds=1))
            assert re.search(said, failure(ckpt.save, 0, {**state, "loader": loader})), said


@by_ranks(2)
def a_save_that_fails_in_one_rank_is_an_error_of_every_rank_at_the_end(directory, patch):
    rank, state = begin("sharded")

    def full(point):
        if point == points.PART_OPENED:
            raise OSError(28, "No space left on device")

    for of_rank in range(2):
        patch.setattr(points, "on_point", full if rank == of_rank else None)
        ckpt = Checkpoints(directory / f"full-{of_rank}", every=None)
        ckpt.save(0, state, force=True)
        assert "No space left on device" in failure(ckpt.wait)


@by_ranks(2)
def a_save_that_a_store_has_and_denies_is_removed_whole_or_stays_whole(directory, patch):
    """The store has the manifest, says that it has not, and is away for rank 0 from then on."""
    rank, state = begin()
    put = stores.Store.put

    def put_and_fail(self, name, data):
        put(self, name, data)
        patch.setattr(stores.Store, "remove", away)
        away(self, name)

    def away(self, name):
        raise OSError(5, "Input/output error")

    if rank == 0:
        patch.setattr(stores.Store, "put", put_and_fail)
    ckpt = Checkpoints(directory / "denied", every=None)
    ckpt.save(0, state, force=True)
    assert "Input/output error" in failure(ckpt.wait)
    dist.barrier()
    patch.undo()
    assert Checkpoints(directory / "denied").restore(state) == 1


@by_ranks(2)
def who_gives_up_waiting_for_the_commit_leaves_its_part_of_the_save(directory, patch):
    """Rank 1 has waited for rank 0's word for too long as that one commits."""
    rank, state = begin()
    state["own"] = per_rank(Loader(rank))
    put = stores.Store.put

    def put_late(self, name, data):
        patch.undo()
        dist.barrier()
        put(self, name, data)

    ckpt = Checkpoints(directory / "late", every=None)
    if rank == 0:
        patch.setattr(stores.Store, "put", put_late)
        ckpt.save(0, state, force=True)
        ckpt.wait()
    else:
        patch.setattr(group, "WORD_SECONDS", 0.1)
        patch.setattr(group, "WRITE_SECONDS", 0.2)
        ckpt.save(0, state, force=True)
        assert "did not come" in failure(ckpt.wait)
        dist.barrier()
    dist.barrier()
    patch.undo()
    assert Checkpoints(directory / "late").restore(state) == 1


@by_ranks(2)
def one_damaged_part_of_many_and_all_ranks_pass_the_save_over(directory, patch):
    rank, state = begin("sharded")
    patch.setattr(stores, "LATE_SECONDS", 0.1)
    for step in (4, 9):
        save(directory / "damaged", state, step)
    store, part = stores.Store(str(directory / "damaged")), "__1_0.distcp"
    dist.barrier()
    if rank == 0:
        newest = saves.committed(store)[0]
        chunks = [chunk for item in saves.read_manifest(store, newest).items for chunk in item["chunks"]]
        at = next(at for _, _, name, at, _, _ in chunks if name == part)
        data = bytearray(store.get(f"{newest}/{part}"))
        data[at] ^= 1
        store.put(f"{newest}/{part}", bytes(data))
    dist.barrier()
    assert Checkpoints(directory / "damaged").restore(state) == 5


@by_ranks(2)
def what_ranks_hold_alike_is_written_by_all_and_running_means_are_rank_0s(directory, _):
    """A model with buffers that differ between ranks, as running means do."""
    rank, _ = begin()
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)), torch.nn.BatchNorm1d(64))
    means = [model[4].running_mean, model[4].running_var]
    for one in means:
        one.fill_(rank)
    save(directory / "normed", {"model": model})
    for one in means:
        one.fill_(-1)
    Checkpoints(directory / "normed").restore({"model": model})
    assert torch.cat(means).unique().tolist() == [0.0]
    sizes = [path.stat().st_size for path in (directory / "normed").rglob("*.distcp")]
    assert len(sizes) == 2
    assert max(sizes) < 1.3 * min(sizes)


@by_ranks(2)
def what_is_due_by_time_is_saved_by_all_at_rank_0s_step(directory, patch):
    _, state = begin()
    now = [0.0]
    patch.setattr(agreement, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ckpt = Checkpoints(directory / "by-time", every=timedelta(seconds=10))
    ckpt.restore(state)
    saved = []
    for step in range(40):
        now[0] += 1.0 if dist.get_rank() == 0 else 3.0  # the ranks' clocks do not agree
        if ckpt.should_save(step):
            saved.append(step)
        ckpt.save(step, state)
        ckpt.wait()
    assert saved == [9, 19, 29, 39]


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


@by_ranks(2)
@by_ranks(4)
def what_ranks_hold_differently_is_refused_by_its_name_on_every_rank_and_what_they_hold_alike_is_saved(directory, _):
    rank, count = dist.get_rank(), dist.get_world_size()
    expected = REFUSED | dict.fromkeys(TAKEN, "^None$")
    expected = {what: said for what, said in expected.items() if ("meshes" in what) == (count == 4)}
    found = {what: str(failure(save, directory / "alike" / what, differing(what, rank))) for what in expected}
    assert {what: text for what, text in found.items() if not re.search(expected[what], text)} == {}
    there = {path.parents[1].name for path in (directory / "alike").rglob("manifest.json")}
    assert there & expected.keys() == {*TAKEN} & expected.keys()


@by_ranks(2)
@by_ranks(3)
def sharded_tensors_are_found_in_dicts_by_numbers_and_in_tuples(directory, _):
    def tree(*values, odd):
        return {7: (sharded(values[:3]), [sharded(values[3:])]), "odd": {"x": (odd,)}}

    if dist.get_world_size() == 2:
        save(directory / "nested", {"tree": tree(0.0, 1.0, 2.0, 3.0, odd=torch.ones(2))})
    mine = tree(9.0, 9.0, 9.0, 9.0, odd=torch.zeros(2))
    state, parts = {"tree": mine}, (mine[7][0], mine[7][1][0])
    Checkpoints(directory / "nested").restore(state)
    assert state["tree"] is mine
    assert (mine[7][0], mine[7][1][0]) == parts
    assert [one.full_tensor().tolist() for one in parts] == [[0.0, 1.0, 2.0], [3.0]]
    assert mine["odd"]["x"][0].tolist() == [1.0, 1.0]


# --- who comes, and who does not --------------------------------------------------------------------------------------
@by_ranks(2)
def each_rank_may_wait_by_itself_until_the_save_is_committed_and_ask_for_steps(directory, _):
    ckpt = Checkpoints(directory / "alone", every=None)
    ckpt.save(3, begin()[1], force=True)
    ckpt.wait()
    assert (ckpt.latest, Checkpoints(directory / "alone").steps()) == (3, [3])


class Refuses(Loader):
    """Loads in rank 0 alone."""

    def load_state_dict(self, state):
        if dist.get_rank():
            raise ValueError("not this one")


@by_ranks(2)
def what_one_rank_cannot_load_is_an_error_of_every_rank(directory, _):
    rank, state = begin()
    state["loader"] = Refuses(1)
    save(directory / "refuses", state)
    text = failure(Checkpoints(directory / "refuses").restore, state)
    told = "could not do its part of a checkpoint [rank=1] (seen: ValueError: not this one)"
    assert text == "ValueError: not this one" if rank else told in text


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


@by_ranks(2)
def an_error_that_cannot_say_what_it_is_is_an_error_of_every_rank_as_well(directory, _):
    rank, state = begin()
    state["loader"] = RefusesWithoutWords(1)
    with pytest.raises(MuteError if rank else CheckpointError) as caught:
        save(directory / "mute", state)
    told = "MuteError: <no message: str() of it raised AttributeError: no text>"
    assert rank or caught.value.seen == told


@by_ranks(2)
def after_an_evaluation_a_sharded_model_is_saved_and_restored(directory, _):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with Checkpoints(directory / "evaluated", every=None) as ckpt:
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
        assert ckpt.restore(state) == 2


@by_ranks(2)
def two_trainers_of_one_process_resume_from_files_of_their_own_alone(directory, _):
    from flytekitplugins_safedist.checkpoint.transformers import SafedistCallback

    rank = dist.get_rank()
    for name in ("first", "second"):
        callback = SafedistCallback(directory / name, every=1)
        made = directory / f"of-{name}" / "checkpoint-1"
        if rank == 0:
            made.mkdir(parents=True)
            (made / name).write_text(name)
        of = SimpleNamespace(output_dir=str(made.parent), process_index=rank, world_size=2)
        callback.on_save(of, SimpleNamespace(global_step=1, best_model_checkpoint=None), None)
        callback.checkpoints.wait()
    for name in ("first", "second"):
        newest = SafedistCallback(directory / name).newest()
        assert [path.name for path in Path(newest).iterdir()] == [name]


@pytest.mark.parametrize(("count", "name"), [(count, name) for count, works in WORKS.items() for name in works])
def test_by_ranks(wrong, count, name):
    texts = [of_rank[name] for of_rank in wrong[count] if of_rank[name]]
    assert not texts, "\n".join(texts)


def alone(place, restores):
    join()
    rank, state = begin()
    said = []
    group.logger.warning = said.append
    ckpt = Checkpoints(place, every=None)
    if restores:
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
        first, _ = (one.get() for one in outcomes_of(2, alone, str(tmp_path), restores, meeting=meeting))
    whom = "rank 0 has waited for rank 1" if restores else "ranks did not come to their first meeting: 1: waited"
    texts, times, is_of_another = first
    assert times > 1, "the first time it goes on waiting"
    assert is_of_another, "no cause, where that rank fails later"
    for text in texts:
        assert re.search(rf"{whom} for \d+ s", text)
        assert "Checkpoints.save" in text
        assert "every rank" in text
