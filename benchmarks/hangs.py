"""What it costs to be watched for hangs: the time of a step, the agent's share of a core; how long it takes to look at
many ranks at once; and how soon ranks that hang are back in their function.

The first two are medians of interleaved runs of one function: as by default, with torch's flight recorder on and the
agent asking it each 30 seconds, which most runs are too short for; with a floor, for which it asks more often; and
with the recorder off.

The last is tried with each kind of hang that tests/agents/test_hangs.py has. What ends such a job by itself, and at
once, is left out.

    python benchmarks/hangs.py --ranks 4 8 --runs 5 --stand 64
    python benchmarks/hangs.py --ranks --stand --hang
    python benchmarks/hangs.py --ranks --stand --judge 1024 8192
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flytekitplugins_safedist.hangs import recorders, snapshot
from flytekitplugins_safedist.hangs.evidence import text_of
from flytekitplugins_safedist.hangs.judge import judge
from flytekitplugins_safedist.hangs.processes import Process
from flytekitplugins_safedist.hangs.snapshot import Snapshot
from flytekitplugins_safedist.hangs.stacks import Frame
from flytekitplugins_safedist.hangs.waits import Wait
from tests.harness.procs import Warm, gate, listening_for_workers

PROJECT = Path(__file__).parent / "hangs_project"
NOT = "not watched"
VARIANTS: dict[str, dict[str, str]] = {
    "watched": {},
    "a floor of 10 s": {"HANGS_LOOKS": "1"},
    NOT: {"TORCH_FR_BUFFER_SIZE": "0"},
}
CALL = "import os; os.environ['HANGS_AGENT'] = str(os.getpid()); import hangs_measure; "
STARTS = 300.0
"""Seconds for many ranks to start on few cores."""


THRESHOLD = 5.0
"""Of the tasks that start again (``starts_again`` in the tests' jobs)."""
JOBS = {"torch": "job_hangs", "horovod": "job_hangs_horovod"}


def environment(ranks: int, scratch: str, **more: str) -> dict[str, str]:
    given = {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1", "TMPDIR": scratch, "HANGS_RANKS": str(ranks)}
    return {**os.environ, **given, **more}


def run(ranks: int, steps: int, variant: str) -> dict[str, float]:
    """One job."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-c", f"{CALL}print(hangs_measure.measured(steps={steps}))"]
        variables = environment(ranks, scratch, **VARIANTS[variant])
        done = subprocess.run(command, env=variables, check=True, capture_output=True, text=True)
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found


def compare(ranks: int, runs: int, steps: int) -> None:
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for number in range(runs):
        for variant in list(VARIANTS)[:: 1 if number % 2 else -1]:  # neither is always the second
            found[variant].append(run(ranks, steps, variant))
    for variant, its in found.items():
        step = [each["step"] * 1e3 for each in its]
        agent = statistics.median(each["agent"] for each in its)
        shown = f"step {statistics.median(step):.3f} ms ({min(step):.3f} to {max(step):.3f})"
        print(f"{ranks} ranks, {variant:19} {shown}; agent {agent:.2%} of a core; medians of {runs}", flush=True)
    for variant in VARIANTS.keys() - {NOT}:
        pairs = [one["step"] / other["step"] for one, other in zip(found[variant], found[NOT], strict=True)]
        print(f"{ranks} ranks, {variant} / {NOT}: {statistics.median(pairs):.4f} (of pairs)", flush=True)


def look_at(ranks: int, times: int = 5) -> None:
    """All that a node's agent asks for at a suspicion, of ranks that are connected and sleep."""
    with tempfile.TemporaryDirectory(prefix="h", dir="/tmp") as scratch, tempfile.TemporaryDirectory() as there:
        command = [sys.executable, "-c", f"{CALL}hangs_measure.stands()"]
        job = subprocess.Popen(command, env=environment(ranks, scratch, HANGS_THERE=there), stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + STARTS
            while len(list(Path(there).iterdir())) < ranks and time.monotonic() < deadline:
                time.sleep(1)
            took = [_look(Path(scratch), ranks) for _ in range(times)]
        finally:
            job.send_signal(signal.SIGINT)
            job.wait(60)
    print(f"{ranks} ranks looked at in {statistics.median(took):.2f} s (at most {max(took):.2f}; {times} times)")


def _look(scratch: Path, ranks: int) -> float:
    [places] = snapshot.running_below(scratch).values()
    began = time.monotonic()
    taken = snapshot.take(places, snapshot.by_ourselves)
    sockets = {rank: path.with_suffix(".fr") for rank, (_, path) in places.items()}
    records = recorders.read(sockets, {})
    took = time.monotonic() - began
    answered = sum(bool(each.threads) for each in taken), len(records)
    if answered != (ranks, ranks):
        print(f"of {ranks} ranks {answered[0]} have shown their stacks, {answered[1]} their collectives")
    return took


def judge_job(ranks: int) -> None:
    """All ranks of a job, of which one sleeps, or none does, in groups of eight and in one of all."""
    world, stack = text_of(range(ranks)), (Frame("/app/train.py", 7, "train"),) * 30
    for name, sleeper in (("rank 0 sleeps", 0), ("all wait", -1)):
        snapshots = []
        for rank in range(ranks):
            own = text_of(range(rank // 8 * 8, rank // 8 * 8 + 8))
            waits = tuple(
                Wait(rank, group, members, "all_reduce of Float[1048576]", 500, 1.0, "nccl", 600.0, 570.0, age=999.0)
                for group, members in (("0", world), (str(1 + rank // 8), own))
            )
            begun = {wait.key: wait.number - (rank == sleeper) for wait in waits}
            latest = tuple((wait.key, number, wait.operation) for wait in waits for number in range(493, 501))
            waits = waits if rank != sleeper else ()
            one = Snapshot(rank, Process(rank, "S"), (stack,), waits=waits, begun=begun, latest=latest, is_whole=True)
            snapshots.append(one)
        began = time.perf_counter()
        hang = judge(snapshots)
        took = time.perf_counter() - began
        kind = hang.kind if hang is not None else "none"
        print(f"{ranks} ranks, {name}: {kind} in {took:.2f} s (load {os.getloadavg()[0]:.1f})", flush=True)


def come_back() -> None:
    """Seconds from a hang until rank 0 is in the function again, beyond the threshold."""
    beyond: list[float] = []
    with tempfile.TemporaryDirectory(prefix="h", dir="/tmp") as scratch:
        warm = Warm(listening_for_workers(Path(scratch)))
        for library, case in importlib.import_module("tests.agents.test_hangs").CELLS:
            if ":" in getattr(case, library):
                continue
            directory, module = Path(scratch) / str(len(beyond)), JOBS[library]
            with gate(directory / "gate") as ranks:
                how = {"inputs": {"how": case.how}, "environment": ranks.environment}
                ended = warm.run(f"{module}:starts_again", directory / "job", **how)
                began = min(map(float, ranks.pending().split()))
            if "failed (HangError); all ranks start again" not in ended.out + ended.err:
                raise SystemExit(f"{library}, {case.how}: no hang:\n{ended.out}{ended.err}")
            beyond.append(ended.value - began - THRESHOLD)
            load = os.getloadavg()[0]
            print(f"{library}, {case.what}: threshold + {beyond[-1]:.1f} s (load {load:.1f})", flush=True)
        warm.close()
    median = statistics.median(beyond)
    print(f"{len(beyond)} hangs: threshold + {min(beyond):.1f} to {max(beyond):.1f} s, median {median:.1f} s")


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--stand", type=int, nargs="*", default=[64], help="ranks to look at")
    parser.add_argument("--judge", type=int, nargs="*", default=[8192], help="ranks of a job that is judged")
    parser.add_argument("--hang", action="store_true", help="have ranks hang, too, in every way")
    options = parser.parse_args()
    for ranks in options.ranks:
        compare(ranks, options.runs, options.steps)
    for ranks in options.stand:
        look_at(ranks)
    for ranks in options.judge:
        judge_job(ranks)
    if options.hang:
        come_back()


if __name__ == "__main__":
    main()
