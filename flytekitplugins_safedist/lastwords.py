"""The one sentence that a node's log is to end with, when its job has failed.

What comes after a failure (flytekit's own report of it, tracebacks, the log's tail) is long, and Kubernetes shows the
last lines only: ``terminationMessagePolicy: FallbackToLogsOnError`` takes 2048 bytes, 80 lines at most.
"""

from __future__ import annotations

from .handoff import HERE

LIMIT = 1000
"""Characters of a sentence: all of it must fit into the end of a log that is shown."""


def keep(error: BaseException) -> None:
    """Remember the first line of *error* for the end of this process's log; the latest one counts."""
    HERE.last_words = sentence_of(error)


def sentence_of(error: BaseException) -> str:
    """The first line of *error*, with its type."""
    first = next(iter(str(error).strip().splitlines()), "")
    sentence = f"{type(error).__name__}: {first}"
    return sentence if len(sentence) <= LIMIT else f"{sentence[:LIMIT]}..."


def take() -> str | None:
    """The sentence, once; None when nothing failed."""
    sentence: str | None = HERE.take("last_words")
    return sentence
