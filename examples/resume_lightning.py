"""The same as ``resume_ddp.py``, with PyTorch Lightning: ``pip install lightning``, then
``pyflyte run examples/resume_lightning.py train --where /tmp/run-4``.

Lightning's own loop runs; a callback of some lines sees to the checkpoints.
"""

from __future__ import annotations

from typing import Any

import resume_common as common
from devices import device_of
from flytekit import Resources, task

from flytekitplugins_safedist import SafeTorch, current_rank
from flytekitplugins_safedist.checkpoint import Checkpoints, ResumableSampler, per_rank


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=2), requests=Resources(cpu="2", mem="2Gi"))
def train(where: str = "", epochs: int = 4) -> float:
    """The loss at the end. Saves go to ``where``, or, without it, to Flyte's checkpoint prefix."""
    import lightning.pytorch as pl
    import torch

    class Regression(pl.LightningModule):  # type: ignore[misc]  # lightning is untyped to mypy here
        def __init__(self) -> None:
            super().__init__()
            self.model = common.new_model()

        def training_step(self, batch: Any, _index: int) -> Any:
            x, y = batch
            return torch.nn.functional.mse_loss(self.model(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    class Resumes(pl.Callback):  # type: ignore[misc]  # the same
        """Resumes when the training starts, and tells ``Checkpoints`` of each step."""

        def __init__(self, sampler: ResumableSampler) -> None:
            self.sampler = sampler
            self.random = per_rank(common.RandomNumbers(seed=me.rank))

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.ckpt = Checkpoints(where or None, every=5)
            self.state = {
                "model": module,
                "optimizer": trainer.optimizers[0],
                "sampler": self.sampler,
                "random": self.random,
            }
            self.step = self.ckpt.restore(self.state)
            # What Lightning counts up to max_epochs.
            progress = trainer.fit_loop.epoch_progress.current
            progress.processed = progress.completed = self.sampler.epoch

        def on_train_batch_end(self, _trainer: Any, _module: Any, _outputs: Any, batch: Any, _index: int) -> None:
            self.sampler.advance(len(batch[0]))
            self.ckpt.save(self.step, self.state)
            self.step += 1

        def on_train_epoch_end(self, _trainer: Any, _module: Any) -> None:
            self.sampler.next_epoch()

    me = current_rank()
    module = Regression()
    data = common.points()
    sampler = ResumableSampler(data, rank=me.rank, world_size=me.world_size)
    trainer = pl.Trainer(
        accelerator="gpu" if device_of(me).type == "cuda" else "cpu",
        strategy="ddp",
        devices=me.local_world_size,
        num_nodes=me.nnodes,
        max_epochs=epochs,
        callbacks=[Resumes(sampler)],
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=str(me.scratch),
    )
    trainer.fit(module, common.loader(data, sampler))
    return common.loss_on(module.model)
