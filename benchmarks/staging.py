"""Staging a code archive: against ``tar -xzf``, against what flytekit does in every rank, and from a store of 100 MB/s.

Runs are interleaved and medians are printed, with the ratio that matters. What an interpreter and its imports take is
printed apart and not counted: every measured process says "ready" first and is then let go. CPU seconds are those of
the process and its children from then on.

    python benchmarks/staging.py                      # everything; half an hour
    python benchmarks/staging.py --sets i --runs 3    # a look
    python benchmarks/staging.py --before ../earlier  # beside another checkout, with its own .venv
"""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from staging_stores import Reads, counted, s3, slow_store

HERE = Path(__file__).resolve().parents[1]
RANKS = 8
BEFORE = "before"
PARTS = ["single", "found", "overlap", "node"]
MB = 1_000_000
FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, EXT4_TOPDIR_FL = 0x80086601, 0x40086602, 0x20000
"""linux/fs.h, fs/ext4/ext4.h"""


@dataclass(frozen=True)
class Dataset:
    """Files of one size in ``packages`` x ``parts`` directories, part of which does not compress (images, weights),
    the rest being words."""

    name: str
    files: int
    size: int
    incompressible: float
    packages: int
    parts: int

    def make(self, root: Path) -> Path:
        """The archive, as fast registration makes it: files only, one time for all, as a float."""
        path = root / f"fast-{self.name}.tar.gz"
        chance = random.Random(1)
        words = [bytes(chance.choices(b"abcdefghijklmnopqrstuvwxyz_", k=chance.randint(2, 9))) for _ in range(3000)]
        with tarfile.open(path, "w:gz", compresslevel=6 if self.incompressible < 1 else 1) as archive:
            for number in range(self.files):
                length = self.size // self.files
                if chance.random() < self.incompressible:
                    data = chance.randbytes(length)
                else:
                    data = b" ".join(chance.choices(words, k=length // 5))[:length]
                info = tarfile.TarInfo(f"pkg{number % self.packages}/part{number % self.parts}/module_{number}.py")
                info.size, info.mtime = len(data), 315532800.0
                archive.addfile(info, io.BytesIO(data))
        return path


DATASETS = {
    "i": Dataset("i", 300, 3 * MB, 0.0, 10, 3),
    "i-dirs": Dataset("i-dirs", 300, 3 * MB, 0.0, 40, 7),
    "ii": Dataset("ii", 5_000, 100 * MB, 0.5, 40, 7),
    "iii": Dataset("iii", 20, 1_000 * MB, 1.0, 5, 4),
}
"""Installed packages (flytekit, torch, sklearn, moto) have 5 to 7 modules a directory; (i) has 10 / 3 directories, that
is 7.5 files in each of 40. (i-dirs) is the same with a directory for every file: it shows what directories cost."""


# --- what is measured, in a process of its own ---------------------------------------------------------------------
def work_tar(order: dict[str, str]) -> None:
    """The practical limit: GNU tar on a local file."""
    subprocess.run(["tar", "-xzf", order["uri"], "-C", order["dest"]], check=True)


def work_flytekit(order: dict[str, str]) -> None:
    """What every rank does under the stock command."""
    from flytekit.tools.fast_registration import download_distribution

    download_distribution(order["uri"], order["dest"])


def work_ours(order: dict[str, str]) -> None:
    """The whole of it, as in a pod: fetch, verify, unpack, put in place."""
    from flytekitplugins_safedist.pod.staging import stage

    stage(order["uri"], Path(order["dest"]))


def work_unpack(order: dict[str, str]) -> None:
    """Unpacking alone, of a local file: no copy, digest, rename, or destination."""
    from flytekitplugins_safedist.pod.staging.unpack import Arriving, Options, Stream, Unpacking

    with open(order["uri"], "rb", buffering=0) as file:
        stream = Stream(Arriving(lambda _, most: file.read(most), len), "x", Options(), gzipped=True)
        Unpacking(stream, Path(order["dest"]), 1_000_000).run()


def work_download(order: dict[str, str]) -> None:
    """The bare download, by the same client."""
    from flytekit.core.context_manager import FlyteContextManager

    access = FlyteContextManager.current_context().file_access
    store = access.get_filesystem_for_path(order["uri"])
    store.get_file(order["uri"], str(Path(order["dest"]) / "archive"), max_concurrency=1)


WORK: dict[str, Callable[[dict[str, str]], None]] = {
    "tar -xzf": work_tar,
    "flytekit": work_flytekit,
    "safedist": work_ours,
    "found": work_ours,
    "unpack alone": work_unpack,
    "download": work_download,
}


def worker(order: dict[str, str]) -> None:
    """Import what the work needs, say so, wait, work, report."""
    if order["work"] in ("safedist", "found", "unpack alone", "download"):
        import fsspec.implementations.local  # noqa: F401

        import flytekitplugins_safedist.pod.staging.stage  # noqa: F401
    if order["work"] == "flytekit" or "://" in order["uri"]:
        import flytekit.tools.fast_registration  # noqa: F401
        import s3fs  # noqa: F401
    if order["work"] == "found":
        work_ours(order)
    before = _cpu()
    memory = _peak()
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    WORK[order["work"]](order)
    wall = time.perf_counter() - start
    print(json.dumps({"wall": wall, "cpu": _cpu() - before, "memory": _peak() - memory}), flush=True)


def _peak() -> int:
    """Bytes of memory this process has held at most. Not ru_maxrss, which also remembers the process it came from."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


# --- runs ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Run:
    """One run of one or more processes at once."""

    wall: float
    cpu: float
    memory: int


@dataclass(frozen=True)
class Place:
    """Where runs take place.

    Attributes:
        keep: leave the files, emptied, until the program ends. ext4 does not use the inode of a file that was removed
            in the last minutes: to find another one it looks at each of them, at every creation (fs/ext4/ialloc.c,
            ``recently_deleted``), so that a run would pay for the clearing up of those before it.
    """

    path: Path
    keep: bool

    def spread(self) -> None:
        """Ask ext4 to put each run elsewhere on the disk (``chattr +T``), away from what others have just removed."""
        fd = os.open(self.path, os.O_RDONLY)
        with suppress(OSError):  # another file system
            flags = int.from_bytes(fcntl.ioctl(fd, FS_IOC_GETFLAGS, bytes(8))[:4], sys.byteorder)
            fcntl.ioctl(fd, FS_IOC_SETFLAGS, (flags | EXT4_TOPDIR_FL).to_bytes(8, sys.byteorder))
        os.close(fd)

    def clear(self, scratch: Path) -> None:
        """After a run."""
        if not self.keep:
            shutil.rmtree(scratch)
            return
        for directory, _, names in os.walk(scratch):
            for name in names:
                os.truncate(Path(directory, name), 0)


def run(
    work: str,
    uri: str,
    place: Place,
    *,
    processes: int = 1,
    environment: dict[str, str] | None = None,
    prefix: list[str] | None = None,
    checkout: Path = HERE,
) -> Run:
    """Fresh directories, all processes let go at one moment; wall seconds to the last one's end.

    Args:
        checkout: whose code runs.
    """
    scratch = Path(tempfile.mkdtemp(dir=place.path))
    try:
        started = []
        for number in range(processes):
            dest = scratch / f"dest{number}"
            dest.mkdir()
            order = {"work": work, "uri": uri, "dest": str(dest)}
            order["store"] = str(scratch / "store")  # checkouts from before 2026-11-23 have one
            python = sys.executable if checkout == HERE else str(checkout / ".venv" / "bin" / "python")
            script = str(checkout / "benchmarks" / "staging.py")
            command = [*(prefix or []), python, script, "--worker", json.dumps(order)]
            started.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env={**os.environ, **(environment or {})},
                )
            )
        for process in started:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise SystemExit(f"{work} did not start")
        os.sync()  # what the last run left to be written is not this run's
        for process in started:
            if process.stdin is not None:
                process.stdin.write("\n")
                process.stdin.flush()
        said = [json.loads(process.communicate()[0]) for process in started]
        return Run(max(one["wall"] for one in said), sum(one["cpu"] for one in said), max(o["memory"] for o in said))
    finally:
        place.clear(scratch)


def medians(runs: list[Run]) -> Run:
    """Of each column."""
    return Run(
        statistics.median(one.wall for one in runs),
        statistics.median(one.cpu for one in runs),
        int(statistics.median(one.memory for one in runs)),
    )


def interleaved(count: int, variants: dict[str, Callable[[], Run]]) -> dict[str, Run]:
    """Each variant ``count`` times, in turns."""
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    for _ in range(count):
        for name, variant in variants.items():
            runs[name].append(variant())
    return {name: medians(each) for name, each in runs.items()}


# --- report --------------------------------------------------------------------------------------------------------
def show(title: str, value: str, target: str = "") -> None:
    """One line."""
    print(f"  {title:<58} {value:<34} {target}", flush=True)


def with_before(before: Path | None, variants: dict[str, Callable[..., Run]]) -> dict[str, Callable[[], Run]]:
    """The variants, and safedist as it is in the checkout *before*, if there is one."""
    return {**variants, **({BEFORE: partial(variants["safedist"], checkout=before)} if before else {})}


def show_before(got: dict[str, Run], what: str) -> None:
    """What has become of it since."""
    if BEFORE in got:
        old, new = got[BEFORE], got["safedist"]
        seconds = f"{old.wall:.3f} s / {new.wall:.3f} s"
        show(f"{what}: wall, before / now", f"{old.wall / new.wall:.2f}  ({seconds})", ">= 1")
        show(f"{what}: CPU, before / now", f"{old.cpu / new.cpu:.2f}  ({old.cpu:.3f} s / {new.cpu:.3f} s)", ">= 1")


def report_single(archive: Path, places: dict[str, Place], runs: int, name: str, before: Path | None) -> None:
    """One staging of a local file against GNU tar, and what safety costs of it."""
    for label, place in places.items():
        works = ("tar -xzf", "unpack alone", "safedist")
        variants: dict[str, Callable[..., Run]] = {work: partial(run, work, str(archive), place) for work in works}
        got = interleaved(runs, with_before(before, variants))
        show_before(got, f"single staging, {label}")
        ratio = got["safedist"].wall / got["tar -xzf"].wall
        target = {"iii": "<= 0.67 on tmpfs, <= 1.1 on disk", "i-dirs": ""}.get(name, "<= 1.1")
        seconds = f"{got['safedist'].wall:.3f} s / {got['tar -xzf'].wall:.3f} s"
        show(f"single staging / tar -xzf, {label}", f"{ratio:.2f}  ({seconds})", target)
        safety = got["safedist"].wall - got["unpack alone"].wall
        share = safety / got["safedist"].wall
        show(f"  of which safety: copy, digest, renames, {label}", f"{safety:.3f} s ({100 * share:.0f}%)")
        show(f"  memory above the interpreter, {label}", f"{got['safedist'].memory / MB:.0f} MB", "<= 64 MB")


def report_found(archive: Path, place: Place, runs: int) -> None:
    """What a container that is started again waits for: the code is in the destination."""
    got = interleaved(runs, {work: partial(run, work, str(archive), place) for work in ("safedist", "found")})
    found, new = got["found"].wall, got["safedist"].wall
    show("found on the node / staged", f"{found / new:.3f}  ({found:.4f} s / {new:.3f} s)")


def report_node(place: Place, runs: int, uri: str, environment: dict[str, str], before: Path | None) -> None:
    """One node with 8 ranks against what flytekit does in each of them."""
    store = "S3" if environment else "a file store"
    works = {"flytekit": RANKS, "safedist": 1}
    variants: dict[str, Callable[..., Run]] = {
        work: partial(run, work, uri, place, processes=count, environment=environment) for work, count in works.items()
    }
    got = interleaved(runs, with_before(before, variants))
    show_before(got, f"one staging from {store}")
    stock, ours = got["flytekit"], got["safedist"]
    show(f"{RANKS} ranks from {store}: CPU, flytekit / safedist", f"{stock.cpu / ours.cpu:.1f}", ">= 8")
    seconds = f"{stock.wall:.3f} s / {ours.wall:.3f} s"
    show(f"{RANKS} ranks from {store}: wall, flytekit / safedist", f"{stock.wall / ours.wall:.1f}  ({seconds})", ">= 5")
    fetched = [bytes_fetched(work, uri, place, count, environment) for work, count in works.items()]
    ratio = f"{fetched[0] / fetched[1]:.1f}  ({fetched[0] / MB:.2f} MB / {fetched[1] / MB:.2f} MB)"
    show(f"{RANKS} ranks from {store}: bytes fetched, counted apart", ratio, ">= 8")


def bytes_fetched(work: str, uri: str, place: Place, processes: int, environment: dict[str, str]) -> int:
    """What the store sent in a run of its own: counted by a relay before S3, or in the reads of the file."""
    if environment:
        with counted(environment) as (relayed, total):
            run(work, uri, place, processes=processes, environment=relayed)
            return total()
    with tempfile.TemporaryDirectory() as log:
        reads = Reads(Path(uri), Path(log))
        run(work, uri, place, processes=processes, prefix=reads.prefix)
        return reads.total()


def report_overlap(archive: Path, place: Place, runs: int, before: Path | None) -> None:
    """From a store of 100 MB/s: does the rest hide behind the download?"""
    with slow_store(archive, 100 * MB) as url:
        endpoint = url.rpartition("/")[0]
        environment = {
            "FLYTE_AWS_ENDPOINT": endpoint,
            "FLYTE_AWS_ACCESS_KEY_ID": "x",
            "FLYTE_AWS_SECRET_ACCESS_KEY": "y",
        }
        uri = f"s3://bucket/{archive.name}"
        variants: dict[str, Callable[..., Run]] = {
            work: partial(run, work, uri, place, environment=environment) for work in ("download", "safedist")
        }
        got = interleaved(runs, with_before(before, variants))
    show_before(got, "staging from a store of 100 MB/s")
    ratio = got["safedist"].wall / got["download"].wall
    seconds = f"{got['safedist'].wall:.3f} s / {got['download'].wall:.3f} s"
    show("staging / bare download, store of 100 MB/s", f"{ratio:.2f}  ({seconds})", "<= 1.2 on (ii)")


def report_start(runs: int) -> None:
    """What is not counted above."""
    for title, code in (
        ("interpreter", "pass"),
        ("interpreter and staging", "import flytekitplugins_safedist.pod.staging.stage"),
        ("interpreter and flytekit", "import flytekit"),
    ):
        seconds = []
        for _ in range(runs):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            seconds.append(time.perf_counter() - start)
        show(f"start, not counted: {title}", f"{statistics.median(seconds):.3f} s")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=list(DATASETS), default=list(DATASETS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--memory-disk", type=Path, default=Path("/dev/shm"), help="a tmpfs")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a real disk")
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit with its .venv")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(json.loads(options.worker))
        return
    print(f"medians of {options.runs}, interleaved; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
    report_start(options.runs)
    with ExitStack() as whole:
        disk = Place(Path(whole.enter_context(tempfile.TemporaryDirectory(dir=options.disk))), keep=True)
        disk.spread()
        for name in options.sets:
            with ExitStack() as stack:
                memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.memory_disk)))
                report(DATASETS[name], memory, disk, options)


def report(dataset: Dataset, memory: Path, disk: Place, options: argparse.Namespace) -> None:
    """All that is measured with one set."""
    archive = dataset.make(memory)
    tmpfs, runs, before = Place(memory, keep=False), options.runs, options.before
    packed = archive.stat().st_size / MB
    print(f"({dataset.name}) {dataset.files} files, {dataset.size / MB:g} MB, {packed:.1f} MB packed")
    parts = ["single"] if dataset.name == "i-dirs" else options.parts
    if "single" in parts:
        report_single(archive, {"tmpfs": tmpfs, "disk": disk}, runs, dataset.name, before)
    if "found" in parts:
        report_found(archive, disk, runs)
    if "overlap" in parts:
        report_overlap(archive, tmpfs, runs, before)
    if "node" in parts:
        few = max(runs // 2, 1)
        report_node(tmpfs, few, str(archive), {}, before)
        with s3(archive) as (uri, environment):
            report_node(tmpfs, few, uri, environment, before)


if __name__ == "__main__":
    main()
