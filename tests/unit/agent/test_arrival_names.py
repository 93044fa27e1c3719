"""How the nodes of one attempt find each other and nobody else: real arrivals are in tests/agents/test_arrival.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flytekitplugins_safedist.agent.arrival import run_id
from flytekitplugins_safedist.rank.task_context import IN_POD
from tests.unit.rank.test_order import SNAPSHOT


def test_each_attempt_of_each_execution_has_a_name_of_its_own():
    other = replace(SNAPSHOT, execution_id=(*SNAPSHOT.execution_id[:2], "another"))
    names = {
        run_id(flyte, environment)
        for flyte in (SNAPSHOT, other)
        for environment in ({}, {"FLYTE_ATTEMPT_NUMBER": "1"}, {"FLYTE_ATTEMPT_NUMBER": "11"})
    }
    assert len(names) == 6
    assert run_id(SNAPSHOT, {}) == run_id(SNAPSHOT, {"FLYTE_ATTEMPT_NUMBER": "0"})


def test_two_tasks_of_one_execution_are_two_jobs_and_all_nodes_of_one_have_its_name():
    prefixes = ("s3://b/f1/n0/data/0", "s3://b/f1/n1/data/0", "s3://b/f1/n1/data/0/")
    one, other, same = (run_id(replace(SNAPSHOT, mode=IN_POD, output_metadata_prefix=each), {}) for each in prefixes)
    assert one != other == same


def test_an_attempt_that_is_not_a_number_is_not_taken_for_the_first():
    with pytest.raises(ValueError, match="second"):
        run_id(SNAPSHOT, {"FLYTE_ATTEMPT_NUMBER": "second"})
