"""Horovod ranks: Gloo as the controller, and Horovod's own key-value server, started fresh for each round.

A rank needs only variables (horovod/runner/gloo_run.py: create_slot_env_vars; horovod/common/gloo/gloo_context.cc). A
rank that dies leaves keys behind in the server, so no round may use another's.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

from ... import envvars
from ...compat import horovod as horovod_inside
from ...errors import TopologyError
from ...fs.identity import Identity
from .torch import EVERY_RANKS, LOOPBACK, TorchBackend

_HINT = (
    "build its wheel against the installed torch with horovod_build/build.py of this project "
    "(the published sdist does not compile against torch >= 2.1), in the task's image too"
)

_PORT = "horovod_port"
"""Name under which node 0 offers the port of its key-value server to all nodes."""


class HorovodBackend(TorchBackend):
    """``hvd.init()`` finds everything in the environment; torch.distributed is told the same places."""

    needs = (*TorchBackend.needs, ("horovod", "horovod.torch", _HINT))
    libraries = ("torch", "horovod.torch", *EVERY_RANKS)
    keeps_store = False  # few of these ranks have a process group

    def __init__(self) -> None:
        self._server: Any = None
        self._thread: threading.Thread | None = None

    def open_round(self, *, nnodes: int, nproc_per_node: int) -> Mapping[str, str]:
        """Start the key-value server: on the loopback interface when the job has only this node."""
        from horovod.runner.common.util.hosts import HostInfo, get_host_assignments

        self.close_round()
        self._server = horovod_inside.key_value_server(LOOPBACK if nnodes == 1 else "")
        hosts = [HostInfo(_scope(node), nproc_per_node) for node in range(nnodes)]
        self._server.init(get_host_assignments(hosts, nnodes * nproc_per_node))
        self._thread = threading.Thread(target=self._server.serve_forever, name="safedist horovod server", daemon=True)
        self._thread.start()
        return {_PORT: str(self._server.server_address[1])}

    def environment(self, at: Identity, offered: Mapping[str, str], *, run_id: str, timeout: float) -> dict[str, str]:
        """Torch's, and Horovod's own."""
        variables = {
            **super().environment(at, offered, run_id=run_id, timeout=timeout),
            envvars.HOROVOD_CONTROLLER: "gloo",
            envvars.HOROVOD_CPU_OPERATIONS: "gloo",
            envvars.HOROVOD_GLOO_RENDEZVOUS_ADDR: offered[envvars.MASTER_ADDR],
            envvars.HOROVOD_GLOO_RENDEZVOUS_PORT: offered[_PORT],
            # Ranks wait this long for each other in hvd.init(); the default of 30 s is less than one slow download.
            envvars.HOROVOD_GLOO_TIMEOUT_SECONDS: str(math.ceil(timeout)),
            envvars.HOROVOD_RANK: str(at.rank),
            envvars.HOROVOD_SIZE: str(at.world_size),
            envvars.HOROVOD_LOCAL_RANK: str(at.local_rank),
            envvars.HOROVOD_LOCAL_SIZE: str(at.local_world_size),
            envvars.HOROVOD_CROSS_RANK: str(at.node_rank),
            envvars.HOROVOD_CROSS_SIZE: str(at.nnodes),
            envvars.HOROVOD_HOSTNAME: _scope(at.node_rank),
        }
        if at.nnodes == 1:
            variables[envvars.HOROVOD_GLOO_IFACE] = "lo"
        return variables

    def close_round(self) -> None:
        """Stop the key-value server and free its port."""
        server, thread = self._server, self._thread
        self._server = self._thread = None
        if server is not None and thread is not None:
            server.shutdown()
            server.server_close()
            thread.join()


def refuse_unknown_address() -> None:
    """See that Horovod finds node 0, and Gloo the address of this rank, by the network interface that is named, or by
    the host's name, as they do that themselves: they would end the process (SIGSEGV, SIGABRT).

    Raises:
        TopologyError: node 0 has IPv6 addresses only; there is no such interface; or the name has no address, or none
            of this machine.
    """
    _refuse_ipv6(os.environ.get(envvars.HOROVOD_GLOO_RENDEZVOUS_ADDR, LOOPBACK))
    if interface := os.environ.get(envvars.HOROVOD_GLOO_IFACE):
        _refuse_unknown_interface(interface)
        return
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = str(error)
    else:
        why = f"it is {', '.join(sorted({str(entry[4][0]) for entry in found}))}, which is not here"
        for family, kind, proto, _, address in found:
            with contextlib.suppress(OSError), socket.socket(family, kind, proto) as probe:
                probe.bind(address)
                return
    raise TopologyError(
        "Horovod finds this rank's address by the name of its host, and that name has none here",
        where={"host": name},
        seen=why,
        hint="give the pod a host name that resolves to its own address (/etc/hosts), or set HOROVOD_GLOO_IFACE to the "
        "network interface by which the nodes reach each other",
    )


def _refuse_ipv6(host: str) -> None:
    """Horovod's key-value server, and those who ask it, know IPv4 alone."""
    with contextlib.suppress(OSError, UnicodeError):  # a name that is not known now is Horovod's to wait for
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        if all(family == socket.AF_INET6 for family, *_ in found):
            raise TopologyError(
                "Horovod's ranks meet over IPv4 only, and node 0 has none",
                where={envvars.HOROVOD_GLOO_RENDEZVOUS_ADDR: host},
                seen=", ".join(sorted({str(address[0]) for *_, address in found})),
                hint="use SafeTorch, whose ranks meet over IPv6 too, or a network whose pods have IPv4 addresses",
            )


def _refuse_unknown_interface(name: str) -> None:
    there = [each for _, each in socket.if_nameindex()]
    if name.partition(":")[0] not in there:  # what follows a colon labels one of its addresses
        raise TopologyError(
            "Horovod is to find this rank's address by a network interface that is not there",
            where={envvars.HOROVOD_GLOO_IFACE: name},
            expected=f"one of {', '.join(there)}",
            hint="set it to the interface by which the nodes reach each other, of one name in all pods, or leave it "
            "out: Horovod takes the address of the pod's host name then",
        )


def _scope(node_rank: int) -> str:
    """Horovod keys each node's scope by its "host name"; node ranks differ where host names may not."""
    return f"node-{node_rank}"
