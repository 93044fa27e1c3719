"""The rank server and its agent's end, with small processes as ranks: nothing heavy is imported."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist.errors import LaunchError
from flytekitplugins_safedist.rank import shared_page
from flytekitplugins_safedist.rank.order import JobOrder, RankOrder, TaskSource
from flytekitplugins_safedist.rank.places import RankFiles
from flytekitplugins_safedist.rank_server import client, launch
from flytekitplugins_safedist.rank_server import server as served
from flytekitplugins_safedist.rank_server.client import EndedRank, Imported, RankServer
from tests.harness.outcomes import rank_at
from tests.harness.procs import DEADLINE, ROOT, alive, until
from tests.unit.rank.test_order import SNAPSHOT

pytestmark = pytest.mark.processes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RankServer]:
    installed = tmp_path / "site-packages"  # where a test puts libraries
    installed.mkdir()
    sys.path.insert(0, str(installed))
    with RankServer(launch.launch(os.environ)) as running:
        sys.path.remove(str(installed))
        yield running


def job(directory: Path) -> JobOrder:
    path = ("", *sys.path)
    source = TaskSource("train", module="no_such_module_here")
    return JobOrder(source, directory, path, ("argv",), directory / "inputs.pb", SNAPSHOT, 60.0)


def order(directory: Path, name: str) -> RankOrder:
    return RankOrder(
        context=rank_at(directory),
        environment={**os.environ, "PYTHONPATH": str(ROOT)},
        files=RankFiles.at(directory / name, directory / f"{name}.fr"),
        log=directory / f"{name}.log",
        ran_before=False,
    )


def start(server: RankServer, tmp_path: Path, *, fork: bool) -> list[int]:
    """Two processes that are told to be ranks, and share nothing with an agent: both end at once, with a traceback."""
    return server.start(job(tmp_path), [order(tmp_path, each) for each in "ab"], fork=fork, timeout=DEADLINE)


def take(server: RankServer, tmp_path: Path, timeout: float = DEADLINE, **libraries: str) -> Imported:
    """What comes of importing libraries of these sources."""
    for name, source in libraries.items():
        (tmp_path / "site-packages" / f"{name}.py").write_text(source)
    server.take([f"import {name}" for name in libraries], environment=os.environ)
    return server.ready(timeout)


def ended(server: RankServer, count: int) -> list[EndedRank]:
    found: list[EndedRank] = []
    while len(found) < count:
        more = server.ended(wait=DEADLINE)
        assert more, "a rank that ended was not reported"
        found += more
    return found


@pytest.mark.parametrize("fork", [True, False])
def test_ends_are_reported_once_each_with_code_and_time(server, tmp_path, fork, monkeypatch):
    pids = start(server, tmp_path, fork=fork)
    reported = ended(server, 2)
    assert sorted(each.pid for each in reported) == sorted(pids)
    assert {each.exit_code for each in reported} == {1}
    assert all(each.time_ns > 1_500_000_000 * 10**9 for each in reported)
    assert all(4 << 20 < each.peak < 4 << 30 for each in reported), "bytes that an interpreter holds"
    assert server.ended() == []
    if not fork:
        assert "a.page" in (tmp_path / "a.log").read_text()
    ends: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _: ends.append(group))
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(LaunchError, match="SIGKILL"):
        server.ended(wait=DEADLINE)
    assert ends == [], "their numbers may be others' by now"


def test_a_rank_gets_its_orders_where_a_sandbox_refuses_files_in_memory(tmp_path):
    """Some filters of system calls do, and a kernel with ``vm.memfd_noexec=2``."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\ndef refused(*_):\n    raise PermissionError(1, 'not permitted')\nos.memfd_create = refused\n"
    )
    with RankServer(launch.launch({**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"})) as running:
        start(running, tmp_path, fork=False)
        ended(running, 2)
    assert "a.page" in (tmp_path / "a.log").read_text(), "it looks for what its orders name"


def test_what_a_rank_has_started_ends_with_it_while_another_rank_runs(server, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, subprocess, time\n"
        "if os.environ['TEST_STAYS']:\n"
        "    time.sleep(600)\n"
        "os.setsid()\n"  # as a rank is in a session of its own
        "print(subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
    )
    path = f"{tmp_path}:{ROOT}"
    leaves, stays = (
        replace(order(tmp_path, name), environment={**os.environ, "PYTHONPATH": path, "TEST_STAYS": does})
        for name, does in (("a", ""), ("b", "yes"))
    )
    pids = server.start(job(tmp_path), [leaves, stays], fork=False, timeout=DEADLINE)
    assert [each.pid for each in ended(server, 1)] == pids[:1]
    started = int(leaves.log.read_text().splitlines()[0])
    until(lambda: not alive(started), "it has ended")
    assert alive(pids[1])


def test_all_ends_that_are_there_are_taken_in_at_once(server, tmp_path, monkeypatch):
    pids = start(server, tmp_path, fork=True)
    server.signal([], signal.SIGTERM)
    until(lambda: not any(map(alive, pids)), "both end")
    server.signal([], signal.SIGTERM)  # what is told before the answer has come with it
    assert len(server.ended()) == 2


def test_a_server_that_cannot_do_what_it_is_asked_says_so_and_lives_on(server, tmp_path):
    with pytest.raises(LaunchError, match=r"could not start.*FileNotFoundError"):
        server.start(job(tmp_path / "nowhere"), [order(tmp_path, "a")], fork=False, timeout=DEADLINE)
    assert take(server, tmp_path, quiet="X = 1").failed == {}


def test_ranks_before_one_that_could_not_be_started_are_ended(server, tmp_path):
    shared_page.make(tmp_path / "a.page")
    fifo = tmp_path / "script.py"
    os.mkfifo(fifo)
    told = replace(job(tmp_path), source=TaskSource("train", script=str(fifo)))
    orders = [order(tmp_path, "a"), replace(order(tmp_path, "b"), log=tmp_path / "nowhere" / "b.log")]
    with pytest.raises(LaunchError, match=r"could not start.*FileNotFoundError"):
        server.start(told, orders, fork=False, timeout=DEADLINE)
    [rank] = ended(server, 1)
    assert rank.exit_code == -signal.SIGKILL


def test_answers_to_what_was_given_up_are_taken_for_no_other(server, tmp_path):
    with pytest.raises(LaunchError, match="did not answer 'start' in time"):
        server.start(job(tmp_path), [order(tmp_path, "a")], fork=False, timeout=0)
    server.signal([], signal.SIGTERM)
    assert len(start(server, tmp_path, fork=True)) == 2


def test_libraries_are_found_where_they_are_installed_and_nothing_of_the_users_is(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise AssertionError('of the user')")
    (tmp_path / "json.py").write_text("raise AssertionError('of the user')")
    assert take(server, tmp_path, library="import json, mine").failed == {
        "import library": "ModuleNotFoundError: No module named 'mine'"
    }


def test_a_file_of_the_users_beside_the_workflow_that_is_named_as_one_of_pythons_is_not_executed(tmp_path):
    for name in ("resource", "token", "code", "secrets", "select", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('of the user')")
    program = tmp_path / "elsewhere" / "program.py"
    program.parent.mkdir()
    program.write_text(
        "import os\nfrom flytekitplugins_safedist.rank_server.client import RankServer\n"
        "from flytekitplugins_safedist.rank_server.launch import launch\n"
        "with RankServer(launch(os.environ)) as server:\n"
        "    server.take_needed(['resource', 'token', 'code'], os.environ)\n    print(server.ready(60).failed)\n"
    )
    done = subprocess.run([sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "{}\n", done.stderr


GUARDS = (
    "import os, sys\nfrom pathlib import Path\n"
    "from flytekitplugins_safedist.rank_server.client import RankServer\n"
    "from flytekitplugins_safedist.rank_server.launch import launch\n"
    "server = RankServer(launch(os.environ))\n"
    "server.guard([Path(sys.argv[1])])\n"
    "server.take([], environment=os.environ)\nserver.ready(60)\n"
    "if sys.argv[2] == 'forks' and os.fork() == 0:\n    sys.stdin.read()\n    os._exit(0)\n"
    "print(server.pid, flush=True)\nsys.stdin.readline()\nserver.close()\n"
)


@pytest.mark.parametrize("how", ["is killed", "closes", "forks"])
def test_what_was_guarded_goes_with_an_agent_that_is_killed_as_with_one_that_closes(tmp_path, how):
    """Also where a child that the agent has forked lives on, and with it a copy of its end of the connection."""
    guarded = tmp_path / "guarded"
    guarded.mkdir()
    agent = subprocess.Popen(
        [sys.executable, "-c", GUARDS, str(guarded), how],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdin is not None
    assert agent.stdout is not None
    server = int(agent.stdout.readline())
    if how != "closes":
        agent.kill()
    else:
        agent.stdin.close()
    agent.wait(DEADLINE)
    until(lambda: not alive(server), "the server ends with its agent")
    assert not guarded.exists()
    agent.stdin.close()
    agent.stdout.close()


def test_a_lost_server_is_an_error_with_its_end_and_closing_is_still_fine(server, tmp_path):
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(LaunchError, match="SIGKILL"):
        server.ended(wait=DEADLINE)
    server.close()
    with pytest.raises(LaunchError):
        take(server, tmp_path, quiet="")


def test_a_library_that_kills_its_process_is_reported(server, tmp_path):
    with pytest.raises(LaunchError, match="SIGABRT"):
        take(server, tmp_path, vanishes="import os\nos.abort()\n")


ENDLESS = "import threading\nthreading.Event().wait()\n"


def test_an_import_without_end_is_an_error_at_its_deadline_and_closing_does_not_wait_for_it(server, tmp_path):
    with pytest.raises(LaunchError, match="did not answer 'take' in time"):
        take(server, tmp_path, timeout=1.0, endless=ENDLESS)
    server.close()
    assert not alive(server.pid)


MUCH = {"MUCH": "x" * 1_000_000}
"""More than a connection takes that nobody reads."""


def test_what_is_too_much_for_a_server_that_imports_waits_no_longer_than_for_the_answer(server, tmp_path):
    (tmp_path / "site-packages" / "endless.py").write_text(ENDLESS)
    server.take(["import endless"], environment=os.environ)
    server.take([], environment=MUCH)
    with pytest.raises(LaunchError, match="did not answer 'take' in time"):
        server.ready(1.0)
    server.close()
    assert not alive(server.pid)


def test_a_server_that_somebody_has_frozen_hears_all_of_an_order(server, tmp_path):
    os.kill(server.pid, signal.SIGSTOP)
    orders = [replace(order(tmp_path, each), environment={**os.environ, **MUCH}) for each in "ab"]
    with pytest.raises(LaunchError, match="could not start"):  # for the kernel the variable is too long
        server.start(job(tmp_path), orders, fork=False, timeout=DEADLINE)
    assert len(start(server, tmp_path, fork=True)) == 2


def test_a_server_that_has_given_way_to_a_copy_serves_on_under_its_number(server, tmp_path):
    thread = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    found = take(server, tmp_path, starts=thread, quiet="X = 1")
    assert found.unsafe is None
    assert found.left[0].startswith("`import starts` starts 1 thread(s)")
    pids = start(server, tmp_path, fork=True)
    assert sorted(each.pid for each in ended(server, 2)) == sorted(pids)
    server.close()
    assert server._exit_code == 0


def test_an_orphan_that_the_kernel_cannot_end_does_not_hold_up_the_report_of_its_rank(monkeypatch):
    ours, theirs = socket.socketpair()
    found = served.ForkServer(theirs, os.getpid())
    rank = os.fork()
    if rank == 0:
        os._exit(0)
    found.ranks.add(rank)
    reported: list[bytes] = []

    def end(**_: Any) -> None:
        reported.append(ours.recv(4096, socket.MSG_DONTWAIT))

    monkeypatch.setattr(served.cleanup, "end_descendants", end)
    os.waitid(os.P_PID, rank, os.WEXITED | os.WNOWAIT)
    found.reap_one(rank)
    assert json.loads(reported[0][4:])["pid"] == rank


@pytest.mark.parametrize("fork", [True, False])
def test_a_server_that_does_not_answer_is_not_taken_for_gone_while_its_ranks_run(server, tmp_path, fork, monkeypatch):
    """Stopped, as under a debugger or on a machine that is out of memory: what it is told to signal must end all the
    same."""
    monkeypatch.setattr(client, "SIGNAL_SECONDS", 0.05)
    pid, writer = held(server, tmp_path, fork=fork)
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(LaunchError, match="is gone, and its ranks with it") as caught:
        server.signal([pid], signal.SIGKILL)
    assert "did not answer 'signal' in time" in str(caught.value.__cause__)
    assert "PYTHONHOME" not in str(caught.value), "Python had started: ranks ran"
    until(lambda: not alive(pid), "the rank ends")
    os.close(writer)


@pytest.mark.parametrize("fork", [True, False])
def test_a_rank_dies_with_its_server_though_nobody_is_there_to_end_it(server, tmp_path, fork):
    pid, writer = held(server, tmp_path, fork=fork)
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not alive(pid), "the rank ends")
    os.close(writer)


def held(server: RankServer, tmp_path: Path, *, fork: bool) -> tuple[int, int]:
    """A rank that reads a FIFO which nobody fills, and the writing end of that."""
    shared_page.make(tmp_path / "a.page")
    fifo = tmp_path / "script.py"
    os.mkfifo(fifo)
    told = replace(job(tmp_path), source=TaskSource("train", script=str(fifo)))
    [pid] = server.start(told, [order(tmp_path, "a")], fork=fork, timeout=DEADLINE)
    return pid, opened_when_read(fifo)


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
    with pytest.raises(LaunchError, match=r"the rank server cannot be started.*/nowhere/python.*Fix: look whether"):
        launch.launch({})


def test_whoever_starts_a_server_may_have_a_thousand_files_open(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, before[0]), before[1]))
    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        for _ in range(1030):  # FD_SETSIZE is 1024
            held.enter_context(open(os.devnull))
        with RankServer(launch.launch(os.environ)) as server:
            (tmp_path / "site-packages").mkdir()
            assert take(server, tmp_path, timeout=DEADLINE).failed == {}
            assert server.fits(os.environ)


def test_what_an_interpreter_reads_as_it_starts_must_be_as_it_was_for_a_server_to_serve_again(server, tmp_path):
    take(server, tmp_path, quiet="X = 1")
    names = ["TZ", "LC_ALL", "PYTHONHASHSEED", "LD_PRELOAD", "MALLOC_ARENA_MAX"]
    assert server.fits({**os.environ, "ANOTHER": "1"})
    assert [name for name in names if server.fits({**os.environ, name: "1"})] == []


def listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_that_is_asked_again_stands_by_no_more() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        one = served.ForkServer(theirs, os.getpid())
        one._answer("guard", paths=["/of/the/job/before"])
        one.on_stand_by(seconds=0.0)
        assert one.guarded == []
        one._answer("guard", paths=[])
        assert one.ends_at == math.inf
        for each in (one.wake_read, one.wake_write, *one.agents_end):
            os.close(each)


def test_a_store_is_kept_for_one_round_and_takes_as_many_ranks_as_may_open_files(
    server: RankServer, tmp_path: Path
) -> None:
    from torch.distributed import TCPStore

    assert server.keep_store() == 0, "torch is not there"
    hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (64, hard))
    server.take_needed(["torch.distributed"], os.environ)
    assert server.ready(DEADLINE).unsafe is None
    first, soon = server.keep_store(), timedelta(seconds=20)
    ranks = [TCPStore("127.0.0.1", first, is_master=False, timeout=soon) for _ in range(80)]
    assert [rank.add("there", 1) for rank in ranks] == [*range(1, 81)]
    start(server, tmp_path, fork=True)
    ended(server, 2)
    server.end_ranks()
    assert listens(first), "whatever becomes of the ranks"
    second = server.keep_store()
    assert (listens(first), listens(second)) == (False, True)
    server.stand_by(60.0)
    assert not listens(second)
    third = server.keep_store()
    assert listens(third)
    server.close()
    assert not listens(third)
