"""Tasks that tell what their module found as it was imported, and whether their rank was forked from that."""

from __future__ import annotations

import json
import os
import sys

import scipy.linalg  # a library that starts as many threads as its variables allow
import torch
from flytekit import ImageSpec, task

from flytekitplugins_safedist import SafeTorch, Timeouts

READ = {
    name: os.environ.get(name)
    for name in ("MY", "HIS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTORCH_NVML_BASED_CUDA_CHECK")
}
HIS = {"HIS": "y", "OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1"}
THREADS = torch.get_num_threads()
MINE, OTHER = ImageSpec(name="mine", packages=["torch"]), ImageSpec(name="other", packages=["tensorflow"])
IN = [MINE.is_container(), OTHER.is_container()]


@task(task_config=SafeTorch(nproc_per_node=2, timeouts=Timeouts(exit=2)), environment={"MY": "x", **HIS})
def found() -> str:
    forked = "flytekitplugins_safedist.rank_server.server" in sys.modules
    training = "torch._dynamo" in sys.modules
    config = sys.modules.get("torch._inductor.config")
    tuned = bool(config is not None and config.coordinate_descent_tuning)
    found = {"at import": READ, "threads": THREADS, "forked": forked, "norm": float(scipy.linalg.norm([3.0, 4.0]))}
    return json.dumps({**found, "training": training, "tuned": tuned, "in images": IN})
