"""What fails in the agent's own process, and is nobody's error."""

from __future__ import annotations

import pytest

from flytekitplugins_safedist.agent.run import of_platform
from flytekitplugins_safedist.errors import LaunchError, ScratchError


def test_what_fails_in_the_process_that_runs_the_ranks_is_the_platforms_and_has_no_secret_of_an_address() -> None:
    with pytest.raises(LaunchError, match=r"seen: ValueError: https://store/code\?\.\.\.") as caught, of_platform():
        raise ValueError("https://store/code?sig=secret")
    assert "secret" not in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_that_says_what_it_is_stays_that() -> None:
    with pytest.raises(ScratchError), of_platform():
        raise ScratchError("no room")
