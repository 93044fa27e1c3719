"""PyTorch ranks: the standard env:// variables, as torchrun documents them."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ... import envvars
from ...compat.torch import STORE_MAKER
from ...errors import MissingDependencyError, TopologyError
from ...fs.identity import Identity

LOOPBACK = "127.0.0.1"

FLOOR = (2, 5)
"""The oldest torch that ranks run with, and that anything is tried with (docs/versions.md). Under 2.4 functions that
train with DistributedDataParallel often hung as they returned; whether :mod:`..replicas` cures that there too is not
known."""

EVERY_RANKS = ("flytekit", "flytekitplugins_safedist.plugin.task", "torch._dynamo")
"""What every rank imports, whatever its backend; the last one with its first optimizer."""

_EARLY_SECONDS = 5.0
"""For a connection of this process to itself."""

_HINT = "pip install 'flytekitplugins-safedist[torch]', in the task's image too"


class TorchBackend:
    """A way for ranks to find each other: ``init_process_group()`` finds everything in the environment.

    Attributes:
        needs: packages that must be installed, each with the module that proves it and how to get it.
        libraries: modules that are imported once for all ranks of a node.
    """

    needs: tuple[tuple[str, str, str], ...] = (("torch", "torch", _HINT),)
    libraries: tuple[str, ...] = ("torch", "torch.distributed", *EVERY_RANKS)

    def find(self) -> None:
        """Look whether all that ranks need is installed, without importing it: an agent needs no torch, whose libraries
        would stay in its memory for the whole job.

        Raises:
            MissingDependencyError: it is not, or torch is older than :data:`FLOOR`.
        """
        for package, _, hint in self.needs:
            if package not in sys.modules and importlib.util.find_spec(package) is None:
                what = f"{package} is not installed"
                raise MissingDependencyError(what, where={"module": package}, seen="no such module", hint=hint)
        with suppress(PackageNotFoundError):  # a source tree, say: whoever imports it will know
            refuse_before_floor(version("torch"))

    def check(self, failed: Mapping[str, str]) -> None:
        """Look whether all that ranks need could be imported.

        Args:
            failed: errors of imports in the rank server, by statement.

        Raises:
            MissingDependencyError: it could not.
        """
        for package, module, hint in self.needs:
            error = failed.get(f"import {module}")
            if error is not None:
                what = f"{package} is installed, but cannot be imported"
                raise MissingDependencyError(what, where={"module": module}, seen=error, hint=hint)

    def open_round(self, *, nnodes: int, nproc_per_node: int) -> Mapping[str, str]:
        """On node 0, before each round: start what ranks meet at. What it returns, every node finds among what is
        ``offered`` in that round. Of torch's nothing: rank 0 opens its store."""
        return {}

    def close_round(self) -> None:
        """End what :meth:`open_round` started. Does nothing when nothing is open."""

    def environment(self, at: Identity, offered: Mapping[str, str], *, run_id: str, timeout: float) -> dict[str, str]:
        """The variables of one rank: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables

        Args:
            at: the rank.
            offered: where node 0 is in this round (MASTER_ADDR, MASTER_PORT), and what it opened there.
            run_id: names the job.
            timeout: seconds that ranks may wait for each other when they meet.
        """
        return {
            envvars.RANK: str(at.rank),
            envvars.LOCAL_RANK: str(at.local_rank),
            envvars.WORLD_SIZE: str(at.world_size),
            envvars.LOCAL_WORLD_SIZE: str(at.local_world_size),
            envvars.GROUP_RANK: str(at.node_rank),
            envvars.GROUP_WORLD_SIZE: str(at.nnodes),
            envvars.MASTER_ADDR: offered[envvars.MASTER_ADDR],
            envvars.MASTER_PORT: offered[envvars.MASTER_PORT],
            envvars.ROLE_NAME: "default",
            envvars.ROLE_RANK: str(at.rank),
            envvars.ROLE_WORLD_SIZE: str(at.world_size),
            envvars.TORCHELASTIC_RUN_ID: run_id,
            envvars.TORCHELASTIC_RESTART_COUNT: str(at.round),
            envvars.TORCHELASTIC_USE_AGENT_STORE: str(False),
        }


def prepare_store(environment: Mapping[str, str]) -> None:
    """Before the user's function opens its first group: see what it asks of the store that all ranks meet at, and in
    rank 0 have that store listen already.

    All ranks start at once. One that looks for the store a moment before rank 0 listens is refused, and torch's client
    looks again half a second to a second later, at the start and after each restart. The group shares the server that
    is there (``multi_tenant``), and ours is let go of then: the next group must find neither the port nor its keys.

    Where torch is not imported yet, or makes its store otherwise, nothing happens.

    Args:
        environment: the rank's variables.
    """
    is_torchs = environment.get(envvars.TORCHELASTIC_USE_AGENT_STORE) == str(False)
    module = sys.modules.get("torch.distributed.rendezvous")
    create: Callable[..., Any] | None = getattr(module, STORE_MAKER, None)
    if not is_torchs or environment[envvars.WORLD_SIZE] == "1" or create is None:
        return
    held = [_open_store(environment)] if environment[envvars.RANK] == "0" else []
    me, here = os.getpid(), (environment[envvars.MASTER_ADDR], environment[envvars.MASTER_PORT])

    @functools.wraps(create)
    def first(*args: Any, **kwargs: Any) -> Any:
        asked = {**dict(zip(("hostname", "port", "rank", "world_size"), args, strict=False)), **kwargs}
        if (asked.get("hostname"), str(asked.get("port"))) == here:
            is_alone = os.getpid() == me and not _has_children()
            refuse_another_place(environment, asked["rank"], asked["world_size"], is_alone=is_alone)
        setattr(module, STORE_MAKER, create)
        try:
            return create(*args, **kwargs)
        finally:
            held.clear()

    setattr(module, STORE_MAKER, first)


def _open_store(environment: Mapping[str, str]) -> Any:
    with suppress(Exception):  # the port is somebody's: the group's own store will say so
        return sys.modules["torch.distributed"].TCPStore(
            host_name=LOOPBACK,
            port=int(environment[envvars.MASTER_PORT]),
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timedelta(seconds=_EARLY_SECONDS),
        )


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def refuse_another_place(environment: Mapping[str, str], rank: int, world_size: int, *, is_alone: bool) -> None:
    """Refuse a place in a group at this job's own address that no group can have there: all ranks would wait for each
    other until their time is up. Another place than this rank's own may be meant: for some ranks, or in another order.

    Args:
        environment: the rank's variables.
        rank, world_size: that it asks for.
        is_alone: this process has started no others, and was not started by the rank: they may be further ranks.

    Raises:
        TopologyError: there is no such place.
    """
    own, ranks, node = (int(environment[name]) for name in (envvars.RANK, envvars.WORLD_SIZE, envvars.GROUP_RANK))
    if world_size > ranks and is_alone:
        why = f"this job has {ranks} ranks"
    elif rank == 0 and node != 0:
        why = f"rank 0 has the store on node 0, and this is node {node}"
    elif rank >= world_size:
        why = f"ranks count from 0 to {world_size - 1}"
    else:
        return
    raise TopologyError(
        f"init_process_group waits for ranks that will never be there: {why}",
        where={"rank": own},
        seen=f"rank={rank}, world_size={world_size}",
        expected=f"rank={own}, world_size={ranks}",
        hint=f"this job has {ranks} ranks: leave rank and world_size out, or take them from current_rank()",
    )


def refuse_before_floor(version: str) -> None:
    """Raise MissingDependencyError if that version of torch is older than :data:`FLOOR`."""
    if tuple(int(part) for part in version.split(".")[:2]) < FLOOR:
        raise MissingDependencyError(
            "torch is too old: safedist is not tried with it, and jobs hung with it when that was done",
            seen=f"torch {version}",
            expected=f"torch {FLOOR[0]}.{FLOOR[1]} or later",
            hint=_HINT,
        )
