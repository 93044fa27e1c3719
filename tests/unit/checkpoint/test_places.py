"""What attempts before this one have saved is found, whatever they had in between."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flytekitplugins_safedist.checkpoint.places import (
    POINTER,
    Facts,
    find,
    leave_pointer,
    of_execution,
    outputs_before,
    outputs_of,
)
from flytekitplugins_safedist.errors import CheckpointError


def attempt(tmp_path, number, execution="f1"):
    return Facts(
        own=f"{tmp_path}/raw/{execution}-{number}/cp",
        given=False,
        outputs=f"{tmp_path}/meta/proj-dev-{execution}/n0/data/{number}",
        attempt=number,
        execution=("proj", "dev", execution),
    )


def settle(facts):
    """What an attempt does that saves."""
    place = find(facts)
    leave_pointer(facts, place)
    return place


def test_all_attempts_save_where_the_first_did(tmp_path):
    assert settle(attempt(tmp_path, 0)) == attempt(tmp_path, 0).own
    assert settle(attempt(tmp_path, 1)) == attempt(tmp_path, 0).own
    # attempts 2 and 3 died before they left anything
    assert settle(attempt(tmp_path, 4)) == attempt(tmp_path, 0).own


def test_an_attempt_that_left_nothing_is_not_waited_for(tmp_path):
    assert settle(attempt(tmp_path, 1)) == attempt(tmp_path, 1).own
    assert settle(attempt(tmp_path, 2)) == attempt(tmp_path, 1).own


def test_an_attempt_that_has_saved_goes_on_there_whatever_one_before_it_that_is_cut_off_does_since(tmp_path):
    assert settle(attempt(tmp_path, 1)) == attempt(tmp_path, 1).own
    assert settle(attempt(tmp_path, 0)) == attempt(tmp_path, 0).own
    assert settle(attempt(tmp_path, 1)) == attempt(tmp_path, 1).own


def test_a_place_that_the_user_has_given_is_not_written_to_before_the_first_save(tmp_path):
    assert find(Facts(f"{tmp_path}/mine")) == f"{tmp_path}/mine"
    assert list(tmp_path.iterdir()) == []


def test_a_given_place_hides_no_other_of_the_task_and_is_found_by_another_execution(tmp_path):
    given = replace(attempt(tmp_path, 0), own=f"{tmp_path}/best", given=True)
    settle(given)
    assert of_execution(attempt(tmp_path, 0, "new"), "f1") == given.own
    own = attempt(tmp_path, 0).own
    assert settle(attempt(tmp_path, 0)) == own
    settle(given)
    assert find(attempt(tmp_path, 1)) == of_execution(attempt(tmp_path, 0, "new"), "f1") == own


def test_prefixes_that_do_not_end_in_the_attempt_are_not_counted_down():
    assert outputs_before(Facts(own="x", outputs="s3://b/out/7", attempt=2)) == []
    assert outputs_before(Facts(own="x", outputs="s3://b/n0/data/2", attempt=2)) == [
        "s3://b/n0/data/1",
        "s3://b/n0/data/0",
    ]
    assert outputs_before(Facts(own="x", attempt=2)) == []


def test_another_execution_is_found_by_its_name(tmp_path):
    for number in range(2):
        settle(attempt(tmp_path, number, "old"))
    assert of_execution(attempt(tmp_path, 0, "new"), "old") == attempt(tmp_path, 0, "old").own
    with pytest.raises(CheckpointError, match="has left no record"):
        of_execution(attempt(tmp_path, 0, "new"), "older")


def test_where_the_prefix_does_not_show_it_that_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="give the address"):
        outputs_of(Facts(own="x", outputs="s3://b/elsewhere/0", execution=("proj", "dev", "f1")), "old")


def test_a_damaged_record_is_an_error_and_not_an_empty_one(tmp_path):
    settle(attempt(tmp_path, 0))
    (tmp_path / "meta/proj-dev-f1/n0/data/0" / POINTER).write_text("{")
    with pytest.raises(CheckpointError, match="record of where checkpoints are cannot be read"):
        find(attempt(tmp_path, 1))
