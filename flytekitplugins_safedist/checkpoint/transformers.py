"""``SafedistCallback``: saves and resumes a training of Hugging Face's ``Trainer``."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ..fs import barrier, once_per_node
from ..fs.identity import current_identity
from .group import of_rank, of_rank_0, per_rank
from .manager import Checkpoints

_OF_RANK = re.compile(r"(?:rng_state_|__|.*?rank_?)(\d+)[._].*")
"""Names of what each rank writes of its own: random numbers, parts of FSDP's and DeepSpeed's."""

_CALLS = itertools.count()
"""Of ``newest`` in this process, of all callbacks: the same in every rank."""


class SafedistCallback(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
    """Has the trainer make its own checkpoint when a save is due, and hands it on to where it is whole or not there.

    ::

        callback = SafedistCallback()
        trainer = Trainer(..., callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.newest())

    Rank 0's files are read by the first rank of each node; what other ranks have written goes back to them, where there
    are as many as there were, and parts of a sharded checkpoint to every node. What is handed on is removed from
    ``output_dir``, but for the best one.

    Args:
        where, every, keep, resume_from: as of :class:`~.manager.Checkpoints`. Steps are the trainer's.

    Attributes:
        checkpoints: what it saves by.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | None = None,
        *,
        every: int | timedelta | None = timedelta(minutes=10),
        keep: int | None = 3,
        resume_from: str | None = None,
    ) -> None:
        self.checkpoints = Checkpoints(where, every=every, keep=keep, resume_from=resume_from)
        self._saved = 0

    def newest(self) -> str | None:
        """The newest checkpoint, in a directory of this node; None where there is none. A collective."""
        me = current_identity()
        files, own = of_rank_0({}), per_rank({})
        state: dict[str, Any] = {"own": own, **({"files": files} if me.local_rank == 0 else {})}
        if not self.checkpoints.restore(state):
            return None
        # Each call has a directory of its own: of two saves in one, files of the first would stay among the second's.
        key = f"safedist-newest/{next(_CALLS)}"
        directory = Path(once_per_node(key, lambda: tempfile.mkdtemp(prefix="newest-")))
        _write(directory, {**files.value, **own.value})
        barrier("safedist-newest")
        if me.nnodes > 1 and any(map(_is_part_of_rank_0, directory.rglob("*"))):  # which every node has
            self._fetch_parts(directory)
        return str(directory)

    def _fetch_parts(self, directory: Path) -> None:
        """Fetch what ranks of other nodes have written, one after the other, for they are large. A collective.

        torch's DCP spreads what all ranks hold alike over the parts of all; DeepSpeed looks whether all are there.
        """
        me = current_identity()
        for rank in range(me.world_size):
            theirs = of_rank(rank, {})
            is_here = me.rank <= rank < me.rank + me.local_world_size
            self.checkpoints.restore({"own": theirs} if me.local_rank == 0 and not is_here else {})
            _write(directory, theirs.value)
        barrier("safedist-newest")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step is done; the last one is saved in any case."""
        if self.checkpoints.should_save(state.global_step - 1) or state.global_step >= state.max_steps:
            control.should_save = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An epoch is over, or another callback has ended the training in it: then this was the last step."""
        if control.should_training_stop and state.global_step != self._saved:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The trainer has made a checkpoint."""
        made, rank = Path(args.output_dir) / f"checkpoint-{state.global_step}", args.process_index
        names = [str(path.relative_to(made)) for path in sorted(made.rglob("*")) if path.is_file()]
        mine = {name: _mapped(made / name) for name in names if _rank_of(name, args.world_size) == rank}
        files = {"files": of_rank_0(mine), "own": per_rank({} if rank == 0 else mine)}
        self.checkpoints.save(state.global_step - 1, files, force=True)
        self._saved = state.global_step
        if made != Path(state.best_model_checkpoint or ""):
            for name in mine:  # others may still copy theirs, where the ranks share the directory
                (made / name).unlink()


def _is_part_of_rank_0(path: Path) -> bool:
    match = _OF_RANK.fullmatch(path.name)
    return match is not None and int(match[1]) == 0 and not path.name.startswith("rng_state_")


def _write(directory: Path, files: Mapping[str, torch.Tensor]) -> None:
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        data.numpy().tofile(directory / name)


def _rank_of(name: str, ranks: int) -> int:
    match = _OF_RANK.fullmatch(Path(name).name)
    number = int(match[1]) if match else 0
    return number if number < ranks else 0  # an adapter's of rank 16, say


def _mapped(path: Path) -> torch.Tensor:
    """A file's bytes, which are read when they are copied."""
    size = path.stat().st_size
    return torch.from_file(str(path), size=size, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
