"""What the parts of a job share about the nodes, whether their number is fixed or a range."""

from __future__ import annotations

from typing import Protocol

from .carried import Carried
from .client import Connection
from .protocol import End, EndKind, Keys


class Membership(Protocol):
    """A node's place among the others, as :class:`~.jobstore.JobStore` needs it."""

    keys: Keys

    @property
    def control(self) -> Connection:
        """The connection for short calls."""

    @property
    def node_rank(self) -> int:
        """This node in the current round; -1 when it is in none."""

    @property
    def nodes(self) -> int:
        """Nodes of the current round."""

    @property
    def heartbeat_timeout(self) -> float:
        """Seconds without a sign of life after which a node counts as gone."""

    def beat_keys(self) -> tuple[str, ...]:
        """The heartbeat counter of each node of the current round, by node rank."""

    def uploader_beat(self) -> str | None:
        """The heartbeat counter of the node that uploads, once the job has ended; None where that node holds the
        store, whose heartbeat timeout says the same."""

    def gone(self) -> tuple[int, ...]:
        """Nodes of the current round that are known to be gone, without asking anybody."""

    def learn(self, known: Carried) -> None:
        """Keep a copy of what the job's store knows, for the store that comes after it."""

    def finish(self, round_no: int) -> bool:
        """End the job as done, if ``round_no`` is still the round that counts; whether the job has ended as done."""

    def close(self, kind: EndKind, text: str) -> End:
        """End the job; the first one to end it decides. Returns the end that counts."""

    def read_end(self) -> End | None:
        """How the job ended, or None while it runs."""
