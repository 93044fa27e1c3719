"""Workflows as their users test them, with tasks mocked by ``flytekit.testing``."""

from __future__ import annotations

from dataclasses import dataclass

from flytekit import map_task, task, workflow
from flytekit.testing import task_mock

from flytekitplugins_safedist import SafeTorch


@dataclass
class Settings:
    rate: float


@task(task_config=SafeTorch())
def train(epochs: int, settings: Settings) -> float:
    return epochs * settings.rate


@task(task_config=SafeTorch())
def no_inputs() -> str:
    return "a rank's"


@task(task_config=SafeTorch())
def square(x: int) -> int:
    return x * x


@workflow
def trained(epochs: int = 3) -> float:
    return train(epochs=epochs, settings=Settings(0.5))


@workflow
def asks() -> str:
    return no_inputs()


@workflow
def squares(xs: list[int]) -> list[int]:
    return map_task(square)(x=xs)


def mocked_then_for_real() -> list[object]:
    """What a mock returned, and what the same tasks give after it, in the same process."""
    with task_mock(square) as mock:
        mock.return_value = 7
        mocked = square(x=3)
    return [mocked, squares(xs=[10, 20]), square(x=4), no_inputs()]
