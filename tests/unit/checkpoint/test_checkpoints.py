"""One process saves and resumes: what is found again, what is passed over, what is refused."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta

import pytest
import torch

from flytekitplugins_safedist.checkpoint import Checkpoints, saves, store
from flytekitplugins_safedist.checkpoint.due import EverySeconds
from flytekitplugins_safedist.errors import CheckpointError, ConfigError
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


@pytest.fixture
def three(place):
    """A place with the saves of steps 1, 2 and 3, whose weights are 1, 2 and 3."""
    ckpt = Checkpoints(place, every=None)
    for step in (1, 2, 3):
        ckpt.save(step, fresh(step), force=True)
    ckpt.wait()
    return place


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


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-1]), id="cut"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: path.unlink(), id="gone"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes() + b"x"), id="longer"),
        pytest.param(
            lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]), id="flipped"
        ),
    ],
)
def test_a_damaged_part_is_passed_over_and_said(three, damage, caplog, monkeypatch):
    monkeypatch.setattr(store, "LATE_SECONDS", 0.1)
    damage(directory(three, 3) / "__0_0.distcp")
    assert resumed(three) == (3, 2.0, 2)
    assert f"{directory(three, 3)} is passed over: a part of a save" in caplog.text


def test_a_damaged_manifest_is_passed_over_and_said(three, caplog):
    path = directory(three, 3) / saves.MANIFEST
    path.write_bytes(path.read_bytes()[:-10])
    assert resumed(three) == (3, 2.0, 2)
    assert f"{directory(three, 3)} is passed over: a manifest cannot be read" in caplog.text


def test_a_save_without_a_manifest_is_none(three):
    (directory(three, 3) / saves.MANIFEST).unlink()
    assert resumed(three) == (3, 2.0, 2)


def test_where_no_save_is_whole_training_does_not_begin_anew_silently(three, monkeypatch):
    monkeypatch.setattr(store, "LATE_SECONDS", 0.1)
    for step in (1, 2, 3):
        (directory(three, step) / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match="there are checkpoints, but none of them is complete"):
        resumed(three)


def test_only_the_newest_stay(place):
    ckpt = Checkpoints(place, every=1, keep=2)
    for step in range(5):
        ckpt.save(step, fresh(step))
    ckpt.wait()
    assert {saves.step_of(path.name) for path in place.iterdir()} - {-1} == {3, 4}


def test_what_a_crash_has_left_goes_with_the_next_commit(place):
    begun = place / "step-000000000007.1700000000000.00000000"
    begun.mkdir(parents=True)
    (begun / "__0_0.distcp").write_bytes(b"half")
    with Checkpoints(place, every=None) as ckpt:
        ckpt.save(1, fresh(), force=True)
    assert not begun.exists()


def test_what_is_saved_is_the_state_at_the_step_whatever_training_does_since(place):
    written = threading.Event()
    points.on_point = lambda point: written.wait(60) if point == points.SAVE_BEGUN else None
    try:
        state = fresh(1)
        ckpt = Checkpoints(place, every=None)
        ckpt.save(1, state, force=True)
        torch.nn.init.constant_(state["model"].weight, 2)
    finally:
        written.set()
        points.on_point = None
    ckpt.wait()
    assert resumed(place)[:2] == (2, 1.0)


def test_one_save_is_in_flight_and_waiting_for_it_is_said(place, caplog):
    caplog.set_level("INFO")
    said = "step 1 waits for the save of step 0, which has been under way"
    points.on_point = lambda point: until(lambda: said in caplog.text, said) if point == points.SAVE_BEGUN else None
    try:
        ckpt = Checkpoints(place, every=1)
        ckpt.save(0, fresh(0))
        ckpt.save(1, fresh(1))
        ckpt.wait()
    finally:
        points.on_point = None
    assert said in caplog.text
    assert resumed(place) == (2, 1.0, 1)


def test_by_time_a_save_in_flight_is_not_waited_for(place):
    written = threading.Event()
    points.on_point = lambda point: written.wait(60) if point == points.SAVE_BEGUN else None
    try:
        ckpt = Checkpoints(place, every=timedelta(microseconds=1))
        ckpt.save(0, fresh(0))
        ckpt.save(1, fresh(1))
    finally:
        written.set()
        points.on_point = None
    ckpt.wait()
    assert resumed(place) == (1, 0.0, 0)


def test_a_save_that_fails_is_said_and_raised_at_the_end_and_what_was_committed_stays(place, caplog):
    ckpt = Checkpoints(place, every=None)
    ckpt.save(1, fresh(1), force=True)
    ckpt.wait()

    def full_disk(point):
        if point == points.PART_OPENED:
            raise OSError(28, "No space left on device")

    points.on_point = full_disk
    try:
        ckpt.save(2, fresh(2), force=True)
        with pytest.raises(OSError, match="No space left"):
            ckpt.wait()
    finally:
        points.on_point = None
    assert "the save of step 2 failed; what was committed before stays: OSError" in caplog.text
    assert resumed(place) == (2, 1.0, 1)
    ckpt.save(3, fresh(3), force=True)
    ckpt.wait()
    assert resumed(place) == (4, 3.0, 3)


def test_a_failed_save_may_be_made_again_for_the_same_step(place):
    ckpt = Checkpoints(place, every=None)

    def fail(point):
        if point == points.PART_OPENED:
            raise OSError(5, "Input/output error")

    points.on_point = fail
    try:
        ckpt.save(2, fresh(2), force=True)
        with pytest.raises(OSError):
            ckpt.wait()
    finally:
        points.on_point = None
    ckpt.save(2, fresh(2), force=True)
    ckpt.wait()
    assert resumed(place) == (3, 2.0, 2)


def test_what_could_not_be_loaded_is_refused_when_it_is_saved(place):
    class Odd:
        pass

    ckpt = Checkpoints(place, every=None)
    with pytest.raises(CheckpointError, match=r"state=sampler\.kept.*Odd"):
        ckpt.save(1, {**fresh(), "sampler": {"kept": Odd()}})
    with pytest.raises(CheckpointError, match=r"state=sampler\.1\.kept.*Odd"):
        ckpt.save(1, {**fresh(), "sampler": [1, {"kept": Odd()}]})
    assert not place.exists()


def test_names_that_differ_are_refused_and_nothing_is_loaded(three):
    state = {"model": fresh(-1)["model"], "more": 1}
    with pytest.raises(CheckpointError, match=r"missing=more.*seen: saved: epoch, model, optimizer"):
        Checkpoints(three).restore(state)
    assert weight(state) == -1.0


def test_a_later_attempt_finds_what_an_earlier_one_has_saved(tmp_path):
    """Two places of one execution, as two attempts have them; the second knows the first by its address."""
    with Checkpoints(tmp_path / "old", every=None) as old:
        old.save(7, fresh(7), force=True)
    state = fresh()
    ckpt = Checkpoints(tmp_path / "new", every=None, resume_from=str(tmp_path / "old"))
    assert ckpt.restore(state) == 8
    ckpt.save(8, fresh(8), force=True)
    ckpt.wait()
    again = Checkpoints(tmp_path / "new", resume_from=str(tmp_path / "old"))
    assert again.restore(fresh()) == 9


def test_all_that_cannot_work_is_said_at_once(place):
    with pytest.raises(ConfigError, match=r"2 problems: keep=0 .*; every=0 "):
        Checkpoints(place, keep=0, every=0)
    with pytest.raises(ConfigError, match=r"every=.* is neither a number of steps nor a time .*more than 0"):
        Checkpoints(place, every=timedelta(0))


@pytest.mark.parametrize("every", [5.0, "10", True])
def test_what_is_neither_steps_nor_a_time_is_refused_not_left_to_never_save(place, every):
    with pytest.raises(ConfigError, match=r"every=.* is neither a number of steps nor a time"):
        Checkpoints(place, every=every)


def test_keep_is_a_number_of_saves(place):
    with pytest.raises(ConfigError, match="keep='3' is not a number of saves"):
        Checkpoints(place, keep="3")


@pytest.mark.parametrize("state", [torch.nn.Linear(1, 1), [1], {0: 1}], ids=["a model", "a list", "no names"])
def test_a_state_that_is_no_dict_by_names_is_refused_also_where_nothing_was_saved(place, state):
    with pytest.raises(CheckpointError, match=r"the state is not a dict by names .*expected: \{\"model\": model"):
        Checkpoints(place).restore(state)
    with pytest.raises(CheckpointError, match="the state is not a dict by names"):
        Checkpoints(place).save(0, state)


@pytest.mark.parametrize("step", [-1, "1", 1.0, torch.tensor(1)])
def test_a_step_that_is_no_number_from_0_is_refused(place, step):
    ckpt = Checkpoints(place, every=None)
    with pytest.raises(CheckpointError, match="a step is a number from 0 that never falls"):
        ckpt.save(step, fresh())
    with pytest.raises(CheckpointError, match="a step is a number from 0 that never falls"):
        ckpt.should_save(step)


def test_steps_that_begin_again_with_an_epoch_are_refused_for_the_oldest_epoch_would_be_resumed(place):
    ckpt = Checkpoints(place, every=None)
    for step in (0, 7, 7):
        ckpt.save(step, fresh())
    with pytest.raises(CheckpointError, match=r"step=0.*the one before was 7.*count steps over all epochs"):
        ckpt.save(0, fresh())


def test_steps_that_begin_again_after_a_resume_are_refused(three):
    ckpt = Checkpoints(three)
    assert ckpt.restore(fresh()) == 4
    with pytest.raises(CheckpointError, match="the one before was 3"):
        ckpt.save(0, fresh())


def test_a_named_place_without_saves_is_not_begun_anew_silently(place, tmp_path):
    ckpt = Checkpoints(place, resume_from=str(tmp_path / "mistyped"))
    with pytest.raises(CheckpointError, match=r"nothing was saved where to resume from .*mistyped"):
        ckpt.restore(fresh())


def test_a_scheduler_that_counts_its_milestones_is_saved(place):
    state = fresh()
    state["scheduler"] = torch.optim.lr_scheduler.MultiStepLR(state["optimizer"], [3, 5, 5])
    with Checkpoints(place) as ckpt:
        ckpt.save(1, state, force=True)
    other = fresh()
    other["scheduler"] = torch.optim.lr_scheduler.MultiStepLR(other["optimizer"], [1])
    assert Checkpoints(place).restore(other) == 2
    assert other["scheduler"].milestones == Counter({3: 1, 5: 2})


def test_without_a_place_the_error_says_how_to_give_one():
    with pytest.raises(CheckpointError, match="there is no place for checkpoints"):
        Checkpoints()


@pytest.mark.parametrize(("told", "due"), [(1, [9, 19, 29, 39]), (4, [12, 20, 32])])
def test_due_by_steps_at_multiples_whatever_steps_are_told(place, told, due):
    ckpt = Checkpoints(place, every=10)
    assert [step for step in range(0, 40, told) if ckpt.should_save(step)] == due


def test_due_by_time_since_the_last_was_begun_as_rank_0_says_at_few_steps():
    now = [0.0]
    policy, saved, looks, look = EverySeconds(100, clock=lambda: now[0]), [], 0, 0
    for step in range(1000):
        now[0] += 1
        if step >= look:
            looks += 1
            due, look = policy.judge(step, busy=False)
            saved += [step] * due
    assert saved == [99 + 100 * number for number in range(10)]
    assert looks < 40, "the ranks meet at few of them"


def test_by_time_a_slow_first_step_does_not_put_off_the_others():
    now = [0.0]
    policy, look = EverySeconds(100, clock=lambda: now[0]), 0
    for step, seconds in enumerate([50, *[0.1] * 2000]):
        now[0] += seconds
        if step >= look:
            due, look = policy.judge(step, busy=False)
            if due:
                break
    assert now[0] == pytest.approx(100, abs=12)


def test_by_time_a_save_that_is_being_written_is_not_waited_for_but_the_next_step_is_looked_at():
    now = [0.0]
    policy = EverySeconds(10, clock=lambda: now[0])
    now[0] = 10
    assert policy.judge(0, busy=True) == (False, 1)
    assert policy.judge(1, busy=False)[0]


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


def test_what_cannot_be_saved_is_refused_at_the_first_call(place):
    state = {**fresh(), "stream": (one for one in ())}
    with pytest.raises(CheckpointError, match=r"state=stream.*generator"):
        Checkpoints(place).restore(state)
    with pytest.raises(CheckpointError, match=r"state=stream.*generator"):
        Checkpoints(place).save(0, state)  # not due for ten minutes


def test_another_model_is_refused_and_nothing_is_loaded(three):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    before = model[0].weight.detach().clone()
    with pytest.raises(
        CheckpointError, match=r"not those of the model.*only saved: model.bias .2., model.weight .2, 2."
    ):
        Checkpoints(three).restore({"model": model})
    assert torch.equal(model[0].weight, before)


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
    tree = {"a": {"b": torch.ones(2), "c": [torch.zeros(1), {"d": (1, 2)}], "e": {}}, 3: {"x": torch.ones(1)}, "f": []}
    with Checkpoints(place) as ckpt:
        ckpt.save(0, {"tree": {key: tree[key] for key in ("a", "f")}, "odd": {3: tree[3]}}, force=True)
    state = {"tree": {}, "odd": None}
    assert Checkpoints(place).restore(state) == 1
    assert repr(state) == repr({"tree": {"a": tree["a"], "f": []}, "odd": {3: tree[3]}})


def test_two_values_of_one_flat_name_are_refused(place):
    with pytest.raises(CheckpointError, match=r"state=tree\.a\.b"), Checkpoints(place) as ckpt:
        ckpt.save(0, {"tree": {"a.b": 1, "a": {"b": 2}}}, force=True)
