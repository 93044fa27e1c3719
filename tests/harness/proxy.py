"""A TCP proxy on loopback whose connections can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Passes everything on to a port until it is cut."""

    def __init__(self, target: int, port: int = 0) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End every connection."""
        pairs, self._pairs = self._pairs, []
        for one in pairs:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Nobody is there from now on."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # else the thread that waits accepts one more
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    near.close()
                    continue
                self._pairs += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _seen(self, data: bytes) -> None:
        """Called with what is about to be passed on."""

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                self._seen(data)
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Holding(Proxy):
    """On the way to an S3 store: holds the first upload of a file back."""

    def __init__(self, target: int, name: str) -> None:
        self.uploads, self._name = 0, name.encode()
        self.begun, self.release = threading.Event(), threading.Event()
        super().__init__(target)

    def _seen(self, data: bytes) -> None:
        if data.startswith(b"PUT ") and self._name in data.partition(b"\r\n")[0]:
            self.uploads += 1
            if self.uploads == 1:
                self.begun.set()
                self.release.wait()
