"""A script with its task in ``__main__``, whose rank hands objects of the script to a spawned process."""

from __future__ import annotations

import multiprocessing

from flytekit import task

from flytekitplugins_safedist import SafeTorch
from flytekitplugins_safedist.run import run_script


class Shard:
    """What a dataset is: an object of a class of the script's."""

    def __init__(self, number: int) -> None:
        self.number = number

    def total(self) -> int:
        return FACTOR * self.number


FACTOR = 100


def read(shard: Shard) -> int:
    return shard.total()


@task(task_config=SafeTorch())
def train() -> int:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return sum(pool.map(read, [Shard(1), Shard(7)]))


@task(task_config=SafeTorch(nproc_per_node=2))
def by_path(path: str) -> None:
    run_script(path)


if __name__ == "__main__":
    print("total", train())
