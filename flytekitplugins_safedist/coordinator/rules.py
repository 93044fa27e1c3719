"""What a job's coordinator and its agents go by: the numbers of one job."""

from __future__ import annotations

from dataclasses import dataclass

_LEAST_TEXT, _MOST_TEXT, _ALL_TEXTS = 8 << 10, 64 << 10, 32 << 20

_BEATS = 6
"""Signs of life within the time after which their absence counts."""


@dataclass(frozen=True)
class Rules:
    """The numbers of one job, the same on every node. Times are in seconds.

    Attributes:
        job: names the attempt of the job; a process that names another one has no part in it.
        min_nodes, max_nodes: the job's size.
        is_fixed: each node has a place of its own, and all are needed; else the size is a range.
        max_restarts: how often a failure of a rank may start all ranks again.
        max_replacements: how often nodes may be lost and come back.
        checks: the nodes are checked, in a round of its own, before the first rank starts.
        rendezvous: for the nodes of a round to come together, or for a leader to be found.
        heartbeat: of silence, after which a connected node is lost.
        grace: without a connection, after which a node is lost, and ends its ranks.
        settle: that a failure which may be an echo waits for the failure that it echoes.
        stop: for ranks to end by themselves.
        kill: for the kernel to end them.
        last_call: that a range waits for more than its minimum.
        preemption: that a pod which is told to stop stays, for all ranks to save.
        upload: that the store may be away.
        renew: between two renewals of the leader's sign.
        short_life: a node that is lost three times, and lives shorter than this each time it is back, is not replaced
            again. The kubelet, too, forgets a container's crashes when it has run for ten minutes.
    """

    job: str
    min_nodes: int
    max_nodes: int
    is_fixed: bool = True
    max_restarts: int = 0
    max_replacements: int = 10
    checks: bool = False
    rendezvous: float = 900.0
    heartbeat: float = 60.0
    grace: float = 3.0
    settle: float = 3.0
    stop: float = 5.0
    kill: float = 30.0
    last_call: float = 30.0
    preemption: float = 20.0
    upload: float = 3600.0
    renew: float = 60.0
    short_life: float = 600.0

    @property
    def is_alone(self) -> bool:
        """There is one node: nobody else can lead the job, and nothing is asked of the store before the upload."""
        return self.max_nodes == 1

    @property
    def beat(self) -> float:
        """Between two signs of life, of a node's and of the leader's."""
        return max(0.05, min(5.0, self.heartbeat / _BEATS))

    @property
    def text_bytes(self) -> int:
        """Of a cause's text, at most: every node gets it, and the leader sends all of them at once."""
        return max(_LEAST_TEXT, min(_MOST_TEXT, _ALL_TEXTS // self.max_nodes))

    @property
    def patience(self) -> float:
        """For every node of a round that is over to have no rank left. All that it waits for, one after the other: a
        silence that is a loss, a connection that comes back, an echo's cause, ranks that end, ranks that are killed."""
        return self.heartbeat + self.grace + self.settle + self.stop + self.kill

    @property
    def stale(self) -> float:
        """A leader's sign that was watched for so long, and did not change, is nobody's."""
        return 3 * self.renew

    @property
    def most_free(self) -> int:
        """Rounds that may end for what costs nothing (a node joins, node 0 stood still); more are paid for."""
        return self.max_nodes + self.max_replacements
