"""PyTorch ranks: the standard env:// variables, as torchrun documents them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ... import envvars
from ...compat.torch import STORE_MAKER
from ...errors import MissingDependencyError
from .base import LOOPBACK, RoundGroup, require, require_found

FLOOR = (2, 5)
"""The oldest torch that ranks run with, and that anything is tried with (docs/versions.md). Under 2.4 functions that
train with DistributedDataParallel often hung as they returned; whether :mod:`..replicas` cures that there too is not
known."""

_EARLY_SECONDS = 5.0
"""For a connection of this process to itself."""

_HINT = "pip install 'flytekitplugins-safedist[torch]', in the task's image too"


class TorchBackend:
    """``torch.distributed.init_process_group()`` finds everything in the environment."""

    libraries: tuple[str, ...] = ("torch", "torch.distributed")
    late: tuple[str, ...] = ("torch._dynamo",)  # by the first optimizer, or DistributedDataParallel

    def find(self) -> None:
        """Raise MissingDependencyError if torch is not installed, or older than :data:`FLOOR`. Does not import it."""
        require_found("torch", package="torch", hint=_HINT)
        with suppress(PackageNotFoundError):  # a source tree, say: whoever imports it will know
            refuse_before_floor(version("torch"))

    def check(self) -> None:
        """Raise MissingDependencyError if torch cannot be imported, or is older than :data:`FLOOR`."""
        require("torch", package="torch", hint=_HINT)
        import torch

        refuse_before_floor(str(torch.__version__))

    def open_round(self, *, nnodes: int, nproc_per_node: int) -> Mapping[str, str]:
        """Nothing: rank 0 opens torch's store, where the rendezvous says."""
        return {}

    def environment(self, group: RoundGroup, local_rank: int) -> Mapping[str, str]:
        """https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables"""
        return {
            envvars.RANK: str(group.rank(local_rank)),
            envvars.LOCAL_RANK: str(local_rank),
            envvars.WORLD_SIZE: str(group.world_size),
            envvars.LOCAL_WORLD_SIZE: str(group.nproc_per_node),
            envvars.GROUP_RANK: str(group.node_rank),
            envvars.GROUP_WORLD_SIZE: str(group.nnodes),
            envvars.MASTER_ADDR: group.address,
            envvars.MASTER_PORT: str(group.port),
            envvars.ROLE_NAME: "default",
            envvars.ROLE_RANK: str(group.rank(local_rank)),
            envvars.ROLE_WORLD_SIZE: str(group.world_size),
            envvars.TORCHELASTIC_RUN_ID: group.run_id,
            envvars.TORCHELASTIC_RESTART_COUNT: str(group.round),
            envvars.TORCHELASTIC_USE_AGENT_STORE: str(False),
        }

    def close_round(self) -> None:
        """Nothing of ours is open."""


def open_store_early(environment: Mapping[str, str]) -> None:
    """In rank 0, as soon as it is there: have torch's store listen before the user's function opens its first group.

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
    if not is_torchs or environment[envvars.RANK] != "0" or environment[envvars.WORLD_SIZE] == "1" or create is None:
        return
    held: list[Any] = []
    with suppress(Exception):  # the port is somebody's: the group's own store will say so
        held.append(
            sys.modules["torch.distributed"].TCPStore(
                host_name=LOOPBACK,
                port=int(environment[envvars.MASTER_PORT]),
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
                timeout=timedelta(seconds=_EARLY_SECONDS),
            )
        )

    @functools.wraps(create)
    def first(*args: Any, **kwargs: Any) -> Any:
        setattr(module, STORE_MAKER, create)
        try:
            return create(*args, **kwargs)
        finally:
            held.clear()

    setattr(module, STORE_MAKER, first)


def refuse_before_floor(version: str) -> None:
    """Raise MissingDependencyError if that version of torch is older than :data:`FLOOR`."""
    if tuple(int(part) for part in version.split(".")[:2]) < FLOOR:
        raise MissingDependencyError(
            "torch is too old: safedist is not tried with it, and jobs hung with it when that was done",
            seen=f"torch {version}",
            expected=f"torch {FLOOR[0]}.{FLOOR[1]} or later",
            hint=_HINT,
        )
