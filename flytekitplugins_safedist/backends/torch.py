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

    def open_round(self, group: Group) -> str:
        """Torch meets at the store that the rendezvous has named."""
        return f"{group.address}:{group.port}"

    def environment(self, group: Group, local_rank: int, endpoint: str) -> Mapping[str, str]:
        """https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables"""
        address, _, port = endpoint.rpartition(":")
        return {
            envvars.RANK: str(group.rank(local_rank)),
            envvars.LOCAL_RANK: str(local_rank),
            envvars.WORLD_SIZE: str(group.world_size),
            envvars.LOCAL_WORLD_SIZE: str(group.nproc_per_node),
            envvars.GROUP_RANK: str(group.node_rank),
            envvars.GROUP_WORLD_SIZE: str(group.nnodes),
            envvars.MASTER_ADDR: address,
            envvars.MASTER_PORT: port,
            envvars.ROLE_NAME: "default",
            envvars.ROLE_RANK: str(group.rank(local_rank)),
            envvars.ROLE_WORLD_SIZE: str(group.world_size),
            envvars.TORCHELASTIC_RUN_ID: group.run_id,
            envvars.TORCHELASTIC_RESTART_COUNT: str(group.round),
            envvars.TORCHELASTIC_USE_AGENT_STORE: str(group.agent_store),
        }

    def close_round(self) -> None:
        """Nothing of ours is open."""
