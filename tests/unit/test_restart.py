"""Whether the ranks start again: a pure decision on budget and cause."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flytekitplugins_safedist.outcome import Fault, Status
from flytekitplugins_safedist.restart import Action, Decision, Policy, decide
from tests.outcomes import OUTCOMES, RAISED, failed, outcome, raised


def test_no_budget_means_no_restart_and_says_which_setting() -> None:
    assert decide(Policy(0), restarts=0, cause=failed()) == Decision(Action.GIVE_UP, "max_restarts=0")


def test_the_budget_is_spent_one_by_one_and_then_it_is_over() -> None:
    reasons = [decide(Policy(2), restarts=done, cause=failed()) for done in range(4)]
    assert reasons == [
        Decision(Action.RESTART, "restart 1 of 2"),
        Decision(Action.RESTART, "restart 2 of 2"),
        Decision(Action.GIVE_UP, "all 2 restart(s) of max_restarts are spent"),
        Decision(Action.GIVE_UP, "all 2 restart(s) of max_restarts are spent"),
    ]


def test_an_error_that_will_repeat_does_not_spend_the_budget() -> None:
    cause = failed(of=raised("ModuleNotFoundError", "No module named 'x'", repeats=True))
    assert decide(Policy(5), restarts=0, cause=cause) == Decision(
        Action.GIVE_UP, "ModuleNotFoundError would repeat: a restart cannot help"
    )


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
def test_any_other_failure_is_worth_a_restart_while_there_is_budget(cause: object) -> None:
    assert decide(Policy(1), restarts=0, cause=cause).action is Action.RESTART  # type: ignore[arg-type]


@given(st.integers(0, 50), OUTCOMES)
def test_a_job_never_restarts_more_often_than_allowed(budget: int, cause: object) -> None:
    restarts = 0
    while decide(Policy(budget), restarts=restarts, cause=cause).action is Action.RESTART:  # type: ignore[arg-type]
        restarts += 1
        assert restarts <= budget


@given(st.integers(0, 50), st.integers(0, 50), RAISED)
def test_what_repeats_is_never_restarted(budget: int, restarts: int, error: object) -> None:
    decision = decide(Policy(budget), restarts=restarts, cause=failed(of=error))  # type: ignore[arg-type]
    repeats = error.repeats  # type: ignore[attr-defined]
    assert decision.action is (Action.RESTART if not repeats and restarts < budget else Action.GIVE_UP)
    assert decision.reason
