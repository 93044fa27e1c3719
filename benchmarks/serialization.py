"""Serialization of 200 tasks, against 200 stock ``Elastic`` tasks of kfpytorch: the same function, image and resources.

Each measurement is a process of its own, which declares the tasks and then turns them into protobuf messages, as fast
registration does; imports are apart. Interleaved, medians, ratios:

    python benchmarks/serialization.py [--tasks 200] [--repeat 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

REACH = 1.5


def ours() -> tuple[Any, type]:
    """The config, and the task class, of this package."""
    from flytekitplugins_safedist.config.options import SafeTorch
    from flytekitplugins_safedist.plugin.task import SafeTask

    return SafeTorch(nnodes=2, nproc_per_node=4), SafeTask


def stock() -> tuple[Any, type]:
    """Those of kfpytorch; shared memory as ours has it."""
    import torch.distributed.run  # noqa: F401  (Elastic's constructor imports it: once, and not per task)
    from flytekitplugins.kfpytorch.task import Elastic, PytorchElasticFunctionTask

    return Elastic(nnodes=2, nproc_per_node=4), PytorchElasticFunctionTask


SIDES: dict[str, Callable[[], tuple[Any, type]]] = {"ours": ours, "stock": stock}


def train(epochs: int, lr: float = 0.1) -> float:
    """The function of every task; it never runs."""
    return lr / epochs


def measure(side: str, count: int) -> dict[str, float]:
    """CPU seconds (other work on the machine disturbs the clock) for imports, declarations and messages."""
    from collections import OrderedDict

    started = time.process_time()
    import warnings

    warnings.simplefilter("ignore")
    from flytekit import Resources
    from flytekit.configuration import FastSerializationSettings, ImageConfig, SerializationSettings
    from flytekit.tools.translator import get_serializable

    config, task_class = SIDES[side]()
    from kubernetes.client import ApiClient, V1PodSpec  # loads its models, which both sides need

    ApiClient().sanitize_for_serialization(V1PodSpec(containers=[]))
    imported = time.process_time()
    resources = Resources(cpu="8", mem="32Gi", gpu="4")
    tasks = [task_class(config, train, requests=resources, limits=resources) for _ in range(count)]
    declared = time.process_time()
    settings = SerializationSettings(
        image_config=ImageConfig.auto(img_name="registry.example/train:1"),
        project="flytesnacks",
        domain="development",
        version="v1",
        fast_serialization_settings=FastSerializationSettings(
            enabled=True, destination_dir="/root", distribution_location="s3://bucket/code.tar.gz"
        ),
    )
    size = sum(len(get_serializable(OrderedDict(), settings, one).to_flyte_idl().SerializeToString()) for one in tasks)
    done = time.process_time()
    return {
        "import": imported - started,
        "declare": declared - imported,
        "serialize": done - declared,
        "total": done - imported,
        "bytes": size / count,
    }


def main() -> None:
    """Run both sides in turns and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--side", choices=tuple(SIDES))
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(options.side, options.tasks)))
        return
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(options.repeat):
        for side in SIDES:
            command = [sys.executable, __file__, "--side", side, "--tasks", str(options.tasks)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[side].append(json.loads(output.splitlines()[-1]))
    medians = {
        side: {key: statistics.median(one[key] for one in runs) for key in runs[0]} for side, runs in found.items()
    }
    for side, values in medians.items():
        print(f"{side:6}", "  ".join(f"{key} {value:8.3f}" for key, value in values.items()))
    for key in ("declare", "serialize", "total", "bytes"):
        print(f"ratio ours/stock, {key}: {medians['ours'][key] / medians['stock'][key]:.2f}")
    ratio = medians["ours"]["total"] / medians["stock"]["total"]
    print(f"{'reached' if ratio < REACH else 'NOT reached'}: total {ratio:.2f} < {REACH}")


if __name__ == "__main__":
    main()
