"""Processes that take one file-system call at a time, in an order that hypothesis chooses, and die where it says."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from tests.fs.ranks import Outcome, Process, pause
from tests.harness.product import Sleeper

CALLS = ("link", "unlink", "rename", "mkdir", "rmdir", "open")


class Stepped:
    """Actors that stand still before each of ``CALLS`` (and at their own ``pause``) until they are let go."""

    def __init__(self, works: Sequence[Callable[[], Any]]) -> None:
        self.actors = [Process(_stepwise, work) for work in works]
        self.at: list[str | None] = [None] * len(works)
        self.outcomes: list[Outcome | None] = [None] * len(works)
        for index in range(len(works)):
            self._next(index)

    def _next(self, index: int) -> None:
        message = self.actors[index].next_message()
        if isinstance(message, Outcome):
            self.outcomes[index], self.at[index] = message, None
        else:
            self.at[index] = message

    def step(self, index: int) -> None:
        """Let one actor make the call that it stands before, and run on to the next."""
        if self.outcomes[index] is None:
            self.actors[index].resume()
            self._next(index)

    def kill(self, index: int) -> None:
        if self.outcomes[index] is None:
            self.actors[index].kill()
            self.outcomes[index] = Outcome("killed", self.at[index])
            self.at[index] = None

    def close(self) -> None:
        for index in range(len(self.actors)):
            self.kill(index)


def run(
    works: Sequence[Callable[[], Any]],
    schedule: Sequence[tuple[int, bool]],
    check: Callable[[Stepped], None],
    most_steps: int = 4000,
) -> list[Outcome]:
    """Follow ``schedule`` (actor, whether it dies), then let all run in turn to their ends; ``check`` each step."""
    stepped = Stepped(works)
    try:
        for index, dies in schedule:
            (stepped.kill if dies else stepped.step)(index % len(works))
            check(stepped)
        for count in range(most_steps):
            if all(stepped.outcomes):
                break
            stepped.step(count % len(works))
            check(stepped)
        assert all(stepped.outcomes), f"still at {stepped.at} after {most_steps} steps"
        return [outcome for outcome in stepped.outcomes if outcome]
    finally:
        stepped.close()


def schedules(actors: int, most: int = 60) -> st.SearchStrategy[list[tuple[int, bool]]]:
    """Long runs of one actor are as likely as quick changes; about one step in twenty is a death."""
    runs = st.tuples(st.integers(0, actors - 1), st.integers(1, 12), st.integers(0, 19).map(lambda n: n == 0))
    return st.lists(runs, max_size=most // 4).map(
        lambda chosen: [(actor, dies and at == length - 1) for actor, length, dies in chosen for at in range(length)]
    )


def _stepwise(work: Callable[[], Any]) -> Any:
    for name in CALLS:
        setattr(os, name, _pausing(name, getattr(os, name)))
    # The schedule is the clock; and who waits for another must stand still, or the other would never be let go.
    time.sleep = lambda seconds: pause("sleep")  # type: ignore[assignment]
    sleep = Sleeper.sleep

    def rest(sleeper: Sleeper, seconds: float) -> None:
        pause("rest")
        sleep(sleeper, 0.0)

    Sleeper.sleep = rest  # type: ignore[method-assign]
    return work()


def _pausing(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def paused(*args: Any, **kwargs: Any) -> Any:
        pause(name)
        return call(*args, **kwargs)

    return paused
