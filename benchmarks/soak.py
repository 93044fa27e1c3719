"""A soak: jobs of 2 nodes x 2 real ranks, each with one fault drawn at random, and what must be true of every one.

Torch and Horovod, a fixed number of nodes and a range. A fault is a rank's (it raises something ordinary, giant or odd,
is killed, crashes, leaves), an agent's (SIGTERM, SIGKILL, a freeze; when all ranks are in the function, or at any
time), or the network's (every connection of one node to the job's store is cut). Pods whose agent leaves with another
code than 0 are started again, as the kubelet does under the policy OnFailure. Then:

- the job ends within its bound;
- outputs.pb is uploaded, or the one error.pb, which names the rank that failed and has the right code and kind;
- every pod exits 0 in the end, and before that otherwise only where its own agent or its store was hit;
- no process and no scratch is left.

    python benchmarks/soak.py --runs 200
    python benchmarks/soak.py --seed 7 --only 31       # the 32nd run of that seed again
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import soaking
from flyteidl.core import errors_pb2, literals_pb2

from tests.harness.procs import Ended, Gate, Running, Warm, gate
from tests.harness.proxy import Proxy
from tests.harness.registered import registered_as

BOUND_SECONDS = 180.0
"""For one job: three heartbeats, two starts of each pod and the waits between them, on a machine that is busy."""

LIVES = 7
"""Starts of a pod: an operator's six restarts."""

RANK_FAULTS = {
    "raise": "USER:ValueError",
    "giant": "USER:ValueError",
    "surrogate": "USER:FileNotFoundError",
    "unspeakable": "USER:UnspeakableError",
    "sys.exit": "USER:SystemExit",
    "os._exit": "USER:Exit3",
    "SIGKILL": "SYSTEM:SIGKILL",
    "SIGSEGV": "USER:SIGSEGV",
    "SIGABRT": "USER:SIGABRT",
}
"""What a rank may do, and the code that it must be told by."""

AGENT_FAULTS = ("SIGTERM", "SIGKILL", "freeze", "cut")


@dataclass(frozen=True)
class Run:
    """One run, drawn from its seed.

    Attributes:
        task: what runs.
        kind: the fault; "none" for a run without one.
        rank: that fails; -1 where none does.
        step: at which it fails.
        once: whether the next round goes well.
        pod: whose agent or store is hit; -1 where none is.
        at: seconds from the start to that; negative: when all ranks are in the function.
    """

    task: str
    kind: str
    rank: int = -1
    step: int = 0
    once: bool = False
    pod: int = -1
    at: float = 0.0

    @property
    def code(self) -> str | None:
        """The code of the error that must be uploaded; None: outputs must be."""
        return RANK_FAULTS[self.kind] if self.rank >= 0 and not self.once else None


def drawn(seed: int, number: int) -> Run:
    """The run of that number: the same for one seed, whatever ran before."""
    die = random.Random(f"{seed}/{number}")
    task = die.choice(["torch_fixed", "torch_range", "horovod_fixed", "horovod_range"])
    what = die.choice(["none", "rank", "rank", "rank", "rank", "agent", "agent", "agent"])
    if what == "none":
        return Run(task, "none")
    if what == "rank":
        kind = die.choice(list(RANK_FAULTS))
        return Run(task, kind, rank=die.randrange(4), step=die.randrange(10), once=die.random() < 0.3)
    at = -1.0 if die.random() < 0.6 else round(die.uniform(0.0, 10.0), 2)
    kind = die.choice(AGENT_FAULTS)
    return Run(task, kind, pod=1 if kind == "cut" else die.randrange(2), at=at)


class Job:
    """Two pods of one job, started again as often as they end otherwise than with 0."""

    def __init__(self, warm: Warm, run: Run, directory: Path, gated: Gate | None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.proxy = Proxy(self.port)
        self.warm, self.run, self.directory = warm, run, directory
        self.fault = asdict(run) if run.rank >= 0 else None
        self.gated = gated
        self.lives: dict[int, list[Ended]] = {0: [], 1: []}
        self.now: dict[int, Running] = {}
        self.over = threading.Event()

    def start(self, pod: int) -> Running:
        files = self.directory / f"pod-{pod}-{len(self.lives[pod])}"
        environment = {
            "FLYTE_INTERNAL_EXECUTION_ID": self.directory.name,
            **registered_as(getattr(importlib.import_module("tests.jobs.job_soak"), self.run.task).task_config),
            "TEST_FAULT": json.dumps(self.fault),
            **(self._fixed(pod) if self.run.task.endswith("fixed") else self._range(pod)),
            **({"TEST_GATE": "1", **self.gated.environment} if self.gated is not None else {}),
        }
        arguments = ["--output-prefix", str(self.directory / "outputs")]
        call = f"job_soak:{self.run.task}"
        return self.warm.start(call, files, environment=environment, kind="execute", arguments=arguments)

    def _store(self, pod: int) -> str:
        return str(self.proxy.port if pod == self.run.pod and self.run.kind == "cut" else self.port)

    def _fixed(self, pod: int) -> dict[str, str]:
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._store(pod)}
        place = {"RANK": str(pod), "WORLD_SIZE": "2", "PET_NODE_RANK": str(pod), "PET_NNODES": "2"}
        return {**meet, **place, **{f"PET_{name}": value for name, value in meet.items()}}

    def _range(self, pod: int) -> dict[str, str]:
        rendezvous = {"PET_RDZV_ENDPOINT": f"127.0.0.1:{self._store(pod)}", "PET_RDZV_BACKEND": "c10d"}
        return {"PET_NNODES": "2:3", **rendezvous}

    def live(self, pod: int) -> None:
        """Run a pod until it exits 0, or has done so too often otherwise."""
        for _ in range(LIVES):
            self.now[pod] = self.start(pod)
            ended = self.now[pod].wait()
            self.lives[pod].append(ended)
            if ended.code == 0 or self.over.is_set():
                return

    def hit(self) -> None:
        """The fault of an agent or its network, when it is time."""
        run = self.run
        if run.at < 0:
            assert self.gated is not None
            self.gated.heard(4)
        elif self.over.wait(run.at):
            return
        try:
            if run.kind == "cut":
                self.proxy.cut()
            elif run.kind == "freeze":
                self.now[run.pod].signal(signal.SIGSTOP)
                self.over.wait(12.0)  # longer than the heartbeat
                self.now[run.pod].signal(signal.SIGCONT)
            else:
                self.now[run.pod].signal(getattr(signal, run.kind))
        except ProcessLookupError:
            return  # it had ended before
        finally:
            if self.gated is not None:
                self.gated.let_go(64)

    def end(self) -> None:
        """Whatever is left of it."""
        self.over.set()
        self.proxy.close()
        for running in self.now.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGCONT)
                os.killpg(running.pid, signal.SIGKILL)


def checked(job: Job) -> None:
    """What must be true when it is over."""
    run, outputs = job.run, job.directory / "outputs"
    uploaded = sorted(path.name for path in outputs.glob("[!.]*"))  # beside these lies the leader's sign
    for pod, lives in job.lives.items():
        codes = [ended.code for ended in lives]
        assert codes[-1:] == [0], f"pod {pod} ended with {codes}"
        assert run.pod >= 0 or codes == [0], f"pod {pod} ended with {codes}, and nothing had hit its agent"
        assert [ended.left for ended in lives] == [[]] * len(lives), f"pod {pod} left processes: {lives[-1].left}"
        assert [ended.scratch for ended in lives] == [[]] * len(lives), f"pod {pod} left scratch"
    if run.code is None:
        assert "error.pb" not in uploaded, error_of(outputs).message
        assert "outputs.pb" in uploaded, f"uploaded: {uploaded}"
        value = value_of(outputs)
        assert value.startswith("6 from 4 ranks"), value
        return
    assert uploaded == ["error.pb"], f"uploaded: {uploaded}"
    error = error_of(outputs)
    kinds = errors_pb2.ContainerError
    assert error.code == run.code, f"{error.code} instead of {run.code}: {error.message[:2000]}"
    assert f"rank {run.rank} (local_rank {run.rank % 2})" in error.message.splitlines()[0], error.message[:2000]
    assert error.kind == (kinds.RECOVERABLE if run.kind == "SIGKILL" else kinds.NON_RECOVERABLE)
    assert "all 1 restart(s) of max_restarts are spent" in error.message, error.message[-2000:]


def error_of(outputs: Path) -> errors_pb2.ContainerError:
    document = errors_pb2.ErrorDocument()
    document.ParseFromString((outputs / "error.pb").read_bytes())
    return document.error


def value_of(outputs: Path) -> str:
    literals = literals_pb2.LiteralMap()
    literals.ParseFromString((outputs / "outputs.pb").read_bytes())
    value: str = literals.literals["o0"].scalar.primitive.string_value
    return value


def carried_out(run: Run, directory: Path, warm: Warm) -> str:
    """One job from its start to what is left of it; returns its task.

    Raises:
        AssertionError: something of what must be true is not.
    """
    directory.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        gated = stack.enter_context(gate(directory / "gate", BOUND_SECONDS)) if run.pod >= 0 and run.at < 0 else None
        job = Job(warm, run, directory, gated)
        threads = ThreadPoolExecutor(3)
        try:
            pods: list[Future[None]] = [threads.submit(job.live, pod) for pod in (1, 0)]
            if run.pod >= 0:
                while len(job.now) < 2:
                    select.select([], [], [], 0.01)
                threads.submit(job.hit)
            deadline = time.monotonic() + BOUND_SECONDS
            for one in pods:
                try:
                    one.result(max(0.0, deadline - time.monotonic()))
                except FutureTimeoutError:
                    raise AssertionError(f"not over after {BOUND_SECONDS:g} s") from None
            checked(job)
        finally:
            job.end()
            threads.shutdown(wait=False, cancel_futures=True)
    return run.task


if __name__ == "__main__":
    sys.exit(soaking.main(__doc__, drawn, carried_out))
