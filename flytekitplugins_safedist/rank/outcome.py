"""How a rank ended, as a value; and the choice of the one root cause among many. Pure."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from ..failures import Failure, Payer, name_of
from ..hangs.gpus import GpuFault
from ..texts import cut, encodable
from .context import RankContext
from .order import Record


class Status(str, Enum):
    """How a rank ended."""

    SUCCEEDED = "succeeded"
    RAISED = "raised"
    EXITED = "exited"
    """Left without an outcome record: ``os._exit``, ``sys.exit`` in a library, a crash at start."""
    KILLED = "killed"
    """Ended by a signal that we did not send."""
    STOPPED = "stopped"
    """Ended by us, because another rank had failed."""


@dataclass(frozen=True)
class Raised(Record):
    """An exception as text: it crosses processes and machines without pickles. All text in it is encodable.

    Attributes:
        type: qualified name of the class.
        message: ``str(exception)``.
        traceback: the formatted traceback, causes included.
        failure: its row in the table of failures, by itself alone.
        repeats: whether a relaunch of the ranks would surely fail the same way (ImportError, SyntaxError, config, full
            disk).
        errnos: ``errno`` of every OSError in the chain of causes.
        of_another: whether it tells of another rank's failure.
        is_agents: whether no code of the rank's has raised it: its agent has found that it is to fail.
        code: the exception's own ``error_code``, which flytekit shows in place of its own; "" where it has none.
    """

    type: str
    message: str
    traceback: str
    failure: Failure = Failure.OWN
    repeats: bool = False
    errnos: tuple[int, ...] = ()
    of_another: bool = False
    is_agents: bool = False
    code: str = ""

    def __post_init__(self) -> None:
        for name in ("type", "message", "traceback", "code"):
            object.__setattr__(self, name, encodable(getattr(self, name)))


RECORD_BYTES = 1 << 15
"""Of a rank's own record, at the cost of the middle of long texts. Its agent adds what it knows besides."""

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU)
"""Sent from outside the program. The others (SIGSEGV, SIGABRT, ...) are the program's own doing, and would repeat."""

_OF_A_GPU = re.compile(r"\b(CUDA|cuda\w*|cu(BLAS|DNN|FFT|SPARSE|SOLVER)\w*|NCCL)\b", re.IGNORECASE)

NO_RANK = -1
"""In the place of a rank: the node itself failed, before it had any."""


@dataclass(frozen=True)
class RankOutcome(Record):
    """How one rank ended. All text in it is encodable.

    Attributes:
        rank, local_rank, node_rank, round: which rank of which launch.
        host: its node's name.
        pid: its process id there.
        status: how it ended.
        time_ns: when, in nanoseconds since the epoch, by its node's clock.
        raised: the exception, where ``status`` is RAISED.
        exit_code: of the process; negative for a signal; None while it has not ended.
        at: the line of code where it crashed, as ``train.py:12 in step``.
        log_tail: the last lines it printed.
        memory: what is known of memory on its node, where it was killed.
        out_of_memory: whether processes were OOM-killed there while the ranks ran.
        timed_out: whether a collective operation of it waited in vain for ranks that were there.
        has_met: whether it may have worked with other ranks.
        others: where the other ranks of its node stood when it had failed for that; as text.
        step: at which it was, by what it saves; -1 where it saves nothing by steps.
        gpu: what its GPU has reported, of which this comes.
        seconds: how long each phase took, by name ("start", "inputs", "function", "outputs").
    """

    rank: int
    local_rank: int
    node_rank: int
    round: int
    host: str
    pid: int
    status: Status
    time_ns: int
    raised: Raised | None = None
    exit_code: int | None = None
    at: str = ""
    log_tail: tuple[str, ...] = ()
    memory: str = ""
    out_of_memory: bool = False
    timed_out: bool = False
    has_met: bool = True
    others: str = ""
    step: int = -1
    gpu: GpuFault | None = None
    seconds: dict[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("host", "at", "memory", "others"):
            object.__setattr__(self, name, encodable(getattr(self, name)))
        object.__setattr__(self, "log_tail", tuple(map(encodable, self.log_tail)))
        object.__setattr__(self, "seconds", {encodable(phase): spent for phase, spent in self.seconds.items()})

    @classmethod
    def of(cls, at: RankContext, pid: int, status: Status, time_ns: int, **facts: Any) -> RankOutcome:
        """The outcome of a rank of this node."""
        place = (at.rank, at.local_rank, at.node_rank, at.round, socket.gethostname())
        return cls(*place, pid=pid, status=status, time_ns=time_ns, **facts)

    @property
    def failed(self) -> bool:
        """Whether this is a failure in itself, and not our own tearing down."""
        return self.status in (Status.RAISED, Status.EXITED, Status.KILLED)

    @property
    def killed_by(self) -> int:
        """The signal that ended it, and was not sent here; 0 for none."""
        return -(self.exit_code or 0) if self.status is Status.KILLED else 0

    @property
    def failure(self) -> Failure:
        """Its row in the table of failures, by all that is known."""
        own, gpu = None if self.raised is None else self.raised.failure, self._gpu_code
        rows = (
            (Failure.GPU_FAULT, gpu.startswith("SYSTEM:")),
            (Failure.GPU_PROGRAM, bool(gpu)),
            (Failure.TIMED_OUT, self.timed_out),
            (Failure.OUT_OF_MEMORY, self.out_of_memory and own is Failure.WORKER_KILLED),
            (own or Failure.OWN, own is not None),
            (Failure.OUT_OF_MEMORY, self.out_of_memory and self.killed_by == signal.SIGKILL),
            (Failure.ABORTED, self.killed_by == signal.SIGABRT),
            (Failure.KILLED, self.killed_by in _FROM_OUTSIDE),
            (Failure.CRASHED, self.killed_by > 0),
        )
        return next((failure for failure, is_so in rows if is_so), Failure.LEFT)

    @property
    def echo(self) -> int:
        """How far it is from a cause: as :attr:`.Row.echo`; nearer by one where it is known what others did, and 3 for
        an exception that tells of another rank's failure."""
        if self.failure is Failure.TIMED_OUT and self.others:
            return 1
        if self.failure is Failure.ABORTED and not self.has_met:
            return 0
        return self.failure.row.echo or (3 if self.raised is not None and self.raised.of_another else 0)

    @property
    def is_the_codes(self) -> bool:
        """Whether it may be the code's or the data's, as a hang may: no store, disk or broken GPU has a part in it."""
        if self.raised is None or self.failure is Failure.GPU_FAULT or self.raised.errnos:
            return False
        row = self.raised.failure.row
        return row.payer is Payer.NOBODY or row.echo > 0 or self.raised.failure is Failure.HANG

    @property
    def may_come_of_a_gpu(self) -> bool:
        """Whether what its GPU has reported may be the cause: not of what the user calls recoverable, no error of a
        store, and nobody else's signal."""
        if self.raised is None:
            return self.killed_by not in _FROM_OUTSIDE
        row = self.raised.failure.row
        may_be = row.payer is Payer.NOBODY or self.raised.failure is Failure.GPU_HARDWARE
        texts = (self.raised.message, self.raised.traceback)
        return row.echo > 0 or (may_be and any(map(_OF_A_GPU.search, texts)))

    @property
    def label(self) -> str:
        """Its code: the row's, or its own."""
        if self.failure.row.code or self._gpu_code:
            return self.failure.row.code or self._gpu_code
        if self.failure is Failure.KILLED:
            return f"SYSTEM:{name_of(self.killed_by or signal.SIGKILL).replace(' ', '')}"
        if self.raised is not None:
            return self.raised.code or f"USER:{self.raised.type.rpartition('.')[2]}"
        if self.failure is Failure.LEFT:
            return f"USER:Exit{self.exit_code}"
        return f"USER:{name_of(self.killed_by).replace(' ', '')}"

    @property
    def _gpu_code(self) -> str:
        return "" if self.gpu is None else self.gpu.code

    def shortened(self, limit: int) -> RankOutcome:
        """The same record with no text longer than ``limit`` characters: the middle is cut, the ends say most."""

        raised = self.raised
        if raised is not None:
            raised = replace(raised, message=cut(raised.message, limit), traceback=cut(raised.traceback, limit))
        per_line = max(80, limit // max(1, len(self.log_tail)))
        lines = tuple(line[:per_line] for line in self.log_tail)
        return replace(self, raised=raised, log_tail=lines, others=cut(self.others, limit))

    def fitting(self, limit: int, dump: Callable[[RankOutcome], str]) -> RankOutcome:
        """The same record, its texts cut as far as it takes for ``dump(record)`` to have at most ``limit`` bytes.

        By the encoded size, because a character has up to four bytes, and a quote more in nested JSON.
        """
        record, characters = self, limit
        while len(dump(record).encode()) > limit and characters > 1:
            characters //= 2
            record = self.shortened(characters)
        while len(dump(record).encode()) > limit and record.log_tail:
            record = replace(record, log_tail=record.log_tail[len(record.log_tail) // 2 + 1 :])
        return record

    def to_json(self) -> str:
        """The record as one line of JSON, in as few bytes as its texts allow: there is a limit."""
        return json.dumps(self.to_dict(), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> RankOutcome:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: the text is no whole record of this kind.
        """
        try:
            return cls.from_dict(json.loads(text))
        except Exception as error:  # mashumaro's and json's, which have no class in common
            raise ValueError(f"not a {cls.__name__}: {type(error).__name__}: {error}") from error


def root_cause(outcomes: Iterable[RankOutcome]) -> RankOutcome | None:
    """The failure that brought the others down, or None when nothing failed.

    Failures that speak for themselves come before those that only say "a peer is gone"; among equals the earliest
    wins, by nanoseconds, and then the lowest rank.
    """
    failed = [outcome for outcome in outcomes if outcome.failed]
    return min(failed, key=lambda outcome: (outcome.echo, outcome.time_ns, outcome.rank), default=None)
