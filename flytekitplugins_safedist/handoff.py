"""What one part of this process leaves for another, where code that is not ours runs in between and hands nothing on.

The entrypoint calls flytekit, which calls the task, uploads and ends; a rank calls the user's function, which asks who
it is. Each value has one kind of writer and one of reader, named below; they alone touch :data:`HERE`. No other module
holds state: ``tests/unit/test_house.py`` looks, and has the list of what is none (caches, locks, signals).
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Handoff:
    """One process's hand-offs. Types are those of rooms above this one, so that the functions which read name them.

    Attributes:
        rank_server: the ``RankServer`` that was forked before anything could start a thread. From the entrypoint to
            the task's agent, once (``ranks.forkserver_client``).
        inputs: the literals that flytekit was to convert, and left to the ranks. Within one dispatch, from one method
            of the task to the next (``plugin.task``); a context variable, since tasks may run in threads.
        upload_seconds: for how long an upload is tried again; None: the longest there is. From the task to the way to
            the store that flytekit makes for itself (``flyte.uploads``).
        verdict_prefix: where this attempt's verdict goes, which is never overwritten. The same way.
        open_job: node 0's ``Membership`` with the job's coordinator, to be closed after the upload. From the task to
            the entrypoint, once (``job.ending``).
        last_words: why the job failed, and how the log's last line begins. From the task to the entrypoint,
            once (``lastwords``).
        failed_imports: by package, the error of its first import here that failed: what a second one says is of that
            one's leavings. From who imports early to who cannot go on without (``ranks.preload``, ``ranks.backends``).
        rank: the ``RankContext`` of a rank, for the user's function (``ranks.context``).
        page: what that rank shares with its agent, a ``RankPage``; with it.
        recorder: what notes the rank's stages and steps, a ``Recorder``; the same way.
        staged: when staging began, by the monotonic clock, and its seconds. From the entrypoint to the record of the
            run (``job.seen``).
        at_end: what to call when the user's function has returned; from ``Checkpoints`` in it to the rank.
        in_any_case: what to call then, and also where it has raised. The same way.
    """

    rank_server: Any = None
    inputs: contextvars.ContextVar[Any] = field(
        default_factory=lambda: contextvars.ContextVar("safedist_inputs", default=None)
    )
    upload_seconds: float | None = None
    verdict_prefix: str | None = None
    open_job: Any = None
    last_words: tuple[str, str] | None = None
    failed_imports: dict[str, str] = field(default_factory=dict)
    rank: Any = None
    page: Any = None
    recorder: Any = None
    staged: tuple[float, float] | None = None
    at_end: list[Callable[[], object]] = field(default_factory=list)
    in_any_case: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def take(self, name: str) -> Any:
        """A value that is handed on once; None afterwards, and where there was none."""
        value = getattr(self, name)
        setattr(self, name, None)
        return value


HERE = Handoff()
