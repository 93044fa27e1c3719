"""The same as ``resume_ddp.py``, with Hugging Face's Trainer and a tiny random model.

``pip install transformers accelerate``, then ``pyflyte run examples/resume_hf.py train --where /tmp/run-5``. The
trainer makes its own checkpoint in scratch; a callback hands it on to where it is complete or not there.
"""

from __future__ import annotations

import resume_common as common
from devices import device_of
from flytekit import Resources, task

from flytekitplugins_safedist import SafeTorch, current_rank


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=2), requests=Resources(cpu="2", mem="2Gi"))
def train(where: str = "", epochs: int = 4) -> float:
    """The loss at the end. Saves go to ``where``, or, without it, to Flyte's checkpoint prefix."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    from flytekitplugins_safedist.checkpoint.transformers import SafedistCallback

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
        save_strategy="no",
        use_cpu=device_of(me).type == "cpu",
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": sentence, "labels": sentence} for sentence in sentences]
    saves = SafedistCallback(where or None, every=5)
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[saves])
    trainer.train(resume_from_checkpoint=saves.newest())
    model.eval()
    with torch.no_grad():
        sentences = sentences.to(model.device)
        return float(model(input_ids=sentences, labels=sentences).loss)
