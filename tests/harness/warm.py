"""A process that imported torch, Horovod and flytekit once, and forks a supervised process for each case it is sent.

What runs in a case is real: a real agent, rank server and ranks, in processes of their own; only the imports are paid
once for all cases: a case's rank server is forked from here, with its libraries, where the product starts an
interpreter. Each case has a supervisor that every orphan of the case is
handed to (PR_SET_CHILD_SUBREAPER), so that "nothing is left running" is the kernel's answer, not a guess.

Run by :mod:`tests.harness.procs`: ``python -m tests.harness.warm LISTENING_SOCKET_FD [FURTHER_LIBRARY...]``. Every
worker of a test session has a connection to it; with the last one it ends.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pickle
import runpy
import select
import signal
import socket
import sys
import tempfile
import traceback
import weakref
from pathlib import Path
from typing import Any, NoReturn

from flytekitplugins_safedist import envvars, termination
from flytekitplugins_safedist.agent import standby
from flytekitplugins_safedist.compat import flytekit as flytekit_inside
from flytekitplugins_safedist.pod import entrypoint
from flytekitplugins_safedist.rank.fork import add_sets
from flytekitplugins_safedist.rank_server.launch import Launched
from flytekitplugins_safedist.rank_server.libraries import Libraries
from flytekitplugins_safedist.rank_server.server import ForkServer
from tests.harness import hugepages, in_agent
from tests.harness.terminal import on_a_terminal

_PR_SET_CHILD_SUBREAPER = 36
_LEFT_OVER_AFTER_SECONDS = 120.0

LIBRARIES = (
    "torch",
    "torch.distributed",
    "flytekit",
    "flytekit.bin.entrypoint",
    "flytekitplugins_safedist.plugin.task",
    "flytekitplugins_safedist.pod.job_task",
    "torch._dynamo",
)
MODULES = {"horovod": "horovod.torch", "lightning": "lightning.pytorch", "transformers": "transformers.trainer"}
"""What is imported of a package that may not be installed."""


SESSION = Path(tempfile.gettempdir())
"""Before a case has a directory of its own."""

IMPORTED = Libraries()
"""Of the rank servers of all cases."""


def main(arguments: list[str]) -> None:
    listener = socket.socket(fileno=int(arguments[0]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors report by their pipe; nobody waits for them
    further = [one for one in ("horovod", *arguments[1:]) if one not in MODULES or importlib.util.find_spec(one)]
    libraries = [*LIBRARIES, *(MODULES.get(one, one) for one in further)]
    IMPORTED.take([f"import {name}" for name in libraries], needed=True)
    unsafe = IMPORTED.unsafe or IMPORTED.failed or None
    _declare_tasks()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch's have no part in an agent's end: it does not import torch
    hugepages.collapse()
    hello = json.dumps({"unsafe": unsafe}).encode() + b"\n"
    connections: list[socket.socket] = []
    while True:
        for ready in select.select([listener, *connections], [], [])[0]:
            if ready is listener:
                connections.append(listener.accept()[0])
                connections[-1].sendall(hello)
            elif not _asked(ready, [listener, *connections]):
                connections.remove(ready)
                ready.close()
                if not connections:
                    os._exit(0)  # what libraries have to say at an interpreter's end concerns no test


def of_nobody(number: int) -> str:
    """A task of this process."""
    return str(number)


def _declare_tasks() -> None:
    """What each process does once for its first task (patterns are compiled, annotations evaluated), done for all."""
    from flytekit import task
    from flytekit.core.context_manager import FlyteEntities

    from flytekitplugins_safedist import SafeHorovod, SafeTorch

    for config in (SafeTorch(), SafeHorovod()):
        task(task_config=config)(of_nobody)
        del FlyteEntities.entities[-1]
    importlib.metadata.version("torch")  # goes through the names of all that is installed
    gc.freeze()


def _asked(connection: socket.socket, sockets: list[socket.socket]) -> bool:
    """Start the case that a worker asks for; False when the worker is gone."""
    try:
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 1)
    except ConnectionResetError:
        return False
    if not message:
        return False
    if os.fork() == 0:
        for one in sockets:
            one.close()
        _supervise(json.loads(message), descriptors[0])
    for descriptor in descriptors:
        os.close(descriptor)
    return True


def _supervise(case: dict[str, Any], report: int) -> NoReturn:
    """Run one case; tell its process id at once, and at its end its exit code and who was left behind."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    pid = os.fork()
    if pid == 0:
        os.close(report)
        _be_the_case(case)
    os.write(report, json.dumps({"pid": pid}).encode() + b"\n")
    _, status = os.waitpid(pid, 0)
    left = _reap_the_rest()
    code = os.waitstatus_to_exitcode(status)
    os.write(report, json.dumps({"code": code, "left": left}).encode() + b"\n")
    os._exit(0)


def _reap_the_rest() -> list[str]:
    """Wait until no descendant is alive. Those that are after the deadline are named, and ended."""

    def too_late(*_: object) -> NoReturn:
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, _LEFT_OVER_AFTER_SECONDS)
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        return []
    except TimeoutError:
        return _end_descendants()


def _end_descendants() -> list[str]:
    import psutil

    named = []
    for process in psutil.Process().children(recursive=True):
        named.append(f"{process.pid}: {' '.join(process.cmdline()) or process.name()}")
        process.kill()
    return named


def _be_the_case(case: dict[str, Any]) -> NoReturn:
    os.setpgid(0, 0)
    for name, number in (("out", 1), ("err", 2)):
        file = os.open(case[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        os.close(file)
    if case.get("typed") is not None:
        os._exit(on_a_terminal(case["typed"], lambda: _run_the_case(case)))
    _run_the_case(case)


def _run_the_case(case: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]
        os.chdir(case["cwd"])
        os.environ.clear()
        os.environ.update(case["environment"])
        tempfile.tempdir = None  # computed under the warm process's TMPDIR
        if belong := getattr(sys.modules.get("sitecustomize"), "belong", None):
            belong()  # scripts/contexts: to the test that asked, as its environment says
        if "exec" in case:
            os.execvpe(case["exec"][0], case["exec"], dict(os.environ))
        code = _call(case)
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(bool(leave.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.__stdout__.flush()  # a case may have replaced sys.stdout
        sys.__stderr__.flush()
        os._exit(code)


def _call(case: dict[str, Any]) -> int:
    sys.path[:0] = case["path"]
    main = sys.modules["__main__"]
    main.__spec__ = None  # what a rank spawns imports its main module: in a pod a short script, here nothing
    del main.__file__
    in_agent.adapt()
    flytekit_inside.draw_names_anew()  # all cases of this process have one sandbox
    if case["kind"] == "execute" and envvars.JOB not in os.environ:
        os.environ.update(_registered(case["registered"], json.loads(os.environ.pop("TEST_REGISTERED", "{}"))))
    launched = (
        _fork_a_server() if case["libraries"] and (case["kind"] != "entrypoint" or envvars.JOB in os.environ) else None
    )
    if case["kind"] in ("entrypoint", "execute"):  # Kubernetes lends a container a file for its last word
        termination.PATH = str(Path(case["files"], "termination-log"))
        Path(termination.PATH).touch()
    if case["kind"] == "entrypoint":
        sys.argv[1:] = case["arguments"]
        entrypoint.main(launched=launched)
    module, name = case["call"].split(":")
    if case["kind"] == "execute":
        _pyflyte_execute(module, name, Path(case["files"]), case["arguments"], launched)
    if launched is not None:
        launch, ready = standby.launch, [launched]
        standby.launch = lambda environment: ready.pop() if ready else launch(environment)
    if case["kind"] in ("main", "module"):
        sys.argv[1:] = case["arguments"]
        if case["kind"] == "main":
            runpy.run_path(module, run_name=name)
        else:
            runpy.run_module(module, run_name=name, alter_sys=True)
        return 0
    function = getattr(importlib.import_module(module), name)
    try:
        value = function(**case["inputs"])
    except Exception as error:
        Path(case["files"], "error.pickle").write_bytes(pickle.dumps(error))
        traceback.print_exc()
        return 1
    Path(case["files"], "value.json").write_text(json.dumps(value, default=str))
    return 0


def _fork_a_server() -> Launched:
    """A rank server that has imported the libraries; under this case's variables, as far as it can be told."""
    ours, theirs = socket.socketpair()
    agent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.setsid()
        now = add_sets(os.environ, IMPORTED.sets)
        for name in IMPORTED.reads._read:
            IMPORTED.reads.sets(name, None if name in envvars.IDENTITY else now.get(name))
        try:
            ForkServer(theirs, agent, IMPORTED).run()
        finally:
            os._exit(0)
    theirs.close()
    return Launched(ours, pid)


def _registered(call: str, otherwise: dict[str, Any]) -> dict[str, str]:
    """What registration pins into the task's pods. Found out once for all pods whose task may be the same.

    Args:
        call: module and task.
        otherwise: what is told of the job otherwise than the task says.
    """
    said = {name: value for name, value in os.environ.items() if name.startswith("TEST_")}
    same = {**said, **dict.fromkeys(("TEST_SAID", "TEST_WORD", "TEST_POD"))}
    spec = importlib.util.find_spec(call.split(":", maxsplit=1)[0])
    origin = spec and spec.origin
    key = json.dumps([call, origin, origin and Path(origin).stat().st_mtime_ns, sorted(same.items())])
    known = SESSION / f"registered-{hashlib.sha256(key.encode()).hexdigest()}"
    if not known.exists():
        own = Path(f"{known}-{os.getpid()}")
        own.write_text(_pinned(call))
        own.rename(known)
    if not (told := known.read_text()):
        return {}
    job = json.loads(json.loads(told)[envvars.JOB])
    timeouts = {**job["timeouts"], **otherwise.get("timeouts", {})}
    return {envvars.JOB: json.dumps({**job, **otherwise, "timeouts": timeouts})}


def _pinned(call: str) -> str:
    """The same, by another process, for this one is an agent, and imports nothing of the task's; empty where nobody can
    say. A module that says something as it is imported is not heard, and what makes it fail is not there: it was
    registered at another time."""
    mute = {**os.environ, "TEST_SAID": os.devnull, "TEST_WORD": "/dev/zero", "TEST_BROKEN": ""}
    calm = {name: value for name, value in os.environ.items() if not name.startswith("TEST_")}
    for environment in (mute, calm):
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(1, 2)
                os.environ.clear()
                os.environ.update(environment)
                module, name = call.split(":")
                os.write(write, json.dumps(getattr(importlib.import_module(module), name).plan.pinned()).encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            told = pipe.read()
        os.wait()
        if told:
            return told
    return ""


def _pyflyte_execute(module: str, name: str, files: Path, further: list[str], launched: Launched | None) -> NoReturn:
    """``safedist-execute -- pyflyte-execute`` in this process."""
    inputs = files / "inputs.pb"
    inputs.write_bytes(b"")  # an empty LiteralMap
    resolver = "flytekit.core.python_auto_container.default_task_resolver"
    arguments = ["--inputs", str(inputs), "--output-prefix", str(files / "outputs")]
    arguments += ["--raw-output-data-prefix", str(files / "raw"), "--resolver", resolver, *further, "--"]
    command = ["--", "pyflyte-execute", *arguments, "task-module", module, "task-name", name]
    code = os.environ.get("TEST_CODE")  # the address of an archive to be fetched first
    own = ["--additional-distribution", code, "--dest-dir", str(files / "code")] if code else []
    entrypoint.main([*own, *command], launched=launched)


if __name__ == "__main__":
    main(sys.argv[1:])
