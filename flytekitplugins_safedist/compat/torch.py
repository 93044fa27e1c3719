"""torch's private names, looked up here and nowhere else. Imports torch only inside its functions."""

from __future__ import annotations

from typing import Any

from . import lookup

_AGENT_HOOKS = ("_invoke_run", "_start_workers", "_monitor_workers", "_stop_workers", "_shutdown", "_exit_barrier")


def require_hooks(agent_class: type[Any]) -> None:
    """Look whether torch elastic's agent has what ours overrides: an override of nothing would pass unseen.

    Raises:
        IncompatibleVersionError: one of them is gone.
    """
    for name in _AGENT_HOOKS:
        lookup(agent_class, name, of="torch")


def allow_restarts(agent: Any, count: int) -> None:
    """Say how many restarts a ``SimpleElasticAgent`` has left: it asks this number, and nothing else, whether there is
    another round.

    Raises:
        IncompatibleVersionError: it does not ask it any more.
    """
    lookup(agent, "_remaining_restarts", of="torch")
    agent._remaining_restarts = count


def default_store() -> Any:
    """The store of the process group that this process is in."""
    from torch.distributed import distributed_c10d

    return lookup(distributed_c10d, "_get_default_store", of="torch")()


def backends(group: Any) -> list[Any]:
    """What a process group works with, one for each kind of device: where its threads are.

    Raises:
        IncompatibleVersionError: torch keeps them in another way.
    """
    backend_for = lookup(group, "_get_backend", of="torch")
    return [backend_for(device) for device in lookup(group, "_device_types", of="torch")]
