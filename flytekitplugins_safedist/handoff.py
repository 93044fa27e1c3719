"""What one part of this process leaves for another, where code that is not ours runs in between and hands nothing on.

The entrypoint calls flytekit, which calls the task, uploads and ends; a rank calls the user's function, which asks who
it is. Each such value is a :class:`Slot` of the module that reads it, which says who fills it.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Slot(Generic[T]):
    """A place for one value, of this process; None while there is none."""

    def __init__(self) -> None:
        self.value: T | None = None

    def take(self) -> T | None:
        """The value, which is handed on once: the place is empty afterwards."""
        value, self.value = self.value, None
        return value
