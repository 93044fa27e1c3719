"""The two ways to save: all by rank 0, or each rank its part. What of the state is copied, written, and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol

from ..errors import CheckpointError
from . import full, layouts, sharded, trees
from . import manifest as manifests
from .crew import Crew, HorovodCrew
from .finding import Found
from .saves import Order, Save
from .staging import Buffers

Write = Callable[[Order], "Save | None"]
"""Writes and commits what was copied."""


class Mode(Protocol):
    """How this job saves."""

    joint: bool
    """Whether every rank takes part; else rank 0 alone."""

    def pick(self, state: Mapping[str, Any], crew: Crew, *, weights_only: bool) -> Picked:
        """What is to be copied. Copies nothing yet.

        Raises:
            CheckpointError: the state holds something that could not be loaded again.
        """


class Picked(Protocol):
    """A state whose tensors are still the live ones."""

    def copied(self, buffers: Buffers) -> Write:
        """Copy; return what writes the copy."""


def mode_for(state: Mapping[str, Any], crew: Crew, sharded_: bool | None) -> Mode:  # noqa: FBT001
    """Full, unless the state's models are sharded over the ranks, or the user says so.

    Raises:
        CheckpointError: what the user says cannot be done with this state or these ranks.
    """
    parted = layouts.is_sharded(state)
    if parted and sharded_ is False:
        raise CheckpointError(
            "rank 0 does not have all of this model: it cannot be saved by rank 0 alone",
            hint="leave out sharded=False",
        )
    wanted = parted if sharded_ is None else sharded_
    if wanted and isinstance(crew, HorovodCrew):
        raise CheckpointError(
            "Horovod's ranks cannot save together: torch.distributed.checkpoint needs torch.distributed",
            hint="leave out sharded=True: rank 0 saves",
        )
    return Sharded() if wanted else Full()


class Full:
    """Rank 0 writes everything in one part."""

    joint = False

    def pick(self, state: Mapping[str, Any], crew: Crew, *, weights_only: bool) -> Picked:
        return _PickedFull(trees.split(trees.collect(state), weights_only=weights_only))


class _PickedFull:
    def __init__(self, split: trees.Split) -> None:
        self._split = split

    def copied(self, buffers: Buffers) -> Write:
        tree = trees.join(self._split.tree, buffers.copy(self._split.tensors))
        return lambda order: full.write(order, tree)


class Sharded:
    """Each rank writes its part of the tensors of models and optimizers, rank 0 the rest."""

    joint = True

    def pick(self, state: Mapping[str, Any], crew: Crew, *, weights_only: bool) -> Picked:
        split = trees.split(layouts.collect(state), weights_only=weights_only)
        return _PickedSharded(split, layouts.joint(state, split), crew)


class _PickedSharded:
    def __init__(self, split: trees.Split, joint: Mapping[str, Any], crew: Crew) -> None:
        self._split, self._joint, self._crew = split, joint, crew

    def copied(self, buffers: Buffers) -> Write:
        crew = self._crew
        copies = buffers.copy(self._split.tensors if crew.rank == 0 else self._joint)
        tensors = {name: copies[name] for name in self._joint}
        rest = {name: tensor for name, tensor in copies.items() if name not in tensors}
        plain = {"tree": self._split.tree, "tensors": rest}
        return lambda order: sharded.write(order, tensors, plain, crew)


def load(found: Found, state: MutableMapping[str, Any], crew: Crew, *, weights_only: bool) -> None:
    """Load a save into the state, whichever way it was saved. A collective.

    Raises:
        CheckpointError: the save and the state do not have the same names, or the save cannot be loaded so.
    """
    if found.save.manifest.kind == manifests.FULL:
        if layouts.is_fsdp1(state):
            raise CheckpointError(
                "a save of whole tensors cannot be resumed into FullyShardedDataParallel: its optimizer has flat parts",
                where={"path": found.save.name},
                hint="shard the model by fully_shard (FSDP2), which can resume it",
            )
        tree = full.load(found.room, weights_only=weights_only)
        trees.distribute(state, layouts.parted(state, tree))
        return
    plain = sharded.load_plain(found.room, weights_only=weights_only)
    trees.match(state, plain["tree"])
    split = trees.split(layouts.collect(state), weights_only=False)
    tensors = layouts.joint(state, split)
    sharded.load_tensors(found.save, tensors, found.room, crew)
    layouts.distribute(state, trees.join(plain["tree"], {**tensors, **plain["tensors"]}))
