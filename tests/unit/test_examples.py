"""Both examples learn: on four ranks as well as on one, and the same; and the real command says where the model is."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.procs import ROOT

EPOCHS = 14


@pytest.fixture(scope="session")
def warm(warm_to_train):
    return warm_to_train


@pytest.fixture(scope="module")
def one(warm, tmp_path_factory):
    """What one rank comes to, by whichever backend: it sums nothing."""
    return trained(warm, tmp_path_factory.mktemp("one"), "digits_ddp", 1)


def trained(warm, directory: Path, example: str, ranks: int) -> dict[str, Any]:
    inputs = {"example": example, "ranks": ranks, "epochs": EPOCHS}
    value: dict[str, Any] = warm.run("job_examples:train", directory / "job", inputs=inputs).value
    return value


def by_the_command(warm, directory: Path) -> dict[str, Any]:
    """The same of four ranks with Horovod, by the command that the example is run with, as far as it tells that."""
    import torch

    command = f"{Path(sys.executable).parent / 'pyflyte'}:__main__"
    arguments = ["run", str(ROOT / "examples" / "digits_horovod.py"), "train", "--epochs", str(EPOCHS)]
    ended = warm.run(command, directory / "job", kind="main", arguments=arguments)
    assert ended.code == 0, ended.err
    assert ended.scratch == []
    told = r"model=(/\S*digits\.pt), score=Score\(accuracy=([\d.]+), loss=([\d.]+), world_size=(\d+)\)"
    [(model, accuracy, loss, size)] = re.findall(told, ended.out)
    weights = torch.cat([each.flatten() for each in torch.load(model).values()]).tolist()
    return {"accuracy": float(accuracy), "loss": float(loss), "world_size": int(size), "weights": weights}


@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_four_ranks_learn_and_equal_one_rank_with_the_same_global_batch(warm, tmp_path, one, backend):
    four = by_the_command(warm, tmp_path) if backend == "horovod" else trained(warm, tmp_path, "digits_ddp", 4)
    assert (four["world_size"], one["world_size"]) == (4, 1)
    assert four["accuracy"] >= 0.95
    assert four["accuracy"] == pytest.approx(one["accuracy"], abs=0.005)
    assert four["loss"] == pytest.approx(one["loss"], rel=0.02)
    # Sums of floats in another order, amplified by Adam over some hundred steps.
    assert four["weights"] == pytest.approx(one["weights"], abs=0.02)


def test_the_sidecar_that_is_shown_ends_with_the_trainer() -> None:
    """One beside it in ``containers`` that never ends keeps a finished job running."""
    names = runpy.run_path(str(ROOT / "examples" / "overrides.py"))
    spec = names["SIDECAR"].pod_spec
    assert [container.name for container in spec.containers] == ["trainer"]
    assert [container.restart_policy for container in spec.init_containers] == ["Always"]
