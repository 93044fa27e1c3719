"""Importing the package is cheap and harmless, and flytekit finds it."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


def said(code: str) -> list[list[str]]:
    """The lines that a fresh interpreter prints, in words."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines()]


def test_importing_it_is_cheap_for_everybody_and_what_needs_neither_flytekit_nor_torch_imports_neither() -> None:
    """flytekit loads of every installed plugin the package alone: whoever imports flytekit where this is installed pays
    for it, whether their tasks are ours or not."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    declared = settings["options.entry_points"]["flytekit.plugins"].strip()
    assert declared == "safedist = flytekitplugins_safedist"
    ours, loaded = said("""
import sys, flytekitplugins_safedist
print(*[name for name in sys.modules if name.startswith("flytekitplugins_safedist.")])
import flytekitplugins_safedist.config, flytekitplugins_safedist.errors, flytekitplugins_safedist.envvars
import flytekitplugins_safedist.rank.backends as backends
from flytekitplugins_safedist import FsError
backends.create("torch"), backends.create("horovod")
print(*{name.partition(".")[0] for name in sys.modules})
""")
    assert set(ours) == {f"flytekitplugins_safedist.{name}" for name in ("errors", "lazy")}
    assert set(loaded).isdisjoint({"torch", "horovod", "flytekit"})


def test_what_goes_wrong_below_the_import_of_a_public_name_is_told_with_its_cause(tmp_path: Path) -> None:
    """``from package import name`` forgets an AttributeError, which is what two versions that do not fit raise."""
    (tmp_path / "mashumaro.py").write_text("import os\nos.no_such_name_in_this_version\n")
    code = "from flytekitplugins_safedist import SafeTorch"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert "AttributeError: module 'os' has no attribute 'no_such_name_in_this_version'" in done.stderr
    assert "ImportError: SafeTorch of flytekitplugins_safedist cannot be imported: module 'os' has no" in done.stderr


WITHOUT_LINUX = """
import fcntl, os, platform, resource, select, signal, socket, sys
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
taken = [(module, name, vars(module).pop(name)) for module, names in LINUX.items() for name in names.split()
         if hasattr(module, name)]
system, platform.system = platform.system, lambda: "Darwin"
"""
DECLARED = """
from collections import OrderedDict
from flytekit import Resources, task
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.core.task import TaskPlugins
from flytekit.tools.translator import get_serializable
from flytekitplugins_safedist import SafeHorovod, SafeTorch

def train(x: int) -> None: ...

print(*(TaskPlugins.find_pythontask_plugin(each).__name__ for each in (SafeHorovod, SafeTorch)))
made = task(task_config=SafeTorch(nnodes=2), requests=Resources(gpu="2"))(train)
images = ImageConfig(default_image=Image(name="default", fqn="registry.example/train", tag="1"))
settings = SerializationSettings(image_config=images, project="p", domain="d", version="v")
print(get_serializable(OrderedDict(), settings, made).template.type)

platform.system = system
for module, name, value in taken:
    setattr(module, name, value)
import flytekitplugins_safedist.agent.run
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_a_task_is_declared_and_serialized_without_torch_and_what_linux_alone_has_and_an_agent_needs_no_torch() -> None:
    """On macOS: a stand-in, for no Mac is at hand. Running tasks there is not promised."""
    *_, tasks, kind, loaded = said(WITHOUT_LINUX + DECLARED)
    assert (tasks, kind) == (["SafeTask", "SafeTask"], ["pytorch"])
    assert set(loaded).isdisjoint({"torch", "horovod"})
    assert "flytekit" in loaded, "a heavy import would be seen"


def test_every_public_name_can_be_imported() -> None:
    import flytekitplugins_safedist as package

    assert [name for name in package.__all__ if not hasattr(package, name)] == []
