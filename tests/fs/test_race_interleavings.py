"""claim, once_* and publish under orders of single file-system calls, and deaths, that hypothesis thinks of."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings

from flytekitplugins_safedist.errors import FsError, WorkerLostError, WorkFailedError
from flytekitplugins_safedist.fs import Identity, claim, file_group, once_per_job, publish
from tests.fs.ranks import pause
from tests.fs.stepping import Stepped, run, schedules
from tests.harness.product import once

SLOW = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def _identity(rank: int, world_size: int) -> Identity:
    return Identity(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)


@SLOW
@given(schedules(3))
def test_claim_at_most_one_living_holder_and_everyone_living_gets_it(schedule):
    with tempfile.TemporaryDirectory() as place:
        lock = Path(place, "lock")

        def hold() -> str:
            with claim(lock, timeout=30):
                pause("inside")
            return "done"

        def check(stepped: Stepped) -> None:
            assert stepped.at.count("inside") <= 1

        outcomes = run([hold] * 3, schedule, check)
        assert all(outcome.kind == "killed" or outcome.get() == "done" for outcome in outcomes)
        assert not lock.exists() or any(outcome.kind == "killed" for outcome in outcomes)


def _once_actor(place: str, rank: int, ranks: int, on_death: str, *, fails: bool = False):
    def act() -> str:
        once.LOOK_S, once.PULSE_S = 0.01, 3600
        group = file_group(Path(place, "notes"), identity=_identity(rank, ranks))

        def work() -> str:
            handle = os.open(Path(place, "begun"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.write(handle, b"x")
            os.close(handle)
            pause("working")
            if fails:
                raise ValueError("bad data")
            return f"by {rank}"

        return once_per_job("k", work, on_death=on_death, timeout=30, group=group)

    return act


def _begun(place: str) -> int:
    begun = Path(place, "begun")
    return len(begun.read_bytes()) if begun.exists() else 0


@SLOW
@given(schedules(3))
def test_once_works_at_most_once_and_all_survivors_agree(schedule):
    with tempfile.TemporaryDirectory() as place:
        outcomes = run([_once_actor(place, rank, 3, "fail") for rank in range(3)], schedule, lambda stepped: None)
        survivors = [outcome for outcome in outcomes if outcome.kind != "killed"]
        assert _begun(place) <= 1
        values = {outcome.get() for outcome in survivors if outcome.kind == "value"}
        errors = {type(outcome.error()) for outcome in survivors if outcome.kind != "value"}
        assert len(values) + len(errors) == (1 if survivors else 0)
        assert errors <= {WorkerLostError}
        assert not errors or len(survivors) < 3, "nobody is lost where nobody died"


@SLOW
@given(schedules(3))
def test_once_with_takeover_gives_every_survivor_the_one_result(schedule):
    with tempfile.TemporaryDirectory() as place:
        outcomes = run([_once_actor(place, rank, 3, "takeover") for rank in range(3)], schedule, lambda stepped: None)
        survivors = [outcome for outcome in outcomes if outcome.kind != "killed"]
        assert len({outcome.get() for outcome in survivors}) <= 1
        assert _begun(place) <= 1 + 3 - len(survivors)


@SLOW
@given(schedules(3))
def test_once_gives_every_survivor_the_one_error(schedule):
    with tempfile.TemporaryDirectory() as place:
        works = [_once_actor(place, rank, 3, "takeover", fails=True) for rank in range(3)]
        errors = [outcome.error() for outcome in run(works, schedule, lambda stepped: None) if outcome.kind != "killed"]
        assert {type(error) for error in errors} <= {WorkFailedError}
        assert all("ValueError: bad data" in str(error) for error in errors)


@settings(SLOW, max_examples=25)
@given(schedules(2, most=200))
def test_publish_is_all_or_nothing_at_every_step(schedule):
    with tempfile.TemporaryDirectory() as place:
        target = Path(place, "out", "made")

        def act(rank: int):
            def publish_part() -> str:
                once.LOOK_S, once.PULSE_S = 0.01, 3600
                group = file_group(Path(place, "notes"), identity=_identity(rank, 2))
                with publish(target, shared="yes", timeout=0.5, group=group) as part:
                    (part / f"part-{rank}").write_text("whole")
                    (part / "sub").mkdir()
                    (part / "sub" / f"part-{rank}").write_text("whole")
                return "published"

            return publish_part

        def whole() -> bool:
            try:
                return (
                    sorted(os.listdir(target)) == ["part-0", "part-1", "sub"] and len(os.listdir(target / "sub")) == 2
                )
            except FileNotFoundError:
                return False

        def check(stepped: Stepped) -> None:
            assert whole() or not target.exists()

        # So many that half a second, after which a rank gives up on the other, is over before them on any machine.
        outcomes = run([act(0), act(1)], schedule, check, most_steps=1_000_000)
        for outcome in outcomes:
            if outcome.kind == "value":
                assert whole()
            elif outcome.kind != "killed":
                assert isinstance(outcome.error(), FsError), outcome
        if all(outcome.kind == "value" for outcome in outcomes):
            assert os.listdir(target.parent) == ["made"], "no draft is left"
