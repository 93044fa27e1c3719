"""What a job's coordinator goes by, and what it is told of."""

from __future__ import annotations

from dataclasses import dataclass

from .messages import Message


@dataclass(frozen=True)
class Rules:
    """What a job's coordinator goes by. Times are in seconds.

    Attributes:
        run: names the job.
        min_nodes, max_nodes: its size.
        fixed: whether each node has a node_rank of its own, and all are needed.
        max_restarts, max_replacements: the budgets of the whole job.
        timeout: for all nodes to arrive, for each round anew.
        heartbeat: of silence after which a node is lost.
        stop: that ending a node's ranks may take.
        last_call: that a range waits for further nodes when ``min_nodes`` are there.
        about: what else to say of a node that keeps dying: what its container is limited to.
        grace: that a lost connection may take to come back.
        short_life: a node that is lost three times, and lives shorter than this each time it is back, is not replaced
            again. The kubelet, too, forgets a container's crashes when it has run for ten minutes.
    """

    run: str
    min_nodes: int
    max_nodes: int
    fixed: bool
    max_restarts: int = 0
    max_replacements: int = 10
    timeout: float = 900.0
    heartbeat: float = 60.0
    stop: float = 5.0
    last_call: float = 30.0
    about: str = ""
    grace: float = 3.0
    short_life: float = 600.0

    @property
    def patience(self) -> float:
        """How long the nodes of a round that is over may take to say how it ended there."""
        return self.stop + max(5.0, min(15.0, self.heartbeat))


@dataclass(frozen=True)
class Said:
    """A message of a process."""

    process: str
    message: Message


@dataclass(frozen=True)
class Disconnected:
    """The connection of a process is lost."""

    process: str


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Said | Disconnected | Tick
Sent = tuple[str, Message]
"""To a process."""
