"""Whether the ranks start again: a pure decision on the cause and on what the job's budget granted."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flytekitplugins_safedist.job.policy import Action, Decision, decide, would_repeat
from flytekitplugins_safedist.ranks.outcome import Fault, Raised, RankOutcome, Status
from tests.harness.outcomes import OUTCOMES, RAISED, failed, outcome, raised

REPEATING = failed(of=raised("ModuleNotFoundError", "No module named 'x'", repeats=True))


def test_no_budget_means_no_restart_and_says_which_setting() -> None:
    assert decide(0, cause=failed(), granted=None) == Decision(Action.GIVE_UP, "max_restarts=0")


def test_a_granted_restart_is_counted_against_the_budget_and_then_it_is_over() -> None:
    assert [decide(2, cause=failed(), granted=granted) for granted in (1, 2, None)] == [
        Decision(Action.RESTART, "restart 1 of 2"),
        Decision(Action.RESTART, "restart 2 of 2"),
        Decision(Action.GIVE_UP, "all 2 restart(s) of max_restarts are spent"),
    ]


def test_a_budget_of_one_that_is_spent_is_told_apart_from_none() -> None:
    spent = Decision(Action.GIVE_UP, "all 1 restart(s) of max_restarts are spent")
    assert decide(1, cause=failed(), granted=None) == spent


def test_an_error_that_will_repeat_is_given_up_whatever_the_budget() -> None:
    for granted in (None, 1):
        assert decide(5, cause=REPEATING, granted=granted) == Decision(
            Action.GIVE_UP, "ModuleNotFoundError would repeat: a restart cannot help"
        )
    assert would_repeat(REPEATING)


@pytest.mark.parametrize(
    "cause",
    [
        failed(),
        failed(of=raised(fault=Fault.RECOVERABLE)),
        failed(of=raised(fault=Fault.SYSTEM)),
        failed(of=raised(consequence=True)),
        outcome(0, Status.KILLED, exit_code=-signal.SIGKILL),
        outcome(0, Status.KILLED, exit_code=-signal.SIGSEGV),
        outcome(0, Status.EXITED, exit_code=7),
    ],
)
def test_any_other_failure_is_worth_asking_the_budget(cause: RankOutcome) -> None:
    assert not would_repeat(cause)
    assert decide(1, cause=cause, granted=1).action is Action.RESTART


@given(st.integers(0, 50), st.none() | st.integers(1, 50), OUTCOMES)
def test_there_is_no_restart_that_the_budget_did_not_grant(
    budget: int, granted: int | None, cause: RankOutcome
) -> None:
    decision = decide(budget, cause=cause, granted=granted)
    assert decision.reason
    assert (decision.action is Action.RESTART) == (granted is not None and not would_repeat(cause))


@given(st.integers(0, 50), RAISED)
def test_what_repeats_is_never_restarted(budget: int, error: Raised) -> None:
    assert would_repeat(failed(of=error)) is error.repeats
    assert error.repeats == (decide(budget, cause=failed(of=error), granted=1).action is Action.GIVE_UP)
