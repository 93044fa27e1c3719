"""What registration pinned into the pod: all that a node needs to meet the others, without the task's own code."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from .. import envvars, stopping
from .options import DEFAULT_REPLACEMENTS, Timeouts

_PINNED = ("rendezvous", "heartbeat", "upload")


@dataclass(frozen=True)
class Registered:
    """The job as it was registered.

    Attributes:
        min_nodes, max_nodes: equal for a fixed size.
        nproc_per_node: ranks per node.
        timeouts: as the task's, where nodes wait for each other.
        max_replacements: how often nodes may be lost, in the whole job.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    timeouts: Timeouts
    max_replacements: int = DEFAULT_REPLACEMENTS

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Registered | None:
        """Read it; None where this pod is not known to be one of ours."""
        low, _, high = env.get(envvars.NODES, "").partition(":")
        ranks = env.get(envvars.NPROC_PER_NODE, "")
        if not (low.isdecimal() and (high or low).isdecimal() and ranks.isdecimal()):
            return None
        return cls(
            int(low),
            int(high or low),
            int(ranks),
            _timeouts(env.get(envvars.TIMEOUTS, "")),
            replacements_pinned(env),
        )


def replacements_pinned(env: Mapping[str, str]) -> int:
    """How often nodes may be lost in the whole job, as registered."""
    text = env.get(envvars.MAX_REPLACEMENTS, "")
    return int(text) if text.isdecimal() else DEFAULT_REPLACEMENTS


def grace_pinned(env: Mapping[str, str]) -> float:
    """Seconds that this pod has between SIGTERM and SIGKILL; what is no time to wait is Kubernetes' usual one."""
    with suppress(ValueError):
        seconds = float(env.get(envvars.GRACE, ""))
        if 0 < seconds < float("inf"):
            return seconds
    return stopping.GRACE_SECONDS


def timeouts_text(timeouts: Timeouts) -> str:
    """As pinned: ``rendezvous=900 heartbeat=60 upload=3600``."""
    return " ".join(f"{name}={getattr(timeouts, name):g}" for name in _PINNED)


def _timeouts(text: str) -> Timeouts:
    found = Timeouts()
    for part in text.split():
        name, _, value = part.partition("=")
        if name in _PINNED:
            with suppress(ValueError):
                found = replace(found, **{name: float(value)})
    return found
