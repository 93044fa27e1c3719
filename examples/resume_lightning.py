"""The same as ``resume_ddp.py``, with PyTorch Lightning: ``pip install lightning``, then
``pyflyte run examples/resume_lightning.py train --where /tmp/run-4``.

Lightning's own loop runs, with a schedule of the learning rate; a callback sees to the checkpoints.
"""

from __future__ import annotations

from typing import Any

import resume_common as common
from devices import device_of
from flytekit import Resources, task

from flytekitplugins_safedist import SafeTorch, current_rank
from flytekitplugins_safedist.checkpoint import ResumableSampler


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=2), requests=Resources(cpu="2", mem="2Gi"))
def train(where: str = "", epochs: int = 4) -> float:
    """The loss at the end. Saves go to ``where``, or, without it, to Flyte's checkpoint prefix."""
    import lightning.pytorch as pl
    import torch

    from flytekitplugins_safedist.checkpoint.lightning import SafedistCheckpoint

    class Regression(pl.LightningModule):  # type: ignore[misc]  # lightning is untyped to mypy here
        def __init__(self) -> None:
            super().__init__()
            self.model = common.new_model()

        def training_step(self, batch: Any, _index: int) -> Any:
            x, y = batch
            return torch.nn.functional.mse_loss(self.model(x), y)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=2e-2)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8 * epochs)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    me = current_rank()
    module = Regression()
    torch.manual_seed(me.rank)  # dropout of each rank's own
    data = common.points()
    sampler = ResumableSampler(data, rank=me.rank, world_size=me.world_size)
    trainer = pl.Trainer(
        accelerator="gpu" if device_of(me).type == "cuda" else "cpu",
        strategy="ddp",
        devices=me.local_world_size,
        num_nodes=me.nnodes,
        max_epochs=epochs,
        callbacks=[SafedistCheckpoint(where or None, sampler=sampler, every=5)],
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=str(me.scratch),
    )
    trainer.fit(module, common.loader(data, sampler))
    return common.loss_on(module.model)
