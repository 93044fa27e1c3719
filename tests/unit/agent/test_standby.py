"""The rank server of a local run that stands by for the next: used where nothing has changed, gone with its process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flytekitplugins_safedist.agent import standby
from flytekitplugins_safedist.errors import LaunchError
from tests.harness.procs import DEADLINE, ROOT, alive, until

pytestmark = pytest.mark.processes

ENVIRONMENT = dict(os.environ)


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a test installs libraries."""
    where = tmp_path / "site-packages"
    where.mkdir()
    monkeypatch.syspath_prepend(str(where))
    yield where
    standby._STANDBY.close()


def one_job(*libraries: str, **variables: str) -> int:
    """The process id of the server that a job gets."""
    environment = {**ENVIRONMENT, **variables}
    with standby.lent(environment) as server:
        server.take([f"import {each}" for each in libraries], environment=environment)
        assert server.ready(DEADLINE).failed == {}
        server.end_ranks()
        return server.pid


def test_the_next_job_of_the_process_has_the_same_server_as_long_as_nothing_changes(installed: Path) -> None:
    (installed / "library.py").write_text("import os\nHOME = os.environ.get('LIBRARY_HOME')")
    pids = [one_job("library"), one_job("library", NOBODY_READS="1")]
    assert pids[0] == pids[1]
    pids.append(one_job(LIBRARY_HOME="/mine"))
    pids.append(one_job("library", OMP_SCHEDULE="static"))
    (installed / "further").mkdir()
    pids.append(one_job())
    assert len(set(pids[1:])) == len(pids) - 1
    assert [pid for pid in pids if alive(pid)] == pids[-1:], "one stands by, and no other is left"


def test_a_further_place_of_libraries_or_another_umask_is_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [standby._surroundings(), standby._surroundings()]
    assert seen[0] == seen[1]
    further = tmp_path / "elsewhere" / "site-packages"
    further.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(further))
    seen.append(standby._surroundings())
    before = os.umask(0o77)
    seen.append(standby._surroundings())
    os.umask(before)
    assert seen[1] != seen[2] != seen[3]


def test_the_process_may_have_a_name_that_is_no_text() -> None:
    before = Path("/proc/self/comm").read_bytes()
    try:
        Path("/proc/self/comm").write_bytes(b"\xe3\x83\xa9\xe3\x83")  # the kernel keeps 15 bytes of a title
        assert one_job() == one_job()
    finally:
        Path("/proc/self/comm").write_bytes(before)


def test_two_jobs_at_once_have_two_servers_of_which_one_stays() -> None:
    with standby.lent(ENVIRONMENT) as one, standby.lent(ENVIRONMENT) as other:
        pids = one.pid, other.pid
    assert len(set(pids)) == 2
    assert [pid for pid in pids if alive(pid)] == [one_job()]


def test_after_an_exception_none_stays() -> None:
    with pytest.raises(KeyboardInterrupt), standby.lent(ENVIRONMENT) as server:
        raise KeyboardInterrupt
    assert not alive(server.pid)
    assert standby._STANDBY.server is None


@pytest.mark.parametrize("how", ["is killed", "has waited too long"])
def test_a_server_that_has_ended_meanwhile_is_replaced(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "has waited too long":
        monkeypatch.setattr(standby, "IDLE_SECONDS", 0.0)
    pid = one_job()
    if how == "is killed":
        os.kill(pid, 9)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert one_job() != pid


def test_a_server_that_is_gone_at_its_jobs_end_is_the_jobs_to_say() -> None:
    with standby.lent(ENVIRONMENT) as server:
        os.kill(server.pid, 9)
        with pytest.raises(LaunchError, match="SIGKILL"):
            server.ended(wait=DEADLINE)
        server.end_ranks()
    assert standby._STANDBY.server is None


def test_the_end_of_the_thread_that_has_started_a_server_does_not_end_what_it_does_for_another(
    installed: Path, tmp_path: Path
) -> None:
    """An import that hangs is ended by the kernel with the server's parent, which to the kernel is a thread."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (installed / "library.py").write_text(f"open({str(fifo)!r}).read()")
    started, over = threading.Event(), threading.Event()

    def first() -> None:
        one_job()
        started.set()
        over.wait()

    thread = threading.Thread(target=first)
    thread.start()
    started.wait()
    with standby.lent(ENVIRONMENT) as server:
        server.take(["import library"], environment=ENVIRONMENT)
        with fifo.open("w") as source:  # opened when it is read
            over.set()
            thread.join()
            source.write("go on")
        assert server.ready(DEADLINE).failed == {}


PROGRAM = """
import os, sys
from flytekitplugins_safedist.agent import standby
def one_job():
    with standby.lent(dict(os.environ)) as server:
        server.take([], environment=os.environ)
        server.ready(60)
        return server.pid
print(one_job(), flush=True)
child = os.fork()
if child == 0:
    print(one_job(), flush=True)
    sys.exit()
os.waitpid(child, 0)
print(one_job(), flush=True)
sys.stdin.read()
if sys.argv[1] == "is killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_a_server_ends_with_its_process_and_is_not_its_childrens(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=False,
    )
    own, childs, again = map(int, done.stdout.split())
    assert own == again != childs
    if how == "ends":
        assert not alive(own)
    until(lambda: not alive(own) and not alive(childs), "servers end")
