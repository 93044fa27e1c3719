"""Connections to a TCPStore whose calls can be given up, and the server side.

A store whose process is *frozen* (SIGSTOP, a paused container, a machine that swaps) answers nothing, and no client
call that waits for a reply returns: not even ``wait`` with a timeout, which asks the server to cancel and waits for
that reply. So each connection lives on a thread of its own that may be abandoned; the caller waits on a future.
"""

from __future__ import annotations

import atexit
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from ..errors import RendezvousError, RendezvousTimeoutError, StoreLostError

T = TypeVar("T")

FOREVER = timedelta(days=7)
"""Timeout given to torch where our own deadline counts: an expired torch timeout writes a stack trace to the log."""

_RESOLVE_AGAIN = 0.5
"""Seconds between look-ups of a name that does not exist yet."""

_AFTER_A_PAUSE = 1.0
"""Seconds that a late reply is given when the deadline has passed."""

_AT_EXIT = 1.0
"""Seconds that the interpreter's end waits for connections that were closed: see :func:`_see_off`."""

_Job = tuple["Future[Any]", Callable[[Any], Any]]

_closed: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class Connection:
    """One client's way to the job's store, on one thread. Open it with :meth:`dial` or :meth:`within`.

    Args:
        where: the store, for messages.
        heartbeat_timeout: seconds without a reply after which the store counts as lost.
        label: name of the thread.
    """

    def __init__(self, where: str, *, heartbeat_timeout: float, label: str) -> None:
        self.where = where
        self._where = {"store": where}
        self._heartbeat_timeout = heartbeat_timeout
        self._dead: str | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._store: list[Any] = []
        # A daemon: it may hang in a call to a frozen store for ever, and must not keep the process alive.
        name = f"safedist-{label}"
        self._thread = threading.Thread(target=_serve_jobs, args=(self._jobs, self._store), name=name, daemon=True)
        self._thread.start()

    @classmethod
    def within(cls, store: Any, *, heartbeat_timeout: float, label: str) -> Connection:
        """To a store in this process."""
        connection = cls("in this process", heartbeat_timeout=heartbeat_timeout, label=label)
        connection._store.append(store)
        return connection

    @classmethod
    def dial(cls, host: str, port: int, *, timeout: float, heartbeat_timeout: float, label: str) -> Connection:
        """To a TCPStore, which may come up later than this node.

        Raises:
            RendezvousTimeoutError: no connection within ``timeout`` seconds.
        """
        connection = cls(f"{host}:{port}", heartbeat_timeout=heartbeat_timeout, label=label)
        try:
            connection._connect(host, port, time.monotonic() + timeout)
        except RendezvousTimeoutError:
            connection.close()
            raise
        return connection

    def _connect(self, host: str, port: int, deadline: float) -> None:
        from torch.distributed import DistError, TCPStore

        _await_name(host, deadline, self._where)
        left = max(0.1, deadline - time.monotonic())

        limit = timedelta(seconds=left)
        # Refused connections are retried inside, with backoff, and quietly: node 0 may be the last to come.
        opening = self.open(lambda: TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False))
        try:
            opening.result(left + 1.0)
        except (DistError, FutureTimeoutError) as error:
            raise RendezvousTimeoutError(
                "node 0 is missing: its store accepts no connection",
                where=self._where,
                seen=_probe(host, port),
                expected="node 0's agent listening there",
                hint="see whether node 0's pod was scheduled, and whether a network policy blocks the port",
            ) from error

    def open(self, connect: Callable[[], Any]) -> Future[None]:
        """Connect on this connection's own thread, which may hang in it; the future is done when that has worked."""

        def opened(_: Any) -> None:
            store = connect()
            store.set_timeout(FOREVER)
            self._store.append(store)

        return self.submit(opened)

    def submit(self, op: Callable[[Any], T]) -> Future[T]:
        """Queue a call; its future may never be done. Calls run one after the other."""
        future: Future[T] = Future()
        self._jobs.put((future, op))
        return future

    def call(self, what: str, op: Callable[[Any], T], timeout: float | None = None) -> T:
        """Run ``op(store)`` and wait for its reply, at most ``timeout`` seconds (default: the heartbeat timeout).

        Raises:
            StoreLostError: the store is gone, or did not reply in time. The connection is useless from then on.
        """
        from torch.distributed import DistError

        if self._dead is not None:
            raise self._lost(what, self._dead)
        limit = self._heartbeat_timeout if timeout is None else timeout
        try:
            return _patient_result(self.submit(op), limit)
        except FutureTimeoutError:
            self._dead = f"no reply for {limit:g} s"
            raise self._lost(what, self._dead) from None
        except DistError as error:
            self._dead = str(error).splitlines()[0]
            raise self._lost(what, self._dead) from error

    def wait_for_key(self, key: str) -> Future[None]:
        """A future that is done when ``key`` exists. Occupies the connection until then."""
        return self.submit(lambda store: store.wait([key], FOREVER))

    def raw(self) -> Any:
        """The TCPStore itself, for torch elastic's agent. Its calls have no deadline of ours."""
        return self._store[0]

    def close(self) -> None:
        """Let the thread end and drop the connection, unless a call never returns."""
        self._dead = self._dead or "closed"
        _closed.add(self._thread)
        self._jobs.put(None)

    def _lost(self, what: str, seen: str) -> StoreLostError:
        return StoreLostError(
            "the job's store does not answer",
            where={**self._where, "while": what},
            seen=seen,
            expected="a reply from node 0's agent",
            hint="look at node 0's pod first: killed, evicted, paused, or cut off by the network",
        )


def _patient_result(future: Future[T], limit: float) -> T:
    try:
        return future.result(limit)
    except FutureTimeoutError:
        # If it was this process that stood still (a paused container), the reply is already in the socket.
        return future.result(_AFTER_A_PAUSE)


def _serve_jobs(jobs: queue.SimpleQueue[_Job | None], cell: list[Any]) -> None:
    while (job := jobs.get()) is not None:
        future, op = job
        try:
            future.set_result(op(cell[0] if cell else None))
        except BaseException as error:  # it belongs to the caller, whatever it is
            future.set_exception(error)
        del job, future, op
    cell.clear()


@atexit.register
def _see_off() -> None:
    """Let closed connections go before the interpreter does.

    A thread that comes back from torch's C++ (it drops the store there, too) while Python is being torn down cannot
    take the interpreter's lock any more: it is ended inside C++ code, which aborts the process ("terminate called
    without an active exception"), and a job that ended in good order leaves with SIGABRT. One that never comes back
    does no harm.
    """
    end = time.monotonic() + _AT_EXIT
    for thread in list(_closed):
        thread.join(max(0.0, end - time.monotonic()))


class Server:
    """The TCPStore server in node 0's agent. Listens, on every interface, from construction to :meth:`close`.

    Args:
        host: node 0's name as the others know it; decides between IPv4 and both families.
        port: the port they know.

    Raises:
        RendezvousError: the port is taken, or may not be used.
    """

    def __init__(self, host: str, port: int) -> None:
        import torch
        from torch.distributed import TCPStore

        # We bind, torch serves: its own bind takes every interface, and says only in words that a port is taken.
        # Before 2.8 torch cannot serve a socket of ours (pytorch/pytorch#150215); then ours, which does not listen,
        # only finds out whether the port is free and keeps it until torch, with SO_REUSEADDR too, has bound it.
        serve = takes_listening_socket(torch.__version__)
        try:
            ours = _listener(host, port) if serve else _bound_everywhere(port)
        except OSError as error:
            raise RendezvousError(
                "the job's store cannot listen",
                where={"port": port},
                seen=error.strerror or str(error),
                expected="a free port on node 0",
                hint="another agent of this job may still be running in this pod; choose another port if not",
            ) from error
        self.port: int = ours.getsockname()[1]
        limit = timedelta(seconds=30)
        options: dict[str, Any] = {"is_master": True, "timeout": limit, "wait_for_workers": False}
        if serve:
            options["master_listen_fd"] = ours.detach()
        self._store: Any = TCPStore("127.0.0.1", self.port, **options)
        ours.close()

    def close(self) -> None:
        """Stop listening and forget everything."""
        self._store = None


def takes_listening_socket(torch_version: str) -> bool:
    """Whether this torch's default store server can take a listening socket over (pytorch/pytorch#150215, in 2.8)."""
    major, minor = torch_version.split("+", maxsplit=1)[0].split(".")[:2]
    return (int(major), int(minor)) >= (2, 8)


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


def _listener(host: str, port: int) -> socket.socket:
    # On a socket for both families an IPv4 peer is ::ffff:a.b.c.d, which no hosts file resolves: torch's look-up of
    # every peer's name would go to the DNS. So both families only where IPv6 may be used.
    sock = _bound(socket.AF_INET, "", port) if _is_ipv4_only(host) else _bound_everywhere(port)
    try:
        # The kernel caps it at net.core.somaxconn. Thousands of nodes connect in the same second.
        sock.listen(65535)
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


def _await_name(host: str, deadline: float, where: dict[str, str]) -> None:
    """Wait until ``host`` has an address: a headless service has none until node 0's pod is scheduled."""
    pause = threading.Event()
    while True:
        try:
            socket.getaddrinfo(host, None)
        except socket.gaierror as error:
            if time.monotonic() >= deadline:
                raise RendezvousTimeoutError(
                    "node 0 is missing: its name has no address",
                    where=where,
                    seen=error.strerror,
                    expected="an address for node 0's service",
                    hint="see whether node 0's pod was scheduled and the job's headless service exists",
                ) from error
            pause.wait(_RESOLVE_AGAIN)
        else:
            return


def _probe(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), timeout=2.0).close()
    except OSError as error:
        return str(error)
    return "the port accepts connections, but the store behind it does not answer"
