"""What SIGTERM does to the container's process, from its first line to its last.

A signal is never an ordinary exception: whatever catches everything (an import that may fail, a task's own ``except
BaseException``) would go on as if nothing had been said, with half-imported modules, and its next error would pass for
the user's. So the process ends at once where nothing needs to be cleared up (imports, above all), and elsewhere it
unwinds for a moment, and then ends whether or not somebody swallowed the exception: see :class:`Phase`.

As a container's first process it would not even be ended by a signal that it has no handler for (pid_namespaces(7)).
Before :func:`listen` nothing can be done about that; this module imports little, so that it comes early.
"""

from __future__ import annotations

import _thread
import atexit
import gc
import io
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, NoReturn

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

EXIT_FAILED = 1
"""Of one that ends by what no other start would change, and could not upload that: one of the task's ``retries``."""

end_now = os._exit
"""Kept from before any module of the user's is imported, where ``os._exit`` is an error."""


class Phase(Enum):
    """What this process is at, and so what SIGTERM does to it.

    ===================  =============================================  ===============================================
    phase                what is under way                              SIGTERM
    ===================  =============================================  ===============================================
    NOTHING_HALF_MADE    imports, questions; or all is done             ends the process at once
    HALF_MADE            code is staged; a task runs                    unwinds the main thread; after
                                                                        :data:`UNWIND_SECONDS` the process ends
    VERDICT              the attempt's verdict is uploaded              lets that be finished, within the grace period
    ===================  =============================================  ===============================================

    The exit status is that of the verdict once there is one (:func:`decided`), else :data:`EXIT_UNDECIDED`.
    """

    NOTHING_HALF_MADE = 1
    HALF_MADE = 2
    VERDICT = 3


class _State:
    """What this process's signals, and those who answer to them, have decided so far."""

    listening = False
    requested_at: float | None = None
    grace = GRACE_SECONDS
    phase = Phase.NOTHING_HALF_MADE
    ends_at: float | None = None
    leaving: float | None = None
    verdict: int | None = None


_PROCESS = _State()


class StopRequested(SystemExit):
    """Unwinds the main thread; swallowing it gains a moment, no more."""


def listen() -> None:
    """Take over SIGTERM, also when it was ignored or taken by somebody else. Main thread only."""
    _PROCESS.listening = True
    signal.signal(signal.SIGTERM, _on_sigterm)


def listen_again() -> None:
    """Take it back from code that ran since, where :func:`listen` was called (flytekit's installation of packages
    leaves a handler that does nothing; a task's module may bring one that is meant for its ranks)."""
    if _PROCESS.listening:
        listen()


def listening() -> bool:
    """Whether SIGTERM is this module's: in a container's process it is, in a user's own interpreter never."""
    return _PROCESS.listening


def reckon_with(seconds: float) -> None:
    """How long Kubernetes waits between SIGTERM and SIGKILL."""
    _PROCESS.grace = seconds


def leave_within(seconds: float) -> None:
    """How long :func:`leave` waits for what the user's code has left: threads, handlers of ``atexit``."""
    _PROCESS.leaving = seconds


def within_grace(seconds: float, *, then: float) -> float:
    """``seconds``, or less where Kubernetes would end this process before ``then`` more have passed."""
    return min(seconds, max(0.0, _PROCESS.grace - then - MARGIN_SECONDS)) if _PROCESS.listening else seconds


def stop_requested() -> bool:
    """Whether this process was told to stop: then nothing new is begun, and above all nothing uploaded, unless what is
    to be uploaded is the verdict (:func:`finish`)."""
    return _PROCESS.requested_at is not None and _PROCESS.phase is not Phase.VERDICT


def note(*, within: float) -> None:
    """For an owner of SIGTERM other than this module: it has come, and the process ends ``within`` seconds."""
    _note()
    end_within(within)


def finish() -> None:
    """What is uploaded from here on is the attempt's verdict: it is finished also when this process is told to stop,
    or was, as long as the grace period lasts."""
    _PROCESS.phase = Phase.VERDICT
    if _PROCESS.requested_at is not None:
        _end_at(_PROCESS.requested_at + _PROCESS.grace - MARGIN_SECONDS)


def decided(code: int) -> None:
    """The verdict is in the store: SIGTERM still ends the process, with this exit code, and takes nothing back."""
    _PROCESS.verdict = code


@contextmanager
def unwinding() -> Iterator[None]:
    """Inside, something half made must go first, unless it is the verdict that is to be finished."""
    before = _PROCESS.phase
    _enter(Phase.HALF_MADE)
    try:
        yield
    finally:
        _enter(before)


def _enter(phase: Phase) -> None:
    if _PROCESS.phase is not Phase.VERDICT:  # which is the last
        _PROCESS.phase = phase


def end_within(seconds: float) -> None:
    """End this process after ``seconds``, whatever it does by then, unless it finishes its verdict."""
    _end_at(time.monotonic() + seconds)


def end() -> NoReturn:
    """End now, without a word to anybody: the rank server sees it, and clears up after this process."""
    end_now(_undecided() if _PROCESS.verdict is None else _PROCESS.verdict)


def _undecided() -> int:
    if _PROCESS.requested_at is not None:
        text = "told to stop by SIGTERM before this attempt had a verdict: nothing is wrong with the task"
        if _PROCESS.phase is Phase.VERDICT:
            text = "told to stop by SIGTERM, and the grace period is over before the upload of this attempt's verdict"
        termination.say(text, alone=True)
    return EXIT_UNDECIDED


def leave(code: int) -> NoReturn:
    """End as an interpreter does, up to where it would take itself apart.

    Threads that wait in C++ for a store are still there. One that comes back to an interpreter that is being taken
    apart is ended by it in the middle of C++ code, which aborts the process (SIGABRT; as a container's first process,
    SIGSEGV) and makes its exit code a lie. A thread or a handler of the user's that does not end has
    :func:`leave_within`.
    """
    uploaded = _PROCESS.verdict == 0
    if not uploaded:  # else nothing turns that success into a failure
        is_open = _PROCESS.requested_at is not None and _PROCESS.verdict is None
        decided(_undecided() if is_open and code in (0, EXIT_UNDECIDED) else code)
    if _PROCESS.leaving is not None and _PROCESS.ends_at is None:
        end_within(_PROCESS.leaving)
    try:
        if not handlers_run():
            decided(0 if uploaded else _PROCESS.verdict or 1)
    finally:
        end()


def handlers_run() -> bool:
    """Do what an interpreter does at its end, up to where it would take itself apart. Whether all is written that was
    held back."""
    written = True
    try:
        if (threading := sys.modules.get("threading")) is not None:
            threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    _write_what_is_open()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except AttributeError:
            continue  # an object of the user's with no more than a write(), which holds nothing back
        except Exception:  # the same, whatever it raises: nothing may come between here and the end
            written = False
    return written


def _write_what_is_open() -> None:
    """As an interpreter does that is taken apart: files that are left open have all that was written to them, and those
    that compress have their end. From the top: what lies upon another file is held back there at first."""
    any_buffered: Any = io.BufferedIOBase.__base__  # not the abstract class, which is slow to ask
    text, plain = io.TextIOWrapper, (io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)
    found = [each for each in gc.get_objects() if issubclass(type(each), (text, any_buffered))]
    for file in sorted(found, key=lambda each: (not issubclass(type(each), text), issubclass(type(each), plain))):
        with suppress(Exception):  # closed by now, or a full disk: an interpreter does not say so either
            if file.writable():
                file.flush() if issubclass(type(file), (text, *plain)) else file.close()


def _on_sigterm(number: int, _frame: object) -> None:
    again = _PROCESS.requested_at is not None
    _note()
    phase = _PROCESS.phase if _PROCESS.verdict is None else Phase.NOTHING_HALF_MADE
    if again and phase is not Phase.NOTHING_HALF_MADE:
        return  # its end is near
    name = signal.Signals(number).name
    if phase is Phase.VERDICT:
        _say(f"told to stop by {name}: the upload is finished first")
        finish()
        return
    _say(f"told to stop by {name}")
    if phase is Phase.NOTHING_HALF_MADE:
        end()
    end_within(UNWIND_SECONDS)
    raise StopRequested(EXIT_UNDECIDED)


def _note() -> None:
    if _PROCESS.requested_at is None:
        _PROCESS.requested_at = time.monotonic()


def _end_at(when: float) -> None:
    waiting, _PROCESS.ends_at = _PROCESS.ends_at is not None, when
    if waiting:
        return  # the thread that waits finds the new time when the old one has come
    try:
        # Not threading.Thread, whose locks the code that a signal interrupted may hold.
        _thread.start_new_thread(_end_in_time, ())
    except RuntimeError:
        end()


def _end_in_time() -> None:
    while _PROCESS.ends_at is not None and (left := _PROCESS.ends_at - time.monotonic()) > 0:
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
