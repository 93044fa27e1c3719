"""Meeting points: what a rank gets when the store ends with rank 0, right after all have met."""

from __future__ import annotations

import pytest

from flytekitplugins_safedist.errors import FsIoError
from flytekitplugins_safedist.fs import Group, Identity, barrier, exchange
from flytekitplugins_safedist.fs.coordination import MemoryCoordinationStore


class EndsAfterTheMeeting(MemoryCoordinationStore):
    """Rank 0 has met the others, has seen that they have read it, and has left before they clear the notes away."""

    def forget(self, key: str, member: int) -> None:
        raise FsIoError("the store that the ranks talk through is gone")


def exchanged(group: Group) -> list[str]:
    return exchange("point", "here", group=group)


def waited(group: Group) -> None:
    barrier(group=group)


@pytest.mark.parametrize(("meet", "gives"), [(exchanged, ["here"]), (waited, None)])
def test_a_store_that_ends_with_rank_0_fails_no_rank_that_has_met_it(meet, gives):
    group = Group(EndsAfterTheMeeting(), Identity())
    assert [meet(group) for _ in range(3)] == [gives] * 3
