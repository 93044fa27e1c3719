"""Signals that tell an agent to stop: they come into its inbox, as everything else does that it is to act on."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .. import stopping
from ..coordinator.server import Inbox


@dataclass
class Signalled:
    """In the inbox: a signal tells this process to stop.

    Attributes:
        number: of the signal.
        at: when it came, by the monotonic clock: the loop may take it later.
        stood: where ranks were then; "" where nobody has looked.
    """

    number: signal.Signals
    at: float = field(default_factory=time.monotonic)
    stood: str = ""


class StacksWanted:
    """In the inbox: somebody (SIGQUIT) wants to see where the ranks stand."""


@contextmanager
def into(inbox: Inbox, longest: Callable[[int], float]) -> Iterator[None]:
    """Inside, the first SIGTERM, SIGINT or SIGHUP comes into the inbox; later ones do not disturb the clean-up. And
    each SIGQUIT (in a terminal: Ctrl-\\) as :class:`StacksWanted`. Under nohup there is no SIGHUP.

    Only the main thread can; a task called from another thread leaves signals to whoever owns them.

    Args:
        inbox: takes them.
        longest: asked with the number; seconds after which a container's process ends, come what may.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    outlives_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = (signal.SIGTERM, signal.SIGINT, *(() if outlives_terminal else (signal.SIGHUP,)))

    def stop(number: int, _frame: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        if stopping.listening():
            stopping.note(within=longest(number))
        inbox.put(Signalled(signal.Signals(number)))

    before = {number: signal.signal(number, stop) for number in numbers}
    before[signal.SIGQUIT] = signal.signal(signal.SIGQUIT, lambda *_: inbox.put(StacksWanted()))
    if stopping.stop_requested():  # just before, where it was swallowed (a finalizer, a callback of the collector)
        inbox.put(Signalled(signal.SIGTERM))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
