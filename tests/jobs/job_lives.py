"""A job of one pod that lives a life (tests/checkpoint/lives.py): ``$TEST_LIFE``; a round is a life of its own."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from flytekit import task

from flytekitplugins_safedist import SafeTorch, Timeouts, current_rank
from tests.checkpoint.lives import Kill, Life, live


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=1, timeouts=Timeouts(stop=1, exit=5)))
def train() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    me = current_rank()
    told = json.loads(os.environ["TEST_LIFE"])
    kill = Kill(**told["kill"]) if me.round == 0 else None
    directory = Path(told["directory"])
    live(replace(Life(**told), number=told["number"] + me.round, kill=kill, directory=directory), me.rank)
