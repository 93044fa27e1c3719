"""The same as ``resume_ddp.py``, with Hugging Face's Trainer and a tiny random model.

``pip install transformers accelerate``, then ``pyflyte run examples/resume_hf.py train --where /tmp/run-5``. The
trainer makes its own checkpoint in scratch; a callback hands it on, whole, to where it is complete or not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import resume_common as common
from devices import device_of
from flytekit import Resources, task

from flytekitplugins_safedist import SafeTorch, current_rank
from flytekitplugins_safedist.checkpoint import checkpoints


class Directory:
    """A directory of files as a state."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def state_dict(self) -> dict[str, bytes]:
        """Each file's bytes, by its path."""
        files = (file for file in self.path.rglob("*") if file.is_file())
        return {str(file.relative_to(self.path)): file.read_bytes() for file in files}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Write the files."""
        for name, data in state.items():
            file = self.path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=2), requests=Resources(cpu="2", mem="2Gi"))
def train(where: str = "", epochs: int = 4) -> float:
    """The loss at the end. Saves go to ``where``, or, without it, to Flyte's checkpoint prefix."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

    class Saves(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
        """Has the trainer save when a pod is told to stop, and hands on what it saved."""

        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            if ckpt.wanted(state.global_step - 1):
                control.should_save = True

        def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
            made = Directory(Path(args.output_dir) / f"checkpoint-{state.global_step}")
            ckpt.save(state.global_step - 1, {"trainer": made})

    me = current_rank()
    set_seed(1)
    # Without dropout: each rank has random numbers of its own, and what is handed on holds those of rank 0 only.
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    tokens = torch.randint(32, (common.POINTS, 1), generator=torch.Generator().manual_seed(0))
    sentences = (tokens + torch.arange(16)) % 32
    arguments = TrainingArguments(
        output_dir=str(me.scratch / "trainer"),
        num_train_epochs=epochs,
        per_device_train_batch_size=16,
        learning_rate=2e-2,
        save_strategy="steps",
        save_steps=5,
        use_cpu=device_of(me).type == "cpu",
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": sentence, "labels": sentence} for sentence in sentences]
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Saves()])

    ckpt = checkpoints(where or None, every=None)
    resumed = Directory(me.scratch / "resumed")
    step = ckpt.resume({"trainer": resumed})
    trainer.train(resume_from_checkpoint=str(resumed.path) if step else None)
    with torch.no_grad():
        sentences = sentences.to(model.device)
        return float(model(input_ids=sentences, labels=sentences).loss)
