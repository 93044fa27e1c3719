"""Trainings by Lightning and by Hugging Face's Trainer, broken off at some step; they go on in another process."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Imported before processes are forked from the test's: each would take seconds for it.
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from flytekitplugins_safedist.checkpoint import ResumableSampler
from flytekitplugins_safedist.checkpoint.lightning import SafedistCheckpoint
from flytekitplugins_safedist.checkpoint.transformers import SafedistCallback
from tests.checkpoint.saving import reach_stores

ADAPTER = "adapter_rank_16.json"
"""A file of the user's in a checkpoint, whose name has a number that is no rank's."""


class BrokenOffError(Exception):
    """At this point the process is gone."""


def points() -> Any:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(100, 8, generator=made)
    return torch.utils.data.TensorDataset(x, x.sin().sum(1, keepdim=True))


def by_lightning(place: str, stop: int, **options: Any) -> Any:
    """Learning rate and loss of each step; broken off after ``stop`` steps, of a training that is not to end before."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel("ERROR")
    told: list[Any] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
            self.seen = 0

        def training_step(self, batch: Any, _index: int) -> Any:
            self.seen += 1
            loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
            told.append((self.trainer.current_epoch, self.optimizers().param_groups[0]["lr"], loss.item(), self.seen))
            return loss

        def validation_step(self, batch: Any, _index: int) -> None:
            self.log("val", torch.nn.functional.mse_loss(self.model(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=40)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            checkpoint["seen"] = self.seen

        def on_load_checkpoint(self, checkpoint: Any) -> None:
            self.seen = checkpoint["seen"]

    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if len(told) == stop:
                saves.checkpoints.wait()
                raise BrokenOffError

    data = points()
    sampler = ResumableSampler(data, rank=0, world_size=1)
    saves = SafedistCheckpoint(place, sampler=sampler, every=3)
    monitor = pl.callbacks.EarlyStopping("val", patience=100)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[saves, Stops(), monitor],
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=place,
        **{"max_epochs": 4, **options},
    )
    loader = torch.utils.data.DataLoader(data, batch_size=16, sampler=sampler)
    try:
        trainer.fit(Module(), loader, torch.utils.data.DataLoader(data, batch_size=50))
    except BrokenOffError:
        return told, -1, 0
    return told, trainer.global_step, monitor.wait_count


def by_transformers(place: str, scratch: str, stop: int, ends: int = -1, **options: Any) -> Any:
    """The same; of each step its number, learning rate and loss. A callback ends the training after ``ends`` steps."""
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel("ERROR")
    set_seed(1)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=8, vocab_size=32))
    tokens = (torch.randint(32, (100, 1), generator=torch.Generator().manual_seed(0)) + torch.arange(8)) % 32
    told: list[Any] = []

    class Tells(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            if "loss" in logs:
                told.append((state.global_step, logs["learning_rate"], logs["loss"]))
                if len(told) == stop:
                    saves.checkpoints.wait()
                    raise BrokenOffError

    class Ends(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == ends

    class Adds(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            (Path(scratch) / f"checkpoint-{state.global_step}" / ADAPTER).touch()

    arguments = TrainingArguments(
        output_dir=scratch,
        per_device_train_batch_size=16,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **{"num_train_epochs": 4, "save_strategy": "no", **options},
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    saves = SafedistCallback(place, every=3)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, callbacks=[Adds(), saves, Tells(), Ends()]
    )
    newest = saves.newest()
    assert newest is None or (Path(newest) / ADAPTER).exists()
    try:
        trainer.train(resume_from_checkpoint=newest)
    except BrokenOffError:
        return told, -1, 0
    saves.checkpoints.wait()
    return told, trainer.state.global_step, sorted(path.name for path in Path(scratch).rglob("*.safetensors"))


def hand_on(place: str, scratch: str, rank: int, ranks: int, written: dict[str, bytes]) -> dict[str, bytes]:
    """What a rank finds again of what all have handed on: ``written`` is what the trainer has made on its node."""
    reach_stores()
    dist.init_process_group("gloo")
    made = Path(scratch) / "checkpoint-1"
    for name, data in written.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(data)
    saves = SafedistCallback(place)
    arguments = SimpleNamespace(output_dir=scratch, process_index=rank, world_size=ranks)
    saves.on_save(arguments, SimpleNamespace(global_step=1, best_model_checkpoint=None), None)
    saves.checkpoints.wait()
    newest = Path(SafedistCallback(place).newest() or "")
    return {str(path.relative_to(newest)): path.read_bytes() for path in newest.rglob("*") if path.is_file()}
