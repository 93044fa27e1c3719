"""The examples on GPUs that are not here: their count is made up, and what goes to one goes to torch's meta device.

An operation between the meta device and the CPU fails as one between a GPU and the CPU does, so a batch, a model or a
sum that stays behind fails here.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.overrides import TorchFunctionMode

sys.path.append(str(Path(__file__).parents[2] / "examples"))

RANK_1 = SimpleNamespace(rank=1, local_rank=1, world_size=2, local_world_size=2, nnodes=1)


class Gpus(TorchFunctionMode):
    """Puts on the meta device what is meant for a GPU, and remembers for which one."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[torch.device] = set()
        self.current: list[int] = []

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [self._meta(value) for value in args]
        kwargs = {name: self._meta(value) for name, value in (kwargs or {}).items()}
        if func in (torch.Tensor.item, torch.Tensor.__float__) and args[0].is_meta:
            return 0.0
        if func is torch.Tensor.cpu and args[0].is_meta:
            return torch.zeros(args[0].shape)
        return func(*args, **kwargs)

    def _meta(self, value: Any) -> Any:
        if not isinstance(value, torch.device) or value.type != "cuda":
            return value
        self.used.add(value)
        return torch.device("meta")


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs."""
    with Gpus() as made:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "set_device", made.current.append)
        for check in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
            # Of an optimizer's step, by torch's version: a CUDA build asks the driver, which is not there.
            monkeypatch.setattr(torch.optim.Optimizer, check, lambda self: None, raising=False)
        yield made


@pytest.fixture
def torch_group(monkeypatch):
    """A process group of a rank that is alone with itself: what it was told."""
    told = SimpleNamespace(backends=[], device_ids=[])

    class Replica(torch.nn.Module):
        def __init__(self, module: torch.nn.Module, device_ids: list[int] | None = None) -> None:
            super().__init__()
            self.module = module
            told.device_ids.append(device_ids)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    def all_reduce(tensor: torch.Tensor) -> None:
        assert tensor.is_meta == (told.backends == ["nccl"]), "NCCL takes tensors on GPUs, gloo here those on the CPU"

    monkeypatch.setattr(distributed, "init_process_group", told.backends.append)
    monkeypatch.setattr(distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", Replica)
    return told


@pytest.fixture
def horovod(monkeypatch):
    """A Horovod of one rank, with NCCL unless told otherwise."""
    made = ModuleType("horovod.torch")
    made.__dict__.update(
        init=lambda: None,
        rank=lambda: RANK_1.rank,
        size=lambda: RANK_1.world_size,
        nccl_built=lambda: True,
        Sum="sum",
        allreduce=lambda tensor, op: tensor,
        broadcast_parameters=lambda state, root_rank: None,
        DistributedOptimizer=lambda optimizer, named_parameters: optimizer,
    )
    package = ModuleType("horovod")
    package.__dict__["torch"] = made
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setitem(sys.modules, "horovod.torch", made)
    return made


def train(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module(example)
    monkeypatch.setattr(module, "current_rank", lambda: SimpleNamespace(scratch=tmp_path, **vars(RANK_1)))
    if example.startswith("resume"):
        saves = SimpleNamespace(restore=lambda state: 0, save=lambda step, state: None)
        monkeypatch.setattr(module, "Checkpoints", lambda *_, **__: saves)
    return module.train.task_function(epochs=1)


@pytest.mark.parametrize("example", ["digits_ddp", "resume_ddp"])
def test_with_ddp_all_is_on_the_gpu_of_this_rank_but_its_weights(gpus, torch_group, tmp_path, monkeypatch, example):
    trained = train(example, tmp_path, monkeypatch)
    assert gpus.current == [1], "made the current one, for NCCL takes that"
    assert gpus.used == {torch.device("cuda", 1)}
    assert torch_group.backends == ["nccl"]
    assert torch_group.device_ids == [[1]]
    if example == "digits_ddp":  # its weights load on a machine without a GPU
        assert {tensor.device.type for tensor in torch.load(str(trained.model)).values()} == {"cpu"}


@pytest.mark.parametrize("example", ["digits_horovod", "resume_horovod"])
def test_with_horovod_all_is_on_the_gpu_of_this_rank(gpus, horovod, tmp_path, monkeypatch, example):
    train(example, tmp_path, monkeypatch)
    assert gpus.current == [1]
    assert gpus.used == {torch.device("cuda", 1)}


@pytest.mark.parametrize("example", ["digits_horovod", "resume_horovod"])
def test_a_horovod_without_nccl_trains_on_the_cpu(gpus, horovod, tmp_path, monkeypatch, example):
    horovod.__dict__["nccl_built"] = lambda: False
    train(example, tmp_path, monkeypatch)
    assert (gpus.current, gpus.used) == ([], set())


def test_with_fewer_gpus_than_ranks_they_train_on_the_cpu(gpus, torch_group, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    train("digits_ddp", tmp_path, monkeypatch)
    assert (gpus.current, gpus.used) == ([], set())
    assert torch_group.backends == ["gloo"]
    assert torch_group.device_ids == [None]
