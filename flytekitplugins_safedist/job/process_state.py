"""What of its own process an agent changes while it drives, and puts back: signal handlers, and torch's variables."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch.distributed.elastic.multiprocessing.api import SignalException

from .. import stopping
from ..config.grace_period import END_SECONDS


@contextmanager
def signals_as_exceptions(stop_seconds: float, defer: Callable[[int], float]) -> Iterator[None]:
    """Turn the first SIGTERM, SIGINT or SIGHUP into torch's SignalException; later ones do not disturb the clean-up.

    Only the main thread can; a task called from another thread leaves signals to whoever owns them.

    Args:
        stop_seconds: how long ranks may take to end. A container's process ends some seconds after that, come what may.
        defer: told of the signal; returns how many seconds this node stays first, seeing to the exception itself then.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def stop(number: int, _frame: object) -> None:
        for stop_signal in numbers:
            signal.signal(stop_signal, signal.SIG_IGN)
        stays = defer(number)
        if stopping.listening():
            stopping.note(within=stays + stop_seconds + END_SECONDS)
        if stays:
            return
        raise SignalException(f"agent {os.getpid()} got {signal.Signals(number).name}", sigval=signal.Signals(number))

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


_TORCH_SETTINGS: Mapping[str, str] = {
    # Every node runs the same number of ranks: torch elastic then computes ranks without a word to the store.
    "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
    # With its shared store, agents keep the address of a pod that was replaced
    # (torch/distributed/elastic/rendezvous/dynamic_rendezvous.py). Only a range of nodes (c10d) reads it.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


@contextmanager
def torch_settings() -> Iterator[None]:
    """What torch elastic takes from this process's own variables. Ranks do not inherit them."""
    before = {name: os.environ.get(name) for name in _TORCH_SETTINGS}
    os.environ.update(_TORCH_SETTINGS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
