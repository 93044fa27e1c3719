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

from . import termination

UNWIND_SECONDS = 0.5
"""For clearing up what is half made. Kubernetes gives a pod 30 s, and whoever stops a process by hand a second."""

GRACE_SECONDS = 30.0
"""From SIGTERM to the kubelet's SIGKILL where a pod asks for nothing else."""

MARGIN_SECONDS = 2.0
"""Between our own end and that."""

EXIT_UNDECIDED = 128 + signal.SIGKILL
"""Of a process that dies undecided for a reason that is not the user's: told to stop, no store to write the verdict to,
no rank server. Flyte takes it of a lone pod for the platform's, and starts another attempt for free; any other code but
0 takes one of the task's ``retries`` (v1.16, ``flytek8s/pod_helper.go``, DemystifyFailure). Nobody else who reads it
tells it from another that is not 0 (docs/kubeflow.md)."""

end_now = os._exit
"""Kept from before any module of the user's is imported, where ``os._exit`` is an error."""

_listening = False
_told = False
_told_at = 0.0
_grace = GRACE_SECONDS
_unwinds = False
_finishing = False
_ends_at: float | None = None
_leaving: float | None = None
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


def reckon_with(seconds: float) -> None:
    """How long Kubernetes waits between SIGTERM and SIGKILL."""
    global _grace  # noqa: PLW0603
    _grace = seconds


def leave_within(seconds: float) -> None:
    """How long :func:`leave` waits for what the user's code has left: threads, handlers of ``atexit``."""
    global _leaving  # noqa: PLW0603
    _leaving = seconds


def within_grace(seconds: float, *, then: float) -> float:
    """``seconds``, or less where Kubernetes would end this process before ``then`` more have passed."""
    return min(seconds, max(0.0, _grace - then - MARGIN_SECONDS)) if _listening else seconds


def told() -> bool:
    """Whether this process was told to stop: then nothing new is begun, and above all nothing uploaded, unless what is
    to be uploaded is the verdict (:func:`finish`)."""
    return _told and not _finishing


def note(*, within: float) -> None:
    """For an owner of SIGTERM other than this module: it has come, and the process ends ``within`` seconds."""
    _note()
    end_within(within)


def finish() -> None:
    """What is uploaded from here on is the attempt's verdict: it is finished also when this process is told to stop,
    or was, as long as the grace period lasts."""
    global _finishing  # noqa: PLW0603
    _finishing = True
    if _told:
        _end_at(_told_at + _grace - MARGIN_SECONDS)


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
    """End this process after ``seconds``, whatever it does by then, unless it finishes its verdict."""
    _end_at(time.monotonic() + seconds)


def end() -> NoReturn:
    """End now, without a word to anybody: the rank server sees it, and clears up after this process."""
    end_now(_undecided() if _verdict is None else _verdict)


def _undecided() -> int:
    if _told:
        text = "told to stop by SIGTERM before this attempt had a verdict: nothing is wrong with the task"
        termination.say(text, alone=True)
    return EXIT_UNDECIDED


def leave(code: int) -> NoReturn:
    """End as an interpreter does, up to where it would take itself apart.

    Threads that wait in C++ for a store are still there. One that comes back to an interpreter that is being taken
    apart is ended by it in the middle of C++ code, which aborts the process (SIGABRT; as a container's first process,
    SIGSEGV) and makes its exit code a lie. A thread or a handler of the user's that does not end has
    :func:`leave_within`.
    """
    uploaded = _verdict == 0
    if not uploaded:  # else nothing turns that success into a failure
        decided(_undecided() if _told and _verdict is None and code in (0, EXIT_UNDECIDED) else code)
    threading = sys.modules.get("threading")
    if _leaving is not None and _ends_at is None:
        end_within(_leaving)
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
                decided(0 if uploaded else _verdict or 1)
        end()


def _on_sigterm(number: int, _frame: object) -> None:
    again = _told
    _note()
    if again and (_unwinds or _finishing) and _verdict is None:
        return  # its end is near
    name = signal.Signals(number).name
    if _finishing and _verdict is None:
        _say(f"told to stop by {name}: the upload is finished first")
        finish()
        return
    _say(f"told to stop by {name}")
    if not _unwinds or _verdict is not None:
        end()
    end_within(UNWIND_SECONDS)
    raise ToldToStop(EXIT_UNDECIDED)


def _note() -> None:
    global _told, _told_at
    if not _told:
        _told, _told_at = True, time.monotonic()


def _end_at(when: float) -> None:
    global _ends_at
    waiting, _ends_at = _ends_at is not None, when
    if waiting:
        return  # the thread that waits finds the new time when the old one has come
    try:
        # Not threading.Thread, whose locks the code that a signal interrupted may hold.
        _thread.start_new_thread(_end_in_time, ())
    except RuntimeError:
        end()


def _end_in_time() -> None:
    while _ends_at is not None and (left := _ends_at - time.monotonic()) > 0:
        time.sleep(left)
    end()


def _say(text: str) -> None:
    # Straight to the descriptor, and only if it takes it: the signal may have interrupted sys.stderr itself, or a log's
    # handler that holds its lock, and a log that nobody reads must not keep this process.
    try:
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"[safedist] {text}\n".encode())
    except (OSError, ValueError):
        return
