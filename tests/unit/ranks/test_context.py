"""``current_rank()``: the rank that a process is, and an error that says so where there is none."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from pathlib import Path

import pytest

import flytekitplugins_safedist
from flytekitplugins_safedist.errors import NotInTaskError
from flytekitplugins_safedist.handoff import HERE
from flytekitplugins_safedist.ranks import context, shared_page
from flytekitplugins_safedist.ranks.context import RankContext, current_rank

RANK = RankContext(
    rank=5,
    local_rank=1,
    node_rank=2,
    world_size=6,
    local_world_size=2,
    nnodes=3,
    round=4,
    attempt=7,
    job="f0-1234",
    scratch=Path("/scratch/round-4/rank-5"),
)


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HERE, "rank", None)
    monkeypatch.setattr(HERE, "page", None)


def test_outside_a_task_it_raises_and_says_where_to_call_it() -> None:
    with pytest.raises(NotInTaskError) as caught:
        current_rank()
    assert str(caught.value) == (
        "current_rank() was called outside a rank. Next step: call it inside the function of a @task with "
        "task_config=SafeHorovod(...) or SafeTorch(...); at import of a module, and in the workflow, there is no rank "
        "yet, and in a process that the function spawns (as a DataLoader does its workers, "
        "multiprocessing_context='spawn' or 'forkserver') there is none: hand it over"
    )


def test_a_rank_finds_itself_also_from_its_threads(tmp_path: Path) -> None:
    shared_page.make(tmp_path / "page")
    context.enter(RANK, shared_page.open_page(tmp_path / "page"))
    assert current_rank() is RANK
    seen: list[RankContext] = []
    thread = threading.Thread(target=lambda: seen.append(current_rank()))
    thread.start()
    thread.join()
    assert seen == [RANK]


def test_a_rank_knows_that_it_is_preempted_and_says_that_it_has_saved(tmp_path: Path) -> None:
    agents = shared_page.make(tmp_path / "page")
    context.enter(RANK, shared_page.open_page(tmp_path / "page"))
    assert not agents.listens
    assert not current_rank().preempted
    assert agents.listens
    agents.preempt()
    assert current_rank().preempted
    assert not agents.finished(1, urgent=True)
    current_rank().saved()
    assert agents.finished(1, urgent=True)


def test_outside_a_task_there_is_nothing_to_be_preempted() -> None:
    with pytest.raises(NotInTaskError, match="outside a rank"):
        _ = RANK.preempted


def test_the_public_name_is_the_same_function() -> None:
    assert flytekitplugins_safedist.current_rank is current_rank


def test_a_context_is_a_value_that_cannot_be_changed_and_that_pickles() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RANK.rank = 0  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(RANK)) == RANK


def test_it_has_everything_that_was_promised() -> None:
    assert {field.name for field in dataclasses.fields(RankContext)} == {
        "rank",
        "local_rank",
        "node_rank",
        "world_size",
        "local_world_size",
        "nnodes",
        "round",
        "attempt",
        "job",
        "scratch",
    }


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(RankContext)])
def test_nothing_about_a_rank_has_a_default(name: str) -> None:
    facts = {field.name: getattr(RANK, field.name) for field in dataclasses.fields(RankContext)}
    del facts[name]
    with pytest.raises(TypeError, match=name):
        RankContext(**facts)
