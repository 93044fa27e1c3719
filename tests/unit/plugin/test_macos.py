"""Tasks are written and registered on macOS, too: without the names of Python's modules that Linux alone has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import fcntl, os, platform, resource, select, signal, socket
LINUX = {
    os: "pidfd_open memfd_create sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate eventfd splice "
        "copy_file_range getrandom setns unshare EFD_CLOEXEC MFD_CLOEXEC sched_setscheduler SCHED_BATCH O_TMPFILE "
        "O_PATH P_PIDFD",
    select: "epoll EPOLLIN EPOLLOUT",
    signal: "pidfd_send_signal SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT SIGPOLL sigtimedwait sigwaitinfo",
    socket: "SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK MSG_NOSIGNAL TCP_USER_TIMEOUT AF_NETLINK AF_VSOCK",
    resource: "prlimit RLIMIT_NICE",
    fcntl: "F_OFD_SETLK F_SEAL_SEAL F_ADD_SEALS F_SETPIPE_SZ",
}
for module, names in LINUX.items():
    for name in names.split():
        vars(module).pop(name, None)
platform.system = lambda: "Darwin"

from collections import OrderedDict
from flytekit import Resources, task
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.tools.translator import get_serializable
from flytekitplugins_safedist import SafeTorch

def train(x: int) -> int:
    return x

made = task(task_config=SafeTorch(nnodes=2), requests=Resources(gpu="2"))(train)
images = ImageConfig(default_image=Image(name="default", fqn="registry.example/train", tag="1"))
settings = SerializationSettings(image_config=images, project="p", domain="d", version="v")
print(get_serializable(OrderedDict(), settings, made).template.type)
"""


@pytest.mark.processes
def test_a_task_is_declared_and_serialized_without_what_linux_alone_has(tmp_path: Path) -> None:
    """A stand-in: no Mac is at hand. Running tasks there is not promised."""
    file = tmp_path / "on_a_mac.py"
    file.write_text(PROGRAM)
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["pytorch"], done.stderr
