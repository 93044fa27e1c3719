"""Who of those that have started this process keeps SIGTERM to itself, in containers of bash and tini."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys

import pytest

from tests.harness import needs

pytestmark = pytest.mark.processes

WHO = shlex.join([sys.executable, "-c", "from flytekitplugins_safedist.pod.parents import *; print(deaf_parent())"])


@pytest.mark.parametrize(
    ("before", "shell", "who"),
    [
        ([], "exec WHO", "None"),
        (["tini", "--"], "exec WHO", "None"),
        ([], "WHO; exit $?", "bash (process 1)"),
        (["tini", "--"], "WHO; exit $?", "bash (process 2)"),
        ([], "trap 'kill %1' TERM; WHO & wait", "None"),
    ],
)
def test_a_parent_that_neither_takes_sigterm_nor_hands_it_on_is_named(before, shell, who):
    needs.root("make a container's process 1")
    if before and shutil.which("tini") is None:
        needs.missing("there is no tini", bring="apt-get install tini")
    container = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *before]
    command = [*container, "bash", "-c", shell.replace("WHO", WHO)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{who}\n"
