"""PyTorch ranks: the standard env:// variables, as torchrun documents them."""

from __future__ import annotations

from collections.abc import Mapping

from .. import envvars
from .base import Group, require


class TorchBackend:
    """``torch.distributed.init_process_group()`` finds everything in the environment."""

    libraries: tuple[str, ...] = ("torch", "torch.distributed")

    def check(self) -> None:
        """Raise MissingDependencyError if torch cannot be imported."""
        require("torch", package="torch", hint="pip install 'flytekitplugins-safedist[torch]', in the task's image too")

    def open_round(self, *, nnodes: int, nproc_per_node: int) -> Mapping[str, str]:
        """Nothing: rank 0 opens torch's store, where the rendezvous says."""
        return {}

    def environment(self, group: Group, local_rank: int) -> Mapping[str, str]:
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
