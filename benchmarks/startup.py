"""From command start to the last rank inside the user's function, and to its first optimizer step; and what it takes.

The commands are those that run in a pod under fast registration, here on one machine:

- ``horovodrun``: what a stock HorovodJob runs, with one ``--dest-dir`` per rank so that it survives its own race;
- ``elastic``: kfpytorch's ``Elastic`` with spawn;
- ``safedist``: ours; ``safedist spawn``: ours with ``start_method="spawn"``.

Runs are interleaved and medians are printed. Seconds end when the last rank has entered the function, and when the last
one has made the first step of a small model's optimizer. CPU seconds are those of the whole command with all its
descendants, until that step and to its end. Memory is the PSS of every process of the job while all ranks wait after
that step; "per further rank" is the slope between the smallest and the largest number of ranks.

    python benchmarks/startup.py --ranks 1 2 4 8 --runs 5
    python benchmarks/startup.py --ranks 4 --runs 5 --imports 3    # a module that takes 3 CPU seconds to import
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.harness.registered import registered

PROJECT = Path(__file__).parent / "startup_project"
MARKER = "BENCH_JOB"
DEADLINE_SECONDS = 300.0


@dataclass(frozen=True)
class Run:
    """One run: seconds to the last entry and to the last rank's first step, CPU seconds until then and in total, PSS of
    the whole job in bytes."""

    entry: float
    step: float
    step_cpu: float
    cpu: float
    pss: int


def archive(target: Path) -> Path:
    """The code archive, as fast registration makes it."""
    with tarfile.open(target, "w:gz") as tar:
        for file in sorted(PROJECT.glob("*.py")):
            tar.add(file, arcname=file.name)
    return target


def execute_arguments(work: Path, task: str) -> list[str]:
    """The ``pyflyte-execute`` part of every variant."""
    from flyteidl.core import literals_pb2

    inputs = literals_pb2.LiteralMap()
    inputs.literals["directory"].scalar.primitive.string_value = str(work)
    (work / "inputs.pb").write_bytes(inputs.SerializeToString())
    return [
        "pyflyte-execute",
        *("--inputs", str(work / "inputs.pb")),
        *("--output-prefix", str(work / "out")),
        *("--raw-output-data-prefix", str(work / "raw")),
        *("--resolver", "flytekit.core.python_auto_container.default_task_resolver"),
        *("--", "task-module", "startup_tasks", "task-name", task),
    ]


def stock_command(work: Path, code: Path, ranks: int) -> list[str]:
    """``horovodrun … pyflyte-fast-execute …``: every rank unpacks, each into a directory of its own."""
    fast = ["pyflyte-fast-execute", "--additional-distribution", str(code), "--dest-dir", "@DEST@", "--"]
    line = " ".join([*fast, *execute_arguments(work, "stock")]).replace("@DEST@", f"{work}/code-$HOROVOD_RANK")
    setup = f"mkdir -p {work}/code-$HOROVOD_RANK {work}/out-$HOROVOD_RANK; exec {line}"
    per_rank = setup.replace(f"--output-prefix {work}/out", f"--output-prefix {work}/out-$HOROVOD_RANK")
    return ["horovodrun", "--gloo", "-np", str(ranks), "-H", f"localhost:{ranks}", "sh", "-c", per_rank]


def elastic_command(work: Path, code: Path, ranks: int) -> list[str]:
    """``pyflyte-fast-execute … pyflyte-execute``, whose task spawns the ranks."""
    dest = work / "code"
    dest.mkdir()
    fast = ["pyflyte-fast-execute", "--additional-distribution", str(code), "--dest-dir", str(dest), "--"]
    return [*fast, *execute_arguments(work, "elastic")]


def our_command(task: str) -> Callable[[Path, Path, int], list[str]]:
    """``safedist-execute … pyflyte-execute``."""

    def command(work: Path, code: Path, ranks: int) -> list[str]:
        dest = work / "code"
        dest.mkdir()
        ours = ["safedist-execute", "--additional-distribution", str(code), "--dest-dir", str(dest), "--"]
        return [*ours, *execute_arguments(work, task)]

    return command


VARIANTS: dict[str, Callable[[Path, Path, int], list[str]]] = {
    "horovodrun": stock_command,
    "elastic": elastic_command,
    "safedist": our_command("ours"),
    "safedist spawn": our_command("ours_spawn"),
}


def of_job(marker: str, measure: Callable[[Path], float]) -> float:
    """The sum over every process that carries the marker in its environment."""
    wanted = f"{MARKER}={marker}".encode()
    total = 0.0
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                total += measure(process)
        except OSError:
            continue
    return total


def pss_of(process: Path) -> float:
    """Bytes of proportional set size."""
    lines = (process / "smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def cpu_of(process: Path) -> float:
    """CPU seconds, with those of children that have ended (proc(5): stat, fields 14 to 17)."""
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def run(variant: str, ranks: int, imports: float) -> Run:
    """One run of one variant, whose module takes so many CPU seconds more to import."""
    with tempfile.TemporaryDirectory(prefix="startup-") as name:
        work = Path(name)
        code = archive(work / "code.tar.gz")
        command = VARIANTS[variant](work, code, ranks)
        marker = uuid.uuid4().hex
        method = "spawn" if variant == "safedist spawn" else "preload"
        pinned = registered(backend="horovod", nproc_per_node=ranks, start_method=method)
        environment = {
            **os.environ,
            **(pinned if variant.startswith("safedist") else {}),
            "BENCH_RANKS": str(ranks),
            "BENCH_IMPORT_SECONDS": str(imports),
            MARKER: marker,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "FLYTE_SDK_LOGGING_LEVEL": "50",
        }
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with (work / "log").open("wb") as log:
            started = time.time()
            process = subprocess.Popen(
                command, env=environment, cwd=work, stdout=log, stderr=log, start_new_session=True
            )
            try:
                entry = wait_for_marks(work, "entered", ranks, process) - started
                step = wait_for_marks(work, "stepped", ranks, process) - started
                step_cpu = of_job(marker, cpu_of)
                pss = of_job(marker, pss_of)
                (work / "release").touch()
                process.wait(DEADLINE_SECONDS)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                shutil.copy(work / "log", "startup-failed.log")
                raise
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if process.returncode != 0:
            shutil.copy(work / "log", "startup-failed.log")
            raise SystemExit(f"{variant} with {ranks} ranks ended with {process.returncode}; see startup-failed.log")
        return Run(entry=entry, step=step, step_cpu=step_cpu, cpu=cpu, pss=int(pss))


def wait_for_marks(work: Path, what: str, ranks: int, process: subprocess.Popen[bytes]) -> float:
    """The time (seconds since the epoch) at which the last rank had left its mark."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        marks = list(work.glob(f"*.{what}"))
        if len(marks) == ranks:
            return max(float(mark.read_text()) for mark in marks)
        time.sleep(0.02)
    raise SystemExit(f"only {len(list(work.glob(f'*.{what}')))} of {ranks} ranks have {what}")


def main() -> None:
    """Run everything, interleaved, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--imports", type=float, default=0.0, metavar="SECONDS", help="further CPU time of the import")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    runs: dict[tuple[str, int], list[Run]] = {}
    for _ in range(arguments.runs):
        for ranks in arguments.ranks:
            for variant in arguments.variants:
                runs.setdefault((variant, ranks), []).append(run(variant, ranks, arguments.imports))
    report(runs, arguments.ranks, arguments.variants)
    if arguments.json:
        rows = [
            {"variant": variant, "ranks": ranks, **dataclasses.asdict(one)}
            for (variant, ranks), each in runs.items()
            for one in each
        ]
        arguments.json.write_text(json.dumps(rows, indent=1))


def report(runs: dict[tuple[str, int], list[Run]], ranks: list[int], variants: list[str]) -> None:
    """Print the table."""

    def median(variant: str, count: int, what: Callable[[Run], float]) -> float:
        return statistics.median(what(one) for one in runs[variant, count])

    columns = f"{'to last entry':>14} {'first step':>11} {'CPU to it':>10} {'CPU':>9} {'PSS of job':>11}"
    print(f"{'variant':16} {'ranks':>5} {columns}")
    for count in ranks:
        for variant in variants:
            print(
                f"{variant:16} {count:5d} {median(variant, count, lambda one: one.entry):12.2f} s "
                f"{median(variant, count, lambda one: one.step):9.2f} s "
                f"{median(variant, count, lambda one: one.step_cpu):8.2f} s "
                f"{median(variant, count, lambda one: one.cpu):7.2f} s "
                f"{median(variant, count, lambda one: one.pss) / 2**20:7.0f} MiB"
            )
    few, many = min(ranks), max(ranks)
    if few == many:
        return
    print("\nmemory per further rank (PSS):")
    for variant in variants:
        slope = (median(variant, many, lambda one: one.pss) - median(variant, few, lambda one: one.pss)) / (many - few)
        print(f"  {variant:16} {slope / 2**20:7.0f} MiB")
    if "safedist" not in variants:
        return
    print("\nsafedist against the others (ratio; below 1 is better):")
    for variant in variants:
        for count in ranks:
            entry = median("safedist", count, lambda one: one.entry) / median(variant, count, lambda one: one.entry)
            cpu = median("safedist", count, lambda one: one.cpu) / median(variant, count, lambda one: one.cpu)
            step = median("safedist", count, lambda one: one.step) / median(variant, count, lambda one: one.step)
            its = median("safedist", count, lambda one: one.step_cpu) / median(variant, count, lambda one: one.step_cpu)
            print(
                f"  {variant:16} {count:2d} ranks: to last entry {entry:.2f}, CPU {cpu:.2f}; "
                f"to the first step {step:.2f}, CPU {its:.2f}"
            )


if __name__ == "__main__":
    main()
