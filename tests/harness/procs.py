"""Real jobs for tests: run, signalled, waited for with deadlines, and asked what they left behind."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyteidl.core import errors_pb2, literals_pb2

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 240.0
"""Seconds after which a test gives up on something that must happen; generous, for slow machines. Never a measure."""
TO_TRAIN = ("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo", "lightning", "transformers")
"""What ranks import besides that save, or have an optimizer: two seconds and more for each. Not in every case's
process: the more it holds the dearer are its forks (by a quarter, with these)."""


@dataclass(frozen=True)
class Ended:
    """A case that has ended.

    Attributes:
        code: exit code, negative for a signal.
        left: processes of the case that were still alive well after it ended.
        out, err: what it wrote.
        files: its directory: ``value.json``, ``error.pickle``, ``outputs/``.
    """

    code: int
    left: list[str]
    out: str
    err: str
    files: Path

    @property
    def value(self) -> Any:
        """What the call returned."""
        path = self.files / "value.json"
        assert path.exists(), f"no value: exit code {self.code}\n{self.out}\n{self.err}"
        return json.loads(path.read_text())

    @property
    def error(self) -> BaseException:
        """What the call raised, as it pickles."""
        path = self.files / "error.pickle"
        assert path.exists(), f"no error: exit code {self.code}\n{self.out}\n{self.err}"
        if str(ROOT / "tests" / "jobs") not in sys.path:  # it may be of a class of the job's
            sys.path.append(str(ROOT / "tests" / "jobs"))
        error: BaseException = pickle.loads(path.read_bytes())
        return error

    @property
    def uploaded(self) -> list[str]:
        """Names of what pyflyte-execute uploaded. What is hidden is no verdict."""
        outputs = self.files / "outputs"
        names = [path.name for path in outputs.iterdir()] if outputs.exists() else []
        return sorted(name for name in names if not name.startswith("."))

    @property
    def scratch(self) -> list[str]:
        """What is left under the directory that held this case's scratch and temporary files."""
        return sorted(path.name for path in (self.files / "tmp").iterdir() if path.name.startswith("safedist"))


def uploaded_output(ended: Ended) -> str:
    """The one text output that a case uploaded."""
    literals = literals_pb2.LiteralMap()
    literals.ParseFromString((ended.files / "outputs" / "outputs.pb").read_bytes())
    value: str = literals.literals["o0"].scalar.primitive.string_value
    return value


def uploaded_error(ended: Ended) -> errors_pb2.ContainerError:
    """The one error that a case uploaded."""
    document = errors_pb2.ErrorDocument()
    document.ParseFromString((ended.files / "outputs" / "error.pb").read_bytes())
    return document.error


class Running:
    """A case that runs."""

    def __init__(self, report: int, files: Path) -> None:
        self._report = report
        self._buffer = b""
        self.files = files
        self.pid: int = self._line()["pid"]

    def signal(self, number: int) -> None:
        """Send a signal to the case's first process: the agent."""
        os.kill(self.pid, number)

    def wait(self) -> Ended:
        """Wait for the end of the case and of everything it started."""
        last = self._line()
        os.close(self._report)
        out, err = ((self.files / name).read_text(errors="replace") for name in ("out", "err"))
        return Ended(last["code"], last["left"], out, err, self.files)

    def _line(self) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([self._report], [], [], DEADLINE)
            assert readable, f"nothing for {DEADLINE:g} s from a case:\n{self.shown}"
            data = os.read(self._report, 1 << 16)
            assert data, f"the supervisor of a case is gone:\n{self.shown}"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    @property
    def shown(self) -> str:
        """What it has written so far."""
        return "\n".join((self.files / name).read_text(errors="replace") for name in ("out", "err"))


def listening_for_workers(directory: Path, name: str = "warm", further: Sequence[str] = ()) -> Path:
    """Start a process with everything imported (:mod:`tests.harness.warm`); returns its socket for cases."""
    path = directory / f"{name}.socket"
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(64)
        subprocess.Popen(
            [sys.executable, "-m", "tests.harness.warm", str(listener.fileno()), *further],
            cwd=ROOT,
            env={**_without_libraries_own(os.environ), "PYTHONPATH": _python_path()},
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
        )
    return path


class Warm:
    """A connection to a process with everything imported, which forks cases (:mod:`tests.harness.warm`)."""

    def __init__(self, path: Path) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(str(path))
        readable, _, _ = select.select([self._connection], [], [], 2 * DEADLINE)
        assert readable, "importing torch and flytekit takes for ever"
        hello = json.loads(self._connection.recv(1 << 16) or b'{"unsafe": "it died"}')
        assert hello["unsafe"] is None, hello

    def close(self) -> None:
        """Leave it; it ends with the last connection."""
        self._connection.close()

    def start(
        self,
        call: str,
        files: Path,
        *,
        inputs: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        kind: str = "call",
        libraries: bool = True,
        arguments: Sequence[str] = (),
        cwd: Path | None = None,
        path: Sequence[Path] = (),
        registered: str = "",
        typed: Sequence[tuple[list[str], str]] | None = None,
    ) -> Running:
        """Start a case.

        Args:
            call: ``module:task``; called with ``inputs``.
            files: a new directory for what the case writes; its TMPDIR is in it.
            inputs: arguments, as JSON carries them.
            environment: further variables.
            kind: "call"; "execute" for pyflyte-execute; "main" to run the file before the colon as a script, "module"
                a module, each with ``arguments``; "entrypoint" for safedist-execute, which takes its command from them.
            libraries: have the rank server's be there already; else it imports them, as everywhere but in tests.
            arguments: further ones for pyflyte-execute.
            cwd: working directory; ``files`` where it is None.
            path: further directories of modules, before all others.
            registered: the task that registration has seen, if it was another.
            typed: have the case on a terminal, where that is typed (:mod:`tests.harness.terminal`).
        """
        known = [] if kind in ("entrypoint", "module") else [str(ROOT / "tests" / "jobs"), str(ROOT)]
        case = {"call": call, "kind": kind, "libraries": libraries, "path": [*map(str, path), *known]}
        case |= {"arguments": list(arguments), "registered": registered or call, "typed": typed}
        return self._start({**case, "cwd": str(cwd or files)}, files, dict(inputs or {}), environment or {})

    def run(self, call: str, files: Path, **options: Any) -> Ended:
        """Run a case to its end; nothing may be left of it."""
        ended = self.start(call, files, **options).wait()
        assert ended.left == []
        return ended

    def command(self, command: Sequence[str], files: Path, environment: Mapping[str, str] | None = None) -> Running:
        """Start a command line of its own: nothing is warm."""
        return self._start({"exec": list(command)}, files, {}, environment or {})

    def _start(
        self, case: dict[str, Any], files: Path, inputs: dict[str, Any], environment: Mapping[str, str]
    ) -> Running:
        temporary = files / "tmp"
        temporary.mkdir(parents=True)
        own = {"TMPDIR": str(temporary), "PYTHONPATH": _python_path()}
        everything = {**_without_libraries_own(os.environ), **own, **environment}
        everything["PATH"] = f"{Path(sys.executable).parent}:{everything['PATH']}"
        everything["FLYTE_LOCAL_CACHE_ENABLED"] = everything.get("FLYTE_LOCAL_CACHE_ENABLED", "false")
        places = {"files": str(files), "cwd": str(files), "out": str(files / "out"), "err": str(files / "err")}
        message = json.dumps({**places, **case, "inputs": inputs, "environment": everything})
        ours, theirs = os.pipe()
        (files / "out").touch()
        (files / "err").touch()
        socket.send_fds(self._connection, [message.encode()], [theirs])
        os.close(theirs)
        return Running(ours, files)


def _without_libraries_own(environment: Mapping[str, str]) -> dict[str, str]:
    """What torch has set in this process is not what a pod begins with."""
    own = ("KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK", "TORCHINDUCTOR_CACHE_DIR")
    return {name: value for name, value in environment.items() if name not in own}


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


@contextmanager
def interpreter(code: str, *arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A Python of its own that runs some code, and has said that it is "ready". It is killed at the end."""
    command, pipe = [sys.executable, "-c", code, *arguments], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, **options) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


class Gate:
    """A FIFO between ranks and a test: ranks say lines and wait for a word; nobody sleeps.

    In the rank: :func:`say`, :func:`wait_for_word`.
    """

    def __init__(self, directory: Path, deadline: float = DEADLINE) -> None:
        self._deadline = deadline
        self.said, self.word = directory / "said", directory / "word"
        os.mkfifo(self.said)
        os.mkfifo(self.word)
        # Read-write, so that opening never blocks and neither side ever sees an end.
        self._said = os.open(self.said, os.O_RDWR)
        self._word = os.open(self.word, os.O_RDWR)
        self._buffer = b""

    @property
    def environment(self) -> dict[str, str]:
        """What ranks need to find it."""
        return {"TEST_SAID": str(self.said), "TEST_WORD": str(self.word)}

    def heard(self, count: int) -> list[str]:
        """The next ``count`` lines, in order of arrival."""
        while self._buffer.count(b"\n") < count:
            readable, _, _ = select.select([self._said], [], [], self._deadline)
            assert readable, f"expected {count} lines, heard only {self._buffer!r}"
            self._buffer += os.read(self._said, 1 << 16)
        *lines, self._buffer = self._buffer.split(b"\n", count)
        return [line.decode() for line in lines]

    def pending(self) -> bytes:
        """What was said and not heard yet."""
        while select.select([self._said], [], [], 0)[0]:
            self._buffer += os.read(self._said, 1 << 16)
        return self._buffer

    def let_go(self, count: int) -> None:
        """Give the word to ``count`` ranks that wait for it, now or later."""
        os.write(self._word, b"x" * count)

    def close(self) -> None:
        os.close(self._said)
        os.close(self._word)


def say(text: str) -> None:
    """In a rank: one line to the test."""
    with open(os.environ["TEST_SAID"], "w") as file:
        file.write(text + "\n")


def wait_for_word() -> None:
    """In a rank: wait until the test gives the word."""
    with open(os.environ["TEST_WORD"], "rb", buffering=0) as file:
        file.read(1)


@contextmanager
def gate(directory: Path, deadline: float = DEADLINE) -> Iterator[Gate]:
    directory.mkdir(parents=True, exist_ok=True)
    made = Gate(directory, deadline)
    try:
        yield made
    finally:
        made.close()


def until(true: Any, what: str) -> None:
    """Wait for a state that nothing announces (a process that the kernel ends), looking again and again."""
    deadline = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < deadline, f"never happened: {what}"
        select.select([], [], [], 0.02)


def ignored_signals() -> str:
    """The signals that a command started from here finds ignored, as /proc/PID/status shows them: those that were so
    before this interpreter, which ignores two itself. A shell's ``&`` ignores SIGQUIT, and nohup SIGHUP."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    python = sum(1 << (number - 1) for number in (signal.SIGPIPE, signal.SIGXFSZ))
    return f"{int(status['SigIgn'], 16) & ~python:016x}"


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def at_rest(pid: int) -> bool:
    """Whether a process waits with all its threads: what it was about to do is done. Two looks, since one takes time:
    a thread that has woken another since runs, or has waited once more."""
    looks = []
    for _ in range(2):
        try:
            pages = [page.read_text() for page in sorted(Path(f"/proc/{pid}/task").glob("*/status"))]
        except (FileNotFoundError, ProcessLookupError):  # of a thread that has ended meanwhile
            return False
        lines = [line for page in pages for line in page.splitlines()]
        looks.append([line for line in lines if line.startswith(("Pid", "State", "voluntary_ctxt_switches"))])
    return looks[0] == looks[1] and all("S (" in line for line in looks[0] if line.startswith("State"))


KILL = signal.SIGKILL
TERM = signal.SIGTERM
