"""What one node's agent is to do, and what it has learned when it is done: values, which start nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..config.options import Resolved
from ..ranks.disk_limit import DiskLimit
from ..ranks.scratch import JobScratch
from ..topology import Topology
from .verdict import Verdict


@dataclass(frozen=True)
class NodePlan:
    """All that one node's agent needs to know. A value: computing it starts nothing.

    Attributes:
        settings: the task's configuration, resolved.
        topology: this node's place in the job.
        scratch: the job's directory on this node.
        job_order: file with what all ranks share.
        environment: the agent's own variables, which ranks inherit.
        run_id: names the job; the same on every node.
        attempt: Flyte's attempt.
        fork: whether ranks may be forked from the server.
        limit: how much they may write to disk.
    """

    settings: Resolved
    topology: Topology
    scratch: JobScratch
    job_order: Path
    environment: Mapping[str, str]
    run_id: str
    attempt: int
    fork: bool
    limit: DiskLimit | None = None


@dataclass
class Report:
    """What the agent learned: for the end line and for the caller."""

    rounds: int = 0
    node_rank: int = -1
    """In the latest round; -1 before the first."""
    seconds: dict[str, float] = field(default_factory=dict)
    result: Path | None = None
    verdict: Verdict | None = None
    decks: tuple[dict[str, str], ...] = ()
    """Of a rank that failed."""
