"""``SafedistCheckpoint``: saves and resumes a training of Lightning's."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from ..errors import CheckpointError
from .group import of_rank_0, per_rank
from .manager import Checkpoints
from .sampler import RandomNumbers, ResumableSampler


class SafedistCheckpoint(Checkpoint):  # type: ignore[misc]  # lightning is untyped to mypy here
    """Goes on from the newest save when the training starts, saves when that is due, and the last step in any case.

    Saved are the model, optimizers and schedulers, how far the loops are, the other callbacks' states, the precision's,
    what the module adds to a checkpoint, each rank's random numbers, and the sampler, or the loaders that have a state.

    Args:
        where, every, keep, resume_from: as of :class:`~.manager.Checkpoints`. Steps are the optimizers'.
        sampler: of the training's one loader, with ``Trainer(use_distributed_sampler=False)``. With it a training goes
            on in the middle of an epoch, with any number of ranks. Without it, and with loaders that have no state, an
            epoch that was broken off is begun with the batches that it began with, as Lightning does it.

    Attributes:
        checkpoints: what it saves by; from the start of the training on.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | None = None,
        *,
        sampler: ResumableSampler | None = None,
        every: int | timedelta | None = timedelta(minutes=10),
        keep: int | None = 3,
        resume_from: str | None = None,
    ) -> None:
        self._options: dict[str, Any] = {"where": where, "every": every, "keep": keep, "resume_from": resume_from}
        self._sampler = sampler

    # --- resume -------------------------------------------------------------------------------------------------------
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Everything is set up, and no loader has been asked yet."""
        self.checkpoints = Checkpoints(**self._options)
        self._others = of_rank_0(None)
        self._own, self._loops = per_rank(None), dict[str, Any]()
        self._state = {"model": trainer.strategy.model, "others": self._others, "own": self._own, "loops": self._loops}
        self._state |= {f"optimizer_{number}": each for number, each in enumerate(trainer.optimizers)}
        configs = enumerate(trainer.lr_scheduler_configs)
        self._state |= {f"scheduler_{number}": config.scheduler for number, config in configs}
        if hasattr(trainer.precision_plugin, "load_state_dict"):
            self._state["precision"] = trainer.precision_plugin
        if self._sampler is not None:
            self._state["sampler"] = self._sampler
            trainer.reload_dataloaders_every_n_epochs = 1  # else Lightning counts the batches of an epoch once
        self._random: Any = None
        self._step = self.checkpoints.restore(self._state) - 1
        if self._step >= 0:
            self._go_on(trainer, pl_module)

    def _go_on(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loops, fit = dict(self._loops), trainer.fit_loop
        own = self._own.value or {"random": None, "loaders": []}
        if own["loaders"]:
            loops["state_dict"] = {**loops["state_dict"], "combined_loader": own["loaders"]}
        self._random = own["random"]
        fit.load_state_dict(loops)
        for callback in trainer.callbacks:
            if callback.state_key in self._others.value["callbacks"]:
                callback.load_state_dict(self._others.value["callbacks"][callback.state_key])
        pl_module.on_load_checkpoint(self._others.value["module"])
        if self._sampler is not None:  # what is left of an epoch is one with fewer batches
            for loop in (fit, fit.epoch_loop, fit.epoch_loop.val_loop):
                loop.restarting = False
            for count in (fit.epoch_progress.current, fit.epoch_progress.total):
                count.ready = count.started = count.processed = count.completed = self._sampler.epoch

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Nothing is drawn any more before the first step."""
        loader, limit = trainer.train_dataloader, trainer.limit_train_batches
        if self._sampler is not None and (getattr(loader, "sampler", None) is not self._sampler or limit != 1.0):
            raise CheckpointError(
                "the sampler of SafedistCheckpoint cannot tell where the training is",
                seen=f"a loader with {type(getattr(loader, 'sampler', loader)).__name__}, limit_train_batches={limit}",
                hint="one DataLoader(sampler=sampler), Trainer(use_distributed_sampler=False), and no limit",
            )
        if self._random is not None:
            RandomNumbers().load_state_dict(self._random)

    # --- save ---------------------------------------------------------------------------------------------------------
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A save is of a whole optimizer step; of the last one of an epoch when that has ended."""
        if self._sampler is not None:
            self._sampler.advance(min(trainer.train_dataloader.batch_size, len(self._sampler)))
        if not trainer.is_last_batch and trainer.global_step > self._step + 1:
            self._save(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._sampler is not None:
            self._sampler.next_epoch()
        self._save(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save(trainer, pl_module, force=True)
        self.checkpoints.wait()

    def _save(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *, force: bool = False) -> None:
        self._step = trainer.global_step - 1
        if self._step < 0 or (not self.checkpoints.should_save(self._step) and not force):
            return
        module: dict[str, Any] = {"state_dict": {}}
        pl_module.on_save_checkpoint(module)
        callbacks = {each.state_key: each.state_dict() for each in trainer.callbacks if each is not self}
        self._others.value = {"module": module, "callbacks": {key: held for key, held in callbacks.items() if held}}
        self._loops.clear()
        self._loops.update(trainer.fit_loop.state_dict())
        self._loops["state_dict"] = dict(self._loops["state_dict"])
        loaders = self._loops["state_dict"].pop("combined_loader", [])
        self._own.value = {"random": RandomNumbers().state_dict(), "loaders": loaders}
        self.checkpoints.save(self._step, self._state, force=force)
