"""What a rank saves because a pod of the job is told to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from flytekitplugins_safedist.checkpoint import Checkpoints, saves
from flytekitplugins_safedist.checkpoint.agreement import MARK, wait_for_others
from flytekitplugins_safedist.checkpoint.places import Facts, find
from flytekitplugins_safedist.checkpoint.store import Store
from flytekitplugins_safedist.rank import context, shared_page
from flytekitplugins_safedist.rank.shared_page import AgentPage, RankPage
from tests.harness.outcomes import rank_at
from tests.harness.procs import until


@pytest.fixture
def become(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have this process be a rank."""

    def enter(rank: int = 0, *, size: int = 1, nnodes: int = 1) -> None:
        node, local = divmod(rank, size // nnodes)
        nodes = {"node_rank": node, "local_rank": local, "nnodes": nnodes, "local_world_size": size // nnodes}
        monkeypatch.setattr(context._RANK, "value", rank_at(tmp_path, rank=rank, world_size=size, **nodes))

    return enter


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, become: Callable[..., None]) -> AgentPage:
    """The agent's end of this process's page."""
    made = shared_page.make(tmp_path / "page")
    monkeypatch.setattr(context._PAGE, "value", shared_page.open_page(tmp_path / "page"))
    become()
    return made


def answered(agent: AgentPage, call: int, step: int, *, urgent: bool, forced: bool = False) -> None:
    agent.call(call)
    agent.answer(call, step, urgent=urgent, forced=forced)


@pytest.fixture
def stood_still(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Filled when a rank would stand still."""
    found: list[str] = []
    monkeypatch.setattr(RankPage, "stand_still", lambda _: found.append("still"))
    return found


def steps(place: Path) -> set[int]:
    return {saves.step_of(name) for name in saves.committed(Store(str(place)))}


def test_an_urgent_save_is_committed_and_the_last_thing_a_rank_does(agent, tmp_path, monkeypatch):
    there: list[set[int]] = []
    monkeypatch.setattr(RankPage, "stand_still", lambda _: there.append(steps(tmp_path / "place")))
    answered(agent, 1, 0, urgent=True)
    Checkpoints(tmp_path / "place", every=None).save(0, {"x": 0})
    assert there == [{0}]
    assert agent.finished(1, urgent=True)


@pytest.mark.parametrize(("every", "call"), [(10**6, 1), (timedelta(hours=1), 1), (None, 2**18 - 1)], ids=str)
def test_a_forced_save_is_committed_though_none_is_due_and_the_ranks_go_on(agent, stood_still, tmp_path, every, call):
    checkpoints = Checkpoints(tmp_path / "place", every=every)
    answered(agent, call, 1, urgent=False, forced=True)
    checkpoints.save(0, {"x": 0})
    assert not agent.finished(call, urgent=False)
    checkpoints.save(1, {"x": 0})
    assert (steps(tmp_path / "place"), stood_still) == ({1}, [])
    assert agent.finished(call, urgent=False)


@pytest.mark.parametrize("urgent", [True, False], ids=["a pod leaves", "a node joins"])
def test_the_last_save_of_a_round_that_fails_is_said_and_nobody_waits_for_it(
    agent, stood_still, tmp_path, caplog, urgent
):
    (tmp_path / "file").write_text("in the way")
    answered(agent, 1, 0, urgent=urgent, forced=not urgent)
    Checkpoints(tmp_path / "file" / "place", every=None).save(0, {"x": 0})
    assert agent.finished(1, urgent=urgent)
    assert stood_still == (["still"] if urgent else [])
    assert f"the last save before {'the pod leaves' if urgent else 'a node joins'} failed" in caplog.text


def test_a_trainer_that_makes_its_own_files_is_told_before_until_it_saves(agent, stood_still, tmp_path):
    answered(agent, 1, 1, urgent=True)
    ckpt = Checkpoints(tmp_path / "place", every=None)
    assert not ckpt.should_save(0)
    assert ckpt.should_save(1)
    assert ckpt.should_save(2), "it could not save at the step before"
    assert not agent.finished(1, urgent=True)
    ckpt.save(2, {"x": 2})
    assert steps(tmp_path / "place") == {2}
    assert agent.finished(1, urgent=True)
    assert not ckpt.should_save(2), "it has"


@pytest.mark.parametrize(
    ("every", "saved"),
    [
        ((100, None), ([99, 199, 270], [200])),
        ((None, 100), ([200], [99, 199, 270])),
        ((None, None), ([200, 270], [270])),
    ],
    ids=["the first saves by itself", "the second does", "none does"],
)
def test_of_several_the_save_is_of_those_that_save_by_themselves_else_of_all(
    agent, stood_still, tmp_path, every, saved
):
    places = [tmp_path / "one", tmp_path / "two"]
    several = [Checkpoints(place, every=each, keep=None) for place, each in zip(places, every, strict=True)]
    best = every.index(None)
    for step in range(280):
        if step == 270:
            answered(agent, 1, 270, urgent=True)
        for number, ckpt in enumerate(several):
            ckpt.save(step, {"x": step}, force=number == best and step == 200)
        if stood_still:
            break
    assert [sorted(steps(place)) for place in places] == [list(each) for each in saved]
    assert step == 270
    assert agent.finished(1, urgent=True)


def test_a_rank_stands_still_when_no_save_of_any_of_several_is_in_flight(
    agent, stood_still, tmp_path, monkeypatch, caplog
):
    """The best model is being written, slowly, when the run has made its last save."""
    caplog.set_level("INFO")
    agent.stays(20.0)
    put = Store.put

    def slowly(self: Store, name: str, data: bytes) -> None:
        if "two" in self.url and name.endswith(saves.MANIFEST):
            until(
                lambda: "leaving waits for the save before" in caplog.text or agent.finished(1, urgent=True),
                "the end of the run's last save",
            )
        put(self, name, data)

    monkeypatch.setattr(Store, "put", slowly)
    monkeypatch.setattr(RankPage, "stand_still", lambda _: stood_still.append(sorted(steps(tmp_path / "two"))))
    run, best = Checkpoints(tmp_path / "one", every=100), Checkpoints(tmp_path / "two", every=None)
    run.save(1, {"x": 1})
    best.save(1, {"x": 1}, force=True)
    answered(agent, 1, 2, urgent=True)
    run.save(2, {"x": 2})
    assert stood_still == [[1]]
    assert not [thread for thread in threading.enumerate() if thread.name == "safedist-leaving"], "marks are taken away"


def test_where_a_rank_goes_past_the_step_of_one_of_several_it_stands_still_all_the_same(agent, stood_still, tmp_path):
    """One of them is told of some steps only."""
    one, two = (Checkpoints(tmp_path / name, every=None) for name in ("one", "two"))
    for step in range(3):
        one.save(step, {"x": step})
    two.save(2, {"x": 2})
    answered(agent, 1, 3, urgent=True)
    one.save(3, {"x": 3})
    assert stood_still == []
    one.save(4, {"x": 4})
    assert stood_still == ["still"]
    assert (steps(tmp_path / "one"), steps(tmp_path / "two")) == ({3}, set())


def test_by_time_rank_0_asks_and_all_save_where_the_agents_say(agent, become, stood_still, tmp_path, monkeypatch):
    """The other rank of two is played by nobody: what rank 0 decides is what a job of one decides."""
    become(size=2)
    ckpt = Checkpoints(tmp_path / "place", every=timedelta(microseconds=1))
    for step in range(3):
        ckpt.save(step, {"x": step})
    assert agent.asked == 1, "once, however many steps it takes"
    answered(agent, 1, 3, urgent=False)
    ckpt.save(3, {"x": 3})
    ckpt.wait()
    assert steps(tmp_path / "place") == {3}
    assert agent.finished(1, urgent=False)
    ckpt.save(4, {"x": 4})
    assert agent.asked == 2
    assert stood_still == []


def test_by_time_another_rank_asks_nobody_and_saves_nothing_by_itself(agent, become, tmp_path):
    become(1, size=2)
    ckpt = Checkpoints(tmp_path / "place", every=timedelta(microseconds=1))
    assert not any(ckpt.should_save(step) for step in range(3))
    assert agent.asked == 0


def test_who_saves_by_steps_saves_nothing_more_where_another_one_has_asked(agent, stood_still, tmp_path):
    answered(agent, 1, 4, urgent=False)
    with Checkpoints(tmp_path / "place", every=3) as ckpt:
        for step in range(6):
            ckpt.save(step, {"x": step})
    assert steps(tmp_path / "place") == {2, 5}
    assert agent.finished(1, urgent=False)


@pytest.mark.parametrize(
    ("rank", "nnodes", "marks"),
    [(0, 1, True), (1, 1, False), (0, 2, True)],
    ids=["rank 0 of one node", "rank 1 of it", "rank 0 of two nodes"],
)
def test_that_a_pod_leaves_is_marked_by_rank_0_alone(
    agent: AgentPage,
    become: Callable[..., None],
    stood_still: list[str],
    tmp_path: Path,
    rank: int,
    nnodes: int,
    marks: bool,
) -> None:
    become(rank, size=2, nnodes=nnodes)
    agent.stays(20.0)
    ckpt = Checkpoints(tmp_path / "place", every=100)
    ckpt.should_save(0)
    waiting = [thread for thread in threading.enumerate() if thread.name == "safedist-leaving"]
    assert bool(waiting) == marks
    agent.preempt()
    if marks:
        until((tmp_path / "place" / MARK).exists, "the mark")
        answered(agent, 1, 1, urgent=True)
        ckpt.save(1, {"x": 1})
    assert not (tmp_path / "place" / MARK).exists()
    assert steps(tmp_path / "place") == ({1} if marks else set())


def test_the_next_attempt_waits_where_a_pod_saves_also_before_the_first_save(agent, stood_still, tmp_path, monkeypatch):
    """Each attempt has a place of its own, until one has left a pointer."""
    first, second = (
        Facts(
            str(tmp_path / f"raw-{number}"), given=False, outputs=str(tmp_path / "meta" / str(number)), attempt=number
        )
        for number in (0, 1)
    )
    monkeypatch.setattr("flytekitplugins_safedist.checkpoint.places.gather", lambda *_, **__: first)
    agent.stays(20.0)
    ckpt = Checkpoints(every=100)
    ckpt.should_save(0)
    agent.preempt()
    until(lambda: find(second) == first.own, "the place of the attempt before")
    assert (tmp_path / "raw-0" / MARK).exists()
    answered(agent, 1, 1, urgent=True)
    ckpt.save(1, {"x": 1})
    assert steps(tmp_path / "raw-0") == {1}


def test_a_mark_that_cannot_be_taken_away_costs_a_wait_and_no_more(tmp_path, monkeypatch, caplog):
    store = Store(str(tmp_path))
    store.put(MARK, b"another host")
    monkeypatch.setattr(Store, "remove", lambda *_: (_ for _ in ()).throw(PermissionError("read-only")))
    wait_for_others(store, "job-a1-", "job-a1-r0", 0.0)
    assert "another host has committed no save in 0 s" in caplog.text
    assert f"{MARK} stays in {tmp_path}" in caplog.text


def test_a_mark_of_its_own_attempt_is_taken_away_and_nobody_waits(tmp_path, caplog):
    """Its ranks had no time to save, and were killed; those of a replaced pod begin when all have ended."""
    store = Store(str(tmp_path))
    store.put(MARK, b"pod-0 of job-a1-r0")
    wait_for_others(store, "job-a1-", "job-a1-r1", 1000.0)
    assert store.get(MARK) is None
    assert "waiting" not in caplog.text


def test_ones_own_mark_stays_as_does_what_another_pod_has_left_meanwhile(tmp_path, monkeypatch):
    """Training may go back to a save in the time that it has to save."""
    store = Store(str(tmp_path))
    store.put(MARK, b"pod-0 of job-a1-r1")
    wait_for_others(store, "job-a1-", "job-a1-r1", 1000.0)
    assert store.get(MARK) == b"pod-0 of job-a1-r1"
    got = iter([b"pod-0 of job-a1-r0", b"pod-0 of job-a2-r0"])
    monkeypatch.setattr(Store, "get", lambda *_: next(got))
    wait_for_others(store, "job-a1-", "job-a1-r1", 1000.0)
    monkeypatch.undo()
    assert store.get(MARK) is not None
