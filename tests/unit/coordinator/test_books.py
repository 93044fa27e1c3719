"""What rounds cost, how books are merged, and the end that they come to."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flytekitplugins_safedist.coordinator.books import (
    Books,
    Cause,
    Leader,
    Loss,
    Memory,
    Outcome,
    Round,
    judge,
)
from tests.unit.coordinator.coordination import FIXED, RANGE

ME = Leader(1, "a")


def cause(number: int = 0, **facts: object) -> Cause:
    known = {"name": "ValueError", "text": f"text {number}", "time_ns": 10, "machine": "m1", "where": "node 1 (m1)"}
    return Cause(Round(ME, number), 1, **{**known, **facts})  # type: ignore[arg-type]


def failed(number: int, **facts: object) -> Outcome:
    return Outcome(Round(ME, number), cause(number, **facts))


def lost(number: int, **facts: object) -> Outcome:
    return Outcome(Round(ME, number), loss=Loss("node 1", "gone", **facts))  # type: ignore[arg-type]


def books(*outcomes: Outcome) -> Books:
    return Books(Round(ME, len(outcomes)), 3, outcomes=outcomes)


LOSS, OWN, ECHO = Loss("node 1", "gone"), cause(), cause(echo=4)


@pytest.mark.parametrize(
    ("facts", "costs"),
    [
        ({"cause": OWN}, "restart"),
        ({"cause": OWN, "loss": LOSS}, "restart"),
        ({"cause": OWN, "free": "a node joins"}, "restart"),
        ({"cause": ECHO}, "restart"),
        ({"cause": ECHO, "loss": LOSS}, "replacement"),
        ({"cause": ECHO, "free": "a node joins"}, "nothing"),
        ({"loss": LOSS}, "replacement"),
        ({"loss": LOSS, "free": "a node joins"}, "replacement"),
        ({"free": "a node joins"}, "nothing"),
    ],
)
def test_one_round_costs_one_thing(facts, costs):
    assert Outcome(Round(ME, 0), **facts).costs == costs


outcomes = st.builds(
    Outcome,
    st.builds(Round, st.builds(Leader, st.integers(1, 2), st.sampled_from("ab")), st.integers(0, 2)),
    cause=st.none()
    | st.builds(lambda echo, at: cause(echo=echo, time_ns=at), st.sampled_from([0, 4]), st.integers(0, 3)),
    loss=st.none() | st.just(LOSS),
    free=st.sampled_from(["", "a node joins"]),
)


@given(st.lists(outcomes, max_size=5))
def test_whoever_has_the_same_books_comes_to_the_same_end_in_whatever_order_it_has_learned_them(some):
    ends, found = set(), set()
    for order in itertools.islice(itertools.permutations(some), 24):
        merged = Books()
        for outcome in order:
            merged = merged.merged(Books(outcome.round, 3).noting(outcome))
        assert merged.merged(merged) is merged
        found.add(merged)
        ends.add(judge(merged, 1, FIXED))
    assert len(found) == len(ends) == 1


def test_of_one_cause_in_two_wordings_ones_own_stays_and_then_both_are_the_same():
    mine, theirs = books(failed(0, text="")), books(failed(0, text="long"))
    assert mine.merged(theirs) is mine


def test_of_two_losses_ones_own_stays_unless_the_other_alone_says_why_it_was():
    """Else two nodes that know of two would tell their leader so in turns, without end."""
    full = Memory(99, 100)
    plain, mine, theirs = books(lost(0)), books(lost(0, memory=full)), books(lost(0, memory=full, life=3.0))
    assert plain.merged(mine) == mine
    assert mine.merged(plain) is mine
    assert mine.merged(theirs) is mine


def test_a_new_round_keeps_what_was_before_without_its_texts():
    before = books(failed(0), lost(1)).beginning(Round(ME, 2), 4)
    assert (before.round.number, before.size) == (2, 4)
    assert [each.costs for each in before.outcomes] == ["restart", "replacement"]
    assert before.outcomes[0].cause.text == ""
    assert str(before.outcomes[0].cause) == "rank 1 failed (ValueError) on node 1 (m1)"


def test_the_rounds_before_one_are_told_in_a_line_each_and_no_other():
    job = books(failed(0, name="SIGKILL"), lost(1), failed(2))
    assert job.earlier(Round(ME, 2)) == [f"round 0 ended: {job.outcomes[0].why}", "round 1 ended: node 1: gone"]


@pytest.mark.parametrize(
    ("rules", "some", "why"),
    [
        (FIXED, [failed(0)], ""),
        (replace(FIXED, max_restarts=0), [failed(0)], "max_restarts=0"),
        (
            FIXED,
            [failed(0), failed(1), failed(2)],
            "all 2 restart(s) of max_restarts are spent, and it was ValueError each time",
        ),
        (FIXED, [failed(0, repeats=True)], "the same ValueError would come again"),
        (
            FIXED,
            [failed(0, step=7), failed(1, step=7)],
            "rank 1 with ValueError at step 7 has failed before: it is the code or the data, and a restart cannot help",
        ),
        (FIXED, [failed(0, step=7), failed(1, step=8)], ""),
        (FIXED, [failed(0, step=7), failed(1, step=7, name="KeyError")], None),
        (FIXED, [failed(0, step=-1), failed(1, step=-1)], ""),
    ],
)
def test_why_there_is_no_further_restart(rules, some, why):
    verdict = judge(books(*some), 1, rules)
    if why:
        assert (verdict.kind, verdict.text, verdict.cause) == ("failed", why, some[-1].cause)
    else:
        assert verdict is None


@pytest.mark.parametrize(
    ("steps", "ends"),
    [((7, 7, 7), True), ((7, 5, 6), True), ((7, 5, 8), False), ((5, 7, 7), False), ((7, -1, 6), False)],
    ids=["one place", "before it", "further at last", "further at first", "who knows where"],
)
def test_restarts_that_bring_no_progress_end_the_job_though_some_are_left(steps, ends):
    some = [Outcome(Round(ME, at), replace(cause(at, step=step), rank=at)) for at, step in enumerate(steps)]
    verdict = judge(books(*some), 1, replace(FIXED, max_restarts=9))
    why = f"3 rounds in a row have failed at or before step {steps[0]}: restarts bring no progress"
    assert (verdict is not None and verdict.text == why) == ends


@pytest.mark.parametrize(
    ("machines", "names", "is_named"),
    [
        (("m1", "m1", "m1"), ("ValueError", "RuntimeError", "OSError"), True),
        (("m1", "m1", "m2"), ("ValueError", "RuntimeError", "OSError"), False),
        (("m1", "m1", "m1"), ("ValueError", "ValueError", "ValueError"), False),
    ],
    ids=["one machine, many errors", "two machines", "one error"],
)
def test_a_machine_on_which_all_failed_with_different_errors_is_named(machines, names, is_named):
    some = [failed(at, machine=machines[at], name=names[at]) for at in range(3)]
    named = "Every failure so far was on node 1 (m1), with different errors (ValueError, RuntimeError, OSError)"
    assert (named in judge(books(*some), 1, FIXED).text) == is_named
    alone = replace(FIXED, min_nodes=1, max_nodes=1)
    assert judge(books(*some), 1, alone).text.startswith("all 2 restart(s) of max_restarts are spent")


def test_where_the_text_of_the_last_failure_is_gone_the_one_that_was_learned_late_is_told():
    before = books(failed(0), failed(1)).beginning(Round(ME, 3), 3)
    verdict = judge(before.noting(failed(2)), 1, FIXED)
    assert (verdict.text, verdict.cause.text) == (
        "all 2 restart(s) of max_restarts are spent, and it was ValueError each time",
        "text 2",
    )
    verdict = judge(books(failed(0), failed(2)).beginning(Round(ME, 3), 3).noting(failed(1)), 1, FIXED)
    assert verdict.cause.text == "text 1"
    assert judge(books(failed(0), failed(1), failed(2)).beginning(Round(ME, 3), 3), 1, FIXED).cause.name == "ValueError"


def test_losses_are_counted_by_rounds_and_with_them_leaders_that_began_none_and_rounds_too_many_that_were_free():
    rules = replace(FIXED, max_replacements=2)
    assert judge(books(lost(0), lost(1)), 1, rules) is None
    assert judge(books(lost(0), lost(1), lost(2)), 1, rules).kind == "lost"
    assert judge(books(lost(0)), 4, rules).text == (
        "node 1: gone; node 0 was lost 2 time(s) before it began a round; and max_replacements=2 are used up"
    )
    free = [Outcome(Round(ME, at), free="a node joins") for at in range(rules.most_free + 3)]
    assert judge(books(*free[:-1]), 1, rules) is None
    assert "3 round(s) too many ended" in judge(books(*free), 1, rules).text


@pytest.mark.parametrize(
    ("lives", "rules", "ends"),
    [
        ((-1, 10, 10), FIXED, True),
        ((10, 1000, 10), FIXED, False),
        ((10, -1, 10), FIXED, False),
        ((1, 1, 1), RANGE, False),
    ],
    ids=["short ones", "one long", "nobody knows", "a range"],
)
def test_a_node_that_dies_in_one_place_again_and_again_is_not_replaced_any_more(lives, rules, ends):
    verdict = judge(books(*(lost(at, life=float(life)) for at, life in enumerate(lives))), 1, rules)
    why = "node 1 was lost 3 times, and lived less than 600 s each time"
    assert (verdict is not None and verdict.text.startswith(why)) == ends
    assert ends or verdict is None
