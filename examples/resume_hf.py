"""The same as ``resume_ddp.py``, with Hugging Face's Trainer and a tiny random model.

``pip install transformers accelerate``, then ``pyflyte run examples/resume_hf.py train --where /tmp/run-5``. The
trainer makes its own checkpoint in scratch; a callback hands it on, whole, to where it is complete or not there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import resume_common as common
from devices import device_of
from flytekit import Resources, task

from flytekitplugins_safedist import SafeTorch, current_rank
from flytekitplugins_safedist.checkpoint import Checkpoints


def files_of_all_ranks(directory: Path) -> dict[str, bytes]:
    """The bytes of each file, by its path: the trainer leaves most of them to rank 0, and one to each rank."""
    import torch.distributed as dist

    mine = {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}
    every: list[dict[str, bytes]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    return {name: files[name] for files in every for name in sorted(files)}


def written(files: dict[str, bytes], directory: Path) -> Path:
    """A directory of those files."""
    for name, data in files.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return directory


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=2), requests=Resources(cpu="2", mem="2Gi"))
def train(where: str = "", epochs: int = 4) -> float:
    """The loss at the end. Saves go to ``where``, or, without it, to Flyte's checkpoint prefix."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

    class Saves(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
        """Has the trainer save when a pod is told to stop, and hands on what it saved."""

        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            if ckpt.should_save(state.global_step - 1):
                control.should_save = True

        def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
            made = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            ckpt.save(state.global_step - 1, {"files": files_of_all_ranks(made)}, force=True)

    me = current_rank()
    set_seed(1)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes))
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

    ckpt = Checkpoints(where or None, every=None)
    kept: dict[str, Any] = {"files": {}}
    step = ckpt.restore(kept)
    resumed = written(kept["files"], me.scratch / "resumed")
    trainer.train(resume_from_checkpoint=str(resumed) if step else None)
    model.eval()
    with torch.no_grad():
        sentences = sentences.to(model.device)
        return float(model(input_ids=sentences, labels=sentences).loss)
