"""The one sentence that a node's log is to end with, when its job has failed.

What comes after a failure (flytekit's own report of it, tracebacks, the log's tail) is long, and Kubernetes shows the
last lines only: ``terminationMessagePolicy: FallbackToLogsOnError`` takes 2048 bytes, 80 lines at most.
"""

from __future__ import annotations

LIMIT = 1000
"""Characters of a sentence: all of it must fit into the end of a log that is shown."""

_sentence: str | None = None


def keep(error: BaseException) -> None:
    """Remember the first line of *error* for the end of this process's log; the latest one counts."""
    global _sentence  # noqa: PLW0603  (handed from the task to the entrypoint, with all of flytekit in between)
    first = next(iter(str(error).strip().splitlines()), "")
    sentence = f"{type(error).__name__}: {first}"
    _sentence = sentence if len(sentence) <= LIMIT else f"{sentence[:LIMIT]}..."


def take() -> str | None:
    """The sentence, once; None when nothing failed."""
    global _sentence
    sentence, _sentence = _sentence, None
    return sentence
