"""What attempts before this one have saved is found, whatever they had in between."""

from __future__ import annotations

import pytest

from flytekitplugins_safedist.checkpoint.places import (
    RECORD,
    Facts,
    known_before,
    leave_record,
    outputs_before,
    outputs_of,
)
from flytekitplugins_safedist.errors import CheckpointError


def attempt(tmp_path, number, execution="f1"):
    return Facts(
        own=f"{tmp_path}/raw/{execution}-{number}/cp",
        before=f"{tmp_path}/raw/{execution}-{number - 1}/cp" if number else None,
        outputs=f"{tmp_path}/meta/proj-dev-{execution}/n0/data/{number}",
        attempt=number,
        execution=("proj", "dev", execution),
    )


def test_the_first_attempt_knows_none(tmp_path):
    assert known_before(attempt(tmp_path, 0)) == []


def test_an_attempt_that_left_nothing_hides_nothing(tmp_path):
    leave_record(attempt(tmp_path, 0), [])
    # attempts 1 and 2 died before they left anything
    assert known_before(attempt(tmp_path, 3)) == [attempt(tmp_path, 2).own, attempt(tmp_path, 0).own]


def test_each_attempt_hands_on_what_it_knows(tmp_path):
    first = attempt(tmp_path, 0)
    leave_record(first, ["/recovered/from"])
    second = attempt(tmp_path, 1)
    leave_record(second, known_before(second))
    # without the outputs' prefix: Flyte's word on the attempt before, and what that one left in its place
    third = Facts(own=f"{tmp_path}/raw/f1-2/cp", before=second.own)
    assert known_before(third) == [second.own, first.own, "/recovered/from"]


def test_prefixes_that_do_not_end_in_the_attempt_are_not_counted_down():
    assert outputs_before(Facts(own="x", outputs="s3://b/out/7", attempt=2)) == []
    assert outputs_before(Facts(own="x", outputs="s3://b/n0/data/2", attempt=2)) == [
        "s3://b/n0/data/1",
        "s3://b/n0/data/0",
    ]
    assert outputs_before(Facts(own="x", attempt=2)) == []


def test_another_execution_is_found_by_its_name(tmp_path):
    for number in range(2):
        facts = attempt(tmp_path, number, "old")
        leave_record(facts, known_before(facts))
    new = attempt(tmp_path, 0, "new")
    found = known_before(new, records_at=outputs_of(new, "old"))
    assert found == [attempt(tmp_path, 1, "old").own, attempt(tmp_path, 0, "old").own]


def test_where_the_prefix_does_not_show_it_that_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="give the address"):
        outputs_of(Facts(own="x", outputs="s3://b/elsewhere/0", execution=("proj", "dev", "f1")), "old")


def test_a_damaged_record_is_an_error_and_not_an_empty_one(tmp_path):
    first = attempt(tmp_path, 0)
    leave_record(first, [])
    (tmp_path / "raw/f1-0/cp" / RECORD).write_text("{")
    with pytest.raises(CheckpointError, match="record of earlier checkpoints cannot be read"):
        known_before(attempt(tmp_path, 1))
