"""What an MPIJob needs of Kubernetes: the operator's files, and ``kubectl exec``.

The files are those of training-operator v1.9.0 (mpijob_controller.go: newConfigMap, updateDiscoverHostsInConfigMap).

``kubectl`` is a stand-in, because there is no Kubernetes API here. What the launcher relies on is kept: the output of
both streams, the exit status, no standard input (the operator's script does not ask for it), ``exec`` into this job's
workers only, as the launcher's role has it, and that the end of ``kubectl``, or of its connection, does not end what it
has started. Its other half is the test, which runs the command in the worker's container.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import socketserver
import struct
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docker.errors import APIError
from docker.types import Mount

from tests.containers.cluster import Job, Pod
from tests.containers.engine import Docker, Options, until

SOCKET = "/var/run/kubernetes/api.sock"
KUBEXEC = """#!/bin/sh
set -x
POD_NAME=$1
shift
/opt/kube/kubectl exec ${POD_NAME} -- /bin/sh -c "$*\""""
KUBECTL = f'''#!/usr/bin/env python3
import json, os, socket, struct, sys

what, pod, dashes, *command = sys.argv[1:]
assert (what, dashes) == ("exec", "--"), sys.argv
connection = socket.socket(socket.AF_UNIX)
connection.connect("{SOCKET}")
connection.sendall(json.dumps([pod, command]).encode() + b"\\n")
stream = connection.makefile("rb")
while header := stream.read(5):
    kind, size = struct.unpack("!BI", header)
    data = stream.read(size)
    if kind:
        while data:
            data = data[os.write(kind, data):]
        continue
    if code := int(data):
        print("command terminated with exit code", code, file=sys.stderr)
    sys.exit(code)
sys.exit("error: unexpected EOF")
'''


def operator_files(launcher: str, workers: list[str]) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    """The contents of the launcher's volumes, and of each worker's."""
    assert launcher.endswith("-launcher")
    hostfile = "".join(f"{name} slots=1\n" for name in workers)
    discover = "#!/bin/sh" + "".join(f"\necho {name}:1" for name in workers)
    config = {"kubexec.sh": KUBEXEC, "hostfile": hostfile, "discover_hosts.sh": discover}
    return (
        {"mpi-job-config": config, "mpi-job-kubectl": {"kubectl": KUBECTL}},
        {"mpi-job-config": {"kubexec.sh": KUBEXEC}},
    )


class Api(socketserver.ThreadingUnixStreamServer):
    """The other end of the stand-in's socket."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, docker: Docker, directory: Path, allowed: list[str]) -> None:
        super().__init__(str(directory / Path(SOCKET).name), _Exec)
        self.docker = docker
        self.allowed = allowed
        self.open: dict[str, list[socket.socket]] = {name: [] for name in allowed}

    def cut(self, pod: str) -> None:
        """Break every connection into *pod*, as a restart of the API server does; what was started there lives on."""
        for one in self.open[pod]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class _Exec(socketserver.StreamRequestHandler):
    server: Api

    def handle(self) -> None:
        pod, command = json.loads(self.rfile.readline())
        if pod not in self.server.allowed:
            self._send(2, f'Error from server (Forbidden): pods "{pod}" is forbidden\n'.encode())
            return self._send(0, b"1")
        self.server.open[pod].append(self.request)
        try:
            self._send(0, self._execute(pod, command).encode())
        except APIError as error:
            self._send(2, f"error: {error.explanation}\n".encode())
            self._send(0, b"1")
        return None

    def _execute(self, pod: str, command: list[str]) -> str:
        """Run it, hand on what it writes, and give its exit status."""
        api = self.server.docker.client.api
        started = api.exec_create(pod, command)["Id"]
        for out, err in api.exec_start(started, stream=True, demux=True):
            for kind, data in ((1, out), (2, err)):
                if data:
                    self._send(kind, data)
        return str(until(lambda: exit_code(api, started), "a command in a pod has an exit code"))

    def _send(self, kind: int, data: bytes) -> None:
        # To a client that is gone, nothing: what runs in the pod does not notice.
        with contextlib.suppress(OSError):
            self.request.sendall(struct.pack("!BI", kind, len(data)) + data)


@contextlib.contextmanager
def operated(job: Job) -> Iterator[Api]:
    """Give the pods of an MPIJob what the operator gives them, and the launcher a way into the workers."""
    launcher, *workers = job.pods
    names = [pod.name for pod in workers]
    # Not in the test's own directory: the path of a socket has room for 107 characters.
    directory = Path(tempfile.mkdtemp(prefix="kube-"))
    try:
        directory.chmod(0o755)
        with Api(launcher.docker, directory, names) as api:
            (directory / Path(SOCKET).name).chmod(0o777)
            launcher.options += Options(mounts=(Mount(str(Path(SOCKET).parent), str(directory), type="bind"),))
            launcher.files, of_worker = operator_files(launcher.name, names)
            for pod in workers:
                pod.files = of_worker
            serving = threading.Thread(target=api.serve_forever, daemon=True)
            serving.start()
            try:
                yield api
            finally:
                api.shutdown()
                serving.join()
    finally:
        shutil.rmtree(directory)


def processes(pod: Pod) -> list[str]:
    """Command lines of what runs in a pod."""
    return [args for _, args in pod.container.top(ps_args="-o pid,args")["Processes"]]


def exit_code(api: Any, started: str) -> str:
    """The exit status of a command that was started in a container; empty until the daemon knows it."""
    code = api.exec_inspect(started)["ExitCode"]
    return "" if code is None else str(code)
