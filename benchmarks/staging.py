"""Staging a code archive: against ``tar -xzf``, against what flytekit does in every rank, and from a store of 100 MB/s.

Runs are interleaved and medians are printed, with the ratio that matters. What an interpreter and its imports take is
printed apart and not counted: every measured process says "ready" first and is then let go. CPU seconds are those of
the process and its children from then on.

    python benchmarks/staging.py                      # everything; half an hour
    python benchmarks/staging.py --sets i --runs 3    # a look
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

RANKS = 8
MB = 1_000_000


@dataclass(frozen=True)
class Dataset:
    """Files of one size, part of which does not compress (images, weights), the rest being words."""

    name: str
    files: int
    size: int
    incompressible: float

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
                info = tarfile.TarInfo(f"pkg{number % 40}/sub{number % 7}/module_{number}.py")
                info.size, info.mtime = len(data), 315532800.0
                archive.addfile(info, io.BytesIO(data))
        return path


DATASETS = {
    "i": Dataset("i", 300, 3 * MB, 0.0),
    "ii": Dataset("ii", 5_000, 100 * MB, 0.5),
    "iii": Dataset("iii", 20, 1_000 * MB, 1.0),
}


# --- what is measured, in a process of its own ---------------------------------------------------------------------
def work_tar(order: dict[str, str]) -> None:
    """The practical limit: GNU tar on a local file."""
    subprocess.run(["tar", "-xzf", order["uri"], "-C", order["dest"]], check=True)


def work_flytekit(order: dict[str, str]) -> None:
    """What every rank does under the stock command."""
    from flytekit.tools.fast_registration import download_distribution

    download_distribution(order["uri"], order["dest"])


def work_ours(order: dict[str, str]) -> None:
    """The whole of it: fetch, verify, unpack, publish, merge."""
    from flytekitplugins_safedist.staging import Options, stage

    stage(order["uri"], Path(order["dest"]), Options(store=Path(order["store"])))


def work_unpack(order: dict[str, str]) -> None:
    """Unpacking alone: no digest, manifest, rename, or destination."""
    from flytekitplugins_safedist.archive import Inflate, Limits, unpack_tar
    from flytekitplugins_safedist.staging.ahead import Ahead
    from flytekitplugins_safedist.staging.source import Retry, open_source

    source = open_source(order["uri"], Retry())
    source.identity()
    with Ahead(Inflate("x", Limits()).run(source.chunks())) as pieces:
        unpack_tar(pieces, Path(order["dest"]), label="x", limits=Limits())
    source.close()


def work_download(order: dict[str, str]) -> None:
    """The bare download, by the same client, to nowhere."""
    from flytekitplugins_safedist.staging.source import Retry, open_source

    source = open_source(order["uri"], Retry())
    source.identity()
    for _ in source.chunks():
        pass
    source.close()


WORK: dict[str, Callable[[dict[str, str]], None]] = {
    "tar -xzf": work_tar,
    "flytekit": work_flytekit,
    "safedist": work_ours,
    "unpack alone": work_unpack,
    "download": work_download,
}


def worker(order: dict[str, str]) -> None:
    """Import what the work needs, say so, wait, work, report."""
    if order["work"] in ("safedist", "unpack alone", "download"):
        import flytekitplugins_safedist.staging.stage  # noqa: F401
    if order["work"] == "flytekit" or "://" in order["uri"]:
        import flytekit.tools.fast_registration  # noqa: F401
        import s3fs  # noqa: F401
    before = _cpu()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    WORK[order["work"]](order)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"wall": wall, "cpu": _cpu() - before, "memory": (after - memory) * 1024}), flush=True)


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


def run(work: str, uri: str, place: Path, *, processes: int = 1, environment: dict[str, str] | None = None) -> Run:
    """Fresh directories, all processes let go at one moment; wall seconds to the last one's end."""
    scratch = Path(tempfile.mkdtemp(dir=place))
    try:
        started = []
        for number in range(processes):
            dest = scratch / f"dest{number}"
            dest.mkdir()
            order = {"work": work, "uri": uri, "dest": str(dest), "store": str(scratch / "store")}
            command = [sys.executable, __file__, "--worker", json.dumps(order)]
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
        shutil.rmtree(scratch)


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


# --- stores --------------------------------------------------------------------------------------------------------
@contextmanager
def s3(archive: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A local S3 server (moto's) with the archive in it."""
    import botocore.session

    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            text = ""
            while "http://127.0.0.1:" not in text:
                time.sleep(0.1)
                log.seek(0)
                text = log.read()
            endpoint = "http://127.0.0.1:" + text.split("http://127.0.0.1:")[1].split()[0]
            keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
            client = botocore.session.get_session().create_client("s3", endpoint_url=endpoint, **keys)
            client.create_bucket(Bucket="code")
            client.put_object(Bucket="code", Key=archive.name, Body=archive.read_bytes())
            environment = {
                "FLYTE_AWS_ENDPOINT": endpoint,
                "FLYTE_AWS_ACCESS_KEY_ID": "test",
                "FLYTE_AWS_SECRET_ACCESS_KEY": "test",
            }
            yield f"s3://code/{archive.name}", environment
        finally:
            server.kill()
            server.wait()


SLOW_STORE = """
import http.server, os, sys, threading, time
path, rate = sys.argv[1], float(sys.argv[2])
size, lock, free_at = os.path.getsize(path), threading.Lock(), [0.0]
def pace(count):
    with lock:  # one wire for all connections
        free_at[0] = max(free_at[0], time.perf_counter()) + count / rate
        until = free_at[0]
    time.sleep(max(until - time.perf_counter(), 0))
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_HEAD(self): self.answer(False)
    def do_GET(self): self.answer(True)
    def answer(self, body):
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, end = int(first), int(last) + 1 if last else size
        self.send_response(206)
        for name, value in (("Accept-Ranges", "bytes"), ("ETag", "x"), ("Content-Length", str(end - start))):
            self.send_header(name, value)
        self.end_headers()
        with open(path, "rb") as file:
            file.seek(start)
            while body and start < end:
                data = file.read(min(131072, end - start))
                pace(len(data))
                self.wfile.write(data)
                start += len(data)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def slow_store(archive: Path, rate: float) -> Iterator[str]:
    """An HTTP store that sends ``rate`` bytes a second in all."""
    command = [sys.executable, "-c", SLOW_STORE, str(archive), str(rate)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        port = server.stdout.readline().strip() if server.stdout is not None else ""
        yield f"http://127.0.0.1:{port}/{archive.name}"
    finally:
        server.kill()
        server.communicate()


# --- report --------------------------------------------------------------------------------------------------------
def show(title: str, value: str, target: str = "") -> None:
    """One line."""
    print(f"  {title:<58} {value:<34} {target}", flush=True)


def report_single(archive: Path, places: dict[str, Path], runs: int, name: str) -> None:
    """One staging of a local file against GNU tar, and what safety costs of it."""
    for label, place in places.items():
        works = ("tar -xzf", "unpack alone", "safedist")
        got = interleaved(runs, {work: partial(run, work, str(archive), place) for work in works})
        ratio = got["safedist"].wall / got["tar -xzf"].wall
        target = "<= 1.1" if name != "iii" or label == "disk" else "<= 0.67"
        seconds = f"{got['safedist'].wall:.3f} s / {got['tar -xzf'].wall:.3f} s"
        show(f"single staging / tar -xzf, {label}", f"{ratio:.2f}  ({seconds})", target)
        safety = got["safedist"].wall - got["unpack alone"].wall
        share = safety / got["safedist"].wall
        show(f"  of which safety: digest, manifest, renames, merge, {label}", f"{safety:.3f} s ({100 * share:.0f}%)")
        show(f"  memory above the interpreter, {label}", f"{got['safedist'].memory / MB:.0f} MB", "<= 64 MB")


def report_node(size: int, place: Path, runs: int, uri: str, environment: dict[str, str]) -> None:
    """One node with 8 ranks against what flytekit does in each of them; ``size``: bytes of the archive."""
    store = "S3" if environment else "a file store"
    got = interleaved(
        runs,
        {
            "flytekit": lambda: run("flytekit", uri, place, processes=RANKS, environment=environment),
            "safedist": lambda: run("safedist", uri, place, environment=environment),
        },
    )
    stock, ours = got["flytekit"], got["safedist"]
    show(f"{RANKS} ranks from {store}: CPU, flytekit / safedist", f"{stock.cpu / ours.cpu:.1f}", ">= 8")
    show(f"{RANKS} ranks from {store}: wall, flytekit / safedist", f"{stock.wall / ours.wall:.1f}", ">= 5")
    show(f"{RANKS} ranks from {store}: bytes fetched", f"{RANKS * size / MB:.1f} / {size / MB:.1f} MB", ">= 8")


def report_overlap(archive: Path, place: Path, runs: int) -> None:
    """From a store of 100 MB/s: does the rest hide behind the download?"""
    with slow_store(archive, 100 * MB) as uri:
        got = interleaved(runs, {work: partial(run, work, uri, place) for work in ("download", "safedist")})
    ratio = got["safedist"].wall / got["download"].wall
    seconds = f"{got['safedist'].wall:.3f} s / {got['download'].wall:.3f} s"
    show("staging / bare download, store of 100 MB/s", f"{ratio:.2f}  ({seconds})", "<= 1.2 on (ii)")


def report_start(runs: int) -> None:
    """What is not counted above."""
    for title, code in (
        ("interpreter", "pass"),
        ("interpreter and staging", "import flytekitplugins_safedist.staging.stage"),
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
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--memory-disk", type=Path, default=Path("/dev/shm"), help="a tmpfs")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a real disk")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(json.loads(options.worker))
        return
    print(f"medians of {options.runs}, interleaved; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
    report_start(options.runs)
    for name in options.sets:
        with ExitStack() as stack:
            tmpfs = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.memory_disk)))
            disk = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.disk)))
            archive = DATASETS[name].make(tmpfs)
            dataset = DATASETS[name]
            print(
                f"({name}) {dataset.files} files, {dataset.size / MB:g} MB, {archive.stat().st_size / MB:.1f} MB packed"
            )
            report_single(archive, {"tmpfs": tmpfs, "disk": disk}, options.runs, name)
            report_overlap(archive, tmpfs, options.runs)
            size = archive.stat().st_size
            report_node(size, tmpfs, max(options.runs // 2, 1), str(archive), {})
            uri, environment = stack.enter_context(s3(archive))
            report_node(size, tmpfs, max(options.runs // 2, 1), uri, environment)


if __name__ == "__main__":
    main()
