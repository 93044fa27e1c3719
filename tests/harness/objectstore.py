"""An object store over HTTP on loopback that fails on order: what staging must bear, and what it must name."""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ClientError(Exception):
    """As botocore's: the code is in ``response``."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}}


class ObjectStore:
    """Serves ``content`` at every path.

    Attributes:
        content: the object.
        headers: further headers of every answer; None as a value takes one away.
        fault: called with (method, number of the request from 0); returns None, a status code, ("cut", n) to break
            the connection after n bytes, ("reset", n) to reset it there, ("replace", content) to have the object
            overwritten first, "hang" for no answer as long as the store is open, "drip" for a byte now and then,
            ("held", n) to go on after n bytes when that is allowed, or ("short", n) for n bytes less.
        hanging: set as soon as a request hangs.
        goes_on: set to allow what is held to go on.
        requests: how many of each method were asked.
        sent: bytes of the object that were sent.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.fault: Callable[[str, int], object] = lambda _method, _number: None
        self.headers: dict[str, str | None] = {}
        self.hanging, self.goes_on = threading.Event(), threading.Event()
        self._closed = threading.Event()
        self.requests: Counter[str] = Counter()
        self.sent = 0
        self._lock = threading.Lock()
        store = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                store._answer(self, "HEAD")

            def do_GET(self) -> None:
                store._answer(self, "GET")

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/bucket/fast.tar.gz"

    def _answer(self, handler: BaseHTTPRequestHandler, method: str) -> None:
        with self._lock:
            number = self.requests[method]
            self.requests[method] += 1
        fault = self.fault(method, number)
        if isinstance(fault, int):
            handler.send_error(fault)
            return
        if fault == "hang":
            self.hanging.set()
            self._closed.wait()
            return
        kind, amount = fault if isinstance(fault, tuple) else (fault, 0)
        if kind == "replace":
            self.content = amount
        start, end = self._range(handler.headers.get("Range"))
        body = self.content[start:end]
        if kind == "short":
            body = body[:-amount]
        handler.send_response(206 if (start, end) != (0, len(self.content)) else 200)
        handler.send_header("Accept-Ranges", "bytes")
        told: dict[str, str | None] = {
            "Content-Range": f"bytes {start}-{end - 1}/{len(self.content)}",
            "ETag": f'"{hash(self.content)}"',
            "Content-Length": str(len(body)),
            **self.headers,
        }
        for name, value in told.items():
            if value is not None:
                handler.send_header(name, value)
        handler.end_headers()
        if method == "HEAD":
            return
        if kind == "drip":
            self._drip(handler, body)
            return
        if kind in ("cut", "reset"):
            body = body[:amount]
            handler.close_connection = True
        if kind == "reset":  # closing with this set sends RST
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with self._lock:
            self.sent += len(body)
        if kind == "held":
            handler.wfile.write(body[:amount])
            handler.wfile.flush()
            self.goes_on.wait()
            body = body[amount:]
        handler.wfile.write(body)

    def _drip(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        self.hanging.set()
        with suppress(OSError):  # whoever asked has gone
            for at in range(len(body)):
                handler.wfile.write(body[at : at + 1])
                handler.wfile.flush()
                if self._closed.wait(0.05):
                    return

    def _range(self, header: str | None) -> tuple[int, int]:
        if header is None:
            return 0, len(self.content)
        first, _, last = header.removeprefix("bytes=").partition("-")
        return int(first), min(int(last) + 1 if last else len(self.content), len(self.content))

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> ObjectStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
