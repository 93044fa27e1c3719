"""In a job of one process nobody is met: the work is done, and its error is its own."""

from __future__ import annotations

import pytest

from flytekitplugins_safedist.errors import FsError
from flytekitplugins_safedist.fs import barrier, once_per_job, once_per_node, rank_zero_first


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "HOROVOD_RANK", "SAFEDIST_MEETING", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("once", [once_per_job, once_per_node])
def test_the_function_is_called(once):
    value = object()
    assert once("key", lambda: value) is value
    with pytest.raises(ZeroDivisionError):
        once("key", lambda: 1 / 0)


def test_nobody_is_waited_for():
    barrier(timeout=1e-9)
    with rank_zero_first(timeout=1e-9), rank_zero_first("node"):
        pass


def test_several_ranks_without_a_place_to_meet_are_told_what_to_call_first(monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4, "GROUP_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(FsError, match=r"4 ranks have nothing to meet over yet.*init_process_group"):
        barrier()
