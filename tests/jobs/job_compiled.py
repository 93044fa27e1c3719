"""A task that compiles in both its rounds, and tells where that is kept and whether it was found again."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch
import torch._inductor.compile_fx  # seconds, which each rank would take in each round
from flytekit import task
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import cache_dir

from flytekitplugins_safedist import SafeTorch, Timeouts, current_rank
from tests.harness.procs import say, wait_for_word


@task(task_config=SafeTorch(nproc_per_node=2, max_restarts=1, timeouts=Timeouts(stop=0.5, exit=0.5)))
def compiles_twice() -> None:
    me = current_rank()
    if me.rank == 0:  # seconds: where the other would have it, it says
        # Else it compiles a program for each extension that this CPU might have, and its headers beforehand.
        plain = {"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
        computed = torch.compile(lambda x: x * x + 1, options=plain)(torch.full((8,), 3.0))
        assert computed[0] == 10.0
    kept = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    built = sorted(path.name for path in kept.rglob("*.so"))
    found = counters["inductor"]["fxgraph_cache_hit"]
    say(json.dumps([me.rank, me.round, str(kept), str(cache_dir()), len(built), found]))
    if me.round == 0:
        if me.rank != 0:
            signal.pause()
        wait_for_word()
        raise ValueError("once")
