"""The handler that torch elastic's agents talk to."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ..errors import ConfigError, GroupClosedError, Problem, RendezvousError, RendezvousTimeoutError
from .base import MASTER_ADDR, MASTER_PORT, JobHandler
from .group import FixedGroup
from .protocol import End
from .refusing import refuse_fixed
from .session import PrepareRound
from .settings import BACKEND, GroupSettings

DEFAULT_PORT = 29400
"""Where the endpoint names no port: torch elastic's own default (torch/distributed/run.py)."""


class SafedistHandler(JobHandler):
    """Rendezvous for a group of fixed size.

    Args:
        settings: who this node is, and how long it waits.
        local_addr: address of node 0 that ranks elsewhere can reach; default: the endpoint's host.
        prepare_round: called on node 0 with the round's number before each round; returns texts that every node finds
            in :attr:`values` once the round is complete, such as the address of Horovod's key-value server.
    """

    settings: GroupSettings
    _group: FixedGroup

    def __init__(
        self, settings: GroupSettings, *, local_addr: str | None = None, prepare_round: PrepareRound | None = None
    ) -> None:
        super().__init__(settings, prepare_round)
        self._address = "127.0.0.1" if settings.nodes == 1 else local_addr or settings.host
        self._group = FixedGroup(settings, self._offer)

    @property
    def node_0_holds_store(self) -> bool:
        """True: node ranks are fixed."""
        return True

    @property
    def holds_store(self) -> bool:
        """Whether this is node 0."""
        return self.settings.node_rank == 0

    @property
    def nodes(self) -> int:
        """Size of the group."""
        return self.settings.nodes

    @property
    def uploads(self) -> bool:
        """Whether this is the one node that uploads how the job ended: node 0."""
        return self.settings.node_rank == 0

    def get_backend(self) -> str:
        """Name in torch elastic's registry."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until every node of the job is there.

        Called while this node's round is still the current one, it asks all nodes for a new round.

        Raises:
            RendezvousTimeoutError: nodes were missing at the deadline; the same on every node, naming them.
            GroupClosedError, FencedError, StoreLostError: see :mod:`flytekitplugins_safedist.errors`.
        """
        formed = self._group.join()
        self._round, self._values = formed.generation, formed.values
        address, port = formed.values[MASTER_ADDR], int(formed.values[MASTER_PORT])
        store = PrefixStore(f"safedist/{self.settings.run_id}/agent/{formed.generation}", self._group.links.raw.raw())
        bootstrap = RendezvousStoreInfo(address, port)
        return RendezvousInfo(store, self.settings.node_rank, self.settings.nodes, bootstrap)

    def step_down(self) -> None:
        """Nothing: each round waits for a process in this node's place."""

    def refuse(self, text: str) -> End:
        """Instead of joining, end the job as failed: see :class:`~.session.RendezvousSession`."""
        return refuse_fixed(self._group, text)

    def is_closed(self) -> bool:
        """Whether the group was seen to have ended. Never blocks."""
        watch = self._group.watch
        if watch is None:
            return False
        try:
            watch.check()
        except (GroupClosedError, RendezvousTimeoutError):
            return True
        except RendezvousError:
            return False
        return False

    def set_closed(self) -> None:
        """End the group for every node.

        Raises:
            FencedError: another process took this node's place; a fenced process ends nothing.
            StoreLostError: node 0 is gone or frozen.
        """
        self._group.close("done", "the job is over")

    def shutdown(self) -> bool:
        """End the group and leave it. Node 0 stays, at most ``shutdown_grace`` seconds, until the others have left."""
        with suppress(RendezvousError):
            self.set_closed()
        self.leave()
        return True

    def _offer(self, generation: int) -> Mapping[str, str]:
        return self._offered(generation, self._address)


def handler_from_parameters(params: RendezvousParameters) -> SafedistHandler:
    """The handler for what ``torchrun`` was told.

    ``--nnodes=N --rdzv-backend=safedist --rdzv-endpoint=HOST:PORT --rdzv-id=ID --rdzv-conf=node_rank=R``, and in
    ``--rdzv-conf`` also ``timeout``, ``heartbeat_timeout``, ``heartbeat_interval``, ``shutdown_grace`` (seconds) and
    ``max_replacements``; ``silence``, ``beat`` and ``linger`` are older names of the three in the middle.

    Raises:
        ConfigError: an elastic range, or no or an impossible ``node_rank``; lists every problem.
    """
    problems: list[Problem] = []
    if params.min_nodes != params.max_nodes:
        seen = f"{params.min_nodes}:{params.max_nodes}"
        problems.append(Problem("nnodes", seen, "is a range", "use a fixed number, or the c10d backend"))
    node_rank = params.get("node_rank", params.get("rank"))
    number = _number("node_rank", -1 if node_rank is None else node_rank, int, problems)
    if node_rank is None:
        problems.append(Problem("node_rank", None, "is not given", "pass --rdzv-conf=node_rank=R, 0 to nnodes-1"))
    elif number is not None and not 0 <= number < params.max_nodes:
        problems.append(Problem("node_rank", node_rank, f"is not in 0..{params.max_nodes - 1}", "correct it"))
    if not params.endpoint.strip():
        problems.append(Problem("endpoint", params.endpoint, "is empty", "pass --rdzv-endpoint=NODE0:PORT"))
    given: dict[str, Any] = {}
    for name, kind in _OPTIONS.items():
        spelling = next(
            (candidate for candidate in (name, _OLDER_NAMES.get(name, name)) if params.get(candidate) is not None), None
        )
        if spelling is not None:
            given[name] = _number(spelling, params.get(spelling), kind, problems)
            if given[name] is not None and given[name] < 0:
                problems.append(Problem(spelling, params.get(spelling), "is negative", "give 0 or more"))
    if problems:
        raise ConfigError(problems, where={"rendezvous backend": BACKEND})
    given["about"], given["moved"] = params.get("about") or "", params.get("moved") or ""
    # Whoever watches heartbeats with the same patience must see several before it runs out.
    patience = given.get("heartbeat_timeout", GroupSettings.heartbeat_timeout)
    given.setdefault("heartbeat_interval", min(GroupSettings.heartbeat_interval, patience / 6))
    host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
    settings = GroupSettings(
        run_id=params.run_id,
        nodes=params.max_nodes,
        node_rank=int(node_rank),
        host=host,
        port=port,
        **given,
    )
    return SafedistHandler(settings, local_addr=params.local_addr)


_OPTIONS: Mapping[str, type[int] | type[float]] = {
    "timeout": float,
    "heartbeat_timeout": float,
    "heartbeat_interval": float,
    "shutdown_grace": float,
    "max_replacements": int,
    "short_life": float,
}
"""What ``--rdzv-conf`` may set besides ``node_rank``; fields of :class:`GroupSettings`."""
_OLDER_NAMES = {"heartbeat_timeout": "silence", "heartbeat_interval": "beat", "shutdown_grace": "linger"}


def _number(name: str, value: Any, kind: type[int] | type[float], problems: list[Problem]) -> float | None:
    try:
        return kind(value)
    except (TypeError, ValueError):
        problems.append(Problem(name, value, "is not a number", "correct it"))
        return None
