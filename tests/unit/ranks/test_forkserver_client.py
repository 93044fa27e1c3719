"""The rank server and its agent's end, with small processes as ranks: nothing heavy is imported."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from flytekitplugins_safedist.errors import LaunchError
from flytekitplugins_safedist.ranks import forkserver, forkserver_client, shared_page
from flytekitplugins_safedist.ranks.context import RankContext
from flytekitplugins_safedist.ranks.forkserver_client import EndedRank, RankServer
from flytekitplugins_safedist.ranks.order import RankOrder
from tests.harness.procs import DEADLINE, ROOT, alive, until


@pytest.fixture
def server() -> Iterator[RankServer]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with RankServer.spawn({**os.environ, "PYTHONPATH": path}) as running:
        yield running


def start(server: RankServer, tmp_path: Path, *, fork: bool) -> list[int]:
    """Two processes that are told to be ranks, and share nothing with an agent: both end at once, with a traceback."""
    return server.start([order(tmp_path, each) for each in "ab"], fork=fork, timeout=DEADLINE)


def order(tmp_path: Path, name: str) -> Path:
    place = RankContext(
        rank=0,
        local_rank=0,
        node_rank=0,
        world_size=1,
        local_world_size=1,
        nnodes=1,
        round=0,
        attempt=0,
        job="f0-1234",
        scratch=tmp_path,
    )
    to = RankOrder(
        context=place,
        environment={**os.environ, "PYTHONPATH": str(ROOT)},
        file=tmp_path / f"{name}.json",
        log=tmp_path / f"{name}.log",
        records=tmp_path / f"{name}.fr",
    )
    to.file.write_text(to.to_json())
    return to.file


def prepare(server: RankServer, cwd: Path, *modules: str, guard: Sequence[Path] = (), timeout: float = DEADLINE) -> str:
    server.guard(guard)
    path = [str(cwd), *sys.path]
    server.prepare(cwd=cwd, environment=os.environ, sys_path=path, libraries=["json"], modules=modules)
    return str(server.ready(timeout))


def ended(server: RankServer, count: int) -> list[EndedRank]:
    found: list[EndedRank] = []
    while len(found) < count:
        more = server.ended(wait=DEADLINE)
        assert more, "a rank that ended was not reported"
        found += more
    return found


@pytest.mark.parametrize("fork", [True, False])
def test_ends_are_reported_once_each_with_code_and_time(server, tmp_path, fork):
    pids = start(server, tmp_path, fork=fork)
    reported = ended(server, 2)
    assert sorted(each.pid for each in reported) == sorted(pids)
    assert {each.exit_code for each in reported} == {1}
    assert all(each.time_ns > 1_500_000_000 * 10**9 for each in reported)
    assert server.ended() == []
    if not fork:
        assert "a.page" in (tmp_path / "a.log").read_text()


def test_a_server_that_cannot_do_what_it_is_asked_says_so_and_lives_on(server, tmp_path):
    with pytest.raises(LaunchError, match=r"could not prepare.*FileNotFoundError"):
        prepare(server, tmp_path / "nowhere")
    with pytest.raises(LaunchError, match=r"could not start.*FileNotFoundError"):
        server.start([tmp_path / "no order"], fork=False, timeout=DEADLINE)
    assert prepare(server, tmp_path) == "None"


def test_what_was_guarded_goes_with_a_killed_agent_as_with_one_that_closes(tmp_path):
    script = (
        "import os, sys\nfrom pathlib import Path\n"
        "from flytekitplugins_safedist.ranks.forkserver_client import RankServer\n"
        "server = RankServer.spawn(os.environ)\n"
        "importing = {'libraries': ['json'], 'modules': ['endless']} if len(sys.argv) > 2 else {}\n"
        "server.prepare(cwd='/', environment=os.environ, sys_path=[*sys.argv[2:], *sys.path], **importing)\n"
        "server.guard([Path(sys.argv[1])])\n"
        "print(server._pid, flush=True)\nsys.stdin.readline()\nserver.close()\n"
    )
    (tmp_path / "endless.py").write_text("import threading\nthreading.Event().wait()\n")
    for how in ("kill", "close", "kill while it imports"):
        guarded = tmp_path / how
        guarded.mkdir()
        agent = subprocess.Popen(
            [sys.executable, "-c", script, str(guarded), *([str(tmp_path)] if "imports" in how else [])],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert agent.stdin is not None
        assert agent.stdout is not None
        server = int(agent.stdout.readline())
        if "kill" in how:
            agent.kill()
        agent.stdin.close()
        agent.stdout.close()
        agent.wait(DEADLINE)
        until(lambda pid=server: not alive(pid), "the server ends with its agent")
        assert not guarded.exists()


def test_a_lost_server_is_an_error_with_its_end_and_closing_is_still_fine(server):
    os.kill(server._pid, signal.SIGKILL)
    with pytest.raises(LaunchError, match="SIGKILL"):
        server.ended(wait=DEADLINE)
    server.close()
    with pytest.raises(LaunchError):
        prepare(server, Path("/"))


@pytest.mark.parametrize(("call", "said"), [("sys.exit(3)", "SystemExit: 3"), ("os._exit(4)", "os._exit(4)")])
def test_a_module_that_ends_the_process_at_import_makes_forking_unsafe_and_not_the_server_die(
    server, tmp_path, call, said
):
    (tmp_path / "leaves.py").write_text(f"import os, sys\n{call}\n")
    assert f"would have ended this process by {said}" in prepare(server, tmp_path, "leaves")
    server.signal([], signal.SIGTERM, whole_group=False)


def test_a_module_that_is_a_process_killer_is_reported(server, tmp_path):
    (tmp_path / "vanishes.py").write_text("import os\nos.abort()\n")
    with pytest.raises(LaunchError, match="SIGABRT") as caught:
        prepare(server, tmp_path, "vanishes")
    assert "start_method='spawn'" in str(caught.value)


def test_an_import_without_end_is_an_error_at_its_deadline_and_closing_does_not_wait_for_it(server, tmp_path):
    (tmp_path / "endless.py").write_text("import threading\nthreading.Event().wait()\n")
    with pytest.raises(LaunchError, match="did not answer 'prepare' in time"):
        prepare(server, tmp_path, "endless", timeout=1.0)
    server.close()
    assert not alive(server._pid)
    assert server._exit_code == 0, "it left by itself, and was not killed for its import"


def test_an_orphan_that_the_kernel_cannot_end_does_not_hold_up_the_report_of_its_rank(monkeypatch):
    ours, theirs = socket.socketpair()
    served = forkserver.ForkServer(theirs)
    rank = os.fork()
    if rank == 0:
        os._exit(0)
    served.ranks.add(rank)
    reported: list[bytes] = []
    monkeypatch.setattr(
        forkserver.process_tree, "end", lambda **_: reported.append(ours.recv(4096, socket.MSG_DONTWAIT))
    )
    served.reap_one(rank)
    assert json.loads(reported[0][4:])["pid"] == rank


@pytest.mark.parametrize("fork", [True, False])
def test_a_server_that_does_not_answer_is_not_taken_for_gone_while_its_ranks_run(server, tmp_path, fork, monkeypatch):
    """Stopped, as under a debugger or on a machine that is out of memory: what it is told to signal must end all the
    same."""
    monkeypatch.setattr(forkserver_client, "SIGNAL_SECONDS", 0.05)
    shared_page.make(tmp_path / "a.page")
    job = tmp_path / "job.json"  # a FIFO that nobody fills: the rank waits for it
    os.mkfifo(job)
    [pid] = server.start([order(tmp_path, "a")], fork=fork, timeout=DEADLINE)
    writer = opened_when_read(job)
    os.kill(server._pid, signal.SIGSTOP)
    with pytest.raises(LaunchError, match="is gone, and its ranks with it") as caught:
        server.signal([pid], signal.SIGKILL, whole_group=True)
    assert "did not answer 'signal' in time" in str(caught.value.__cause__)
    assert "PYTHONHOME" not in str(caught.value), "Python had started: ranks ran"
    until(lambda: not alive(pid), "the rank ends")
    os.close(writer)


def opened_when_read(fifo: Path) -> int:
    """The writing end of a FIFO, as soon as somebody reads."""
    ends: list[int] = []

    def opened() -> bool:
        with contextlib.suppress(OSError):
            ends.append(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        return bool(ends)

    until(opened, "somebody reads")
    return ends[0]


def test_a_server_that_cannot_be_started_is_a_launch_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(LaunchError, match=r"the rank server cannot be started.*/nowhere/python"):
        RankServer.spawn({})
