"""What a failed process leaves where it is looked for first: the last line of its log, and the termination message.

What comes after a failure (flytekit's own report of it, tracebacks, the log's tail) is long, and Kubernetes shows the
last lines only: ``terminationMessagePolicy: FallbackToLogsOnError`` takes 2048 bytes, 80 lines at most. And where the
kubelet calls a container OOMKilled, for one rank of it that was, Flyte reads no ``error.pb``, whatever the exit code:
the termination message is all that it shows.
"""

from __future__ import annotations

from . import termination
from .errors import SafedistError
from .handoff import Slot
from .texts import encodable, named

LIMIT = 1000
"""Characters of the last line: all of it must fit into the end of a log that is shown."""

FAILED = "the job failed: "

_KEPT: Slot[tuple[str, str]] = Slot()
"""How the log's last line begins, and why the job failed: from the task to the entrypoint."""


def keep(error: BaseException | str, prefix: str = FAILED) -> None:
    """Remember *error*, its cause in the first line, for the end of this process; the latest one counts.

    Args:
        error: why the job failed, or this process ends.
        prefix: what the last line of the log says before that.
    """
    _KEPT.value = (prefix, encodable(error if isinstance(error, str) else text_of(error)))


def text_of(error: BaseException) -> str:
    """What an error says; ours begin with the cause, others with their type."""
    return str(error) if isinstance(error, SafedistError) else named(error)


def take() -> str | None:
    """The last line of the log, once, and leave all of it as the container's termination message; None when nothing
    failed."""
    kept = _KEPT.take()
    if kept is None:
        return None
    prefix, text = kept
    termination.say(text)
    return first_line(prefix + text)


def first_line(text: str) -> str:
    """Of *text*, with the cause in it."""
    line = next(iter(text.strip().splitlines()), "")
    return line if len(line) <= LIMIT else f"{line[:LIMIT]}..."
