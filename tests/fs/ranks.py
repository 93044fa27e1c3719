"""Real processes for race tests: started together, stopped at named points, killed, and asked what they got."""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.harness.procs import Running, Warm

DEADLINE = 240.0
"""Seconds after which a process that says nothing hangs; generous, for slow machines. Never a measure."""
_fork, _spawn = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")

AT_LENGTH = os.environ.get("SAFEDIST_TEST_AT_LENGTH", "0") not in ("", "0")
"""Whether the races run at the size that docs/fs.md tells of, which takes minutes each. They are the same races."""


def size(short: int, at_length: int) -> int:
    """How many, of processes, rounds or seconds."""
    return at_length if AT_LENGTH else short


class Outcome:
    """What a process's function returned or raised, or that it died."""

    def __init__(self, kind: str, value: Any) -> None:
        self.kind, self.value = kind, value

    def get(self) -> Any:
        assert self.kind == "value", f"{self.kind}: {self.value}"
        return self.value

    def error(self) -> BaseException:
        assert self.kind == "error", f"{self.kind}: {self.value}"
        error: BaseException = self.value[0]
        return error

    def __repr__(self) -> str:
        return f"<{self.kind}: {self.value}>"


class Process:
    """One forked process that runs ``work(*args)``, with a channel for ordering: ``pause`` there, ``resume`` here.

    A ``small`` one is a fresh interpreter that has imported the module of ``work`` alone: its forks cost a fraction of
    those of a process that has torch.
    """

    def __init__(
        self, work: Callable[..., Any], *args: Any, env: dict[str, str] | None = None, small: bool = False
    ) -> None:
        self._here, there = _fork.Pipe()
        start: type[multiprocessing.Process] = _spawn.Process if small else _fork.Process  # type: ignore[assignment]
        self._process = start(target=_main, args=(there, self._here, work, args, env or {}))
        self._process.start()
        there.close()
        self._paused: list[str] = []

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def until(self, point: str, within: float = DEADLINE) -> None:
        """Wait until the process says that it is at ``point`` (and stands still there)."""
        assert self._here.poll(within), f"did not reach {point}"
        message = self._here.recv()
        assert message == ("at", point), message

    def resume(self) -> None:
        self._here.send("go")

    def next_message(self, within: float = DEADLINE) -> str | Outcome:
        """The next point at which it stands still, or its outcome."""
        try:
            if not self._here.poll(within):
                self.kill()
                return Outcome("hung", f"for {within} s")
            kind, value = self._here.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            return Outcome("died", self._process.exitcode)
        if kind == "at":
            return str(value)
        self._process.join()
        return Outcome(kind, value)

    def done(self) -> bool:
        """Whether its outcome (or its next point) is there to be read."""
        return bool(self._here.poll())

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.join()

    def outcome(self, within: float = DEADLINE) -> Outcome:
        message = self.next_message(within)
        assert isinstance(message, Outcome), f"stands still at {message}"
        return message


_channel: Any = None


def pause(point: str) -> None:
    """Called in a process: say that ``point`` is reached, and stand still until resumed or killed."""
    _channel.send(("at", point))
    _channel.recv()


def _main(there: Any, here: Any, work: Callable[..., Any], args: Sequence[Any], env: dict[str, str]) -> None:
    global _channel  # noqa: PLW0603
    here.close()
    _channel = there
    os.environ.update(env)
    # What is garbage of the parent's is the parent's: an s3fs among it would wait a second, as it ends, for a thread
    # that is not here, and the worker's tests leave some thirty (a trainer asks for a collection).
    gc.freeze()
    if torch := sys.modules.get("torch"):
        # A further thread of OpenMP would be waited for without end where a test before this one had some.
        torch.set_num_threads(1)
    try:
        message = ("value", work(*args))
    except BaseException as error:
        message = ("error", (error, traceback.format_exc()))
    there.send(message)
    there.close()
    os._exit(0)


def rank_env(rank: int, world_size: int, per_node: int | None = None, **more: str) -> dict[str, str]:
    """torchrun's environment for one rank."""
    local = per_node or world_size
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local),
        "GROUP_WORLD_SIZE": str(-(-world_size // local)),
        **more,
    }


_reserved: deque[Any] = deque(maxlen=64)
"""Ports that stay this process's, so that no other test's chance gives one away before the ranks listen there."""


def meeting_point() -> dict[str, str]:
    """torchrun's variables for where ranks meet: a port of this machine that is free."""
    from tests.harness import product

    _reserved.append(product.ReservedPort())
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_reserved[-1].port)}


@contextmanager
def corner() -> Iterator[dict[str, str]]:
    """The variables by which ranks find the corner of a job's coordinator, which a process of its own serves."""

    def serve(path: str) -> None:
        from tests.harness import product

        inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        rules = product.Rules("job", min_nodes=1, max_nodes=1)
        server = product.Server(rules, "here", inbox)
        link = product.Link(rules, product.Endpoint("here", 0), inbox=inbox, own=server.connect)
        link.place = product.MeetingPlace(Path(path), "job", link.put)
        messages = product.messages
        link.begin(messages.Status("job", "here", 0, 1.0, "host", offer=messages.Offer(messages.NO_ROUND, {})))
        want: Any = None
        while not getattr(want, "runs", False):
            want = inbox.get(timeout=DEADLINE)
        link.place.open(want.course.round, 0)
        pause("open")

    with TemporaryDirectory() as directory:
        path = f"{directory}/meeting"
        with processes([(serve, path)]) as (server,):
            server.next_message()
            yield {"SAFEDIST_MEETING": path, "TORCHELASTIC_RUN_ID": "job", "SAFEDIST_ROUND": "0"}


@contextmanager
def agents_store() -> Iterator[dict[str, str]]:
    """torchrun's variables for the store of its agent, which a process of its own serves."""

    def serve() -> None:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pause(str(store.port))

    # In a process of its own: to fork one that has the store's threads can deadlock the child.
    with processes([(serve,)]) as (server,):
        port = str(server.next_message())
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}


def torchrun(warm: Warm, files: Path, script: Path, *arguments: str | Path, **variables: str) -> Running:
    """Start the real ``torchrun`` where torch is imported already; ranks are interpreters of their own.

    Args:
        warm: starts it.
        files: for what it says.
        script: what its ranks run.
        arguments: ``torchrun``'s options, and behind them, without a dash, those of the script.
        variables: for both.
    """
    options = [str(each) for each in arguments if str(each).startswith("--")]
    own = [str(each) for each in arguments if str(each) not in options]
    command: dict[str, Any] = {"kind": "module", "arguments": [*options, str(script), *own], "libraries": False}
    return warm.start("torch.distributed.run:__main__", files, environment=variables, **command)


@contextmanager
def processes(
    works: Sequence[tuple[Any, ...]], envs: Sequence[dict[str, str]] | None = None
) -> Iterator[list[Process]]:
    """Start ``(function, *args)`` in one process each; none outlives the block."""
    started: list[Process] = []
    try:
        for index, (work, *args) in enumerate(works):
            started.append(Process(work, *args, env=envs[index] if envs else None))
        yield started
    finally:
        for process in started:
            if process._process.is_alive():
                process.kill()


def outcomes_of(
    count: int, work: Callable[..., Any], *args: Any, within: float = DEADLINE, meeting: Any = None, **variables: str
) -> list[Outcome]:
    """What becomes of ``work(*args)`` in so many ranks, which find torchrun's variables, and these."""
    meeting = meeting or meeting_point()
    envs = [{**rank_env(rank, count), **meeting, **variables} for rank in range(count)]
    with processes([(work, *args)] * count, envs) as started:
        return [one.outcome(within) for one in started]


def faults_of(works: Mapping[str, Callable[..., None]], meet: Callable[[], object], *args: Any) -> dict[str, str]:
    """Do them one after the other with what other ranks do; what has gone wrong with each here: nothing, mostly.

    Args:
        works: by their names; they take ``args`` and a patch that ends with them.
        meet: returns when all ranks are behind a work.
        args: for each of them.
    """
    import pytest  # which the ranks of jobs need not import

    wrong = {}
    for name, work in works.items():
        sys.stderr.write(f"{name}\n")  # the last one is who hangs
        with pytest.MonkeyPatch.context() as patch:
            try:
                work(*args, patch)
                wrong[name] = ""
            except (Exception, pytest.fail.Exception):  # pytest.raises' is none of Exception's
                wrong[name] = traceback.format_exc()
        meet()
    return wrong


def together(
    count: int, work: Callable[..., Any], *args: Any, envs: Any = None, within: float = DEADLINE
) -> list[Outcome]:
    """Run ``work(index, *args)`` in ``count`` processes that all start it at the same moment."""
    gate = _fork.Barrier(count)

    def start(index: int) -> Any:
        gate.wait()
        return work(index, *args)

    with processes([(start, index) for index in range(count)], envs) as started:
        return [process.outcome(within) for process in started]
