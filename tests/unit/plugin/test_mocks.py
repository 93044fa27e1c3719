"""Unit tests of users' own, by ``flytekit.testing``: a mock stands in for a task's ranks, and gets real values."""

from __future__ import annotations

from flytekit.testing import patch, task_mock

from tests.jobs import job_mocked
from tests.jobs.job_mocked import Settings


def test_a_mock_gets_the_real_values_and_its_answer_is_the_tasks():
    with task_mock(job_mocked.train) as mock:
        mock.side_effect = lambda epochs, settings: epochs * settings.rate
        assert job_mocked.trained(epochs=5) == 2.5
    mock.assert_called_once_with(epochs=5, settings=Settings(0.5))


@patch(job_mocked.train)
def test_so_does_what_patch_puts_in_the_tasks_place(mock):
    mock.return_value = 1.5
    assert job_mocked.trained() == 1.5
    mock.assert_called_once_with(epochs=3, settings=Settings(0.5))


def test_a_task_without_inputs_is_mocked_too():
    with task_mock(job_mocked.no_inputs) as mock:
        mock.return_value = "the mock's"
        assert job_mocked.asks() == "the mock's"
    mock.assert_called_once_with()


def test_after_a_mock_each_call_has_its_own_inputs_and_ranks_again(warm, tmp_path):
    ended = warm.run("job_mocked:mocked_then_for_real", tmp_path / "job")
    assert ended.value == [7, [100, 400], 16, "a rank's"]
