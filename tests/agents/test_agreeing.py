"""The fs helpers in ranks of real jobs, where nothing of the user's has been initialised."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("task", ["torch", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_two_tasks_of_one_execution_take_no_answers_from_each_other(warm, tmp_path, task):
    same = {"FLYTE_INTERNAL_EXECUTION_ID": "f1"}
    for word in ("english", "german"):
        ended = warm.run(f"job_agree:{task}", tmp_path / word, environment={**same, "TEST_WORD": word})
        assert ended.value == [word, word, word]


def test_the_tasks_of_a_map_task_take_no_answers_from_each_other(warm, tmp_path):
    words = ["english", "german"]
    same = {"FLYTE_INTERNAL_EXECUTION_ID": "f1"}
    ended = warm.run("job_agree:vocabularies", tmp_path / "job", inputs={"words": words}, environment=same)
    assert ended.value == [[word, word] for word in words]
