"""What a job keeps when its store is lost: however survivors bring it, the job knows the same in the end."""

from __future__ import annotations

from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from flytekitplugins_safedist.rendezvous.carried import Carried, Unit, change

UNITS = st.builds(Unit, st.integers(0, 9), st.text(max_size=3))
SPENT = st.dictionaries(st.integers(0, 30), UNITS, max_size=20)
STORES = st.dictionaries(st.sampled_from("abcdef"), UNITS)
STATES = st.builds(Carried, st.integers(-1, 30), SPENT, SPENT, STORES, st.integers(0, 5)).map(Carried().merge)
STEPS = st.lists(
    st.tuples(st.sampled_from(["began", "restarts", "losses", "taken"]), st.integers(0, 12), UNITS), max_size=30
)
NOTHING = Carried()


def history(steps) -> list[Carried]:
    """What was known after each step on one store: later values know all that earlier ones do."""
    states = [NOTHING]
    for what, round_no, unit in steps:
        now = states[-1]
        if what == "began":
            states.append(now.reached(round_no))
        elif what == "taken":
            states.append(now.taken_again())
        else:
            states.append(now.spend(what, 5, round_no, unit)[0])
    return states


@given(STATES, STATES, STATES)
def test_merging_is_a_join(one, two, three):
    assert one.merge(two) == two.merge(one)
    assert one.merge(two).merge(three) == one.merge(two.merge(three))
    assert one.merge(one) == one
    assert one.merge(NOTHING) == one


@given(STEPS, st.data())
def test_survivors_bring_what_the_one_that_knows_most_knew_in_any_order_stale_and_twice(steps, data):
    states = history(steps)
    brought = data.draw(st.lists(st.sampled_from(states), min_size=1))
    knows_most = max(brought, key=states.index)
    shuffled = data.draw(st.permutations([*brought, *brought[:2]]))
    assert reduce(Carried.merge, shuffled, NOTHING) == knows_most


@given(STEPS, UNITS, UNITS, st.data())
def test_the_loss_of_a_store_that_every_survivor_tells_of_is_one_loss(steps, unit, another, data):
    """Each survivor counts it on its own copy, which may be stale, with its own clock and words."""
    states = history(steps)
    copies = data.draw(st.lists(st.sampled_from(states), min_size=1, max_size=4))
    told = [copy.without_store("s1", unit if at % 2 else another) for at, copy in enumerate(copies)]
    merged, knew_most = reduce(Carried.merge, told), max(copies, key=states.index)
    assert merged.lost == knew_most.lost + 1
    assert (merged.restarts, merged.losses) == (knew_most.restarts, knew_most.losses)


@given(STATES)
def test_what_is_stored_is_read_as_it_was(state):
    assert Carried.parse(state.text().encode()) == state


def test_a_store_that_nobody_has_brought_anything_to_knows_nothing():
    assert Carried.parse(b"") == NOTHING
    assert NOTHING.text() == ""


@given(STATES, STATES)
def test_nothing_known_is_forgotten(one, two):
    both = one.merge(two)
    for each in (one, two):
        assert both.round >= each.round
        assert both.retaken >= each.retaken
        assert set(each.restarts) <= set(both.restarts)
        assert set(each.losses) <= set(both.losses)
        assert set(each.stores) <= set(both.stores)


def test_a_budget_is_spent_once_for_a_round_and_never_beyond_its_limit():
    unit = Unit(1, "rank 3 raised ValueError")
    one, first = NOTHING.spend("restarts", 2, 0, unit)
    assert (one.spend("restarts", 2, 0, Unit(2, "again")), first) == ((one, 1), 1)
    two, second = one.spend("restarts", 2, 4, unit)
    assert second == 2
    assert two.spend("restarts", 2, 5, unit) == (two, None)
    assert two.spend("restarts", 2, 4, unit) == (two, 2)
    assert two.spend("losses", 1, 5, unit)[1] == 1  # a budget of its own


def test_lost_stores_and_other_lost_nodes_share_one_budget():
    unit = Unit(1, "node 0 was lost")
    state = NOTHING.without_store("s1", unit)
    state, second = state.spend("losses", 2, 7, unit)
    assert (state.lost, second) == (2, 2)
    assert state.spend("losses", 2, 8, unit) == (state, None)


def test_old_reasons_go_and_their_rounds_stay():
    state = NOTHING
    for round_no in range(40):
        state, _ = state.spend("losses", 100, round_no, Unit(round_no, "x" * 1000))
    assert len(state.losses) == 40
    assert len(state.text()) < 3000
    assert state.losses[39].why == "x" * 200


def test_the_story_tells_what_was_spent_on_what():
    state, _ = NOTHING.spend("restarts", 3, 2, Unit(1, "rank 3 raised ValueError"))
    state = state.without_store("s1", Unit(3, "node 0 was lost: connection reset"))
    state, _ = state.spend("losses", 3, 4, Unit(2, "node 1 was lost"))
    assert state.told() == (
        "1 restart(s) (rank 3 raised ValueError), "
        "2 time(s) nodes were lost (node 1 was lost; node 0 was lost: connection reset)"
    )
    assert NOTHING.told() == ""


@given(st.text())
def test_whatever_a_reason_holds_it_can_be_sent(text):
    state, _ = NOTHING.spend("losses", 3, 4, Unit(2, text))
    assert Carried.parse(state.text().encode()) == state


def test_a_reason_that_no_encoding_takes_can_be_sent():
    state, _ = NOTHING.spend("losses", 3, 4, Unit(2, "\udc80"))
    assert Carried.parse(state.text().encode()) == state


class Racing:
    """A store on which another node is faster, once."""

    def __init__(self, values: dict[str, str], other: str) -> None:
        self.values, self.other = values, other

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if desired and self.other:
            self.values[key], self.other = self.other, ""
        if self.values.get(key, "") == expected:
            self.values[key] = desired
        return self.values[key].encode()


def test_what_another_node_brings_at_the_same_moment_is_kept():
    ours, theirs = NOTHING.reached(3), NOTHING.reached(1).taken_again()
    store = Racing({}, theirs.text())
    assert change(store, "k", ours.merge) == ours.merge(theirs)
    assert Carried.parse(store.values["k"].encode()) == ours.merge(theirs)


def test_a_round_that_only_may_have_begun_interrupts_no_job():
    assert not Carried().reached(3).interrupted
    assert Carried().taken_again().interrupted
