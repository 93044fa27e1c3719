"""Jobs of several pods: one rendezvous, one result, whatever the shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.containers.cluster import Job


@pytest.fixture(scope="module")
def on_one_machine():
    """What the same training gives in one process: every shape must give that."""
    import torch

    torch.manual_seed(7)
    model = torch.nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.arange(24, dtype=torch.float64).reshape(-1, 1) / 24
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), 3 * x + 0.5).backward()
        optimizer.step()
    return pytest.approx([value.item() for value in model.parameters()], rel=1e-9)


@pytest.mark.parametrize(("backend", "nodes", "ranks"), [("horovod", 2, 2), ("torch", 3, 1), ("horovod", 1, 4)])
def test_a_job_of_any_shape_gives_what_one_machine_gives(
    job: Callable[..., Job], on_one_machine, backend: str, nodes: int, ranks: int
) -> None:
    running = job(f"{backend}_{nodes}x{ranks}", environment={"TEST_TRAINED": "by the library's optimizer"}, steps=20)
    ended = running.run()
    assert [pod.code for pod in ended] == [0] * nodes
    assert running.uploaded == ["outputs.pb"]
    assert running.output["weights"] == on_one_machine
    assert running.output["ranks"] == [
        f"{node * ranks + local} is {local} on node {node}" for node in range(nodes) for local in range(ranks)
    ]
    assert all("waiting until node 0 has uploaded" in pod.log for pod in ended[1:])


def test_a_dataloaders_workers_hand_their_tensors_over_in_the_default_scratch(job: Callable[..., Job]) -> None:
    running = job("torch_loader", steps=20)
    assert [pod.code for pod in running.run()] == [0, 0]
    assert running.output == {"total": 2 * sum(range(20))}
