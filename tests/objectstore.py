"""An object store over HTTP on loopback that fails on order: what staging must bear, and what it must name."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ObjectStore:
    """Serves ``content`` at every path.

    Attributes:
        content: the object.
        ranges: whether the server knows ranges.
        fault: called with (method, number of the request from 0); returns None, a status code, ("cut", n) to break
            the connection after n bytes, or ("replace", content) to have the object overwritten first.
        requests: how many of each method were asked.
        sent: bytes of the object that were sent.
    """

    def __init__(self, content: bytes, *, ranges: bool = True) -> None:
        self.content = content
        self.ranges = ranges
        self.fault: Callable[[str, int], object] = lambda _method, _number: None
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
        if isinstance(fault, tuple) and fault[0] == "replace":
            self.content = fault[1]
        start, end = self._range(handler.headers.get("Range"))
        body = self.content[start:end]
        handler.send_response(206 if (start, end) != (0, len(self.content)) else 200)
        if self.ranges:
            handler.send_header("Accept-Ranges", "bytes")
        handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(self.content)}")
        handler.send_header("ETag", f'"{hash(self.content)}"')
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if method == "HEAD":
            return
        if isinstance(fault, tuple) and fault[0] == "cut":
            body = body[: fault[1]]
            handler.close_connection = True
        with self._lock:
            self.sent += len(body)
        handler.wfile.write(body)

    def _range(self, header: str | None) -> tuple[int, int]:
        if header is None or not self.ranges:
            return 0, len(self.content)
        first, _, last = header.removeprefix("bytes=").partition("-")
        return int(first), min(int(last) + 1 if last else len(self.content), len(self.content))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> ObjectStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
