"""Running a command that is not flytekit's, once its code is staged: it gets the signals that a shell would give it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

logger = logging.getLogger(__name__)

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""An interpreter ignores these (Python/pylifecycle.c: init_signals), and what is ignored stays so across exec."""


EXIT_USAGE = 2
"""Where it cannot be run: Flyte takes one of the task's ``retries``."""


def run(command: Sequence[str]) -> int:
    """Run the command in the place of this process, or, where that is a container's first one, below it; its exit
    code."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        if os.getpid() == 1:
            return run_as_init(command)
        take_place(command)
    except OSError as error:
        logger.error(f"cannot run {command[0]}: {error.strerror}")
        return EXIT_USAGE


def take_place(command: Sequence[str]) -> NoReturn:
    """Become the command: same process, signals as they were.

    Raises:
        OSError: it cannot be run.
    """
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], list(command))  # noqa: S606


def run_as_init(command: Sequence[str]) -> int:
    """Run the command as the one child of a container's first process: pass signals on, and reap what is orphaned.

    Taking its place would make the command the first process itself, which the kernel lets ignore every signal that it
    has no handler for: most programs could then not be stopped.

    Returns:
        Its exit code; 128 and the signal's number where a signal ended it.

    Raises:
        OSError: it cannot be run.
    """
    early: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: object) -> None:
        if child is None:
            early.append(number)
        else:
            with suppress(ProcessLookupError):  # reaped this moment, below; nobody else can have its number yet
                os.kill(child.pid, number)

    before = {number: signal.signal(number, pass_on) for number in _FORWARDED}
    try:
        child = subprocess.Popen(list(command))  # with SIGPIPE and SIGXFSZ restored
        for number in early:
            child.send_signal(number)
        while True:
            pid, status = os.wait()
            if pid == child.pid:
                child.returncode = os.waitstatus_to_exitcode(status)
                break
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode
