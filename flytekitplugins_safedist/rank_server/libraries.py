"""Import libraries once for all ranks of a node, and tell whether forking afterwards is safe.

Forking a process that runs threads copies their locks in whatever state they were, and a CUDA context does not survive
a fork at all. So every import is followed by a look at the process. An import that spoils it is left to the ranks: a
copy of this process from before it goes on in its place.

What libraries read of the environment as they are imported is noted: a rank whose variables say something else then is
a fresh interpreter (:mod:`..rank.fork`).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .. import envvars
from ..errors import IncompatibleVersionError
from ..rank.fork import UNDER, Reads, add_sets, die_with_parent
from .scan import Step

GPU_DEVICES: tuple[str, ...] = ("/dev/nvidia-uvm", "/dev/kfd")
"""What opening a GPU's driver for work opens. NVML, which only asks, opens others, and survives a fork."""

_LEAVING_SECONDS = 2.0
_WAITER = "import os, sys; os._exit(os.waitstatus_to_exitcode(os.waitpid(int(sys.argv[1]), 0)[1]) & 0xFF)"


class Libraries:
    """What this process has imported for its ranks.

    Attributes:
        unsafe: why ranks must not be forked from here, or None when they may.
        left: what is left to each rank, and why.
        failed: the errors of imports, by statement.
        reads: what was read of the environment.
        sets: variables that libraries have set: ranks have them, too (:func:`..rank.fork.add_sets`).
    """

    def __init__(self) -> None:
        self.unsafe: str | None = None
        self.left: list[str] = []
        self.failed: dict[str, str] = {}
        self.reads = Reads()
        self.sets: dict[str, tuple[str | None, str]] = {}
        self.steps: list[str] = []

    def take(self, steps: Sequence[Step], *, needed: bool) -> None:
        """Take the steps that were not taken yet.

        Args:
            steps: imports, and variables that are set before them.
            needed: by every rank: where they spoil this process, so be it. Others are left to the ranks then.
        """
        todo = [step for step in steps if not isinstance(step, str) or step not in self.steps]
        if self.unsafe is not None or not any(isinstance(step, str) for step in todo):
            return
        gc.disable()  # else it looks, hundreds of times, through modules that are there to stay
        try:
            if needed:
                self.unsafe = self._take(todo)
            else:
                self._take_what_is_safe(todo)
        finally:
            gc.enable()
        gc.collect()
        self.reads.draws.find()
        self.reads.top_names()  # looked at here, not in each rank
        gc.freeze()  # what is alive lives as long as the ranks; untouched by the collector, its pages stay shared

    def _take_what_is_safe(self, todo: list[Step]) -> None:
        """Where a step spoils this process, a copy of it from before goes on without that step, under another process
        id; this one waits for its end, without anything in memory."""
        while todo:
            read, write = os.pipe()
            spare = os.fork()
            if spare:
                os.close(read)
                spoilt = self._take(todo)
                if spoilt is not None:
                    _make_way(spare, write, json.dumps([self.steps[-1], spoilt]))
                os.close(write)
                os.waitpid(spare, 0)
                return
            os.close(write)
            with os.fdopen(read) as pipe:
                answer = pipe.read()
            if not answer:  # all is well over there, or somebody has ended it
                os._exit(0)
            die_with_parent(signal.SIGKILL)
            step, why = json.loads(answer)
            self.left.append(f"{why}: each rank imports it by itself")
            # What else imports it would spoil this process, too, and each time all would be imported once more.
            todo = [each for each in todo if not (isinstance(each, str) and _tops(each) & _tops(step))]
            self.steps.append(step)

    def _take(self, todo: Sequence[Step]) -> str | None:
        """Take steps, up to the first that spoils this process; why it does."""
        names: dict[str, Any] = {"__name__": "imports", "__builtins__": __builtins__}
        with self._under():
            for step in todo:
                if isinstance(step, str):
                    self.steps.append(step)
                    spoilt = self._import(step, names)
                    if spoilt is not None:
                        return spoilt
                else:
                    name, value, is_default = step
                    os.environ[name] = os.environ.get(name, value) if is_default else value
        return None

    def _import(self, statement: str, names: dict[str, Any]) -> str | None:
        before = dict(os.environ)
        try:
            with self.reads.noted():
                exec(compile(statement, "<import>", "exec"), names)  # noqa: S102  (an import statement, no more)
        except IncompatibleVersionError as error:  # fresh interpreters will say so themselves, where it is seen
            return str(error)
        except BaseException as error:  # a library may even call sys.exit
            self.failed[statement] = f"{type(error).__name__}: {error}"
        for name, value in os.environ.items():
            if (was := before.get(name)) != value:
                self.sets[name] = self.sets.get(name, (was, value))[0], value
        for name in self.sets:
            self.reads.sets(name, os.environ.get(name))
        return unsafe_to_fork(f"`{' '.join(statement.split())[:200]}`")

    @contextlib.contextmanager
    def _under(self) -> Iterator[None]:
        """Inside, variables are those for imports: what a node's pod is told of its place is no rank's."""
        before = dict(os.environ)
        for name in envvars.IDENTITY:
            os.environ.pop(name, None)
        os.environ.update({**add_sets(os.environ, self.sets), **UNDER})
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def _tops(step: str) -> set[str]:
    """The packages that a step names."""
    return set(re.findall(r"^\s*(?:import|from) (\w+)", step, re.MULTILINE))


def _make_way(spare: int, pipe: int, answer: str) -> NoReturn:
    """Let the copy go on, and only wait for it: whoever has started this process knows its number."""
    os.write(pipe, answer.encode())
    die_with_parent(signal.SIGCONT)  # harmless: the copy sees by its connection that the agent is gone
    # What is open here is not open there: the kernel closes it (O_CLOEXEC).
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", _WAITER, str(spare)])  # noqa: S606


def unsafe_to_fork(culprit: str) -> str | None:
    """Why this process must not be forked, or None.

    Args:
        culprit: what was done last, for the message.
    """
    threads = _threads()
    if threads:
        started = f"{culprit} starts {len(threads)} thread(s) ({', '.join(threads)})"
        return f"{started}, and a forked copy of their locks can hang"
    torch_cuda = sys.modules.get("torch.cuda")
    if torch_cuda is not None and torch_cuda.is_initialized():
        return f"{culprit} initialises CUDA, which does not survive a fork"
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()).startswith(GPU_DEVICES):
                return f"{culprit} opens the GPU driver, whose state does not survive a fork"
    # With a lock of multiprocessing's ranks would wait for each other, and for one that was killed.
    if re.search(r"^\S+ .w.s .* /dev/shm/", Path("/proc/self/maps").read_text(errors="replace"), re.MULTILINE):
        return f"{culprit} makes a lock or memory that forked processes share"
    return None


def _threads() -> list[str]:
    """Names of the threads beside this one. One that was joined takes a moment to leave the kernel's list: give it
    that."""
    deadline = time.monotonic() + _LEAVING_SECONDS
    own = threading.get_native_id()
    while True:
        others = {int(task.name) for task in Path("/proc/self/task").iterdir()} - {own}
        if not others or time.monotonic() > deadline:
            break
        time.sleep(0.002)
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    return [named.get(thread) or _native_name(thread) for thread in sorted(others)]


def _native_name(thread: int) -> str:
    """What the kernel calls a thread that Python does not know: native code has started it."""
    with contextlib.suppress(OSError):
        name = Path(f"/proc/self/task/{thread}/comm").read_text(errors="backslashreplace")  # any bytes, and cut
        return f"native {name.strip()!r}"
    return "native, gone by now"
