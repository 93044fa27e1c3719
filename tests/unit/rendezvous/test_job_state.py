"""Where a job with a range of nodes stands, as a value."""

from __future__ import annotations

import pytest

from flytekitplugins_safedist.rendezvous.job_state import JobState
from flytekitplugins_safedist.rendezvous.protocol import End

FIRST = JobState().next((7, 4, 9))
DONE = End("done", 0, "")
MISSING = End("timeout", 1, "node 2 did not arrive", (2,))


@pytest.mark.parametrize("state", [JobState(), FIRST, FIRST.asked_to_move(), FIRST.ended(DONE), FIRST.ended(MISSING)])
def test_a_state_is_read_as_it_was_written(state):
    assert JobState.parse(state.text().encode()) == state


def test_a_store_without_the_key_stands_before_the_first_round():
    assert JobState.parse(b"") == JobState()
    assert JobState().text() == ""


def test_a_new_round_has_the_next_number_its_own_members_and_is_not_to_be_left():
    assert FIRST.asked_to_move().next((4, 9)) == JobState(round=1, members=(4, 9))


def test_node_0_of_the_round_in_which_the_job_ended_uploads():
    assert FIRST.next((4, 9)).ended(DONE).uploader == 4


@pytest.mark.parametrize("state", [JobState(), FIRST, JobState().ended(MISSING)])
def test_nobody_uploads_before_the_end_or_without_a_round(state):
    assert state.uploader == -1
