"""The pods' network: every life of a pod has an address of its own.

Docker gives a free address again, and the lowest first: a pod that is made anew would have the one it had. So the tests
choose addresses themselves, which docker allows in a network with a subnet of its own only.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
from typing import Any

from docker.models.containers import Container
from docker.types import IPAMConfig, IPAMPool

from tests.containers.engine import Docker

WORKERS = 16
"""Of pytest, at most: each gives away a part of the addresses of its own, one after the other."""

_PLACED = itertools.count()


def make(docker: Docker, name: str) -> None:
    """A network in a subnet that is free now, as docker chooses it for a network without one."""
    networks = docker.client.networks
    tried = networks.create(f"{name}.tried", labels=docker.labels)
    tried.reload()
    subnet = tried.attrs["IPAM"]["Config"][0]["Subnet"]
    tried.remove()
    networks.create(name, labels=docker.labels, ipam=IPAMConfig(pool_configs=[IPAMPool(subnet=subnet)]))


def place(docker: Docker, name: str, alias: str) -> dict[str, Any]:
    """Arguments by which a new container is in a network under an address that nobody had, and a name."""
    subnet = ipaddress.ip_network(docker.client.networks.get(name).attrs["IPAM"]["Config"][0]["Subnet"])
    # From the upper half: docker's own choice begins at the other end.
    half = subnet.num_addresses // 2
    part = (half - 1) // WORKERS
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % WORKERS
    address = str(subnet[half + worker * part + next(_PLACED) % part])
    end = docker.client.api.create_endpoint_config(aliases=[alias], ipv4_address=address)
    return {"network": name, "networking_config": {name: end}}


def address(container: Container, network: str) -> str:
    """The address of a container."""
    container.reload()
    found: str = container.attrs["NetworkSettings"]["Networks"][network]["IPAddress"]
    return found
