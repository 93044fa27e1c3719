"""The GPUs of a node's ranks: which are whose, and whether a failure comes of what one of them has reported."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from .. import envvars
from ..hangs.gpus import GpuFault, GpuUse, GpuWatch, indices_of, to_blame
from ..rank.order import RankOrder
from ..rank.outcome import RankOutcome

_SECONDS = 10
"""From what a GPU reports to the failure that comes of it: CUDA says it at the program's next call."""

_FRESH_SECONDS = 1.0
"""That a look counts for further failures."""


class RankGpus:
    """Those of one round.

    Args:
        watch: the node's.
        orders: of its ranks, by local rank.
    """

    def __init__(self, watch: GpuWatch, orders: Sequence[RankOrder]) -> None:
        self._watch = watch
        self._visible = [order.environment.get(envvars.CUDA_VISIBLE_DEVICES, "") for order in orders]
        self._began_ns = time.time_ns()
        self._looked = float("-inf")

    def look(self) -> None:
        """Now."""
        self._watch.look()

    def of(self, local_rank: int) -> tuple[tuple[GpuUse, ...], tuple[GpuFault, ...]]:
        """A rank's GPUs, and what they have reported in this round, or when they were lost, until the latest look."""
        own = self._indices(local_rank)
        faults = [each for each in self._watch.faults() if each.is_gone or each.time_ns >= self._began_ns]
        of_own = tuple(each for each in faults if each.index in (*own, -1))
        return tuple(gpu for gpu in self._watch.usage() if gpu.index in own), of_own

    def behind(self, local_rank: int) -> GpuFault | None:
        """What a rank hangs for, if its GPU has reported that."""
        return self._to_blame(local_rank, time.time_ns(), at_any_time=True)

    def named(self, failure: RankOutcome) -> RankOutcome:
        """A failure with what its GPU has reported, where it comes of that."""
        if failure.gpu is not None or not failure.may_come_of_a_gpu:
            return failure
        if time.monotonic() > self._looked + _FRESH_SECONDS:  # all ranks of a node may fail at once
            self._watch.look()
            self._looked = time.monotonic()
        gpu = self._to_blame(failure.local_rank, failure.time_ns, at_any_time=failure.timed_out)
        return replace(failure, gpu=gpu)

    def _to_blame(self, local_rank: int, failed_ns: int, *, at_any_time: bool) -> GpuFault | None:
        _, own = self.of(local_rank)
        before = failed_ns - _SECONDS * 10**9
        faults = [each for each in own if each.is_gone or (at_any_time and each.lasts) or each.time_ns >= before]
        return to_blame(faults, failed_ns)

    def _indices(self, local_rank: int) -> set[int]:
        return indices_of(local_rank, len(self._visible), self._watch.usage(), self._visible[local_rank])
