"""Which addresses are this machine's. Asks the kernel's routing table and sends nothing."""

from __future__ import annotations

import socket
from contextlib import suppress


def own_address(host: str, port: int) -> str:
    """The address by which this machine reaches ``host``, and so that by which others reach this one. Sends nothing."""
    with suppress(OSError):
        for family, kind, proto, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, proto) as probe:
                probe.connect(address)
                found: str = probe.getsockname()[0]
                return found
    return socket.gethostname()


def is_here(host: str) -> bool:
    """Whether ``host`` is this machine: the kernel binds no foreign address."""
    if host == socket.gethostname():
        return True
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except socket.gaierror:
        return False  # a pod resolves its own name from the first moment (/etc/hosts)
    for family, kind, proto, _, address in found:
        with suppress(OSError), socket.socket(family, kind, proto) as probe:
            probe.bind(address)
            return True
    return False
