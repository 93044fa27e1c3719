"""The error of a failed job as an exception of the user's own class, too: where the job was called in this process,
``except ValueError`` around the call works as it does around any other call.
"""

from __future__ import annotations

import functools
import sys
from contextlib import suppress
from typing import Any

from ..errors import SafedistError
from ..rank.outcome import Raised

_HEAP_TYPE = 1 << 9
"""``Py_TPFLAGS_HEAPTYPE``: of a class that a ``class`` statement makes."""


def as_users(error: SafedistError, raised: Raised) -> SafedistError:
    """The same facts, in a class that is the error's and that of what a rank has raised; ``error`` itself where this
    process has no such class.

    Args:
        error: of the job.
        raised: what is its cause.
    """
    with suppress(Exception):  # whatever the user's module does as it is asked, or the class as it is derived from
        users = class_of(raised.type)
        if users is not None and not isinstance(error, users):
            both = blank(type(error), users)
            both.__setstate__(error.__dict__)
            if isinstance(both, OSError) and raised.errnos:
                both.errno = raised.errnos[0]
            return both
    return error


def class_of(name: str) -> type[Exception] | None:
    """An exception's class by its qualified name, as far as this process has imported it; nothing is imported."""
    parts = name.split(".")
    places = [(".".join(parts[:n]), parts[n:]) for n in range(len(parts) - 1, 0, -1)]
    for module, path in [*places, ("builtins", parts), ("__main__", parts)]:
        found: Any = sys.modules.get("__main__" if module == "__mp_main__" else module)
        for part in path:
            found = getattr(found, part, None)
        if isinstance(found, type) and issubclass(found, Exception):
            return found
    return None


@functools.cache
def _both(ours: type[SafedistError], users: type[Exception]) -> type[SafedistError]:
    def reduce(self: SafedistError) -> tuple[Any, ...]:
        return blank, (ours, users), dict(self.__dict__)

    names = {"__module__": ours.__module__, "__doc__": ours.__doc__, "__reduce__": reduce}
    both: type[SafedistError] = type(ours.__name__, (ours, users), names)
    return both


def blank(ours: type[SafedistError], users: type[Exception]) -> SafedistError:
    """An error that is of both classes, without its facts. Neither's constructor is called: the user's may want
    anything."""
    both = _both(ours, users)  # type: ignore[arg-type]
    base = next(each for each in both.__mro__ if not each.__flags__ & _HEAP_TYPE)
    made: SafedistError = base.__new__(both)  # type: ignore[call-overload]
    return made
