"""One process saves and resumes: what is found again, what is passed over, what is refused."""

from __future__ import annotations

import contextvars
import multiprocessing
import resource
import signal
import threading
import weakref
from collections import Counter, OrderedDict
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import fsspec.implementations.local
import numpy
import pytest
import torch

from flytekitplugins_safedist.checkpoint import Checkpoints, agreement, manager, per_rank, saves, store
from flytekitplugins_safedist.checkpoint.agreement import Timer
from flytekitplugins_safedist.checkpoint.group import JobRanks
from flytekitplugins_safedist.checkpoint.pieces import marks, sums
from flytekitplugins_safedist.checkpoint.places import Facts
from flytekitplugins_safedist.checkpoint.values import from_bytes, to_bytes
from flytekitplugins_safedist.errors import CheckpointError, ConfigError, FsError, PathBlockedError
from flytekitplugins_safedist.fs import store as places
from flytekitplugins_safedist.meeting import end_of
from tests.checkpoint import points
from tests.harness.procs import until


def fresh(value=0.0):
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, value)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "epoch": int(value)}


def weight(state):
    return float(state["model"].weight[0, 0].detach())


@pytest.fixture
def place(tmp_path):
    return tmp_path / "place"


def save(place, state, step=0):
    with Checkpoints(place, every=None) as ckpt:
        ckpt.save(step, state, force=True)


def save_each(ckpt, *steps):
    """One after the other: each is committed before the next."""
    for step in steps:
        ckpt.save(step, {"x": step})
        ckpt.wait()


@pytest.fixture
def three(place):
    """A place with the saves of steps 1, 2 and 3, whose weights are 1, 2 and 3."""
    for step in (1, 2, 3):
        save(place, fresh(step), step)
    return place


@contextmanager
def at_points(action):
    """Saves do it at each of their points."""
    points.on_point = action
    try:
        yield
    finally:
        points.on_point = None


@contextmanager
def held():
    """No save is written before this ends."""
    goes_on = threading.Event()
    with at_points(lambda point: goes_on.wait(60) if point == points.SAVE_BEGUN else None):
        try:
            yield
        finally:
            goes_on.set()


def directory(place, step):
    (found,) = (path for path in place.iterdir() if saves.step_of(path.name) == step)
    return found


def resumed(place):
    state = fresh(-1)
    return Checkpoints(place).restore(state), weight(state), state["epoch"]


def test_with_nothing_saved_training_begins_at_0(place):
    assert resumed(place) == (0, -1.0, -1)
    assert not place.exists()


def test_the_newest_is_resumed_and_the_next_step_returned_and_the_log_says_from_what(three, caplog):
    caplog.set_level("INFO")
    assert resumed(three) == (4, 3.0, 3)
    assert f"resumed from {three}/{directory(three, 3).name} in " in caplog.text


def test_a_step_that_is_saved_is_not_saved_again(three):
    there = saves.committed(store.Store(str(three)))
    with Checkpoints(three, every=None) as ckpt:
        ckpt.save(ckpt.restore(fresh()) - 1, fresh(3), force=True)
    assert saves.committed(store.Store(str(three))) == there


def test_a_place_where_nothing_can_be_saved_is_an_error_of_the_first_step_and_one_that_can_holds_nothing(place):
    place.touch()
    with pytest.raises(FsError, match="a file is in the way where a directory is needed"):
        Checkpoints(place, every=100).save(0, {"x": 0})
    place.unlink()
    save_each(Checkpoints(place, every=100), 0, 1)
    assert [*place.iterdir()] == []


def test_where_a_save_was_made_or_resumed_from_the_place_is_not_asked_again_and_another_is(
    three, tmp_path, monkeypatch
):
    here, elsewhere = (
        Checkpoints(three, every=100),
        Checkpoints(tmp_path / "other", every=100, resume_from=str(three)),
    )
    for ckpt in (here, elsewhere):
        assert ckpt.restore({"model": fresh(0)["model"]}) == 4
    made = Checkpoints(tmp_path / "made", every=100)
    made.save(0, fresh(0), force=True)
    made.wait()
    monkeypatch.setattr(store.Store, "put", lambda *_: pytest.fail("asked"))
    for ckpt in (here, made):
        ckpt.save(4, fresh(4))
    with pytest.raises(pytest.fail.Exception, match="asked"):
        elsewhere.save(4, fresh(4))


def test_a_store_that_is_away_for_a_while_is_no_error_of_the_first_step(place, monkeypatch, caplog):
    def away(*_):
        raise CheckpointError("the store did not put it") from ConnectionError("reset")

    monkeypatch.setattr(store.Store, "put", away)
    save_each(Checkpoints(place, every=100), 0)
    assert "whether saves can be made in" in caplog.text


class Corner(dict):
    """Where the other of two ranks comes between two looks of this one, and ends."""

    where = "a corner"

    def wait(self, key, _seconds):
        if key == end_of(1):
            self.update({"checkpoint/0/call/0/1": b'["came", null]', key: b"1"})
        return self.get(key)

    def set(self, key, value):
        self[key] = value

    def compare_set(self, key, _expected, desired):
        return self.setdefault(key, desired)

    def delete(self, key):
        self.pop(key, None)


def test_what_a_rank_has_said_just_before_it_ended_is_heard_and_that_it_has_ended_then(monkeypatch):
    two = places.Group(Corner(), 0, 2)
    monkeypatch.setattr(places, "ranks", lambda _: two)
    ranks = JobRanks("a test")
    assert ranks.agree("save", "here", list) == ["here", "came"]
    with pytest.raises(CheckpointError, match="rank 0 has waited for rank 1, which has ended"):
        ranks.agree("save")


def test_who_has_asked_whether_a_step_is_to_be_saved_saves_it_then(place):
    with Checkpoints(place, every=10) as ckpt:
        assert [step for step in range(10) if ckpt.should_save(step)] == [9]
        ckpt.save(9, {"x": 9})
    assert ckpt.steps() == [9]


def test_a_second_run_goes_on_where_the_first_ended(place):
    trained = fresh(5)
    trained["model"](torch.ones(1, 2)).sum().backward()
    trained["optimizer"].step()
    with Checkpoints(place, every=10) as ckpt:
        for step in range(25):
            ckpt.save(step, trained)
    state = fresh()
    ckpt = Checkpoints(place, every=10)
    assert ckpt.restore(state) == 20
    assert ckpt.latest == 19
    assert weight(state) == weight(trained)
    momentum = [one["momentum_buffer"] for one in state["optimizer"].state_dict()["state"].values()]
    assert [one.tolist() for one in momentum] == [
        one["momentum_buffer"].tolist() for one in trained["optimizer"].state_dict()["state"].values()
    ]


def test_no_tensor_is_made_a_text_of_where_a_restore_compares(three, monkeypatch):
    """Of each that would take a millisecond, and a wait for the GPU."""
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda _: pytest.fail("a tensor was made a text of"))
    assert resumed(three) == (4, 3.0, 3)


@pytest.mark.parametrize(
    ("file", "data", "said"),
    [("__0_0.distcp", None, "a part of a save"), (saves.MANIFEST, b"{", "a manifest cannot be read")],
    ids=["a part that is gone", "a manifest that is cut"],
)
def test_a_damaged_save_is_passed_over_and_said(three, caplog, monkeypatch, file, data, said):
    monkeypatch.setattr(store, "LATE_SECONDS", 0.1)
    path = directory(three, 3) / file
    path.unlink() if data is None else path.write_bytes(data)
    assert resumed(three) == (3, 2.0, 2)
    assert f"{directory(three, 3)} is passed over: {said}" in caplog.text


def test_where_no_save_is_whole_training_does_not_begin_anew_silently(three, monkeypatch):
    monkeypatch.setattr(store, "LATE_SECONDS", 0.1)
    for step in (1, 2, 3):
        (directory(three, step) / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match="there are checkpoints, but none of them is complete"):
        resumed(three)


def test_what_a_crash_has_left_goes_with_the_next_commit(place):
    begun = place / "step-000000000007.1700000000000.00000000"
    begun.mkdir(parents=True)
    (begun / "__0_0.distcp").write_bytes(b"half")
    save(place, fresh(), 1)
    assert not begun.exists()


def test_what_has_another_name_than_a_save_is_left_alone(place):
    ckpt = Checkpoints(place, every=1, keep=1)
    save_each(ckpt, 1)
    copied = directory(place, 1).rename(place / f"{directory(place, 1).name}.kept")
    (place / "step-final").mkdir()
    save_each(ckpt, 2, 3)
    assert ckpt.steps() == [3]
    assert {path.name for path in place.iterdir()} == {copied.name, "step-final", directory(place, 3).name}


def test_a_state_of_no_tensors_is_a_step(place):
    for step, state in enumerate(({}, {"model": torch.nn.Identity()})):
        save(place, state, step)
        assert Checkpoints(place).restore(state) == step + 1


def test_what_is_saved_is_the_state_at_the_step_whatever_training_does_since(place):
    state, ckpt = fresh(1), Checkpoints(place, every=None)
    with held():
        ckpt.save(1, state, force=True)
        torch.nn.init.constant_(state["model"].weight, 2)
    ckpt.wait()
    assert resumed(place)[:2] == (2, 1.0)


WAY = contextvars.ContextVar("way", default="none")


def test_the_thread_that_writes_finds_what_its_caller_finds_by_context(place):
    """flytekit's current context is a context variable: without this, the store's credentials are not found."""
    ways = set()
    WAY.set("the caller's")
    with at_points(lambda _: ways.add(WAY.get())):
        save(place, fresh(1), 1)
    assert ways == {"the caller's"}


def test_one_save_is_in_flight_and_waiting_for_it_is_said(place, caplog, monkeypatch):
    monkeypatch.setattr(manager, "_SAY_AFTER_SECONDS", 0.01)
    caplog.set_level("INFO")
    said = "step 1 waits for the save before, which is still being written"
    with (
        at_points(lambda point: until(lambda: said in caplog.text, said) if point == points.SAVE_BEGUN else None),
        Checkpoints(place, every=1) as ckpt,
    ):
        ckpt.save(0, fresh(0))
        ckpt.save(1, fresh(1))
    assert said in caplog.text
    assert resumed(place) == (2, 1.0, 1)


def test_a_process_that_is_forked_while_a_save_is_in_flight_ends(place):
    """As a DataLoader's workers are."""
    forked, written = threading.Event(), threading.Event()
    points.on_point = lambda point: (forked.set(), written.wait()) if point == points.PART_OPENED else None
    try:
        ckpt = Checkpoints(place, every=None)
        ckpt.save(0, {"x": 0}, force=True)
        forked.wait()
        worker = multiprocessing.get_context("fork").Process(target=int)
        worker.start()
        worker.join(30)
        ended = worker.exitcode
        worker.kill()
    finally:
        written.set()
        points.on_point = None
    ckpt.wait()
    assert ended == 0


def test_by_time_a_save_in_flight_is_not_waited_for_and_the_next_is_due_when_it_is_written(place):
    ckpt = Checkpoints(place, every=timedelta(microseconds=1))
    with held():
        ckpt.save(0, fresh(0))
        ckpt.save(1, fresh(1))
    ckpt.wait()
    ckpt.save(2, fresh(2))
    ckpt.wait()
    assert ckpt.steps() == [0, 2]


def test_a_save_that_fails_is_said_and_raised_at_the_end_and_what_was_committed_stays(place, caplog):
    save(place, fresh(1), 1)
    ckpt = Checkpoints(place, every=None)

    def full_disk(point):
        if point == points.PART_OPENED:
            raise OSError(28, "No space left on device")

    with at_points(full_disk):
        ckpt.save(2, fresh(2), force=True)
        with pytest.raises(OSError, match="No space left"):
            ckpt.wait()
        with suppress(ZeroDivisionError), Checkpoints(place, every=None) as other:
            other.save(2, fresh(2), force=True)
            raise ZeroDivisionError  # the user's own, which is not hidden by that
    assert "the save of step 2 failed, what was committed before stays: [Errno 28] No space left" in caplog.text
    assert resumed(place) == (2, 1.0, 1)
    ckpt.save(2, fresh(2), force=True)  # the same again
    ckpt.wait()
    assert resumed(place) == (3, 2.0, 2)


def test_different_steps_are_not_saved_together(place):
    with pytest.raises(CheckpointError, match="seen: rank 0: 1, rank 1: 2"):
        Checkpoints(place)._open([1, 2])


def test_names_that_differ_are_refused_and_nothing_is_loaded(three):
    state = {"model": fresh(-1)["model"], "more": 1}
    with pytest.raises(CheckpointError, match=r"missing=more.*seen: saved: epoch, model, optimizer"):
        Checkpoints(three).restore(state)
    assert weight(state) == -1.0


def test_a_later_attempt_finds_what_an_earlier_one_has_saved(tmp_path):
    """Two places of one execution, as two attempts have them; the second knows the first by its address."""
    save(tmp_path / "old", fresh(7), 7)
    state = fresh()
    ckpt = Checkpoints(tmp_path / "new", every=None, resume_from=str(tmp_path / "old"))
    assert ckpt.restore(state) == 8
    for step in (7, 8):  # the first is saved elsewhere, and not here
        ckpt.save(step, state, force=True)
        ckpt.wait()
    assert ckpt.steps() == [7, 8]
    again = Checkpoints(tmp_path / "new", resume_from=str(tmp_path / "old"))
    assert again.restore(fresh()) == 9


def test_a_step_of_more_digits_than_a_name_is_filled_up_to_is_found_again(place):
    """Who counts tokens comes there."""
    ckpt = Checkpoints(place, every=None, keep=1)
    for step in (2, 10**12, 15 * 10**12):
        ckpt.save(step, fresh(3), force=True)
    ckpt.wait()
    assert ckpt.steps() == [15 * 10**12]
    assert resumed(place) == (15 * 10**12 + 1, 3.0, 3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": "3"}, "keep='3' is not a number of saves"),
        ({"keep": 0, "every": 0}, r"2 problems: keep=0 .*; every=0 "),
    ]
    + [
        ({"every": every}, "neither a number of steps nor a time .*more than 0")
        for every in (5.0, "10", True, timedelta(0))
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_not_left_to_never_save(place, options, said):
    with pytest.raises(ConfigError, match=said):
        Checkpoints(place, **options)


@pytest.mark.parametrize("step", [-1, "1", 1.0, torch.tensor(1)])
def test_a_step_that_is_no_number_from_0_is_refused(place, step):
    ckpt = Checkpoints(place, every=None)
    with pytest.raises(CheckpointError, match=r"step must be .*0 or more.*count steps over all epochs"):
        ckpt.save(step, fresh())
    with pytest.raises(CheckpointError, match=r"step must be .*0 or more"):
        ckpt.should_save(step)


@pytest.mark.parametrize("begun", ["here", "by a restore"])
def test_steps_that_begin_again_with_an_epoch_are_refused(place, begun):
    ckpt = Checkpoints(place, every=None)
    for step in (0, 7, 7):
        ckpt.save(step, fresh(), force=True)
    ckpt.wait()
    if begun == "by a restore":
        ckpt = Checkpoints(place, every=None)
        ckpt.restore(fresh())
    with pytest.raises(
        CheckpointError, match=r"never be smaller than before \(7\) \(seen: 0\).*count steps over all epochs"
    ):
        ckpt.save(0, fresh())


def test_what_only_reads_needs_no_place_that_it_may_write_to(place, tmp_path, monkeypatch, caplog):
    """Who recovers its execution by Flyte's word does not find the saves then, and is not kept from its own."""
    save(place, fresh(), 3)
    (tmp_path / "file").touch()
    facts = Facts(str(tmp_path / "file" / "raw"), given=False, execution=("proj", "dev", "f1"))
    monkeypatch.setattr("flytekitplugins_safedist.checkpoint.places.gather", lambda *_, **__: facts)
    assert Checkpoints(resume_from=str(place)).restore(fresh()) == 4
    assert "an execution that recovers this one does not find what this one has saved" in caplog.text


def test_a_named_place_without_saves_is_not_begun_anew_silently(place, tmp_path):
    ckpt = Checkpoints(place, resume_from=str(tmp_path / "mistyped"))
    with pytest.raises(CheckpointError, match=r"^nothing was saved where to resume from .*mistyped"):
        ckpt.restore(fresh())


def test_a_scheduler_that_counts_its_milestones_is_saved(place):
    state = fresh()
    state["scheduler"] = torch.optim.lr_scheduler.MultiStepLR(state["optimizer"], [3, 5, 5])
    save(place, state, 1)
    other = fresh()
    other["scheduler"] = torch.optim.lr_scheduler.MultiStepLR(other["optimizer"], [1])
    assert Checkpoints(place).restore(other) == 2
    assert other["scheduler"].milestones == Counter({3: 1, 5: 2})


@pytest.mark.parametrize(("where", "seen"), [(None, "no Flyte checkpoint prefix"), ("", "an empty text")])
def test_without_a_place_the_error_says_how_to_give_one(tmp_path, monkeypatch, where, seen):
    """Nor is it the working directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=rf"there is no place for checkpoints \(seen: {seen}.*Fix: give one"):
        Checkpoints(where)


@pytest.mark.parametrize(("told", "due"), [(1, [9, 19, 29, 39]), (4, [12, 20, 32])])
def test_due_by_steps_at_multiples_whatever_steps_are_told(place, told, due):
    ckpt = Checkpoints(place, every=10)
    assert [step for step in range(0, 40, told) if ckpt.should_save(step)] == due


def clock(monkeypatch):
    """Seconds that a test sets."""
    now = [0.0]
    monkeypatch.setattr(agreement.time, "monotonic", lambda: now[0])
    return now


def gaps(now, seconds, steps, every=600):
    """Seconds between the saves of ranks that ask rank 0, where each step takes ``seconds(step)``."""
    timer, last, found = Timer(every), 0.0, []
    for step in range(steps):
        now[0] += seconds(step)
        if step >= timer.look:
            due, timer.look = timer.answer(step, is_busy=False)
            if due:
                found.append(now[0] - last)
                last = now[0]
                timer.begin()
    return found


def test_by_time_saves_are_that_time_apart_and_the_ranks_meet_at_few_steps(monkeypatch):
    found = gaps(clock(monkeypatch), lambda _: 0.1, 60_000)
    assert len(found) == 9
    assert all(600 <= gap < 630 for gap in found)


@pytest.mark.parametrize("slower", [2.0, 10.0])
def test_by_time_steps_that_become_slower_put_no_save_off_for_long(monkeypatch, slower):
    """A twentieth, or a hundredth of the pace, is what a slow store or long sequences make of it."""
    found = gaps(clock(monkeypatch), lambda step: 0.1 if step < 15_000 else slower, 20_000)
    assert max(found) < 600 + 600 / 40 * slower / 0.1 + 2 * slower
    assert max(found[4:]) < 600 + 2 * 600 / 40


def test_by_time_a_slow_first_step_does_not_put_off_the_others(monkeypatch):
    found = gaps(clock(monkeypatch), lambda step: 50 if step == 0 else 0.1, 2000, every=100)
    assert found[0] < 112


def test_rank_0_asks_its_agent_once_and_again_only_after_a_while(monkeypatch):
    now = clock(monkeypatch)
    timer, asked = Timer(10), []
    for second in range(75):
        now[0] = second
        if timer.asks():
            asked.append(second)
    assert asked == [10, 70]
    timer.begin()
    now[0] += 10
    assert timer.asks()


# --- what a part of a state is, and what of it can be had -------------------------------------------------------------
def test_a_part_of_a_state_is_restored_and_the_rest_left_alone(three):
    state = fresh(-1)
    assert Checkpoints(three).restore({"model": state["model"]}) == 4
    assert (weight(state), state["epoch"]) == (3.0, -1)


def test_a_step_is_chosen(three):
    state = fresh(-1)
    ckpt = Checkpoints(three)
    assert ckpt.steps() == [1, 2, 3]
    assert (ckpt.restore(state, step=2), weight(state)) == (3, 2.0)
    with pytest.raises(CheckpointError, match=r"there is no such checkpoint \[step=9\].*steps \[1, 2, 3\]"):
        Checkpoints(three).restore(fresh(), step=9)


NO_DICT = r"the state is not a dict by names .*expected: \{\"model\": model"


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (torch.nn.Linear(1, 1), NO_DICT),
        ([1], NO_DICT),
        ({0: 1}, NO_DICT),
        ({"x": (one for one in ())}, r"state=x\].*generator"),
        ({"x": {"kept": threading.Lock()}}, r"state=x\.kept\].*lock"),
        ({"x": [1, {"kept": threading.Lock()}]}, r"state=x\.1\.kept\].*lock"),
        ({"x": [torch.empty(2, device="meta")]}, r"state=x\.0\].*torch.strided on meta"),
        ({"x": numpy.zeros(3)}, r"state=x\].*ndarray.*torch.from_numpy"),
        ({"x": numpy.datetime64("2026-11-27", "ns")}, r"state=x\].*numpy\.datetime64"),
        ({"x": numpy.timedelta64(3, "ns")}, r"state=x\].*numpy\.timedelta64"),
        ({"x": numpy.void(b"abc")}, r"state=x\].*numpy\.void"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_saved_is_refused_at_the_first_call(place, state, said):
    with pytest.raises(CheckpointError, match=said):
        Checkpoints(place).restore(state)
    with pytest.raises(CheckpointError, match=said):
        Checkpoints(place).save(0, state)  # not due for ten minutes
    assert not place.exists()


def test_an_extra_state_that_could_not_be_loaded_is_refused_by_the_first_save(place):
    with pytest.raises(CheckpointError, match=r"state=model._extra_state.0\].*object"):
        save(place, {"model": Keeps([object()])})


@pytest.mark.parametrize("other", [torch.ones(2), 1], ids=["two tensors", "a tensor and a number"])
def test_two_values_of_one_flat_name_are_refused_at_once(place, other):
    state = {"tree": {"a.b": other, "a": {"b": torch.ones(1)}}}
    for call in (Checkpoints(place).restore, partial(Checkpoints(place).save, 0)):  # which is not due
        with pytest.raises(CheckpointError, match=r"one name, joined by dots \[state=tree\.a\.b\]"):
            call(state)


def test_another_model_is_refused_and_nothing_is_loaded(three):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    before = model[0].weight.detach().clone()
    with pytest.raises(
        CheckpointError, match=r"not those of the model.*only saved: bias .2., weight .2, 2.; only here: 0.bias"
    ):
        Checkpoints(three).restore({"model": model})
    assert torch.equal(model[0].weight, before)


def test_a_model_that_has_no_memory_yet_is_refused_and_told_what_is_to_come_first(place):
    save(place, {"model": torch.nn.Linear(2, 2)})
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="on the meta device") as refused:
        Checkpoints(place).restore({"model": model})
    assert "to_empty" in str(refused.value)
    assert Checkpoints(place).restore({"model": model.to_empty(device="cpu")}) == 1


def test_torchs_own_tools_read_it(three, tmp_path):
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    newest = directory(three, 3)
    dcp_to_torch_save(newest, tmp_path / "one.pt")
    held = torch.load(tmp_path / "one.pt", weights_only=False)
    assert held["model"]["weight"].tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert held["epoch"] == 3
    template = {"model": {"weight": torch.zeros(2, 2)}}
    dcp.load(template, checkpoint_id=newest)
    assert template["model"]["weight"].tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_a_state_dict_of_dicts_and_lists_comes_back_as_it_was(place):
    inner = [torch.zeros(1), {"d": (1, 2)}, (torch.ones(1), ({"x": torch.zeros(()), 4: None},))]
    tree = {
        "a": {"b": torch.ones(2), "c": inner, "e": {}},
        3: {"x": torch.empty(0, 5)},
        "f": [],
        "g": ((), {"": torch.ones(1)}),
    }
    save(place, {"tree": tree})
    state = {"tree": None}
    assert Checkpoints(place).restore(state) == 1
    assert repr(state) == repr({"tree": tree})


# --- models and optimizers --------------------------------------------------------------------------------------------
def trained(model, make, steps=2):
    optimizer = make(model)
    for number in range(steps):
        optimizer.zero_grad()
        (model(torch.full((1, 4), float(number + 1))) * 100).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def two_layers(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to(dtype)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.1)


def backwards(model):
    return torch.optim.Adam([*model.parameters()][::-1], lr=0.1)


def moments(state):
    held = state["optimizer"].state
    return {name: held[each]["exp_avg"].tolist() for name, each in state["model"].named_parameters()}


def moved(place, saved, other):
    save(place, saved)
    Checkpoints(place).restore(other)


def test_an_optimizer_that_has_its_parameters_in_another_order_has_the_moments_of_each(place):
    saved, other = trained(two_layers(), adam), trained(two_layers(), backwards, steps=0)
    moved(place, saved, other)
    assert moments(other) == moments(saved)


def test_what_is_saved_before_the_first_step_has_no_state_and_takes_no_step(place):
    saved, other = trained(two_layers(), adam, steps=0), trained(two_layers(), backwards, steps=0)
    moved(place, saved, other)
    assert (len(saved["optimizer"].state), len(other["optimizer"].state)) == (0, 0)
    assert [each.grad for state in (saved, other) for each in state["model"].parameters()] == [None] * 8


def test_groups_of_no_parameters_keep_what_is_theirs(place):
    """As who sorts parameters into groups may have, with a model that has none of two kinds."""

    def make(model, rates=(0.0, 0.0, 0.0)):
        groups = [{"params": some, "lr": lr} for some, lr in zip(([], model.parameters(), []), rates, strict=True)]
        return torch.optim.AdamW(groups)

    other = trained(two_layers(), make, steps=0)
    moved(place, trained(two_layers(), lambda model: make(model, (0.1, 0.2, 0.3))), other)
    assert [group["lr"] for group in other["optimizer"].param_groups] == [0.1, 0.2, 0.3]


def test_other_groups_are_refused(place):
    model = two_layers()
    other = torch.optim.Adam([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    with pytest.raises(CheckpointError, match=r"not those that it steps \[state=optimizer\].*0.weight.*1.bias"):
        moved(place, trained(two_layers(), adam), {"model": model, "optimizer": other})


def test_an_optimizer_that_was_saved_by_names_is_not_restored_by_numbers(place):
    saved = trained(two_layers(), adam)
    with pytest.raises(CheckpointError, match=r"not those that it steps.*with the model in the state"):
        moved(place, saved, {"optimizer": adam(two_layers())})


def test_one_optimizer_of_two_models_is_saved_by_the_names_of_both(place):
    def pair(order):
        torch.manual_seed(1)
        one, two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        parameters = [*one.parameters(), *two.parameters()]
        return {"a.one": one, "b": two, "optimizer": torch.optim.Adam(order(parameters), lr=0.1)}

    saved, other = pair(list), pair(lambda some: some[::-1])
    (saved["a.one"](torch.ones(1, 4)).sum() + saved["b"](torch.ones(1, 4)).sum() * 7).backward()
    saved["optimizer"].step()
    moved(place, saved, other)
    for name in ("a.one", "b"):
        for one, two in zip(saved[name].parameters(), other[name].parameters(), strict=True):
            assert torch.equal(saved["optimizer"].state[one]["exp_avg"], other["optimizer"].state[two]["exp_avg"])


@pytest.mark.parametrize("mark", [lambda value: value, per_rank], ids=["of all", "per rank"])
def test_what_an_optimizer_holds_in_more_digits_than_its_parameters_keeps_them(place, mark):
    """torch's own load_state_dict() would round it: NAdam has a product of float32 for parameters of bfloat16."""
    saved, other = (trained(two_layers(torch.bfloat16).bfloat16(), lambda _: None, steps=0) for _ in range(2))
    for state in (saved, other):
        state["optimizer"] = torch.optim.NAdam(state["model"].parameters(), lr=0.1)
    saved["model"](torch.ones(1, 4).bfloat16()).sum().backward()
    saved["optimizer"].step()
    optimizers = [state["optimizer"] for state in (saved, other)]
    moved(place, {"optimizer": mark(optimizers[0])}, {"optimizer": mark(optimizers[1])})
    products = [[held["mu_product"] for held in each.state.values()] for each in optimizers]
    assert products[0] == products[1]
    assert {each.dtype for each in products[1]} == {torch.float32}


class Unlike(torch.nn.Module):
    """A model that loads half of what it is given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def _load_from_state_dict(self, state, prefix, *rest):
        super()._load_from_state_dict({f"{prefix}weight": state[f"{prefix}weight"] / 2}, prefix, *rest)


def test_a_model_that_loads_something_else_than_was_saved_is_an_error_that_names_it(place):
    with pytest.raises(CheckpointError, match=r"not what was saved: it is not safe to go on \[state=model.weight\]"):
        moved(place, {"model": Unlike()}, {"model": Unlike()})


class Begins:
    """What sets a value anew as it is loaded: a trainer, say."""

    def __init__(self, sets=bool):
        self.load_state_dict = lambda _: sets()

    def state_dict(self):
        return {"epoch": 7}


def test_what_an_object_sets_as_it_is_loaded_is_as_it_was_saved_or_an_error(place):
    state = fresh(5)
    groups = state["optimizer"].state_dict()["param_groups"]
    sets = Begins(lambda: state["optimizer"].param_groups[0].update(lr=3.0))
    moved(place, {**state, "trainer": Begins()}, {**state, "trainer": sets})
    assert state["optimizer"].state_dict()["param_groups"] == groups
    with pytest.raises(CheckpointError, match=r"not what was saved: it is not safe to go on \[state=model.weight\]"):
        Checkpoints(place).restore({**state, "trainer": Begins(state["model"].weight.data.zero_)})


class Keeps(torch.nn.Module):
    """A model with a buffer that grows, and an extra state."""

    def __init__(self, kept=None):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.register_buffer("history", torch.zeros(0 if kept is None else len(kept)))
        self.kept = kept

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state

    def _load_from_state_dict(self, state, prefix, *rest):
        self.history = state[f"{prefix}history"].clone()
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize(
    "kept", [torch.tensor([1.0, 2.0]), (1, [2.0]), {"a": torch.ones(2)}, [numpy.float64(0.5)]], ids=str
)
def test_what_a_model_keeps_besides_is_its_own_affair(place, kept):
    saved, other = Keeps(kept), Keeps()
    moved(place, {"model": saved}, {"model": other})
    assert repr(other.kept).replace("np.float64(0.5)", "0.5") == repr(kept).replace("np.float64(0.5)", "0.5")
    assert len(other.history) == len(kept)


def test_numbers_of_numpys_are_numbers(place):
    saved = trained(two_layers(), adam)
    saved["optimizer"].param_groups[0]["lr"] = numpy.float64(0.05)
    saved |= {"best": numpy.float32(0.5), "seen": [numpy.int64(3)]}
    other = {**trained(two_layers(), adam, steps=0), "best": None, "seen": []}
    moved(place, saved, other)
    assert (other["best"], other["seen"], type(other["best"])) == (0.5, [3], float)
    assert other["optimizer"].param_groups[0]["lr"] == 0.05


def test_a_layer_that_was_wrapped_when_it_was_saved_is_the_same_without(place):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    saved, other = trained(two_layers(), adam), trained(two_layers(), adam, steps=0)
    saved["model"][0] = torch.compile(checkpoint_wrapper(saved["model"][0]))
    moved(place, saved, other)
    assert torch.equal(other["model"][1].weight, saved["model"][1].weight)
    assert moments(other)["0.weight"] != moments(other)["1.weight"]


class Added(torch.nn.Linear):
    """A layer that saves something under a key that is no attribute of its own, as quantised ones do."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.weight.detach().abs().max()

    def _load_from_state_dict(self, state, prefix, *rest):
        self.loaded = state.pop(f"{prefix}weight.absmax")
        super()._load_from_state_dict(state, prefix, *rest)


def test_a_key_that_is_no_attribute_of_the_model_is_saved_too(place):
    saved, other = Added(2, 2), Added(2, 2)
    moved(place, {"model": torch.compile(saved)}, {"model": other})
    assert other.loaded == saved.weight.abs().max()


# --- in place, and back -----------------------------------------------------------------------------------------------
def test_the_users_own_lists_dicts_and_tensors_are_filled(place):
    mine = {"history": [1.5], "ema": {"a": torch.ones(2), "b": (torch.ones(1), 3)}, "name": "before"}
    save(place, {"history": [2.5, 3.5], "ema": {"a": torch.zeros(2), "b": (torch.zeros(1), 4)}, "name": "x"})
    state, history, ema, tensor = dict(mine), mine["history"], mine["ema"], mine["ema"]["a"]
    Checkpoints(place).restore(state)
    assert (state["history"] is history, state["ema"] is ema, ema["a"] is tensor) == (True, True, True)
    assert (history, tensor.tolist(), state["name"]) == ([2.5, 3.5], [0.0, 0.0], "x")
    assert repr(ema["b"]) == "(tensor([0.]), 4)"


def test_an_ordered_dict_of_the_users_stays_one(place):
    save(place, {"bank": OrderedDict(b=torch.ones(1), a=torch.zeros(1))})
    state = {"bank": OrderedDict(a=torch.ones(1))}
    before = state["bank"]
    Checkpoints(place).restore(state)
    assert state["bank"] is before
    assert repr(before) == repr(OrderedDict(b=torch.ones(1), a=torch.zeros(1)))


def test_a_tensor_of_another_type_or_that_overlaps_itself_is_replaced_not_cast(place):
    save(place, {"x": torch.full((2,), 0.1, dtype=torch.float64), "y": torch.arange(2.0)})
    state = {"x": torch.zeros(2), "y": torch.zeros(1).expand(2)}
    Checkpoints(place).restore(state)
    assert (state["x"].dtype, state["x"].tolist(), state["y"].tolist()) == (torch.float64, [0.1, 0.1], [0.0, 1.0])


def test_after_going_back_the_new_branch_is_the_newest_and_the_step_gone_back_to_stays(place):
    with Checkpoints(place, every=100, keep=3) as ckpt:
        for step in range(1000):
            ckpt.save(step, fresh(1))
    ckpt, state = Checkpoints(place, every=20, keep=3), fresh(-1)
    assert ckpt.restore(state, step=799) == 800
    for step in range(800, 865):
        ckpt.save(step, fresh(2))
    ckpt.wait()
    assert ckpt.steps() == [799, 819, 839, 859]
    assert resumed(place)[0] == 860
    assert Checkpoints(place).restore(state, step=799) == 800


def test_a_step_that_numpy_has_found_can_be_gone_back_to(three):
    with Checkpoints(three, every=None) as ckpt:
        ckpt.restore(fresh(), step=numpy.int64(2))
        ckpt.save(5, fresh(5), force=True)
    assert resumed(three) == (6, 5.0, 5)


def test_a_run_that_goes_back_saves_again_what_it_comes_to_again(place):
    """Else the branch that was given up is resumed."""
    with Checkpoints(place, every=1) as ckpt:
        for value, first in ((1, 0), (2, 2)):
            for step in range(first, 3):
                ckpt.save(step, fresh(value))
            ckpt.wait()
            ckpt.restore(fresh(-1), step=1)
    assert resumed(place)[:2] == (3, 2.0)


def test_a_save_is_newer_than_all_there_are_also_where_the_clock_of_its_node_is_behind(place):
    ahead = place / "step-000000000050.9700000000000.00000000"
    save(place, fresh(50), 50)
    directory(place, 50).rename(ahead)
    with Checkpoints(place, every=None, keep=1) as ckpt:
        ckpt.save(60, fresh(60), force=True)
    assert resumed(place)[0] == 61


class Average:
    """Weights on the average, which begin as the weights themselves."""

    def __init__(self, model):
        self.weights = [each.detach() for each in model.parameters()]

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights = state["weights"]


@pytest.mark.parametrize(
    ("names", "width"), [(("model", "average"), 2), (("average", "model"), 2), (("model", "average"), 1)]
)
def test_what_lies_in_a_models_memory_before_the_restore_is_read_into_its_own(place, names, width):
    def state(average=None):
        model = torch.nn.Linear(width, width)
        torch.nn.init.constant_(model.weight, 1)
        both = {"model": model, "average": Average(model)}
        if average is not None:
            both["average"].weights = [torch.full_like(each, average) for each in both["average"].weights]
        return {name: both[name] for name in names}

    save(place, state(average=7.0))
    restored = state()
    Checkpoints(place).restore(restored)
    assert (weight(restored), restored["average"].weights[0].unique().tolist()) == (1.0, [7.0])


def two(tied):
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(2))
    if tied:
        layers[1].weight = layers[0].weight
    return {"model": layers}


@pytest.mark.parametrize(("before", "after"), [(False, True), (True, True), (True, False)])
def test_layers_that_were_saved_apart_are_not_restored_into_one(place, before, after):
    saved, restored = two(before), two(after)
    save(place, saved)
    if after and not before:
        with pytest.raises(CheckpointError, match="what was loaded is not what was saved"):
            Checkpoints(place).restore(restored)
        return
    Checkpoints(place).restore(restored)
    assert all(torch.equal(one.weight, saved["model"][at].weight) for at, one in enumerate(restored["model"]))


def test_two_of_a_task_that_save_at_one_place_in_turns_are_refused(place):
    run, best = Checkpoints(place, every=1), Checkpoints(place, every=None, keep=1)
    for ckpt in (run, best, run):
        ckpt.save(0 if ckpt.latest is None else 1, {"x": 0}, force=True)
        ckpt.wait()
    with pytest.raises(CheckpointError, match=r"two save at one place: .*another Checkpoints of this task"):
        run.save(2, {"x": 1})


@pytest.fixture
def of_job(monkeypatch):
    """Have this process be a rank of a job."""

    def enter(job, attempt=0):
        monkeypatch.setattr("flytekitplugins_safedist.rank.context.current_rank", lambda: rank)
        rank = SimpleNamespace(job=job, attempt=attempt, rank=0, world_size=1)

    monkeypatch.setattr("flytekitplugins_safedist.checkpoint.agreement.of_rank", lambda: None)
    return enter


def begun_save(place, step, after=0):
    """The directory of one that is not committed."""
    made = place / saves.new_name(step, after)
    made.mkdir(parents=True)
    (made / "__0_0.distcp").touch()
    return made


def test_two_jobs_that_save_at_one_place_at_once_are_refused_and_neither_takes_the_others_unfinished_save(
    place, of_job
):
    of_job("one")
    one = Checkpoints(place, every=1, keep=None)
    of_job("two")
    two = Checkpoints(place.parent / "." / "other" / ".." / "place", every=1, keep=1)  # as from another process
    save_each(two, 0)
    save_each(one, 1)
    directory(place, 1).joinpath(saves.MANIFEST).rename(place / "later")  # it is still being written
    save_each(two, 2)
    (place / "later").rename(directory(place, 1) / saves.MANIFEST)
    save_each(one, 3)
    with pytest.raises(CheckpointError, match=r"two save at one place: .*saves of job two"):
        one.save(4, {"x": 4})


@pytest.mark.parametrize("restores", [False, True], ids=["", "restored meanwhile"])
def test_what_another_job_saves_here_meanwhile_is_never_removed(place, of_job, restores):
    """Its own newest is what it would go on from."""
    of_job("one")
    one = Checkpoints(place, every=1, keep=1)
    save_each(one, 0)
    of_job("two")
    with Checkpoints(place.parent / "." / "other" / ".." / "place", every=1, keep=1) as two:
        two.save(7, {"x": 7})
    if restores:
        assert one.restore({"x": 0}) == 8
    save_each(one, 9)
    assert one.steps() == [7, 9]


def test_a_save_is_newer_than_those_of_an_attempt_that_is_cut_off_and_goes_on_with_its_clock_ahead(place, of_job):
    of_job("job")
    after = Checkpoints(place, every=1, keep=None)
    save_each(after, 5)
    with Checkpoints(place.parent / "." / "other" / ".." / "place", every=1, keep=None) as before:
        before.save(4, {"x": 4})
    directory(place, 4).rename(place / "step-000000000004.9700000000000.00000000")
    save_each(after, 6, 7)  # the first of them finds it
    assert Checkpoints(place).restore({"x": 0}) == 8


def test_an_attempt_that_wakes_before_its_first_save_saves_nothing_over_a_later_ones(place, of_job):
    of_job("job", attempt=1)
    before = Checkpoints(place, every=1)
    assert before.restore({"x": 0}) == 0
    of_job("job", attempt=2)
    with Checkpoints(place, every=1) as after:
        save_each(after, 0, 1)
    with pytest.raises(CheckpointError, match=r"a later attempt goes on .*saves of attempt 2; this is attempt 1"):
        before.save(0, {"x": 0})
    assert Checkpoints(place).restore({"x": 0}) == 2


def test_an_attempt_that_wakes_before_its_first_save_leaves_alone_what_a_later_one_writes_just_then(place, of_job):
    of_job("job")
    before = Checkpoints(place, every=1)
    left = begun_save(place, 3)
    assert before.restore({"x": 0}) == 0
    of_later = begun_save(place, 7, after=saves.time_of(left.name))
    save_each(before, 4)
    assert (left.is_dir(), of_later.is_dir()) == (False, True)


def test_a_later_attempts_save_that_is_committed_while_an_earlier_one_wakes_and_saves_counts(place, of_job):
    """Its name is the older one, and it was not whole when the earlier one's save was begun."""
    of_job("job")
    before = Checkpoints(place, every=1, keep=1)
    assert before.restore({"x": 0}) == 0
    of_job("job", attempt=1)
    save_each(Checkpoints(place, every=1, keep=1), 7)
    manifest = directory(place, 7) / saves.MANIFEST
    manifest.rename(place / "in work")
    with at_points(lambda point: (place / "in work").rename(manifest) if point == points.SAVE_BEGUN else None):
        save_each(before, 4)
    of_job("job", attempt=2)
    assert Checkpoints(place).restore(state := {"x": 0}) == 8
    assert state["x"] == 7


@pytest.mark.parametrize("keep", [1, None])
def test_an_attempt_that_wakes_when_a_later_one_has_saved_hides_nothing_of_it_and_removes_none(place, of_job, keep):
    of_job("job")
    before = Checkpoints(place, every=1, keep=keep)
    save_each(before, 4, 5)
    of_job("job", attempt=1)
    with Checkpoints(place, every=1, keep=keep) as after:
        assert after.restore({"x": 0}) == 6
        save_each(after, 6, 7)
    save_each(before, 6)
    with pytest.raises(CheckpointError, match=r"a later attempt goes on .*saves of attempt 1; this is attempt 0"):
        before.save(7, {"x": 0})
    of_job("job", attempt=2)
    assert Checkpoints(place).restore(state := {"x": 0}) == 8
    assert state["x"] == 7


def test_the_step_gone_back_to_stays_where_the_job_has_gone_on_since(place, of_job):
    of_job("before")
    save_each(Checkpoints(place, every=1, keep=None), *range(4))
    of_job("job")
    for first in (2, 4, 6):
        with Checkpoints(place, every=1, keep=1) as ckpt:
            assert ckpt.restore({"x": 0}, step=1) == first
            for step in range(first, first + 2):
                ckpt.save(step, {"x": step})
    assert ckpt.steps() == [1, 7]
    of_job("another")
    for each in (Checkpoints(place), Checkpoints(place.parent / "other", resume_from=str(place))):
        assert each.restore({"x": 0}, step=1) == 2, "what a job has saved since it went back is its own way"


def test_where_the_newest_of_a_branch_is_damaged_its_job_goes_on_from_the_one_before(place, of_job):
    of_job("job")
    save_each(Checkpoints(place, every=1, keep=None), *range(6))
    for first in (3, 5):
        with Checkpoints(place, every=1, keep=None) as ckpt:
            assert ckpt.restore({"x": 0}, step=2) == first
            for step in range(first, 6):
                ckpt.save(step, {"x": step})
        newest = saves.committed(store.Store(str(place)))[0]
        (place / newest / saves.MANIFEST).write_text("{}")


def test_saves_that_are_found_damaged_do_not_count(place):
    save_each(Checkpoints(place, every=1, keep=3), *range(3))
    for step in (1, 2):
        (directory(place, step) / saves.MANIFEST).write_text("{}")
    with Checkpoints(place, every=1, keep=2) as ckpt:
        assert ckpt.restore({"x": 0}) == 1
        ckpt.save(1, {"x": 1})
    assert ckpt.steps() == [0, 1, 2]


def test_a_manifest_that_comes_late_to_a_save_that_is_removed_counts_for_none(place):
    """A store that was away, or an attempt that is cut off, has put it."""
    save_each(Checkpoints(place, every=1), 0, 1)
    for path in directory(place, 1).iterdir():
        if path.name != saves.MANIFEST:
            path.unlink()
    ckpt = Checkpoints(place, every=1, keep=2)
    save_each(ckpt, 2)
    assert ckpt.steps() == [0, 2]


def test_on_an_object_store_a_save_that_goes_while_it_is_read_is_passed_over(monkeypatch):
    place, looks = "memory://goes", []
    with Checkpoints(place, every=1) as ckpt:
        for step in range(2):
            ckpt.save(step, {"x": torch.full((2,), float(step))})
    filesystem = fsspec.filesystem("memory")
    read = type(filesystem).cat_ranges

    def cat_ranges(self, paths, *arguments, **options):
        if not looks:
            looks.append(self.rm_file(paths[0]))
        return read(self, paths, *arguments, **options)

    monkeypatch.setattr(type(filesystem), "cat_ranges", cat_ranges)
    state = {"x": torch.zeros(2)}
    assert Checkpoints(place).restore(state) == 1
    assert state["x"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("asked", ["ls", "cat_file", "cat_ranges"])
def test_an_object_store_that_says_once_that_nothing_is_there_is_not_believed(monkeypatch, asked):
    """Training would begin anew, and its saves would remove these."""
    place = f"memory://once-{asked}"
    save(place, {"x": torch.ones(2)}, 4)
    memory = type(fsspec.filesystem("memory"))
    answer, said = getattr(memory, asked), []

    def missing_once(self, *arguments, **options):
        if not said:
            said.append(404)
            raise FileNotFoundError(*said)
        return answer(self, *arguments, **options)

    monkeypatch.setattr(memory, asked, missing_once)
    state = {"x": torch.zeros(2)}
    assert (Checkpoints(place).restore(state), state["x"].tolist()) == (5, [1.0, 1.0])


def test_where_all_saves_that_were_there_have_gone_meanwhile_the_newer_one_is_taken(monkeypatch):
    """Who saves keeps one; another job evaluates it."""
    place = "memory://newer"
    saver = Checkpoints(place, every=1, keep=1)
    saver.save(0, {"x": torch.zeros(2)})
    saver.wait()
    filesystem = fsspec.filesystem("memory")
    read = type(filesystem).cat_ranges

    def cat_ranges(self, *arguments, **options):
        monkeypatch.setattr(type(filesystem), "cat_ranges", read)
        saver.save(1, {"x": torch.ones(2)})
        saver.wait()
        return read(self, *arguments, **options)

    monkeypatch.setattr(type(filesystem), "cat_ranges", cat_ranges)
    state = {"x": torch.full((2,), 9.0)}
    assert Checkpoints(place).restore(state) == 2
    assert state["x"].tolist() == [1.0, 1.0]


def test_a_place_from_which_something_goes_while_it_is_listed_is_not_an_empty_one(three, monkeypatch):
    """fsspec of 2023 fails then as where there is nothing at all."""
    local, gone = fsspec.implementations.local.LocalFileSystem, three / "gone"

    def ls(self, path, detail=False, **options):
        return [self.info(each) for each in (*Path(path).iterdir(), gone)]

    monkeypatch.setattr(local, "ls", ls)
    assert resumed(three) == (4, 3.0, 3)


PLAIN = [
    *(
        None,
        True,
        1,
        -1.5,
        "x\ud800",
        b"ab",
        bytearray(b"q"),
        1 + 2j,
        (1, [2, {3: 4, (1, 2): "t"}]),
        {"dict": {"a": 1}},
    ),
    *({1, 2}, frozenset("a"), torch.Size([1, 2]), torch.bfloat16, torch.device("cpu")),
    *(OrderedDict(a=1), Counter("aab"), float("inf"), 1 << 80, numpy.float32(0.5)),
]


def test_plain_values_come_back_as_they_were():
    again = [from_bytes(to_bytes(value, "x")) for value in PLAIN]
    assert again == PLAIN
    assert [type(each) for each in again] == [type(value) for value in PLAIN[:-1]] + [float]


TENSORS = {
    "bf16": torch.ones(2, 2, dtype=torch.bfloat16),
    "sparse": torch.eye(3).to_sparse(),
    "empty": torch.empty(0, 3),
    "of no dimension": torch.tensor(True),
    "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("key", [1.5, (1, 2)], ids=repr)
def test_tensors_under_other_keys_than_text_come_back_as_they_were(key):
    for name, tensor in TENSORS.items():
        again = from_bytes(to_bytes({key: tensor}, "x"))[key]
        assert (name, again.dtype, again.layout) == (name, tensor.dtype, tensor.layout)
        assert torch.equal(again.to_dense(), tensor.to_dense()), name


def test_numbers_that_change_their_places_in_the_middle_of_a_tensor_change_its_mark():
    tensor = torch.arange(100_000, dtype=torch.int64)
    other = [tensor.clone() for _ in range(3)]
    other[0][[50_000, 50_001]] = tensor[[50_001, 50_000]]
    other[1][[50_000, 50_000 + 1024]] = tensor[[50_000 + 1024, 50_000]]
    other[2][[50_000, 70_001]] = tensor[[70_001, 50_000]]
    assert len({*marks([tensor, *other, tensor.view(torch.float64)])}) == 5
    of_a_device = [sums(each.view(torch.uint8)) for each in (tensor, *other)]
    assert len({bytes(each.tolist()) for each in of_a_device}) == 4
    assert len(of_a_device[0]) < 0.05 * tensor.nbytes


def test_a_view_that_is_conjugated_as_it_is_read_has_the_mark_of_what_it_shows():
    assert marks([torch.tensor([1 + 2j]).conj()]) == marks([torch.tensor([1 - 2j])])


def test_what_a_failed_save_could_not_remove_goes_with_the_next_commit(place, monkeypatch):
    refused, remove = [], store.Store.remove

    def once(self, name):
        if not refused:
            refused.append(name)
            raise OSError(5, "Input/output error")
        remove(self, name)

    def fail(point):
        if point == points.PARTS_WRITTEN and not refused:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(store.Store, "remove", once)
    monkeypatch.setattr(points, "on_point", fail)
    ckpt = Checkpoints(place, every=1)
    for step in (0, 1):
        ckpt.save(step, {"x": step})
    ckpt.wait()
    assert [saves.step_of(path.name) for path in place.iterdir()] == [1]


def test_old_saves_that_cannot_be_removed_stay_and_fail_nothing(place, monkeypatch, caplog):
    def refused(self, name):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(store.Store, "remove", refused)
    ckpt = Checkpoints(place, every=1, keep=1)
    save_each(ckpt, *range(6))
    assert ckpt.steps() == [0, 1, 2, 3, 4, 5]
    assert 0 < caplog.text.count("and nothing else is wrong: Access Denied") < 5


def test_of_a_save_at_a_place_that_is_a_file_the_log_says_that_alone(place, caplog):
    place.write_text("a file")
    with pytest.raises(PathBlockedError, match=f"file={place}]"), Checkpoints(place / "ck", every=1) as ckpt:
        ckpt.save(0, {"x": 1})
    assert "nothing else is wrong" not in caplog.text


def test_a_failed_save_leaves_nothing_and_says_what_the_file_system_said(place):
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    ckpt = Checkpoints(place, every=None)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        ckpt.save(2, {"x": torch.ones(10_000)}, force=True)
        with pytest.raises(FsError, match=r"cannot write: .*__0_0.distcp.*file_system=.*EFBIG"):
            ckpt.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(place.iterdir()) == []


def test_the_log_has_a_line_for_the_first_saves_and_then_for_fewer_and_fewer(place, caplog):
    caplog.set_level("INFO")
    save_each(Checkpoints(place, every=1, keep=1), *range(20))
    said = [
        int(line.partition(" is committed, save ")[2].partition(";")[0])
        for line in caplog.messages
        if "committed" in line
    ]
    assert said == [1, 2, 3, 4, 8, 16]


def test_under_another_default_device_saves_and_restores_are_as_ever(place):
    saved, other = trained(two_layers(), adam), trained(two_layers(), adam, steps=0)
    with torch.device("meta"):
        moved(place, {**saved, "x": torch.ones(2, device="cpu")}, {**other, "x": None})
    assert moments(other) == moments(saved)


def test_in_a_process_that_goes_on_what_is_dropped_is_gone_with_its_copy_and_its_thread(place):
    """A notebook, a sweep: each run makes its own. What is in flight is written all the same."""

    def run(number):
        ckpt = Checkpoints(place / str(number), every=None)
        ckpt.save(0, fresh(1.0), force=True)
        return weakref.ref(ckpt)

    before = {*threading.enumerate()}  # other tests' may be there still
    dropped = [run(number) for number in range(3)]
    until(lambda: not any(each() for each in dropped), "nothing holds them")
    until(lambda: {*threading.enumerate()} <= before, "their threads end")
    assert [Checkpoints(place / str(number)).steps() for number in range(3)] == [[0]] * 3


def test_the_root_of_a_file_system_is_a_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = store.Store("/")
    (tmp_path / "x").write_bytes(b"there")
    assert root.get(str(tmp_path / "x")[1:]) == b"there"


def test_a_relative_place_is_where_it_was_named_wherever_the_working_directory_is_then(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ckpt = Checkpoints("place", every=None)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert ckpt.steps() == []
    ckpt.save(0, fresh(), force=True)
    ckpt.wait()
    assert Checkpoints(place).steps() == [0]
