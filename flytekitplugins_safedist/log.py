"""What safedist itself says in the log of a process: Python's ``logging`` under one name, in one format.

Modules have a logger each below :data:`NAME`, and no module adds a handler when it is imported. Whoever starts a
process or a job (the entrypoint, a command, a rank, a task run locally) calls :func:`install`, whose handler writes
``[safedist] …`` to standard error. As Python's own handler of last resort does, it steps back where the user has said
where log lines go, before or after.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

NAME = "flytekitplugins_safedist"
PREFIX = "[safedist] "
_KINDS = {logging.WARNING: "warning: ", logging.ERROR: "error: "}


class _LastResort(logging.Handler):
    """Writes to what ``sys.stderr`` is at that moment, unless a handler of the user's takes the line."""

    def emit(self, record: logging.LogRecord) -> None:
        if _is_routed(logging.getLogger(record.name)):
            return
        try:
            # One write a line, so that lines of several threads do not mix. A user's stream may lack flush().
            sys.stderr.write(f"{PREFIX}{_KINDS.get(record.levelno, '')}{self.format(record)}\n")
            getattr(sys.stderr, "flush", lambda: None)()
        except Exception:  # whatever a user's stream raises: a line in the log is not worth the job
            with suppress(Exception):  # where it is closed, to say so there fails, too
                self.handleError(record)


def install() -> None:
    """Show this package's lines on standard error, from INFO up, unless the user has set another level."""
    logger = logging.getLogger(NAME)
    if not any(isinstance(handler, _LastResort) for handler in logger.handlers):
        logger.addHandler(_LastResort())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def _is_routed(logger: logging.Logger) -> bool:
    """Whether a handler that is not ours sees what *logger* gets; a ``NullHandler`` is one, and says: to nowhere."""
    at: logging.Logger | None = logger
    while at is not None:
        if any(not isinstance(handler, _LastResort) for handler in at.handlers):
            return True
        at = at.parent if at.propagate else None
    return False
