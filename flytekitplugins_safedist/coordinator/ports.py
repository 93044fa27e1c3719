"""Ports that nobody else gets, and the addresses of this machine."""

from __future__ import annotations

import socket
from contextlib import suppress

from ..topology import Endpoint

BACKLOG = 65535
"""Connections that may wait to be accepted: thousands of nodes connect in the same second. The kernel caps it at
``net.core.somaxconn``; whoever finds it full tries again a second later.
"""


class ReservedPort:
    """A free port that nobody else gets, and that a server with ``SO_REUSEADDR`` (as torch's) may still bind.

    Bound but not listening: the kernel hands the port out to no connect and no ``bind(0)``, while a second socket that
    also has ``SO_REUSEADDR`` may bind and listen. So no other process can slip in between choosing and using it.
    """

    def __init__(self) -> None:
        self._socket = _bound_everywhere(0)
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port back. A server that listens on it is not disturbed."""
        self._socket.close()


def listener(host: str, port: int) -> socket.socket:
    """A listening socket on every interface; both families, unless ``host`` has IPv4 addresses only.

    Raises:
        OSError: the port is taken, or may not be used.
    """
    sock = _bound(socket.AF_INET, "", port) if _is_ipv4_only(host) else _bound_everywhere(port)
    try:
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def is_here(host: str) -> bool | None:
    """Whether ``host`` is this machine; None where the name has no address now. A pod resolves its own host name from
    the first moment (/etc/hosts)."""
    if host == socket.gethostname():
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except socket.gaierror:
        return None
    return any(is_own(str(each[4][0])) for each in found)


def is_own(address: str) -> bool:
    """Whether an address is this machine's: the kernel binds no foreign one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def is_answered(endpoint: Endpoint) -> bool:
    """Whether anybody listens there."""
    with suppress(OSError), socket.create_connection((endpoint.host, endpoint.port), timeout=2.0):
        return True
    return False


def _bound_everywhere(port: int) -> socket.socket:
    # Containers without IPv6 refuse the family or the bind; then IPv4 is all there is.
    with suppress(OSError):
        return _bound(socket.AF_INET6, "::", port)
    return _bound(socket.AF_INET, "", port)


def _bound(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def _is_ipv4_only(host: str) -> bool:
    try:
        families = {found[0] for found in socket.getaddrinfo(host, None)}
    except socket.gaierror:
        return False
    return families == {socket.AF_INET}
