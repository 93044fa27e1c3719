"""Rendezvous for groups of a fixed size: every node knows its index, and the work per node is constant.

``register()`` adds the backend ``safedist`` to torch elastic's registry; plain ``torchrun`` finds it through the
``torchrun.handlers`` entry point. See ``docs/rendezvous.md`` for the protocol.

This module imports nothing of torch: ``torch.distributed.elastic.rendezvous`` loads the entry point *while it is being
imported itself*, so an import of it from here would be circular (torch/distributed/elastic/rendezvous/__init__.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .settings import BACKEND as BACKEND


def create_handler(params: Any) -> Any:
    """Make the handler for torch elastic's ``RendezvousParameters``; see :func:`.handler.handler_from_parameters`."""
    from .handler import handler_from_parameters

    return handler_from_parameters(params)


def torchrun_handler() -> Callable[[Any], Any]:
    """The ``torchrun.handlers`` entry point: returns the creator (torch/distributed/elastic/rendezvous/registry.py)."""
    return create_handler


def register() -> None:
    """Register the backend with torch elastic. Calling it twice, or after the entry point was loaded, is harmless."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(BACKEND, create_handler)
