"""Other commands than flytekit's: the signals they find, get, and die of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.harness import needs
from tests.harness.procs import ignored_signals

INIT = """
import sys
from flytekitplugins_safedist.rank_server import cleanup
from flytekitplugins_safedist.pod import other_command
cleanup.adopt_orphans()  # as the kernel does it for a container's first process
sys.exit(other_command.run_as_init(sys.argv[1:]))
"""
# Not an interpreter: Python ignores SIGPIPE by itself.
IGNORED = ["grep", "-E", "SigIgn|SigBlk", "/proc/self/status"]


def start(program: str, *command: str, within: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [*within, sys.executable, "-c", program, *command],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("way", ["other_command.take_place", "other_command.run_as_init"])
def test_no_signal_is_ignored_in_the_command(way):
    program = f"""
import sys
from flytekitplugins_safedist import stopping
from flytekitplugins_safedist.pod import other_command
stopping.listen()
sys.exit({way}(sys.argv[1:]))
"""
    out, err = start(program, *IGNORED).communicate()
    _, blocked, _, ignored = out.split()
    assert int(blocked, 16) == 0, err
    assert int(ignored, 16) & ~int(ignored_signals(), 16) == 0, err  # beyond what this test was started with


def test_the_first_process_passes_signals_on_and_ends_as_the_command_does():
    command = ["sh", "-c", "trap 'echo told; exit 7' TERM; echo ready; while :; do sleep 0.05; done"]
    process = start(INIT, *command)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert (process.returncode, out) == (7, "told\n"), err


def test_a_command_that_a_signal_ended_is_told_as_a_shell_tells_it():
    process = start(INIT, "sh", "-c", "kill -SEGV $$")
    process.communicate()
    assert process.returncode == 128 + signal.SIGSEGV


def test_the_first_process_reaps_what_the_command_orphans(tmp_path):
    script = """
(sh -c 'echo $$ > "$1/orphan"' x "$1" &) ; sleep 0.01
until [ -s "$1/orphan" ]; do sleep 0.01; done
while [ -e "/proc/$(cat "$1/orphan")" ]; do sleep 0.01; done
echo reaped
"""
    process = start(INIT, "sh", "-c", script, "sh", str(tmp_path))
    out, err = process.communicate(timeout=120)
    assert out == "reaped\n", err


def test_a_containers_first_process_stays_for_the_orphans():
    """Any other becomes the command: tests/agents/test_entrypoint.py."""
    needs.root("make a process namespace")
    program = "from flytekitplugins_safedist.pod.start import main; main()"
    within = ("unshare", "--pid", "--fork", "--")
    process = start(program, "--", "sh", "-c", "echo $$ $PPID", within=within)
    out, err = process.communicate()
    assert process.returncode == 0, err
    pid, parent = map(int, out.split())
    assert parent == 1 < pid
