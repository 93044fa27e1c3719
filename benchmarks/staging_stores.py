"""Stores for benchmarks/staging.py: S3, one that sends 100 MB/s, and what is counted of what they send."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def s3(archive: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A local S3 server (moto's) with the archive in it."""
    import botocore.session

    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            text = ""
            while "http://127.0.0.1:" not in text:
                time.sleep(0.1)
                log.seek(0)
                text = log.read()
            endpoint = "http://127.0.0.1:" + text.split("http://127.0.0.1:")[1].split()[0]
            keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
            client = botocore.session.get_session().create_client("s3", endpoint_url=endpoint, **keys)
            client.create_bucket(Bucket="code")
            client.put_object(Bucket="code", Key=archive.name, Body=archive.read_bytes())
            environment = {
                "FLYTE_AWS_ENDPOINT": endpoint,
                "FLYTE_AWS_ACCESS_KEY_ID": "test",
                "FLYTE_AWS_SECRET_ACCESS_KEY": "test",
            }
            yield f"s3://code/{archive.name}", environment
        finally:
            server.kill()
            server.wait()


SLOW_STORE = """
import http.server, os, sys, threading, time
path, rate = sys.argv[1], float(sys.argv[2])
size, lock, free_at = os.path.getsize(path), threading.Lock(), [0.0]
def pace(count):
    with lock:  # one wire for all connections
        free_at[0] = max(free_at[0], time.perf_counter()) + count / rate
        until = free_at[0]
    time.sleep(max(until - time.perf_counter(), 0))
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_HEAD(self): self.answer(False)
    def do_GET(self): self.answer(True)
    def answer(self, body):
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, end = int(first), int(last) + 1 if last else size
        self.send_response(206)
        for name, value in (("Accept-Ranges", "bytes"), ("ETag", "x"), ("Content-Length", str(end - start))):
            self.send_header(name, value)
        self.end_headers()
        with open(path, "rb") as file:
            file.seek(start)
            while body and start < end:
                data = file.read(min(131072, end - start))
                pace(len(data))
                self.wfile.write(data)
                start += len(data)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def slow_store(archive: Path, rate: float) -> Iterator[str]:
    """An HTTP store that sends ``rate`` bytes a second in all."""
    command = [sys.executable, "-c", SLOW_STORE, str(archive), str(rate)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        port = server.stdout.readline().strip() if server.stdout is not None else ""
        yield f"http://127.0.0.1:{port}/{archive.name}"
    finally:
        server.kill()
        server.communicate()


@contextmanager
def counted(environment: dict[str, str]) -> Iterator[tuple[dict[str, str], Callable[[], int]]]:
    """The same S3 by way of a relay that counts the bytes it sends; too slow a way to be timed."""
    host, _, port = environment["FLYTE_AWS_ENDPOINT"].removeprefix("http://").partition(":")
    sent: list[int] = []

    def pump(source: socket.socket, target: socket.socket, seen: Callable[[int], None]) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                seen(len(data))
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection((host, int(port)))
                for pair in ((client, server, lambda _: None), (server, client, sent.append)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        relayed = {**environment, "FLYTE_AWS_ENDPOINT": f"http://127.0.0.1:{listener.getsockname()[1]}"}
        yield relayed, lambda: sum(sent)
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


READING = re.compile(r"\b(?:read|pread64|readv|preadv|sendfile|copy_file_range|splice)\b.* = (\d+)$")


class Reads:
    """Bytes that processes read from one file, as strace(1) sees their system calls; too slow a way to be timed."""

    def __init__(self, path: Path, log: Path) -> None:
        calls = "read,pread64,readv,preadv,sendfile,copy_file_range,splice"
        self._log = log
        self.prefix = ["strace", "-f", "-qq", "-ff", "-o", str(log / "calls"), "-P", str(path), "-e", f"trace={calls}"]

    def total(self) -> int:
        """Of all processes so far."""
        lines = (line for file in self._log.iterdir() for line in file.read_text(errors="replace").splitlines())
        return sum(int(found[1]) for line in lines if (found := READING.search(line)))
