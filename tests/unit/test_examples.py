"""Both examples learn: on four ranks as well as on one, and the same; and the command says where the model is."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.procs import ROOT

EPOCHS = 10
BACKENDS = ["ddp", pytest.param("horovod", marks=pytest.mark.horovod)]


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_four_ranks_learn_and_equal_one_rank_with_the_same_global_batch(warm, tmp_path, one, backend):
    four = trained(warm, tmp_path, f"digits_{backend}", 4)
    assert (four["world_size"], one["world_size"]) == (4, 1)
    assert four["accuracy"] >= 0.95
    assert four["accuracy"] == pytest.approx(one["accuracy"], abs=0.005)
    assert four["loss"] == pytest.approx(one["loss"], rel=0.02)
    # Sums of floats in another order, amplified by Adam over some hundred steps.
    assert four["weights"] == pytest.approx(one["weights"], abs=0.02)


@pytest.mark.horovod
def test_the_real_command_trains_and_says_where_the_model_is(warm, tmp_path):
    command = f"{Path(sys.executable).parent / 'pyflyte'}:__main__"
    arguments = ["run", str(ROOT / "examples" / "digits_horovod.py"), "train", "--epochs", "1"]
    ended = warm.run(command, tmp_path / "job", kind="main", arguments=arguments)
    assert ended.code == 0, ended.err
    assert ended.scratch == []
    [model] = re.findall(r"(/\S*digits\.pt)", ended.out)
    assert Path(model).stat().st_size > 10_000, ended.out


def test_the_sidecar_that_is_shown_ends_with_the_trainer() -> None:
    """One beside it in ``containers`` that never ends keeps a finished job running."""
    names = runpy.run_path(str(ROOT / "examples" / "overrides.py"))
    spec = names["SIDECAR"].pod_spec
    assert [container.name for container in spec.containers] == ["trainer"]
    assert [container.restart_policy for container in spec.init_containers] == ["Always"]
