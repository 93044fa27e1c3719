"""What a user's code does to its own process, or starts and forgets, harms that rank at most, and is said."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(("how", "status"), [("returns", 0), ("raises", 1), ("exits", 3)])
@pytest.mark.parametrize("task", ["forks", "forks_spawned"])
def test_a_child_that_ends_the_function_too_is_not_the_rank(warm, tmp_path, task, how, status):
    ended = warm.run(f"job_hostile:{task}", tmp_path / "job", environment={"TEST_HOW": how})
    assert ended.value == [status, 0], "the child's exit status, and outcomes that it left"
    assert ("ValueError: in the child" in ended.out) == (how == "raises")
