"""What fails in the agent's own process, and is nobody's error."""

from __future__ import annotations

import errno
from typing import cast

import pytest

from flytekitplugins_safedist.agent.node import NodeAgent
from flytekitplugins_safedist.agent.run import driven
from flytekitplugins_safedist.errors import LaunchError, ScratchError


class Agent:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def drive(self) -> None:
        raise self.error


def test_what_fails_in_the_process_that_runs_the_ranks_is_the_platforms() -> None:
    with pytest.raises(LaunchError, match="Too many open files") as caught:
        driven(cast("NodeAgent", Agent(OSError(errno.EMFILE, "Too many open files"))))
    assert caught.value.error_code == "SYSTEM:RanksNotStarted"
    assert isinstance(caught.value.__cause__, OSError)


def test_an_error_that_says_what_it_is_stays_that() -> None:
    with pytest.raises(ScratchError):
        driven(cast("NodeAgent", Agent(ScratchError("no room"))))
