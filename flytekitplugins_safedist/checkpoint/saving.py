"""One save of this rank: what of the state it writes, copied; and writing and committing it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import dcp, saves, state
from .dcp import Path
from .group import JobRanks, failure_of
from .saves import Manifest
from .staging import Buffers
from .store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Order:
    """What to write, but for the state itself; the same in all ranks.

    Attributes:
        store: where.
        name: of the save.
        step: the last step that is in it.
        group: all ranks.
        joint: whether every rank writes, for each holds a part; else rank 0 alone.
    """

    store: Store
    name: str
    step: int
    group: JobRanks
    joint: bool


class Picked:
    """What this rank writes, copied: training may go on. A collective for FSDP1.

    Args:
        given: the user's state.
        own: in rank 0, what each rank has its own of, by rank and name.
        order: of the save.
        buffers: for the copy, of the save in flight until it has ended.

    Attributes:
        failed: why this rank cannot do its part; it comes to a joint save all the same, so that none waits for it.
    """

    def __init__(
        self, given: Mapping[str, Any], own: Sequence[Mapping[str, Any]], order: Order, buffers: Buffers
    ) -> None:
        self.order = order
        self._values: dict[Path, Any] = {}
        self._names = list(given)
        self._per_rank = [name for name, value in given.items() if isinstance(value, state.per_rank)]
        began = time.monotonic()
        self.failed = failure_of(lambda: self._values.update(self._copied(given, own, buffers)))
        self._stood_still = time.monotonic() - began

    def _copied(self, given: Mapping[str, Any], own: Sequence[Mapping[str, Any]], buffers: Buffers) -> dict[Path, Any]:
        rank = self.order.group.rank
        if rank != 0 and not self.order.joint:
            return {}
        values = state.collect(given)
        if rank != 0:
            values = {path: value for path, value in values.items() if state.is_part(value)}
        copied = buffers.copy(values)
        for of_rank, trees in enumerate(own):
            copied.update({(f"{name}@{of_rank}",): (tree,) for name, tree in trees.items()})
        return copied

    def write(self) -> None:
        """Write and commit. A collective of the writing threads of a joint save; committed on return.

        Raises:
            CheckpointError: a rank could not do its part, or the save was not committed.
        """
        order, began = self.order, time.monotonic()
        files = dcp.Files(order.store, order.name, order.group.rank, self._commit)
        dcp.save(self._values, files, order.group.writers if order.joint else None, self.failed)
        if order.group.rank == 0:
            logger.info(
                f"step {order.step} in {order.store.url}/{order.name} is committed; training stood still for "
                f"{self._stood_still:.3f} s, written in {time.monotonic() - began:.1f} s"
            )

    def _commit(self, sizes: dict[str, int], items: dict[str, list[list[int]]]) -> None:
        order = self.order
        made = Manifest(
            step=order.step,
            world_size=order.group.world_size,
            names=self._names,
            per_rank=self._per_rank,
            sizes=sizes,
            items=items,
            versions=saves.versions(),
        )
        order.store.seal(order.name)
        order.store.put(f"{order.name}/{saves.MANIFEST}", made.to_bytes())
