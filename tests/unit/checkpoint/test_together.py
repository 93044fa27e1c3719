"""What a rank saves because a pod of the job is told to stop: at a step, and while it holds a state."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from flytekitplugins_safedist.checkpoint import checkpoints, manifest
from flytekitplugins_safedist.checkpoint.leaving import Leaving
from flytekitplugins_safedist.checkpoint.stores import DirectoryStore
from flytekitplugins_safedist.checkpoint.together import Together
from flytekitplugins_safedist.handoff import HERE
from flytekitplugins_safedist.ranks import shared_page
from flytekitplugins_safedist.ranks.shared_page import AgentPage, RankPage


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentPage:
    """The agent's end of this process's page."""
    made = shared_page.make(tmp_path / "page")
    monkeypatch.setattr(HERE, "page", shared_page.open_page(tmp_path / "page"))
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


def test_a_save_that_is_asked_for_is_taken_at_its_step_and_training_goes_on(agent, stood_still):
    together, saved = Together(Leaving(DirectoryStore(Path()))), []
    for step in range(4):
        if step == 1:
            answered(agent, 1, 2, urgent=False)
        assert together.at(step, lambda _, step=step: saved.append(step)) == (step == 2)
    assert saved == [2]
    assert agent.finished(1, urgent=True)
    assert stood_still == []


def test_an_urgent_save_is_the_last_thing_a_rank_does(agent, stood_still):
    together, saved = Together(Leaving(DirectoryStore(Path()))), []
    answered(agent, 1, 0, urgent=True)
    assert together.at(0, saved.append)
    assert (saved, stood_still) == ([True], ["still"])


def test_a_save_that_fails_is_said_and_nobody_waits_for_it(agent, stood_still, caplog):
    def fail(_: bool) -> None:
        raise OSError("the store is away")

    answered(agent, 1, 0, urgent=True)
    assert Together(Leaving(DirectoryStore(Path()))).at(0, fail)
    assert agent.finished(1, urgent=True)
    assert "the save that all ranks agreed on failed; an earlier one stays: OSError: the store is away" in caplog.text


def test_a_held_state_is_saved_by_a_thread_while_the_rank_does_something_else(agent, stood_still):
    together, saved = Together(Leaving(DirectoryStore(Path()))), threading.Event()
    together.at(3, print)
    with together.holding(3, lambda _: saved.set()):
        answered(agent, 1, 3, urgent=True)
        assert saved.wait(60)
        assert stood_still == []
    assert stood_still == ["still"], "what follows would be lost"


def test_who_calls_at_the_end_of_holding_is_served_before_the_state_changes(agent, stood_still, monkeypatch):
    together, saved = Together(Leaving(DirectoryStore(Path()))), []
    monkeypatch.setattr(Together, "look", lambda *_: None)  # the thread comes too late
    with together.holding(3, lambda _: saved.append(3)):
        answered(agent, 1, 3, urgent=True)
    assert (saved, stood_still) == ([3], ["still"])


def test_an_error_while_holding_is_not_held_up(agent, stood_still):
    with pytest.raises(ValueError, match="mine"), Together(Leaving(DirectoryStore(Path()))).holding(3, print):
        raise ValueError("mine")


def test_outside_a_task_nothing_is_agreed_on(monkeypatch):
    monkeypatch.setattr(HERE, "page", None)
    together = Together(Leaving(DirectoryStore(Path())))
    assert not together.at(0, print)
    with together.holding(0, print):
        pass


def test_a_save_is_asked_for_once_until_it_has_come(agent, stood_still):
    together = Together(Leaving(DirectoryStore(Path())))
    together.ask()
    together.ask()
    assert agent.asked == 1
    answered(agent, 1, 0, urgent=False)
    assert together.at(0, lambda _: None)
    together.ask()
    assert agent.asked == 2


def test_a_save_that_was_due_where_all_agreed_on_one_does_not_come_again_at_the_next_step(agent, tmp_path):
    ckpt = checkpoints(tmp_path / "place", every=5)
    answered(agent, 1, 4, urgent=False)
    for step in range(10):
        ckpt.step(step, {"x": step})
    ckpt.wait()
    assert {manifest.step_of(path.name) for path in (tmp_path / "place").iterdir()} - {None} == {4, 9}
