"""A Kubernetes API server as far as ``safedist why`` asks it: lists of objects, by name and label, in pages.

It answers as a real one did (Kubernetes 1.30): objects recorded there, `Status` bodies for what it refuses.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Json = dict[str, Any]
REFUSED = "refused"
"""In the place of a kind's objects: the caller may not list them."""


class ApiServer:
    """Its objects by kind (``pods``, ``events``, ``pytorchjobs``, ``nodes``); a kind that is not there is 404."""

    def __init__(self, objects: dict[str, Any], address: str) -> None:
        self.objects = objects
        self.address = address
        self.page = 500
        """Objects in an answer at most, whatever the caller allows."""
        self.requests: list[tuple[str, str]] = []
        """Method and path of each."""

    def kubeconfig(self, file: Path, *, namespace: str = "default") -> Path:
        """Write a kubeconfig whose only context is this server."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
            "clusters": [{"name": "test", "cluster": {"server": self.address}}],
            "users": [{"name": "test", "user": {"token": "a-token"}}],
        }
        file.write_text(yaml.safe_dump(config))
        return file

    def answer(self, target: str) -> tuple[int, Json]:
        """Status and body of a GET."""
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        *_, kind = parts = url.path.strip("/").split("/")
        namespace = parts[parts.index("namespaces") + 1] if "namespaces" in parts else None
        if kind not in self.objects:
            return 404, {"kind": "Status", "message": "the server could not find the requested resource", "code": 404}
        if self.objects[kind] == REFUSED:
            said = f'{kind} is forbidden: User "me" cannot list resource "{kind}" at the cluster scope'
            return 403, {"kind": "Status", "message": said, "code": 403}
        items = [each for each in self.objects[kind] if self._is_wanted(each, namespace, query)]
        start = int(query.get("continue", 0))
        end = start + min(int(query["limit"]), self.page)
        further = {"continue": str(end)} if end < len(items) else {}
        return 200, {"kind": "List", "metadata": further, "items": items[start:end]}

    def _is_wanted(self, each: Json, namespace: str | None, query: dict[str, str]) -> bool:
        about = each["metadata"]
        label, _, value = query.get("labelSelector", "").partition("=")
        name = query.get("fieldSelector", "").removeprefix("metadata.name=")
        return (
            namespace in (None, about.get("namespace"))
            and name in ("", about["name"])
            and (not label or about.get("labels", {}).get(label) == value)
        )


@contextmanager
def serving(objects: dict[str, Any]) -> Iterator[ApiServer]:
    """Such a server on loopback, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            api.requests.append((self.command, self.path))
            status, body = api.answer(self.path)
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    api = ApiServer(objects, f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
