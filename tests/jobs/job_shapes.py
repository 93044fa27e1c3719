"""Tasks of every shape that flytekit allows, and functions that call them."""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flytekit import Deck, current_context, map_task, task, workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.error import FlyteError
from flytekit.types.file import FlyteFile

from flytekitplugins_safedist import SafeHorovod, SafeTorch, current_rank
from tests.harness.procs import say

TWO = SafeTorch(nproc_per_node=2)


@dataclass
class Settings:
    """A dataclass as an input."""

    rate: float
    layers: list[int]


class Made(NamedTuple):
    """Several outputs."""

    who: int
    file: FlyteFile
    settings: Settings
    array: np.ndarray


def facts() -> dict[str, str]:
    """Who this rank is, and where."""
    return {**{name: str(value) for name, value in asdict(current_rank()).items()}, "cwd": os.getcwd()}


@task(task_config=TWO)
def everything(
    number: int,
    text: str,
    numbers: list[int],
    mapping: dict[str, float],
    settings: Settings,
    when: datetime,
    maybe: int | None,
    array: np.ndarray,
    file: FlyteFile,
    folder: FlyteDirectory,
) -> Made:
    """Says what it got, and returns what tells the ranks apart."""
    me = current_rank()
    got = {"number": number, "text": text, "numbers": numbers, "mapping": mapping, "settings": settings}
    got |= {"when": when, "maybe": maybe}
    said = {
        "who": facts(),
        "values": repr({**got, "array": array.tolist()}),
        "file": file.download(),
        "file text": Path(file).read_text(),
        "folder": folder.download(),
        "folder names": sorted(os.listdir(folder)),
    }
    say(json.dumps(said))
    path = me.scratch / "made.txt"
    path.write_text(f"made by rank {me.rank}")
    made = Settings(rate=settings.rate + me.rank, layers=settings.layers)
    return Made(who=me.rank, file=FlyteFile(str(path)), settings=made, array=array + me.rank)


def call_everything() -> dict[str, Any]:
    here = Path.cwd()
    (here / "data").mkdir()
    (here / "data" / "part-0").write_text("zero")
    (here / "input.txt").write_text("some data")
    made = everything(
        number=3,
        text="grüße",
        numbers=[1, 2],
        mapping={"a": 0.5},
        settings=Settings(rate=0.25, layers=[8, 4]),
        when=datetime(2020, 2, 3, tzinfo=timezone.utc),
        maybe=None,
        array=np.arange(3),
        file=FlyteFile(str(here / "input.txt")),
        folder=FlyteDirectory(str(here / "data")),
    )
    return {
        "who": made.who,
        "file": Path(made.file).read_text(),
        "settings": asdict(made.settings),
        "array": made.array.tolist(),
        "types": [type(value).__name__ for value in made],
    }


def _who() -> str:
    me = current_rank()
    say(json.dumps(facts()))
    return f"{me.rank} of {me.world_size}"


@task(task_config=SafeTorch(nproc_per_node=2))
def who_torch() -> str:
    return _who()


@task(task_config=SafeHorovod(nproc_per_node=2))
def who_horovod() -> str:
    return _who()


@task(task_config=SafeTorch())
def who_alone() -> str:
    return _who()


@task(task_config=TWO, enable_deck=True)
def with_deck() -> int:
    Deck("report", f"<b>written by rank {current_rank().rank}</b>")
    return 1


@task(task_config=TWO, enable_deck=True)
def with_deck_and_failing() -> None:
    me = current_rank()
    Deck("report", f"<b>written by rank {me.rank}</b>").append("<i>later</i>")
    raise ValueError(f"rank {me.rank} could not finish")


@task(task_config=TWO)
def with_secret() -> str:
    return current_context().secrets.get("vault", "token") + current_context().execution_id.name


@task(task_config=TWO)
def double(x: int) -> int:
    return 2 * x + current_rank().rank


@workflow
def doubled_twice(x: int) -> int:
    return double(x=double(x=x))


@task(task_config=TWO, cache=True, cache_version=os.environ.get("TEST_UNIQUE", "0"))
def cached(x: int) -> int:
    say("ran")
    return x + 1


@task(task_config=TWO)
def cleanup(err: FlyteError | None = None) -> tuple[str, FlyteError | None]:
    """What a workflow calls when it has failed."""
    say(f"rank {current_rank().rank} cleans up after {err and err.message}")
    return err.failed_node_id if err is not None else "nothing", err


@task(task_config=TWO)
def breaks() -> None:
    raise ValueError("not today")


@workflow(on_failure=cleanup)
def breaks_and_cleans_up() -> None:
    breaks()


@task(task_config=TWO)
def wrong_type() -> int:
    return "seven"  # type: ignore[return-value]


@task(task_config=TWO)
def takes_anything(x: object) -> None:
    """Inputs without a type of their own are pickled by flytekit."""


@task(task_config=TWO)
def refuses(x: int) -> None:
    raise ValueError(f"{x} is no number of epochs")


def every_failure() -> list[tuple[str, str]]:
    """Class and text of what calls raise, caught as around any other call."""
    met = []
    for call in (lambda: takes_anything(x=threading.Lock()), wrong_type, breaks_and_cleans_up):
        try:
            call()
        except Exception as error:
            met.append((type(error).__name__, str(error)))
    try:
        refuses(x=-1)
    except ValueError as error:
        met.append((type(error).__name__, str(error)))
    return met


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """A user's decorator: what flytekit is given is then a function inside a function."""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        say(f"calling {function.__name__}")
        return function(*arguments, **named)

    return wrapper


@task(task_config=TWO)
@logged
def decorated(x: int) -> int:
    return x + 1


def call_partial() -> list[int]:
    """A map task with one argument fixed."""

    @workflow
    def mapped(xs: list[int]) -> list[int]:
        return map_task(partial(add, y=10))(x=xs)

    return mapped(xs=[1, 2])


@task(task_config=TWO)
def add(x: int, y: int) -> int:
    return x + y


def every_shape() -> list[Any]:
    return [doubled_twice(x=3), call_partial(), decorated(x=1), with_secret(), [cached(x=1), cached(x=1)]]


if __name__ == "__main__":
    print("main says", double(x=4))
    lock = threading.Lock()

    @task(task_config=TWO)
    def guarded() -> None:
        """Cannot travel to ranks by value, and cannot be imported by them."""
        with lock:
            pass

    guarded()
