"""The same as ``restart_script.with_horovod``, as horovodrun's elastic mode wants it written."""

from __future__ import annotations

import os
from pathlib import Path

import horovod.torch as hvd
import torch
from restart_script import enter, fail_once, step


@hvd.elastic.run  # type: ignore[untyped-decorator]  # horovod is untyped
def train(state: hvd.elastic.TorchState) -> None:
    """What horovodrun enters anew after a failure: the ranks that live do, and those started in the place of others."""
    directory = Path(os.environ["BENCH_DIRECTORY"])
    again = enter(directory, hvd.rank())
    hvd.allreduce(torch.ones(1), name="barrier")
    fail_once(directory, hvd.rank(), again=again)
    hvd.allreduce(torch.ones(1), name="step")
    step(directory, hvd.rank())


if __name__ == "__main__":
    hvd.init()
    train(hvd.elastic.TorchState(step=0))
