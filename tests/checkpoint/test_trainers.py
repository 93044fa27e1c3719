"""The ready callbacks: broken off anywhere and resumed, a training has the rates and losses of the unbroken one, and
ends where it ends."""

from __future__ import annotations

import functools
import inspect

import pytest

from flytekitplugins_safedist.checkpoint import Checkpoints
from tests.fs.ranks import Process, meeting_point, processes, rank_env

EPOCH = 7
"""Steps in it, the last one of a batch that is not full."""


def lives(work, *arguments, stops, **options):
    """What is told in one life after the other; the last one goes on to the end."""
    from tests.checkpoint import trainer_ranks  # seconds, which each worker that collects this file need not spend

    train = getattr(trainer_ranks, work)
    return [Process(_call, train, arguments, stop, options).outcome(within=400).get() for stop in (*stops, -1)]


def _call(train, arguments, stop, options):
    return train(*arguments, stop, **options)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """What an unbroken training tells, which is made once for all tests that compare with it."""

    @functools.cache
    def told(work, options):
        place = tmp_path_factory.mktemp("unbroken")
        more = [str(place / "scratch")] if work == "by_transformers" else []
        return lives(work, str(place / "saves"), *more, stops=(), **dict(options))[0]

    return lambda work, options: told(work, tuple(options.items()))


@pytest.mark.parametrize(
    ("stops", "options"),
    [
        pytest.param((EPOCH + 2,), {}, id="after the last save of an epoch"),
        pytest.param((5, 6), {}, id="twice, first in the first epoch"),
        pytest.param((EPOCH + 5,), {"max_steps": 3 * EPOCH + 2, "max_epochs": -1}, id="by steps, in the second epoch"),
        pytest.param((EPOCH + 3,), {"accumulate_grad_batches": 2}, id="with accumulated gradients"),
    ],
)
def test_lightning(tmp_path, unbroken, stops, options):
    told, step, waits = unbroken("by_lightning", options)
    broken = lives("by_lightning", str(tmp_path / "broken"), stops=stops, **options)
    again, last, waited = broken[-1]
    assert 0 < len(again) < len(told), "it has gone on, not begun anew"
    assert _close(again, told[-len(again) :]), (again, told)
    assert (last, waited) == (step, waits)


def _close(some, others):
    return all(one == pytest.approx(other, rel=1e-5) for one, other in zip(some, others, strict=True))


def test_lightning_that_has_ended_is_saved_and_is_over_at_once(tmp_path):
    place = str(tmp_path / "place")
    first, again = (lives("by_lightning", place, stops=())[0] for _ in range(2))
    assert len(first[0]) == 4 * EPOCH
    assert (again[0], again[1]) == ([], first[1])
    assert Checkpoints(place).steps()[-1] == first[1] - 1


@pytest.mark.parametrize(
    ("stops", "options"),
    [
        pytest.param((5,), {}, id="in the first epoch"),
        pytest.param((EPOCH + 5,), {"max_steps": 3 * EPOCH + 2}, id="by steps, in the second epoch"),
    ],
)
def test_transformers(tmp_path, unbroken, stops, options):
    told, step, nothing = unbroken("by_transformers", options)
    places = str(tmp_path / "broken"), str(tmp_path / "scratch")
    again, last, left = lives("by_transformers", *places, stops=stops, **options)[-1]
    assert 0 < len(again) < len(told)
    assert _close(again, told[-len(again) :])
    assert last == step
    assert nothing == left == [], "what was handed on is not kept in scratch"


def test_the_best_model_of_transformers_stays_however_its_directory_is_written(tmp_path):
    """As "./results" is, which the trainer and a Path write in two ways."""
    steps = dict.fromkeys(("save_steps", "eval_steps"), 2)
    strategy = dict.fromkeys(("save_strategy", "eval_strategy"), "steps")
    best = {**steps, **strategy, "load_best_model_at_end": True, "max_steps": 4}
    places = str(tmp_path / "place"), f"{tmp_path}/./scratch"
    ((_, _, left),) = lives("by_transformers", *places, stops=(), **best)
    assert "model.safetensors" in left


def test_transformers_that_is_ended_by_another_callback_is_saved(tmp_path):
    """As by EarlyStoppingCallback, after an evaluation."""
    places = str(tmp_path / "place"), str(tmp_path / "scratch")
    (told,) = lives("by_transformers", *places, stops=(), ends=5, eval_strategy="steps", eval_steps=5)
    assert told[1] == 5
    assert Checkpoints(places[0]).steps() == [2, 4]


@pytest.mark.parametrize("sharded", [False, True])
def test_each_node_has_all_parts_of_a_sharded_checkpoint_of_transformers(tmp_path, sharded):
    """torch's DCP spreads what all ranks hold alike over the parts of all: a rank of one node reads those of others."""
    from tests.checkpoint import trainer_ranks

    written = [{f"rng_state_{rank}.pth": b"%d" % rank} for rank in range(2)]
    written[0]["config.json"] = b"{}"
    if sharded:
        written[0]["fsdp/.metadata"] = b"where"
        for rank in range(2):
            written[rank][f"fsdp/__{rank}_0.distcp"] = written[rank][f"fsdp_rank{rank}.bin"] = b"part %d" % rank
    meeting = meeting_point()
    envs = [{**rank_env(rank, 2, per_node=1), **meeting} for rank in range(2)]
    places = str(tmp_path / "place"), str(tmp_path / "node")
    works = [(trainer_ranks.hand_on, places[0], f"{places[1]}-{rank}", rank, 2, written[rank]) for rank in range(2)]
    with processes(works, envs) as ranks:
        nodes = [rank.outcome(within=300).get() for rank in ranks]
    both = {**written[0], **written[1]}
    assert nodes == [both if sharded else written[0], both]


def test_saves_of_trainers_are_as_often_and_as_many_are_kept_as_of_a_loop_of_ones_own():
    from flytekitplugins_safedist.checkpoint.lightning import SafedistCheckpoint
    from flytekitplugins_safedist.checkpoint.transformers import SafedistCallback

    usual, *others = (
        {name: each.default for name, each in inspect.signature(kind).parameters.items()}
        for kind in (Checkpoints, SafedistCheckpoint, SafedistCallback)
    )
    for own in others:
        assert {name: own[name] for name in usual} == usual
