"""Where the ranks of a job meet before they have a process group: a key-value corner at the job's coordinator.

A rank calls its own agent, over a Unix socket of its node's scratch, and that carries the call to node 0's. It is there
from a rank's first line, with torch and with Horovod, and fresh in each round. Each thread that calls has a connection
of its own, which ends with the thread; a call that is late or lost closes its connection and leaves the next call a new
one.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from . import envvars, frames
from .errors import MeetingLostError, TopologyError
from .handoff import Slot

_ANSWER_SECONDS = 600.0
"""For an answer. The agent that is asked ends its ranks when it has lost the leader (``Timeouts.heartbeat``): a rank
that gave up before that would end a job of which one machine has only paused."""


def end_of(rank: int) -> str:
    """The key that a rank's agent sets when the rank has ended in order: it comes to no meeting of its round any more.

    What the rank itself has set is there before.
    """
    return f"ended/{rank}"


class Meeting:
    """A rank's way to the key-value corner of its round.

    Args:
        path: of the agent's socket.
        run: names the job.
        round_no: the round that this rank runs in; the corner of another one is not entered.
    """

    def __init__(self, path: str, run: str, round_no: int) -> None:
        self.where = path
        self._hello = {"run": run, "round": round_no}
        self._of_thread = threading.local()

    def set(self, key: str, value: bytes) -> None:
        """Write a value.

        Raises:
            MeetingLostError: the corner is gone, or does not answer: this node's agent has ended, or the round has.
        """
        self._call({"op": "set", "key": key}, value)

    def wait(self, key: str, seconds: float) -> bytes | None:
        """Wait until the key is set; its value, or None where it was not within ``seconds``. Raises as :meth:`set`."""
        found, value = self._call({"op": "wait", "key": key, "seconds": seconds}, seconds=seconds)
        return value if found["there"] else None

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at 0; what it is then. Raises as :meth:`set` does."""
        return int(self._call({"op": "add", "key": key, "amount": amount})[0]["count"])

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Write where the value is ``expected`` (b"" where there is none); what is there then. Raises as ``set``."""
        return self._call({"op": "compare_set", "key": key, "first": len(expected)}, expected + desired)[1]

    def delete(self, key: str) -> None:
        """Forget a key, or nothing. Raises as :meth:`set` does."""
        self._call({"op": "delete", "key": key})

    def close(self) -> None:
        """Close this thread's connection; the next call opens another."""
        sock = self._take()
        if sock is not None:
            _close(sock)

    def _take(self) -> socket.socket | None:
        """This thread's connection, which it has no more; a child that was forked has its parent's copy, which is not
        its own."""
        pid, sock = getattr(self._of_thread, "mine", None) or (0, None)
        self._of_thread.mine = None
        return sock if pid == os.getpid() else None

    def _call(self, head: Mapping[str, Any], body: bytes = b"", seconds: float = 0.0) -> tuple[dict[str, Any], bytes]:
        # Taken for as long as it has no answer: whatever interrupts this call (a handler of a signal's, which may call,
        # too, or an exception) must not read it, nor the next call.
        sock = self._take()
        try:
            sock = sock or self._connected()
            sock.settimeout(seconds + _ANSWER_SECONDS)
            sock.sendall(frames.packed(frames.call(dict(head), body)))
            answer = frames.parsed_call(frames.receive(sock, frames.RANK_BYTES))
        except BaseException as error:
            if sock is not None:
                _close(sock)
            if isinstance(error, TimeoutError):
                raise self._gone(f"no answer within {seconds + _ANSWER_SECONDS:g} s") from error
            if isinstance(error, (OSError, ValueError)):
                raise self._gone(str(error) or type(error).__name__) from error
            raise
        if "refused" in answer[0]:
            _close(sock)
            raise self._gone(str(answer[0]["refused"]))
        self.close()  # a handler's
        self._of_thread.mine = (os.getpid(), sock)
        return answer

    def _gone(self, seen: str) -> MeetingLostError:
        return MeetingLostError(
            "the place where ranks meet is gone",
            where={"address": self.where},
            seen=seen,
            hint="see why this node's agent has ended; or the round that this rank belongs to is over",
        )

    def _connected(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(_ANSWER_SECONDS)
        sock.connect(self.where)
        sock.sendall(frames.packed(json.dumps(self._hello).encode()))
        return sock


def _close(sock: socket.socket) -> None:
    with suppress(OSError):  # somebody has closed its descriptor
        sock.close()


def own_address(host: str, port: int) -> str:
    """The address by which this machine reaches ``host``, and so that by which others reach this one. Sends nothing."""
    with suppress(OSError):
        for family, kind, proto, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, proto) as probe:
                probe.connect(address)
                found: str = probe.getsockname()[0]
                return found
    return socket.gethostname()


OF_RANK: Slot[Meeting] = Slot()
"""This process's, where it is a rank: its code may clear the environment."""


def of_rank(environment: Mapping[str, str]) -> Meeting | None:
    """This rank's way to the corner; None outside a rank of ours, and where the rank is alone in its job.

    What a rank starts (a torchrun of its own, a pool) inherits the variable, and is another job: torchrun says so.

    Raises:
        TopologyError: the agent has named the corner, and not this rank's job or round.
    """
    address = environment.get(envvars.MEETING)
    if environment.get(envvars.TORCHELASTIC_USE_AGENT_STORE) == "True":
        return None
    if not address:
        return OF_RANK.value
    run, number = environment.get(envvars.TORCHELASTIC_RUN_ID), environment.get(envvars.ROUND)
    if run is None or number is None:
        raise TopologyError(
            "this rank knows where ranks meet, but not for which job or round",
            where={envvars.TORCHELASTIC_RUN_ID: run, envvars.ROUND: number},
            expected="both, as the agent sets them for each rank",
            hint="do not remove these variables in the task",
        )
    return Meeting(address, run, int(number))
