"""What each rank says, in every rank: for the tasks of these tests."""

from __future__ import annotations

from flytekitplugins_safedist import current_rank
from flytekitplugins_safedist.fs import barrier, once_per_job


def exchange(name: str, text: str) -> list[str]:
    """The texts of all ranks, in the order of ranks."""
    me = current_rank()
    once_per_job(f"{name} of {me.rank}", lambda: text, timeout=120)
    barrier(name, timeout=120)  # each has said its own: nobody says anything for another
    return [once_per_job(f"{name} of {rank}", str, timeout=120) for rank in range(me.world_size)]
