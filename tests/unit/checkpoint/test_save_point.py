"""What a rank saves because a pod of the job is told to stop."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from flytekitplugins_safedist.checkpoint import Checkpoints, saves
from flytekitplugins_safedist.checkpoint.preemption import MARK, Preemption
from flytekitplugins_safedist.checkpoint.store import Store
from flytekitplugins_safedist.errors import CheckpointError
from flytekitplugins_safedist.ranks import context, shared_page
from flytekitplugins_safedist.ranks.shared_page import AgentPage, RankPage
from tests.fs.ranks import rank_env


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentPage:
    """The agent's end of this process's page."""
    made = shared_page.make(tmp_path / "page")
    monkeypatch.setattr(context._PAGE, "value", shared_page.open_page(tmp_path / "page"))
    return made


def answered(agent: AgentPage, call: int, step: int, *, urgent: bool) -> None:
    agent.call(call)
    agent.answer(call, step, urgent=urgent)


@pytest.fixture
def stood_still(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Filled when a rank would stand still."""
    found: list[str] = []
    monkeypatch.setattr(RankPage, "stand_still", lambda _: found.append("still"))
    return found


def steps(place: Path) -> set[int]:
    return {saves.step_of(name) for name in saves.committed(Store(str(place)))}


def test_a_save_that_is_asked_for_is_taken_at_its_step_and_training_goes_on(agent, stood_still, tmp_path):
    with Checkpoints(tmp_path / "place", every=None) as ckpt:
        for step in range(4):
            if step == 1:
                answered(agent, 1, 2, urgent=False)
            ckpt.save(step, {"x": step})
    assert steps(tmp_path / "place") == {2}
    assert agent.finished(1, urgent=True)
    assert stood_still == []


def test_an_urgent_save_is_committed_and_the_last_thing_a_rank_does(agent, tmp_path, monkeypatch):
    there: list[set[int]] = []
    monkeypatch.setattr(RankPage, "stand_still", lambda _: there.append(steps(tmp_path / "place")))
    answered(agent, 1, 0, urgent=True)
    Checkpoints(tmp_path / "place", every=None).save(0, {"x": 0})
    assert there == [{0}]
    assert agent.finished(1, urgent=True)


def test_an_urgent_save_that_fails_is_said_and_nobody_waits_for_it(agent, stood_still, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    answered(agent, 1, 0, urgent=True)
    Checkpoints(tmp_path / "file" / "place", every=None).save(0, {"x": 0})
    assert agent.finished(1, urgent=True)
    assert stood_still == ["still"]
    assert "the last save before the pod leaves failed" in caplog.text


@pytest.mark.parametrize("asked", [False, True])
def test_state_that_cannot_be_saved_is_an_error_also_where_all_agree_on_that_save(asked, agent, stood_still, tmp_path):
    if asked:
        answered(agent, 1, 1, urgent=False)
    with Checkpoints(tmp_path / "place", every=None) as ckpt:
        ckpt.save(0, {"x": 0}, force=True)
        with pytest.raises(CheckpointError):
            ckpt.save(1, {"x": threading.Lock()}, force=True)
    assert agent.finished(1, urgent=True) == asked
    assert stood_still == []


def test_a_trainer_that_makes_its_own_files_is_told_before_and_saves_then(agent, stood_still, tmp_path):
    answered(agent, 1, 1, urgent=False)
    with Checkpoints(tmp_path / "place", every=None) as ckpt:
        assert not ckpt.should_save(0)
        assert ckpt.should_save(1)
        ckpt.save(1, {"x": 1})
    assert steps(tmp_path / "place") == {1}


def test_a_save_that_was_due_where_all_agreed_on_one_does_not_come_again_at_the_next_step(agent, tmp_path):
    answered(agent, 1, 4, urgent=False)
    with Checkpoints(tmp_path / "place", every=5) as ckpt:
        for step in range(10):
            ckpt.save(step, {"x": step})
    assert steps(tmp_path / "place") == {4, 9}


@pytest.mark.parametrize(
    ("rank", "per_node", "marks"),
    [(0, 2, True), (1, 2, False), (0, 1, False)],
    ids=["rank 0 of one node", "rank 1 of it", "rank 0 of two nodes"],
)
def test_that_a_pod_leaves_is_marked_by_rank_0_of_a_lone_pod_alone(
    agent: AgentPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, per_node: int, marks: bool
) -> None:
    for name, value in rank_env(rank, 2, per_node).items():
        monkeypatch.setenv(name, value)
    agent.stays(20.0)
    preemption = Preemption(lambda: Store(str(tmp_path)))
    preemption.at(0)
    waiting = [thread for thread in threading.enumerate() if thread.name == "safedist-leaving"]
    assert bool(waiting) == marks
    agent.preempt()
    for thread in waiting:
        thread.join()
    assert (tmp_path / MARK).exists() == marks
