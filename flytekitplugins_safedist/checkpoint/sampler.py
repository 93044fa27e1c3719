"""Which samples a rank takes: each once per epoch, also where a training is resumed, with however many ranks.

torch's ``DistributedSampler`` cannot be resumed within an epoch. torchdata's ``StatefulDistributedSampler`` (0.11) can,
but keeps one number, how many *this* rank has had: with another number of ranks it skips some samples and repeats
others, and it does not know the epoch. This one counts what all ranks together have had of the epoch's order, which is
the same number on every rank, and fits any number of them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sized
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from ..errors import SafedistError


@dataclass(eq=False)
class ResumableSampler:
    """Samples of one rank, for a ``DataLoader``; with ``state_dict`` and ``load_state_dict``.

    ::

        sampler = ResumableSampler(dataset, rank=me.rank, world_size=me.world_size)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        for epoch in range(sampler.epoch, epochs):
            for batch in sampler.batches(loader):
                ...  # a training step; then save, with the sampler in what is saved

    A batch counts from when :meth:`batches` hands it out, not from when a worker of the loader fetches it. So save
    after the step that used it, never before. The order is that of torch's ``DistributedSampler`` with the same seed
    and number of ranks. Where the samples that are left do not divide evenly among the ranks, a few are taken twice, so
    that every rank has the same number of steps; or, with ``drop_last``, left out. That is less than one sample per
    rank, and at the end of an epoch only.

    Args:
        dataset: what is sampled; only its length matters.
        rank: this rank, from 0.
        world_size: ranks that share the samples.
        shuffle: another order in each epoch, the same on all ranks.
        seed: of the orders; the same on all ranks.
        drop_last: leave out what does not divide evenly among the ranks.

    Attributes:
        epoch: the epoch that the samples are of; moved on by :meth:`batches` at its end.

    Raises:
        ValueError: ``rank`` is not one of ``world_size``.
    """

    dataset: Sized
    _: KW_ONLY
    rank: int
    world_size: int
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = False
    epoch: int = field(default=0, init=False)
    _taken: int = field(default=0, init=False)
    _uncounted: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank} is not in 0..{self.world_size - 1} (world_size={self.world_size})")

    def __len__(self) -> int:
        """Samples that this rank has left in this epoch; the same on every rank."""
        left = len(self.dataset) - self._taken
        return left // self.world_size if self.drop_last else -(-left // self.world_size)

    def __iter__(self) -> Iterator[int]:
        """This rank's indices in what is left of the epoch."""
        left = self._order()[self._taken :]
        wanted = len(self) * self.world_size
        # What is repeated is the beginning of what is left, again and again where that is less than the ranks.
        padded = left * -(-wanted // len(left)) if left else left
        self._uncounted = True
        return iter(padded[self.rank : wanted : self.world_size])

    def batches(self, loader: Any) -> Iterator[Any]:
        """The batches of what is left of this epoch, counted as they are handed out; then move on to the next epoch.

        Args:
            loader: a ``DataLoader`` with this sampler, and a batch size of its own.

        Raises:
            ValueError: the loader takes its samples from elsewhere, or makes no batches.
        """
        if loader.sampler is not self or loader.batch_size is None:
            raise ValueError("the loader needs sampler=(this sampler) and a batch_size: else nothing can be counted")
        left = len(self)
        for batch in loader:
            size = min(loader.batch_size, left)
            left -= size
            self.advance(size)
            yield batch
        self.next_epoch()

    def advance(self, samples: int) -> None:
        """Count ``samples`` more of each rank as used, where something other than :meth:`batches` goes through the
        loader (a trainer's own loop). Call it for each batch, before a save that includes it."""
        self._uncounted = False
        self._taken = min(self._taken + samples * self.world_size, len(self.dataset))

    def next_epoch(self) -> None:
        """Begin the next epoch, with all its samples."""
        self.epoch += 1
        self._taken = 0
        self._uncounted = False

    def state_dict(self) -> dict[str, Any]:
        """Where the samples are: the same on every rank, after the same number of batches.

        Raises:
            SafedistError: samples were taken, but none counted: the state would repeat them without a word.
        """
        if self._uncounted:
            raise SafedistError(
                "the sampler has given samples out, and was not told which of them were used",
                where={"epoch": self.epoch},
                expected="iterating over sampler.batches(loader)",
                hint="the loader fetches ahead, so only its user can count; with a loop that is not yours, call "
                "sampler.advance(batch size) after each batch",
            )
        return {"epoch": self.epoch, "taken": self._taken, **self._sampled()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another sampler, of however many ranks, was.

        Raises:
            SafedistError: the state is of another data set, or another order of it.
        """
        ours = self._sampled()
        if dict(state) != {"epoch": state.get("epoch"), "taken": state.get("taken"), **ours}:
            raise SafedistError(
                "the state of a sampler does not fit this one: samples would be left out or repeated",
                seen=dict(state),
                expected=ours,
                hint="resume with the same data set, seed and shuffle; or leave the sampler out of what is resumed",
            )
        self.epoch, self._taken = int(state["epoch"]), int(state["taken"])
        self._uncounted = False

    def _sampled(self) -> dict[str, Any]:
        """What a state is of: this data, in these orders."""
        return {"size": len(self.dataset), "seed": self.seed, "shuffle": self.shuffle}

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.dataset)))
        import torch

        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(len(self.dataset), generator=generator, device="cpu").tolist()
        return order


class RandomNumbers:
    """This process's random numbers: Python's, numpy's where it is imported, torch's, and of its GPU. For ``per_rank``:
    each rank draws its own."""

    def state_dict(self) -> dict[str, Any]:
        """Where they are."""
        import torch

        numpy = sys.modules.get("numpy")
        name, keys, *more = numpy.random.get_state() if numpy is not None else ("", None)
        return {
            "python": random.getstate(),
            "numpy": (name, keys.tolist(), *more) if keys is not None else None,
            "torch": torch.get_rng_state(),
            "gpu": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        import torch

        random.setstate(state["python"])
        numpy = sys.modules.get("numpy")
        if numpy is not None and state["numpy"] is not None:
            numpy.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if state["gpu"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["gpu"])
