"""What an agent does that is told to stop: leave at once, or see to it that ranks save first."""

from __future__ import annotations

import signal

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from flytekitplugins_safedist.job.preemption import Preemption


class Ranks:
    """Stands for the agreement of a round."""

    settled = False
    told = False

    def __init__(self, *, listen: bool = True) -> None:
        self._listen = listen

    def start(self) -> None:
        """As the agreement's."""

    def is_listened_to(self) -> bool:
        return self._listen

    def preempt(self) -> None:
        self.told = True


def begun(ranks: Ranks, seconds: float = 60.0) -> Preemption:
    made = Preemption(seconds)
    made.begin(ranks)  # type: ignore[arg-type]
    return made


def test_sigterm_is_deferred_until_all_ranks_have_saved():
    ranks = Ranks()
    preemption = begun(ranks)
    assert preemption.defer(signal.SIGTERM) == 60
    assert ranks.told
    preemption.leave_when_saved()
    ranks.settled = True
    with pytest.raises(SignalException):
        preemption.leave_when_saved()


@pytest.mark.parametrize(
    ("number", "ranks", "seconds"),
    [
        (signal.SIGINT, Ranks(), 60.0),
        (signal.SIGTERM, Ranks(listen=False), 60.0),
        (signal.SIGTERM, Ranks(), 0.0),
    ],
    ids=["asked to end by hand", "no rank would do anything", "the grace period leaves no time"],
)
def test_nothing_is_deferred_when(number, ranks, seconds):
    preemption = begun(ranks, seconds)
    assert preemption.defer(number) == 0
    assert not preemption.pending
    assert not ranks.told
    preemption.leave_when_saved()
