"""What a rank leaves for whoever looks at it from outside, so that its agent can say where it stands and why.

One idle thread does it. At :data:`ASK` it writes the stacks of all threads, as Python itself sees them. Where it does
not come to that, for native code keeps Python's lock, it takes :data:`FORCE`, at which faulthandler writes them without
that lock. Never at once: a frame that Python makes at that moment is read half made, and that ends the process (of
looks at a busy loop one of 45 did under Python 3.10, one of 190 under 3.11). The signals are this thread's: in the main
one they would interrupt a system call of a library's, and what does not begin it again fails (torch's store does, as it
connects). It has torch answer on a socket, and notes which groups this rank is a member of: gloo's recorder does not
know, and torch's server cannot be told to say more (a handler of Python's aborts the process as it ends).
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from ..compat import torch as torch_inside
from ..errors import IncompatibleVersionError

FORCE = getattr(signal, "SIGRTMAX", 64) - 3  # macOS has none, where tasks are written and registered
ASK = FORCE - 1
"""Nobody else's: users and schedulers take SIGUSR1 and SIGUSR2, C libraries the first of the real-time signals."""

START = Path(__file__).parents[1] / "rank"
"""Where the files are whose frames are below the user's, in the main thread and in no other."""

_LOOK_SECONDS = 1.0
"""Between two looks at the groups: a hang is seconds old when anybody asks."""
_CALM_SECONDS = 3600.0
"""The same where there are none to look at: who asks for stacks, or has it look at groups, wakes it."""

_OF_A_CRASH = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}

HANDLES, _MOST_HANDLED = "  Handles ", 200
"""How a line begins that says which exception the main thread handles; and letters of that."""

_MOST_CLOSED = 256
"""Groups that are noted as closed: of the latest ones. A recorder forgets, too."""

_MOST_FRAMES = 100
"""Of a thread, as faulthandler has it."""


class Evidence:
    """Of this process, from now on.

    Args:
        stacks: file that stacks are written to, at each :data:`ASK`.
    """

    def __init__(self, stacks: Path) -> None:
        self._stacks = os.open(stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        # Threads of libraries, and processes that this one starts, inherit both. One that takes signals of all numbers
        # must not be ended by this; the kernel keeps it all the same, since the main thread holds it back.
        signal.signal(ASK, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [ASK, FORCE])
        # Last: whoever sees this handler asks, by the other signal, also a rank that has just begun.
        faulthandler.register(FORCE, file=self._stacks, all_threads=True)
        self._socket: Path | None = None
        self._meet: Callable[[], object] = bool
        self._served = False
        self._made: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="safedist-evidence", daemon=True)
        self._thread.start()

    def follow(self, socket: Path, meet: Callable[[], object] = bool) -> None:
        """Have torch answer at a socket, as soon as it is imported, note groups in :func:`groups_file`, and say that
        there is one."""
        self._meet = meet
        self._served = torch_inside.has_worker_server() and _serve_silently(socket)
        self._socket = socket
        if self._thread.ident is not None:
            signal.pthread_kill(self._thread.ident, ASK)  # from now on it looks at groups

    def note_group(self, name: str) -> None:
        """A group of this name is about to be made. If there was one before it, all that torch has recorded until now
        is of that one: it counts from 1 again."""
        self._made[name] = time.time_ns() if name in self._made else 0

    def _run(self) -> None:
        # No signal of the user's: a thread that comes back from waiting for signals takes one that the main thread was
        # woken for, which then waits on, and never comes to the handler.
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals() - {FORCE, *_OF_A_CRASH})
        before = ""
        while True:
            asked = signal.sigtimedwait([ASK], _LOOK_SECONDS if self._socket is not None else _CALM_SECONDS)
            if asked is not None and asked.si_pid != os.getpid():
                self._write_stacks()
            if self._socket is not None:
                before = self._note_groups(self._socket, before)

    def _write_stacks(self) -> None:
        own = threading.get_ident()
        main = threading.main_thread().ident
        frames = sys._current_frames().items()
        shown = [_shown(ident, frame, is_main=ident == main) for ident, frame in frames if ident != own]
        with contextlib.suppress(OSError):  # no space: it has not answered then
            os.write(self._stacks, "\n".join(shown).encode(errors="backslashreplace"))

    def _note_groups(self, socket: Path, before: str) -> str:
        self._served = self._served or (torch_inside.has_worker_server() and _serve(socket))
        text = _groups(dict(self._made))
        if text:
            self._meet()
        return text if text != before and _written(groups_file(socket), text) else before


def _shown(ident: int, frame: FrameType, *, is_main: bool) -> str:
    """The stack of a thread, as faulthandler writes it; of the main one with the exception that it handles."""
    frames = itertools.islice(traceback.walk_stack(frame), _MOST_FRAMES)
    lines = [f'  File "{each.f_code.co_filename}", line {line} in {each.f_code.co_name}\n' for each, line in frames]
    return f"Thread 0x{ident:016x} (most recent call first):\n{_handled(ident) if is_main else ''}{''.join(lines)}"


def _handled(ident: int) -> str:
    """A line for the exception that a thread handles, without calling any code of its class; "" for none."""
    found: Any = sys._current_exceptions().get(ident)
    error = found[1] if isinstance(found, tuple) else found  # until Python 3.11, three facts
    if not isinstance(error, BaseException):
        return ""
    arguments = BaseException.args.__get__(error)  # type: ignore[attr-defined]
    text = f": {arguments[0][:_MOST_HANDLED]}" if arguments and type(arguments[0]) is str else ""
    return f"{HANDLES}{' '.join(f'{type(error).__qualname__}{text}'.split())[:_MOST_HANDLED]}\n"


def groups_file(socket: Path) -> Path:
    """Where a rank notes its groups: JSON, with ``groups`` (members by name, as :func:`text_of`), ``recorders`` (by
    backend the question that torch answers with what it does; "" where it records nothing of it, and by why nothing can
    be noted), ``endless`` (backends that give up nothing), ``again`` (of names that other groups had before:
    nanoseconds since the epoch, when the group was made) and ``closed`` (groups that are not there any more)."""
    return socket.with_suffix(".groups")


def text_of(ranks: Iterable[int]) -> str:
    """Ranks as a short text: ``0-7``; ``0-56:8`` for each eighth; ``0,3,4`` else."""
    found = sorted(ranks)
    steps = {later - earlier for earlier, later in itertools.pairwise(found)}
    if len(found) < 3 or len(steps) > 1:
        return ",".join(map(str, found))
    step = steps.pop()
    return f"{found[0]}-{found[-1]}" + (f":{step}" if step > 1 else "")


def ranks_of(text: str) -> list[int]:
    """The inverse of :func:`text_of`."""
    if "-" not in text:
        return [int(rank) for rank in text.split(",") if rank]
    ends, _, step = text.partition(":")
    first, _, last = ends.partition("-")
    return list(range(int(first), int(last) + 1, int(step or 1)))


def _groups(made: Mapping[str, int]) -> str:
    try:
        groups = torch_inside.process_groups()
        if not groups and not made:
            return ""
        backends = {backend for _, _, named in groups for backend in named}
        recorders = {backend: torch_inside.recorder(backend) for backend in sorted(backends)}
        members = {name: text_of(ranks) for name, ranks, _ in groups}
        endless = [backend for backend in recorders if not torch_inside.gives_up(backend)]
        again = {name: made_ns for name, made_ns in made.items() if made_ns}
        closed = [name for name in list(made)[-_MOST_CLOSED:] if name not in members]
        facts = {"groups": members, "recorders": recorders, "endless": endless, "again": again, "closed": closed}
        return json.dumps(facts)
    except IncompatibleVersionError as error:
        return json.dumps({"recorders": {str(error): ""}})


def _written(path: Path, text: str) -> bool:
    draft = path.with_suffix(".draft")
    with contextlib.suppress(OSError):  # no space, for now
        draft.write_text(text)
        draft.replace(path)
        return True
    return False


def _serve(socket: Path) -> bool:
    with contextlib.suppress(Exception):  # a path that is too long for a socket: nothing is recorded then
        torch_inside.serve_workers(str(socket))
    return True


def _serve_silently(socket: Path) -> bool:
    """The same, while this process has no other thread that writes: torch says on stderr that it listens, at the head
    of every rank's log."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        return _serve(socket)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
