"""In a worker pod of an MPIJob: one agent, however often the launcher asks for one.

The launcher may ask again while an agent runs: its connection broke (``kubectl exec`` goes through the API server and
the kubelet, whose restart or idle limit ends it, but not what it has started), or its pod was started anew. Then the
one that asks waits for the agent that is there. The kernel arbitrates, by a lock that the agent itself inherits: it is
free when the agent is gone, however it went.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ...ranks.process_tree import die_with_parent

EXIT_UNKNOWN = 1
_ENDED = "[safedist] agent ended with status "
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PATIENCE_SECONDS = 60.0
_BLOCK = 4096
"""Bytes that a pipe takes at once when select calls it writable (pipe(7), PIPE_BUF)."""


def ended(line: str) -> int | None:
    """The agent's exit status, if *line* is the last one of :func:`work`; without it, the connection has broken."""
    found = re.fullmatch(re.escape(_ENDED) + r"(\d+)", line.rstrip())
    return None if found is None else int(found[1])


def work(record: Path, argv: Sequence[str]) -> int:
    """Run the agent, or wait for the one that runs here already.

    Args:
        record: file of this pod that is locked while an agent lives, and whose first line is the process to signal.
        argv: the agent's command.

    Returns:
        The agent's exit status, 128 + n for signal n; 1 if it left none.
    """
    sink, start = Sink(sys.stdout.fileno()), True
    descriptor = os.open(record, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sink.say("[safedist] an agent runs in this pod already: waiting for it; its output is not shown here")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        start = False
    if start:
        _write(descriptor, f"{os.getpid()}\n")
        status = _run(argv, descriptor, sink)
        _write(descriptor, f"ended\n{status}\n")
    else:
        status = _last_status(descriptor)
    sink.say(f"{_ENDED}{status}")
    return status


def _run(argv: Sequence[str], descriptor: int, sink: Sink) -> int:
    # Its output goes through this process: if the connection breaks, the agent must neither die of it nor hang.
    try:
        agent = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(descriptor,),
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),  # noqa: PLW1509  (this process has one thread)
        )
    except OSError as error:
        sink.say(f"[safedist] cannot run {argv[0]}: {error.strerror}")
        return 127
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: agent.send_signal(number))
    if agent.stdout is not None:
        while block := os.read(agent.stdout.fileno(), _BLOCK):
            sink.write(block)
    status = agent.wait()
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # it has ended: a late signal must not cost its status
    return status if status >= 0 else 128 - status


class Sink:
    """The way to the launcher. Where nobody reads any more, output is dropped instead of holding up the agent.

    A broken connection shows as EPIPE or not at all: containerd keeps the pipe open, and a writer would block for ever.
    """

    def __init__(self, descriptor: int, patience: float = _PATIENCE_SECONDS) -> None:
        """
        Args:
            descriptor: where to write.
            patience: seconds that a reader may take.
        """
        self._descriptor = descriptor
        self._patience = self._left = patience
        self._midline = False

    def say(self, text: str) -> None:
        """Write a line of its own, whatever was written last. Not through the log: to the launcher it is a message."""
        self.write(f"{chr(10) if self._midline else ''}{text}\n".encode())

    def write(self, block: bytes) -> None:
        """Write at most 4096 bytes, or drop them."""
        self._midline = not block.endswith(b"\n")
        while block:
            if not select.select([], [self._descriptor], [], self._left)[1]:
                self._left = 0.0
                return
            self._left = self._patience
            try:
                block = block[os.write(self._descriptor, block) :]
            except OSError:
                return


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


def _last_status(descriptor: int) -> int:
    found = re.fullmatch(r"ended\n(\d+)\n", os.pread(descriptor, 100, 0).decode())
    return EXIT_UNKNOWN if found is None else int(found[1])
