"""Two nodes of a job in one process: what they share is only the store, as between pods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from flytekitplugins_safedist.rendezvous.client import ReservedPort
from flytekitplugins_safedist.rendezvous.handler import SafedistHandler
from flytekitplugins_safedist.rendezvous.settings import GroupSettings

ALONE = GroupSettings(
    run_id="job",
    nodes=1,
    node_rank=0,
    host="localhost",
    port=0,
    timeout=60,
    heartbeat_timeout=30,
    heartbeat_interval=0.05,
    shutdown_grace=5,
)


@contextmanager
def one_node() -> Iterator[SafedistHandler]:
    """A job of one node, in its first round."""
    handler = SafedistHandler(ALONE)
    handler.next_rendezvous()
    yield handler
    handler.shutdown()


@contextmanager
def two_nodes() -> Iterator[tuple[SafedistHandler, SafedistHandler]]:
    """A job of two nodes, in its first round. Node 0 holds the store."""
    with reserved_port() as port:
        settings = replace(ALONE, nodes=2, port=port)
        both = (SafedistHandler(settings), SafedistHandler(replace(settings, node_rank=1)))
        together(*(node.next_rendezvous for node in both))
        yield both
        together(*(node.shutdown for node in both))


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody else takes meanwhile."""
    reserved = ReservedPort()
    yield reserved.port
    reserved.close()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Make these calls at once; returns what they return."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
