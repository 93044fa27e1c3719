"""PyTorch ranks: the standard env:// variables, as torchrun documents them."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ... import envvars
from ...compat import torch as torch_inside
from ...errors import MissingDependencyError, TopologyError
from ...fs.identity import Identity

LOOPBACK = "127.0.0.1"

FLOOR = (2, 5)
"""The oldest torch that ranks run with, and that anything is tried with (docs/versions.md). Under 2.4 functions that
train with DistributedDataParallel often hung as they returned; whether :mod:`..replicas` cures that there too is not
known."""

EVERY_RANKS = ("flytekit", "flytekitplugins_safedist.plugin.task", "torch._dynamo")
"""What every rank imports, whatever its backend; the last one with its first optimizer."""

_HINT = "pip install 'flytekitplugins-safedist[torch]', in the task's image too"


class TorchBackend:
    """A way for ranks to find each other: ``init_process_group()`` finds everything in the environment.

    Attributes:
        needs: packages that must be installed, each with the module that proves it and how to get it.
        libraries: modules that are imported once for all ranks of a node.
        keeps_store: node 0 keeps a store for each round, which its ranks meet at.
    """

    needs: tuple[tuple[str, str, str], ...] = (("torch", "torch", _HINT),)
    libraries: tuple[str, ...] = ("torch", "torch.distributed", *EVERY_RANKS)
    keeps_store = True

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
        ``offered`` in that round. Of torch's nothing: the rank server keeps its store."""
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
        kept = offered.get(envvars.STORE_PORT) if at.world_size > 1 else None
        return {
            **({} if kept is None else {envvars.STORE_PORT: kept}),
            envvars.RANK: str(at.rank),
            envvars.LOCAL_RANK: str(at.local_rank),
            envvars.WORLD_SIZE: str(at.world_size),
            envvars.LOCAL_WORLD_SIZE: str(at.local_world_size),
            envvars.GROUP_RANK: str(at.node_rank),
            envvars.GROUP_WORLD_SIZE: str(at.nnodes),
            envvars.NODE_RANK: str(at.node_rank),
            envvars.MASTER_ADDR: offered[envvars.MASTER_ADDR],
            envvars.MASTER_PORT: offered[envvars.MASTER_PORT],
            envvars.ROLE_NAME: "default",
            envvars.ROLE_RANK: str(at.rank),
            envvars.ROLE_WORLD_SIZE: str(at.world_size),
            envvars.TORCHELASTIC_RUN_ID: run_id,
            envvars.TORCHELASTIC_RESTART_COUNT: str(at.round),
            envvars.TORCHELASTIC_USE_AGENT_STORE: str(False),
        }


def prepare_store(environment: Mapping[str, str], meet: Callable[[], object]) -> None:
    """Before the user's function opens its first group: have this rank's groups meet at the store that node 0 keeps
    (:mod:`...rank_server.store`), where it does, and see what they ask of it.

    That store is there before any rank, and when rank 0 has returned, with which its own would end. A group that is
    made again finds none of the keys of the one before. As long as rank 0 has its group, others find a store of its own
    at MASTER_PORT, as anywhere: what looks for one there (torch.distributed.checkpoint does) puts its own keys into it.

    What this process forks or starts is no rank: it meets where MASTER_PORT says, as anywhere.

    Args:
        environment: the rank's variables.
        meet: called when this rank is about to meet others at a store: torch's RPC makes no other group.
    """
    if environment.get(envvars.TORCHELASTIC_USE_AGENT_STORE) != str(False) or environment[envvars.WORLD_SIZE] == "1":
        return
    here, me = (environment[envvars.MASTER_ADDR], environment[envvars.MASTER_PORT]), os.getpid()
    kept, made, beside = environment.get(envvars.STORE_PORT), Counter[int](), list[Any]()

    def around(create: Callable[..., Any], asked: dict[str, Any]) -> Any:
        rank, size, is_own = asked["rank"], asked["world_size"], os.getpid() == me
        if is_own:
            meet()
        if (asked["hostname"], str(asked["port"])) != here:
            return create(**asked)
        has_store = kept is not None and is_own
        refuse_another_place(environment, rank, size, is_alone=is_own and not _has_children(), has_store=has_store)
        if kept is None or not has_store:
            return create(**asked)
        if environment[envvars.RANK] == "0":
            beside[:] = [_open_store(int(asked["port"]))]
        store = create(**{**asked, "port": int(kept), "rank": max(rank, 1)})  # rank 0's would open one
        made[size] += 1  # ranks may have been in groups of fewer before
        store = sys.modules["torch.distributed"].PrefixStore(f"{made[size]} of {size}", store)
        if size > 1:
            _take_place(store, environment[envvars.RANK], rank, size)
        return store

    torch_inside.around_stores(around)
    torch_inside.call_as_group_ends(beside.clear)


def _open_store(port: int) -> Any:
    with suppress(RuntimeError):  # the port is a store's that the user's code has opened, and stays that
        return sys.modules["torch.distributed"].TCPStore(
            host_name=LOOPBACK, port=port, is_master=True, wait_for_workers=False, multi_tenant=True
        )


def _take_place(store: Any, own: str, rank: int, world_size: int) -> None:
    """Refuse a place in a group that another rank has: those of two groups would find each other, and go on as one."""
    holder = store.compare_set(f"place {rank}", "", own).decode()
    if holder != own:
        raise TopologyError(
            "init_process_group is asked for a place that another rank has",
            where={"rank": own},
            seen=f"rank={rank}, world_size={world_size}, which rank {holder} of this job has asked for",
            expected="one group of this job's ranks at MASTER_PORT, each with a place of its own",
            hint="let all ranks make one group, and parts of it with torch.distributed.new_group; or give each group a "
            "tcp:// address of its own as init_method",
        )


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def refuse_another_place(
    environment: Mapping[str, str], rank: int, world_size: int, *, is_alone: bool, has_store: bool
) -> None:
    """Refuse a place in a group at this job's own address that no group can have there: all ranks would wait for each
    other until their time is up. Another place than this rank's own may be meant: for some ranks, or in another order.

    Args:
        environment: the rank's variables.
        rank, world_size: that it asks for.
        is_alone: this process has started no others, and was not started by the rank: they may be further ranks.
        has_store: it is there, whoever is rank 0.

    Raises:
        TopologyError: there is no such place.
    """
    own, ranks, node = (int(environment[name]) for name in (envvars.RANK, envvars.WORLD_SIZE, envvars.GROUP_RANK))
    if world_size > ranks and is_alone:
        why = f"this job has {ranks} ranks"
    elif rank == 0 and node != 0 and not has_store:
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
