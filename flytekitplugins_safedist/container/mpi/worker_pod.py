"""The first process of an MPIJob's worker pod: it waits, and it leaves with the agents that the launcher starts there.

The operator's own (``sleep 365d``) ignores SIGTERM, as every first process does that has no handler for it: ranks of an
aborted job trained on for the whole grace period, and the pods of a finished one stayed as long. The launcher cannot
help: when a job is deleted, its right to ``kubectl exec`` goes with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator, Set
from pathlib import Path

from .launching import RECORD

logger = logging.getLogger(__name__)

_TOLD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOOK_SECONDS = 0.1


def wait(records: str = RECORD) -> int:
    """Wait for a signal, pass it to the agents of this pod, and return when they have ended.

    Args:
        records: how the file begins that an agent's keeper is started with (:func:`.worker_agent.work`).

    Returns:
        0: the operator makes a deleted worker anew, unless it ended as Failed; then it fails the whole job
        (training-operator v1.9.0, mpijob_controller.go, UpdateJobStatus).
    """
    # Blocked and taken one by one: no handler can interrupt what is done about the one before.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_TOLD, signal.SIGCHLD})
    number = _next_signal()
    told: set[int] = set()
    while running := set(keepers(records)):
        _pass_on(number, running - told)
        told |= running
        signal.sigtimedwait({*_TOLD, signal.SIGCHLD}, _LOOK_SECONDS)
        _reap()
    logger.info(f"{signal.Signals(number).name}: {len(told)} agent(s) of this pod have ended")
    return 0


def keepers(records: str) -> Iterator[int]:
    """Process ids of what the launcher has started here: ``safedist-mpi-launch --worker FILE ...``."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is not ours
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            at = arguments.index("--worker") + 1 if "--worker" in arguments else 0
            if at and arguments[at].startswith(records):
                yield int(entry.name)


def _next_signal() -> int:
    while True:
        number = signal.sigwait({*_TOLD, signal.SIGCHLD})
        if number != signal.SIGCHLD:
            return number
        _reap()


def _reap() -> None:
    """Orphans of whatever ran in the pod become children of its first process."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _pass_on(number: int, processes: Set[int]) -> None:
    for process in processes:
        logger.info(f"{signal.Signals(number).name}: passing it to the agent (process {process})")
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
