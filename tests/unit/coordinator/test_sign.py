"""Who leads: both sides of the sign in the store."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flytekitplugins_safedist.coordinator.books import Leader
from flytekitplugins_safedist.coordinator.sign import Lead, Sign, SignWatch, StoreLook
from tests.unit.coordinator.coordination import FIXED


class Store:
    """A leader's way through the store, and what that has."""

    def __init__(self, sign: Sign | None = None) -> None:
        self.sign, self.now = sign, 0.0
        self.lead = Lead("a", FIXED, self.now)

    def look(self, since: float | None = None) -> str:
        self.now += 1
        why = self.lead.on_look(StoreLook(self.now if since is None else since, self.sign, False))
        self.sign = self.lead.take_sign() or self.sign
        return why


@pytest.mark.parametrize(("before", "term"), [(None, 1), (Sign(Leader(4, "z"), 9), 5)])
def test_a_new_leader_takes_the_next_term_and_leads_when_it_has_read_its_own_sign(before, term):
    store = Store(before)
    assert store.lead.term == 0
    store.look()
    assert (store.lead.leader, store.lead.in_doubt) == (Leader(term, "a"), True)
    assert store.sign.leader == store.lead.leader
    store.look()
    assert not store.lead.in_doubt
    assert store.lead.is_first == (before is None)


def test_whose_sign_was_written_over_does_not_lead():
    store = Store()
    store.look()
    store.sign = Sign(Leader(1, "b"), 1)
    assert store.look() == "another process leads this job"
    store = Store()
    store.look()
    store.sign = Sign(Leader(1, "A"), 1)  # of two of one term the greater process leads, and writes it again
    assert store.look() == ""
    assert store.lead.in_doubt
    store.look()
    assert not store.lead.in_doubt


def test_a_term_is_above_whatever_nodes_have_obeyed():
    store = Store()
    store.lead.on_leader(Leader(7, "z"), 0.0)
    store.look()
    assert store.lead.term == 8


def test_each_look_renews_the_sign_once():
    store = Store()
    store.look()
    first = store.sign
    assert store.lead.take_sign() is None
    store.look()
    assert store.sign == replace(first, beat=first.beat + 1)


def test_the_store_is_looked_at_each_renewal_and_each_second_in_doubt():
    store = Store()
    times = [at / 4 for at in range(40) if store.lead.is_due(at / 4)]
    assert times == list(range(10))
    store.look()
    store.look()
    times = [at for at in range(10, 200) if store.lead.is_due(float(at))]
    assert times == [69, 129, 189]


def test_a_leader_in_doubt_gives_up_when_the_store_has_been_away_for_too_long():
    store = Store()
    assert not store.lead.gives_up(FIXED.upload)
    assert store.lead.gives_up(FIXED.upload + 1)
    store.look()
    store.look()
    assert not store.lead.gives_up(9 * FIXED.upload)


def test_a_sign_is_fresh_until_it_was_watched_for_long_without_a_change_by_ones_own_clock():
    watch, sign = SignWatch(), Sign(Leader(1, "a"), 1)
    assert not watch.is_fresh(FIXED, 0.0), "there is none"
    watch.on_look(sign, 100.0)
    assert watch.is_fresh(FIXED, 100.0 + 2.5 * FIXED.renew), "one renewal may have failed"
    assert watch.is_fresh(FIXED, 100.0 + FIXED.stale - 1)
    assert not watch.is_fresh(FIXED, 100.0 + FIXED.stale)
    watch.on_look(sign, 200.0)
    assert not watch.is_fresh(FIXED, 100.0 + FIXED.stale)
    watch.forget()  # this process stood still
    assert watch.is_fresh(FIXED, 100.0 + FIXED.stale)
    watch.on_look(replace(sign, beat=2), 500.0)
    assert watch.is_fresh(FIXED, 500.0)
