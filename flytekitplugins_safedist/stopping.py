"""What SIGTERM does to the container's process, from its first line to its last.

A signal is never an ordinary exception: whatever catches everything (an import that may fail, a task's own ``except
BaseException``) would go on as if nothing had been said, with half-imported modules, and its next error would pass for
the user's. So the process ends at once where nothing needs to be cleared up (imports, above all), and elsewhere it
unwinds for a moment, and then ends whether or not somebody swallowed the exception.

As a container's first process it would not even be ended by a signal that it has no handler for (pid_namespaces(7)).
Before :func:`listen` nothing can be done about that; this module imports little, so that it comes early.
"""

from __future__ import annotations

import _thread
import atexit
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

UNWIND_SECONDS = 0.5
"""For clearing up what is half made. Kubernetes gives a pod 30 s, and whoever stops a process by hand a second."""

EXIT_TOLD = 128 + signal.SIGTERM
"""What a shell says of a process that SIGTERM ended. Not zero: nothing is uploaded, and Flyte retries."""

_listening = False
_told = False
_unwinds = False
_verdict: int | None = None


class ToldToStop(SystemExit):
    """Unwinds the main thread; swallowing it gains a moment, no more."""


def listen() -> None:
    """Take over SIGTERM, also when it was ignored or taken by somebody else. Main thread only."""
    global _listening  # noqa: PLW0603  (signals and their handlers belong to the process)
    _listening = True
    signal.signal(signal.SIGTERM, _on_sigterm)


def listen_again() -> None:
    """Take it back from code that ran since, where :func:`listen` was called (flytekit's installation of packages
    leaves a handler that does nothing; a task's module may bring one that is meant for its ranks)."""
    if _listening:
        listen()


def listening() -> bool:
    """Whether SIGTERM is this module's: in a container's process it is, in a user's own interpreter never."""
    return _listening


def told() -> bool:
    """Whether this process was told to stop: then nothing new is begun, and above all nothing uploaded."""
    return _told


def note(*, within: float) -> None:
    """For an owner of SIGTERM other than this module: it has come, and the process ends ``within`` seconds."""
    global _told  # noqa: PLW0603
    _told = True
    end_within(within)


def decided(code: int) -> None:
    """The verdict is in the store: SIGTERM still ends the process, with this exit code, and takes nothing back."""
    global _verdict  # noqa: PLW0603
    _verdict = code


@contextmanager
def unwinding() -> Iterator[None]:
    """Inside, SIGTERM unwinds the main thread first, because something half made must go."""
    global _unwinds  # noqa: PLW0603
    before, _unwinds = _unwinds, True
    try:
        yield
    finally:
        _unwinds = before


def end_within(seconds: float) -> None:
    """End this process after ``seconds``, whatever it does by then."""
    try:
        # Not threading.Thread, whose locks the code that a signal interrupted may hold.
        _thread.start_new_thread(_end_after, (seconds,))
    except RuntimeError:
        end()


def end() -> NoReturn:
    """End now, without a word to anybody: the rank server sees it, and clears up after this process."""
    os._exit(EXIT_TOLD if _verdict is None else _verdict)


def leave(code: int) -> NoReturn:
    """End as an interpreter does, up to where it would take itself apart.

    Threads that wait in C++ for a store are still there. One that comes back to an interpreter that is being taken
    apart is ended by it in the middle of C++ code, which aborts the process (SIGABRT; as a container's first process,
    SIGSEGV) and makes its exit code a lie.
    """
    decided(code if code != 0 or _verdict is not None or not _told else EXIT_TOLD)
    threading = sys.modules.get("threading")
    try:
        if threading is not None:
            threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):
                decided(_verdict or 1)
        end()


def _on_sigterm(number: int, _frame: object) -> None:
    global _told
    again, _told = _told, True
    if again and _unwinds:
        return  # it is unwinding, and its end is near
    _say(f"told to stop by {signal.Signals(number).name}")
    if not _unwinds or _verdict is not None:
        end()
    end_within(UNWIND_SECONDS)
    raise ToldToStop(EXIT_TOLD)


def _end_after(seconds: float) -> None:
    time.sleep(seconds)
    end()


def _say(text: str) -> None:
    # Straight to the descriptor, and only if it takes it: the signal may have interrupted sys.stderr itself, and a log
    # that nobody reads must not keep this process.
    try:
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"[safedist] {text}\n".encode())
    except (OSError, ValueError):
        return
