"""What is read from faulthandler's text, and how ranks side by side read; and from /proc, of real processes."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from flytekitplugins_safedist.hangs import picture, processes, snapshot, stacks
from flytekitplugins_safedist.hangs.processes import Process
from flytekitplugins_safedist.hangs.snapshot import Snapshot
from flytekitplugins_safedist.hangs.stacks import Frame
from flytekitplugins_safedist.hangs.waits import Steps
from flytekitplugins_safedist.rank import main
from tests.harness.procs import interpreter, until

TORCH = "/site-packages/torch/distributed/"
DUMP = f"""Thread 0x00007f01 [pin] (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 415 in select

Current thread 0x00007f02 (most recent call first):
  File "{TORCH}distributed_c10d.py", line 2501 in all_reduce
  File "{TORCH}c10d_logger.py", line 81 in wrapper
  File "/app/a file.py", line 33 in step
  File "{main.__file__}", line 123 in _work
  File "/app/start.py", line 1 in <module>
"""


CRASHES = """
import ctypes, faulthandler, threading
faulthandler.enable()
threading.Thread(target=threading.Event().wait, daemon=True).start()
def step():
    print("Fatal words of its own", flush=True)
    ctypes.string_at(0)
step()
"""


def test_where_a_process_crashed_is_the_users_own_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CRASHES)
    command = [sys.executable, str(tmp_path / "train.py")]
    ended = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ended.returncode == -signal.SIGSEGV
    assert stacks.crashed_at(ended.stdout) == "train.py:7 in step"
    assert stacks.crashed_at("Fatal words of its own") == ""
    assert stacks.crashed_at(f"Fatal Python error: Aborted\n\n{DUMP}") == "a file.py:33 in step"


def test_the_main_thread_comes_first_and_ends_where_the_users_code_begins_in_the_later_of_two_answers() -> None:
    main, other = stacks.parse(DUMP.replace("line 33", "line 34") + "\n" + DUMP)
    assert Snapshot(0, Process(7, "S"), (main,)).where == "in all_reduce, called at a file.py:33 in step"
    assert Snapshot(0, Process(7, "S"), (other,)).where == "at selectors.py:415 in select"
    assert str(main[0]) == f'  File "{TORCH}distributed_c10d.py", line 2501 in all_reduce'
    assert main[-1].short == "a file.py:33 in step"
    assert other == (Frame("/usr/lib/python3.11/selectors.py", 415, "select"),)
    assert stacks.parse("a rank's own last words\n") == ()


def test_the_main_thread_is_not_taken_for_another_where_there_are_too_many() -> None:
    """Faulthandler shows a hundred, the newest first."""
    pool = 'Thread 0x{} [pool] (most recent call first):\n  File "/app/pool.py", line 1 in waits\n\n'
    assert stacks.parse("".join(map(pool.format, range(100))))[0] == ()
    assert stacks.parse("".join(map(pool.format, range(99))) + DUMP)[0][0].function == "all_reduce"


def taken(
    monkeypatch: pytest.MonkeyPatch, first: Process, last: Process, answers: Sequence[stacks.Threads] = ()
) -> Snapshot:
    """Of a rank that is so at the first look and at the last."""
    looks, given = iter(({7: first}, {7: last})), list(answers)
    monkeypatch.setattr(snapshot, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(processes, "look", lambda _: next(looks))
    monkeypatch.setattr(stacks, "ask", lambda *_: {0: given.pop(0)} if given else {})
    [found] = snapshot.take({0: (7, Path("nowhere"))}, lambda *_: None)
    return found


@pytest.mark.parametrize(
    ("states", "stays"), [("DD", "D"), ("SD", ""), ("DS", ""), ("RR", "R"), ("SR", ""), ("RS", "")]
)
def test_a_rank_is_stuck_in_the_kernel_or_runs_if_it_is_so_at_each_look(
    monkeypatch: pytest.MonkeyPatch, states: str, stays: str
) -> None:
    assert taken(monkeypatch, *(Process(7, state) for state in states)).stays == stays


def connected(each: int, connections: int) -> Process:
    """Of a rank over each of whose connections so many bytes have come. A server reads these as files are read, so that
    they are counted there as well."""
    received = dict.fromkeys(map(str, range(connections)), each)
    return Process(7, "S", data=each * connections, received=received)


@pytest.mark.parametrize(
    ("first", "last", "works"),
    [
        # What is mapped, or read by one long call: of these the kernel counts no characters, until it is over.
        (Process(7, "D", stored=1 << 20), Process(7, "D", stored=1 << 24), True),
        # Rank 0 of a large job, each of whose ranks looks for a key there each second, is not at work.
        (connected(9, 500), connected(309, 500), False),
        (connected(9, 1), connected(150_009, 1), True),
    ],
)
def test_what_is_read_and_written_is_work(
    monkeypatch: pytest.MonkeyPatch, first: Process, last: Process, works: bool
) -> None:
    assert taken(monkeypatch, first, last).works.startswith("reads or writes") is works


READS = (Frame("a.py", 1, "read"), Frame("b.py", 2, "step"))


@pytest.mark.parametrize(
    ("later", "moved"),
    [
        ((Frame("a.py", 9, "read"), READS[1]), False),  # another line of the same call
        ((Frame("a.py", 1, "parse"), READS[1]), True),
        ((Frame("c.py", 1, "read"), READS[1]), True),
        ((READS[0], Frame("b.py", 3, "step")), True),
    ],
)
def test_a_rank_has_moved_that_is_in_another_call_or_whose_callers_are_at_another_line(
    monkeypatch: pytest.MonkeyPatch, later: stacks.Stack, moved: bool
) -> None:
    answers = [stacks.Threads([READS]), stacks.Threads([later])]
    assert taken(monkeypatch, Process(7, "S"), Process(7, "S"), answers).moved is moved


def stack_of(calls: str) -> stacks.Stack:
    """Innermost first; of installed packages, unless a path begins with a slash."""
    found = re.findall(r"(\S+):(\d+) (\S+)", calls)
    return tuple(Frame(str(Path("/lib/site-packages", file)), int(line), name) for file, line, name in found)


USER, AT = "/app/train.py:7 main", "called at train.py:7 in main"
OURS, MPI_OPS = "flytekitplugins_safedist/", "horovod/torch/mpi_ops.py"
BARRIER = f"{OURS}fs/agree.py:1 wait {OURS}fs/collective.py:1 barrier"
SELECTS = f"{sysconfig.get_path('stdlib')}/selectors.py:415 select"
VERIFIES = "_verify_param_shape_across_processes"
SYNCS = " ".join(f"torch/distributed/utils.py:1 _sync_{each}" for each in ("params_and_buffers", "module_states"))
GATHERS = "torch/distributed/_functional_collectives.py:210 all_gather_tensor"
GATHERED = ("all_gather_tensor", True, f"in all_gather_tensor, {AT}")


@pytest.mark.parametrize(
    ("calls", "collective", "is_torchs", "where"),
    [
        (f"torch/distributed/c10d_logger.py:1 wrapper {USER}", "", False, f"at c10d_logger.py:1 in wrapper, {AT}"),
        (f"{OURS}frames.py:1 exactly {BARRIER} {USER}", "barrier", False, f"in barrier, {AT}"),
        (f"{OURS}frames.py:1 exactly {USER}", "", False, f"at frames.py:1 in exactly, {AT}"),
        (f"{USER} {BARRIER}", "", False, "at train.py:7 in main"),  # a function of the user's that barrier calls
        # What torch does with others by itself, where a communicator may be made; and what computes beside it.
        (f"torch/distributed/utils.py:299 {VERIFIES} torch/nn/x.py:1 y {USER}", VERIFIES, True, f"in {VERIFIES}, {AT}"),
        (f"{SYNCS} {USER}", "_sync_module_states", True, f"in _sync_module_states, {AT}"),
        (f"torch/distributed/utils.py:150 _recursive_to {USER}", "", False, f"at utils.py:150 in _recursive_to, {AT}"),
        (f"{SELECTS} torch/utils/data/dataloader.py:9 f {USER}", "", False, f"at selectors.py:415 in select, {AT}"),
        # A tensor that is spread out goes through torch.ops.
        (f"torch/_ops.py:9 __call__ {GATHERS} {USER}", *GATHERED),
        (f"torch/_ops.py:9 __call__ {USER}", "", False, f"at _ops.py:9 in __call__, {AT}"),
        ("torch/_ops.py:9 __call__", "", False, "at _ops.py:9 in __call__"),
        # What calls a collective on behalf of the user is no place to look for a mistake.
        (
            f"{MPI_OPS}:1300 synchronize torch/autograd/function.py:625 apply {MPI_OPS}:240 allreduce {USER}",
            *("synchronize", False, f"in synchronize, {AT}"),
        ),
        (f"{GATHERS} torch/distributed/tensor/_redistribute.py:9 f {USER}", *GATHERED),
        (f"{GATHERS} torch/autograd/graph.py:9 f torch/_tensor.py:9 backward {USER}", *GATHERED),
        ("/app/horovod/train.py:7 main", "", False, "at train.py:7 in main"),  # a project of that name
    ],
)
def test_where_a_rank_is_is_the_innermost_call_that_waits_for_others_and_who_made_it(
    calls: str, collective: str, is_torchs: bool, where: str
) -> None:
    stack = stack_of(calls)
    assert (stacks.collective(stack), stacks.torchs(stack)) == (collective, collective if is_torchs else "")
    assert Snapshot(0, Process(7, "S"), (stack,)).where == where


def test_those_who_stand_in_one_place_are_told_of_once_and_the_many_first() -> None:
    many = [Snapshot(rank, Process(rank, "S", "futex_wait"), stacks.parse(DUMP)[:1]) for rank in (1, 2, 3, 6)]
    few = Snapshot(0, Process(9, "T", children=(77,)), cpu=0.5)
    text = picture.text([few, *many])
    first, *_ = text.splitlines()
    assert first == "ranks 1-3, 6 (4 of 5) stand in all_reduce, called at a file.py:33 in step"
    assert text.count("in all_reduce\n") == 1
    assert "    sleeping (futex_wait)\n" in text
    assert "rank 0 (1 of 5) stands stopped (SIGSTOP); it has not answered" in text
    assert "rank 0's child process 77 has ended or is stopped" in text
    first, *_ = picture.text([Snapshot(0, Process(9))]).splitlines()
    assert first == "rank 0 (1 of 1) stands nowhere: its process has ended"


def test_all_that_was_seen_has_every_call_of_every_thread_and_all_connections() -> None:
    deep = tuple(Frame("/app/deep.py", line, "calls") for line in range(20))
    process = Process(7, "S", peers=("10.0.0.2:4000 (12 bytes not acknowledged)", "[::1]:80"))
    ranks = [Snapshot(0, process, (deep, stacks.parse(DUMP)[1])), Snapshot(1, Process(8, "S"), (deep,))]
    text = picture.text(ranks, whole=True)
    assert all(f'File "/app/deep.py", line {line} in calls' in text for line in range(20))
    assert 'another thread of rank 0:\n      File "/usr/lib/python3.11/selectors.py", line 415 in select' in text
    assert "rank 0 is connected to 10.0.0.2:4000 (12 bytes not acknowledged), [::1]:80" in text
    shown = picture.text(ranks)
    assert "line 19 in calls" not in shown
    assert "connected" not in shown


def here() -> Process:
    """This process."""
    return processes.look([1 << 30, os.getpid()])[os.getpid()]


@contextlib.contextmanager
def connection(loopback: str) -> Iterator[tuple[str, socket.socket, socket.socket]]:
    """Of this process to itself: how the other end is shown, and both."""
    kind = socket.AF_INET6 if ":" in loopback else socket.AF_INET
    with socket.socket(kind) as listener, socket.socket(kind) as sock:
        listener.bind((loopback, 0))
        listener.listen()
        sock.connect(listener.getsockname())
        port = listener.getsockname()[1]
        with listener.accept()[0] as other:
            yield f"[{loopback}]:{port}" if kind == socket.AF_INET6 else f"{loopback}:{port}", sock, other


@pytest.mark.parametrize("loopback", ["127.0.0.1", "::1"])
def test_connections_are_told_with_what_the_other_end_has_not_taken(loopback: str) -> None:
    with connection(loopback) as (shown, sock, _other):
        assert shown in here().peers
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:  # until nothing fits: nobody reads
                sock.send(bytes(1 << 16))
        [told] = [each for each in here().peers if each.startswith(shown)]
        assert re.fullmatch(r".* \([1-9]\d* bytes not acknowledged\)", told)
    assert not [each for each in here().peers if each.startswith(shown)]


def read_from_disks() -> tuple[int, int]:
    """By this process, in bytes, as the kernel has it; and how often it has waited for a page."""
    [read] = re.findall(r"^read_bytes: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)
    return int(read), resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def test_a_page_that_is_waited_for_is_read_also_from_what_is_no_disk(tmp_path: Path) -> None:
    """Of a file system in user space (a store that is mounted, say) the kernel counts nothing but this."""
    file = tmp_path / "mapped"
    file.write_bytes(os.urandom(1 << 22))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before, (read, waited) = here().stored, read_from_disks()
        with mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert sum(mapped[at] for at in range(0, len(mapped), mmap.PAGESIZE)) > 0
        now_read, now_waited = read_from_disks()
        assert here().stored - before >= now_read - read + (now_waited - waited) * (1 << 15)


RECEIVES = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as sock:
    sock.recv(100_000, socket.MSG_WAITALL)
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_what_comes_over_connections_of_a_process_and_of_what_it_has_started_is_counted() -> None:
    """To a DataLoader's worker, say, from a store that is spoken to in plain text."""
    with connection("127.0.0.1") as (_shown, sock, own), socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        before, command = here(), [sys.executable, "-c", RECEIVES, str(listener.getsockname()[1])]
        sock.sendall(bytes(100_000))
        own.recv(100_000, socket.MSG_WAITALL)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            with listener.accept()[0] as other:
                other.sendall(bytes(100_000))
                assert child.stdout is not None
                assert child.stdout.readline() == "ready\n"
                now = here()
            child.communicate()
    grown = {each for each, count in now.received.items() if count - before.received.get(each, 0) >= 100_000}
    assert len(grown & before.received.keys()) == 2, "at both ends"
    assert len(grown - before.received.keys()) == 2, "of the child's, too"
    assert len(now.peers) == len(before.peers) + 1, "whom the process itself is connected to"


STARTS = """
import subprocess, sys
works = "import time\\nwhile time.process_time() < 0.5: pass\\nprint('ready', flush=True)\\ninput()"
child = subprocess.Popen([sys.executable, "-c", works], stdin=subprocess.PIPE)
sys.stdin.readline()
child.communicate(b"\\n")
print("ended", flush=True)
sys.stdin.read()
"""


def test_what_was_started_and_has_ended_has_worked_all_the_same() -> None:
    """A compiler that is run for each file: the sum of those that run at a look falls as one ends."""
    with interpreter(STARTS) as process:
        before = processes.look([process.pid])[process.pid].cpu
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ended\n"
        assert before > 0.4
        assert processes.look([process.pid])[process.pid].cpu > before - 0.1


LISTENS = """
import sys
from pathlib import Path
from flytekitplugins_safedist.hangs.evidence import Evidence
Evidence(Path(sys.argv[1]))
print("ready", flush=True)
def spins():
    while True: pass
def waits():
    sys.stdin.read()
{"spins": spins, "waits": waits}[sys.argv[2]]()
"""
DO = ("spins", "waits", "waits")
"""What each of three does."""


def test_processes_are_told_apart_by_what_they_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_LOOK", 0.25)  # one that has no core for a while has not written all
    monkeypatch.setattr(stacks, "WRITE_SECONDS", 60.0)
    directory = tmp_path / "safedist-x" / "orders"
    directory.mkdir(parents=True)
    files = {rank: directory / f"round-0-rank-{rank}.stacks" for rank in range(4)}
    begin = functools.partial(interpreter, start_new_session=True)
    with contextlib.ExitStack() as held:
        running = [held.enter_context(begin(LISTENS, str(files[rank]), how)) for rank, how in enumerate(DO)]
        # It has no handler: the signal would end it.
        deaf = "import sys; print('ready', flush=True); sys.stdin.read()"
        running.append(held.enter_context(begin(deaf, str(files[3]))))
        os.kill(running[2].pid, signal.SIGSTOP)
        until(lambda: processes.look([running[2].pid])[running[2].pid].state == "T", "it is stopped")
        asked = {rank: (process.pid, files[rank]) for rank, process in enumerate(running)}
        found = {each.rank: each for each in snapshot.take(asked, snapshot.by_ourselves)}
        assert found[0].stack[0].function == "spins"
        assert found[1].stack[0].function == "waits"
        assert not any(each.moved for each in found.values())
        assert found[0].cpu > 5 * found[1].cpu
        assert (found[2].stack, found[2].process.state) == ((), "T")
        assert (found[3].stack, found[3].process.state) == ((), "S")
        below = {tmp_path / "safedist-x": {rank: asked[rank] for rank in range(3)}}
        assert snapshot.running_below(tmp_path) == below
        assert snapshot.running_below(tmp_path / "elsewhere") == {}
    assert processes.look([running[0].pid]) == {running[0].pid: Process(running[0].pid)}


def test_of_those_in_one_place_the_least_and_the_most_work_are_told_and_of_a_very_large_job_what_is_read() -> None:
    many = [Snapshot(rank, Process(10_000 + rank, "S"), stacks.parse(DUMP), cpu=0.2) for rank in range(4096)]
    many[1] = replace(many[1], cpu=0.7)
    text = picture.text(many)
    assert text.startswith("ranks 0-4095 (4096 of 4096) stand in all_reduce")
    assert "process 10000, 10001, " in text
    assert " and 4080 more" in text
    assert max(map(len, text.splitlines())) < 200
    assert "    CPU: 0.20 core(s) to 0.70 core(s)\n" in text
    assert "    CPU: 0.20 core(s)\n" in picture.text(many[:1])
    assert "    in step 7\n" in picture.text([replace(each, steps=Steps(step=7)) for each in many[:2]])
