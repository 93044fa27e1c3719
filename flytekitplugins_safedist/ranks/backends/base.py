"""What every backend answers."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ...errors import MissingDependencyError
from ...handoff import HERE

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class RoundGroup:
    """One round of the job, as this node sees it.

    Attributes:
        round: 0 at first, one more after every restart.
        node_rank, nnodes: this node and how many.
        nproc_per_node: ranks per node.
        address: where other nodes reach node 0; the loopback address when there are none.
        port: a port of node 0 that torch's store may use in this round.
        offered: what node 0's :meth:`RankBackend.open_round` returned, on every node.
        run_id: names the job.
        timeout: seconds that ranks may wait for each other when they meet.
    """

    round: int
    node_rank: int
    nnodes: int
    nproc_per_node: int
    address: str
    port: int
    run_id: str
    timeout: float
    offered: Mapping[str, str]

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.nnodes * self.nproc_per_node

    def rank(self, local_rank: int) -> int:
        """The job-wide rank of one of this node's."""
        return self.node_rank * self.nproc_per_node + local_rank


class RankBackend(Protocol):
    """A way for ranks to find each other."""

    libraries: tuple[str, ...]
    """Modules worth importing once for all ranks of a node."""

    late: tuple[str, ...]
    """Modules that these import by themselves when a rank begins to train: worth it too, after the user's."""

    def find(self) -> None:
        """Raise MissingDependencyError if the backend is not installed here, without importing it: an agent needs no
        torch, whose libraries would stay in its memory for the whole job."""

    def check(self) -> None:
        """Raise MissingDependencyError if the backend cannot be imported here. Imports it."""

    def open_round(self, *, nnodes: int, nproc_per_node: int) -> Mapping[str, str]:
        """On node 0, before each round: start what ranks meet at. What it returns, every node finds in ``offered``."""

    def environment(self, group: RoundGroup, local_rank: int) -> Mapping[str, str]:
        """The variables of one rank."""

    def close_round(self) -> None:
        """End what :meth:`open_round` started. Does nothing when nothing is open."""


def require_found(module: str, *, package: str, hint: str) -> None:
    """Look whether a top-level ``module`` is installed, without importing it.

    Raises:
        MissingDependencyError: it is not.
    """
    if module not in sys.modules and importlib.util.find_spec(module) is None:
        raise MissingDependencyError(
            f"{package} is not installed", where={"module": module}, seen="no such module", hint=hint
        )


def require(module: str, *, package: str, hint: str) -> None:
    """Import ``module``.

    Raises:
        MissingDependencyError: it is not installed, or its native parts do not load.
    """
    try:
        importlib.import_module(module)
    except Exception as error:
        installed = not isinstance(error, ModuleNotFoundError) or error.name != module.split(".", 1)[0]
        what = f"{package} is installed, but cannot be imported" if installed else f"{package} is not installed"
        told = HERE.failed_imports.setdefault(module.partition(".")[0], f"{type(error).__name__}: {error}")
        raise MissingDependencyError(what, where={"module": module}, seen=told, hint=hint) from error
