"""``current_rank()``: the rank that a process is, and an error that says so where there is none."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from pathlib import Path

import pytest

from flytekitplugins_safedist.errors import NotInTaskError
from flytekitplugins_safedist.hangs.waits import Steps
from flytekitplugins_safedist.rank import context, shared_page
from flytekitplugins_safedist.rank.context import RankContext, current_rank
from tests.harness.outcomes import SIXTH, rank_at

Pages = tuple[shared_page.AgentPage, shared_page.RankPage]
RANK = rank_at(Path("/scratch/round-4/rank-5"), **SIXTH, node_dir=Path("/scratch/node"))


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context._RANK, "value", None)
    monkeypatch.setattr(context._PAGE, "value", None)


@pytest.fixture
def pages(tmp_path: Path) -> Pages:
    """The one page, as a rank's agent and as the rank itself has it; this process is the rank."""
    agents, own = shared_page.make(tmp_path / "page"), shared_page.open_page(tmp_path / "page")
    context.enter(RANK, own)
    return agents, own


def test_outside_a_task_it_raises_and_says_where_to_call_it() -> None:
    with pytest.raises(NotInTaskError) as caught:
        current_rank()
    assert str(caught.value) == (
        "current_rank() was called outside a rank. Fix: call it inside the function of a @task with "
        "task_config=SafeHorovod(...) or SafeTorch(...); at import of a module, and in the workflow, there is no rank "
        "yet, and in a process that the function spawns (as a DataLoader does its workers, "
        "multiprocessing_context='spawn' or 'forkserver') there is none: hand it over"
    )


@pytest.mark.usefixtures("pages")
def test_a_rank_finds_itself_also_from_its_threads() -> None:
    assert current_rank() is RANK
    seen: list[RankContext] = []
    thread = threading.Thread(target=lambda: seen.append(current_rank()))
    thread.start()
    thread.join()
    assert seen == [RANK]


def test_a_rank_knows_that_it_is_preempted_and_says_that_it_has_saved(pages: Pages) -> None:
    agents, _ = pages
    assert not agents.listens
    assert not current_rank().preempted
    assert agents.listens
    agents.preempt()
    assert current_rank().preempted
    assert not agents.finished(1, urgent=True)
    current_rank().saved()
    assert agents.finished(1, urgent=True)


def test_outside_a_task_there_is_nothing_to_be_preempted_and_to_save_and_tell_a_step_do_nothing() -> None:
    with context.saving():
        RANK.progress(1)
    with pytest.raises(NotInTaskError, match="outside a rank"):
        _ = RANK.preempted


def test_a_context_is_a_value_that_cannot_be_changed_and_that_pickles() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RANK.rank = 0  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(RANK)) == RANK


def test_it_has_everything_that_was_promised() -> None:
    facts = "rank local_rank node_rank world_size local_world_size nnodes round attempt job scratch node_dir"
    assert {field.name for field in dataclasses.fields(RankContext)} == {*facts.split()}


def test_nothing_about_a_rank_has_a_default() -> None:
    unset = (dataclasses.MISSING, dataclasses.MISSING)
    fields = dataclasses.fields(RankContext)
    assert [field.name for field in fields if (field.default, field.default_factory) != unset] == []


def test_a_ranks_agent_sees_how_far_it_is_by_what_it_tells_and_by_what_it_saves(pages: Pages) -> None:
    agent, page = pages
    assert agent.steps == Steps()
    current_rank().progress(7)
    assert (agent.steps.step, page.step) == (8, 8), "the one that it is in"
    told = agent.steps.told
    current_rank().progress(7)
    assert agent.steps.told != told
    assert agent.steps.step == 8, "told twice it is no other"
    page.at(11)
    assert agent.steps.step == 12
    told = agent.steps.told
    page.at(12)
    assert agent.steps.told != told, "a job that saves by steps need not tell them"


def test_a_rank_is_in_no_step_after_the_last_one_that_is_to_be_nor_after_the_function(pages: Pages) -> None:
    """It may hand on its model for hours, or wait there for somebody else."""
    agent, page = pages
    current_rank().progress(3, of=5)
    assert agent.steps.wait(0) is not None
    current_rank().progress(4, of=5)
    assert (agent.steps.wait(0), agent.steps.step) == (None, 5)
    current_rank().progress(0, of=5)
    assert agent.steps.wait(0) is not None, "it counts from the beginning in each epoch"
    page.come_back()
    assert agent.steps.wait(0) is None


def test_its_agent_sees_when_it_is_in_the_function_after_its_inputs_which_may_take_their_time(pages: Pages) -> None:
    agent, page = pages
    assert (agent.begun, agent.entered) == (False, False)
    page.begin()
    assert (agent.begun, agent.entered) == (True, False)
    page.enter()
    assert (agent.begun, agent.entered) == (True, True)


@pytest.mark.parametrize("steps", [(3, 2), (-1,), (1 << 60,)], ids=["they fall", "below 0", "no page holds it"])
def test_steps_that_are_no_count_are_movement_and_no_place(pages: Pages, steps: tuple[int, ...]) -> None:
    agent, _ = pages
    for step in steps:
        before = agent.steps.told
        current_rank().progress(step)
        assert agent.steps.told != before
    current_rank().progress(5)
    assert agent.steps.step == -1


def test_what_saves_is_seen_from_outside(pages: Pages) -> None:
    agent, _ = pages
    with context.saving(background=True):
        with context.saving():
            assert (agent.steps.is_saving, agent.steps.is_writing) == (True, True)
        assert (agent.steps.is_saving, agent.steps.is_writing) == (False, True)
    assert not agent.steps.is_writing


def test_of_two_that_write_the_last_to_leave_is_seen_whichever_began_first(pages: Pages) -> None:
    agent, page = pages
    one, other = page.saving(background=True), page.saving(background=True)
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert agent.steps.is_writing
    other.__exit__(None, None, None)
    assert not agent.steps.is_writing


def test_its_agent_sees_for_how_long_it_waits_for_an_input_that_another_rank_downloads(pages: Pages) -> None:
    agent, page = pages
    with page.fetched_for():
        with page.fetched_for():
            assert agent.steps.is_fetched_for
        assert agent.steps.is_fetched_for
    assert not agent.steps.is_fetched_for


def test_of_what_is_longer_than_its_place_the_end_is_kept_and_the_rank_waits_as_always(pages: Pages) -> None:
    agents, own = pages
    own.wait_begins("gradients/" * 40 + "last")
    assert agents.waits[:2] == (1, 0)
    assert agents.waits[2].endswith("gradients/last")
