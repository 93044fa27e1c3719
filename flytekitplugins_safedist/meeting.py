"""Where the nodes of a job meet: a rendezvous handler from torch elastic's registry, closed again at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from .agent import NodePlan


@contextmanager
def open_handler(plan: NodePlan) -> Iterator[RendezvousHandler]:
    """A handler for this node."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    handler = get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d", endpoint="localhost:0", run_id=plan.run_id, min_nodes=1, max_nodes=1, local_addr="127.0.0.1"
        )
    )
    try:
        yield handler
    finally:
        handler.shutdown()
