"""PyTorch ranks: the standard env:// variables, as torchrun documents them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from ... import envvars
from ...errors import MissingDependencyError
from .base import RoundGroup, require, require_found

FLOOR = (2, 5)
"""The oldest torch that ranks run with, and that anything is tried with (docs/versions.md). Under 2.4 functions that
train with DistributedDataParallel often hung as they returned; whether :mod:`..replicas` cures that there too is not
known."""

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


def refuse_before_floor(version: str) -> None:
    """Raise MissingDependencyError if that version of torch is older than :data:`FLOOR`."""
    if tuple(int(part) for part in version.split(".")[:2]) < FLOOR:
        raise MissingDependencyError(
            "torch is too old: safedist is not tried with it, and jobs hung with it when that was done",
            seen=f"torch {version}",
            expected=f"torch {FLOOR[0]}.{FLOOR[1]} or later",
            hint=_HINT,
        )
