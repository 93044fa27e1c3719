"""Our reader of archives beside isal and ``tarfile`` with the strict filter: ``python benchmarks/archive.py``.

All take turns on one archive, as code is: many small files, gzip, pax headers. Processor time says more than the clock
where the machine does other work too. ``tarfile and CRC`` does what staging needs besides: a CRC of each file, and the
stream read to its end, where gzip has its own.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import resource
import shutil
import statistics
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from isal import igzip

from flytekitplugins_safedist.container.archive import unpack


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where to unpack; default: the usual one for temporary files")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=options.directory, prefix="safedist-bench-"))
    try:
        _measure(root, make(root / "code.tar.gz", options.files), options.rounds)
    finally:
        shutil.rmtree(root)


def make(path: Path, files: int) -> Path:
    """The archive, the same each time."""
    draw = random.Random(1)
    words = [bytes(draw.choices(b"abcdefghij \n", k=40)) for _ in range(500)]
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for number in range(files):
            data = b"".join(draw.choices(words, k=draw.randint(10, 200)))
            info = tarfile.TarInfo(f"pkg/mod{number % 50}/sub{number % 7}/file_{number}.py")
            info.size, info.mtime = len(data), 1_700_000_000 + number
            archive.addfile(info, io.BytesIO(data))
    return path


def ours(archive: Path, into: Path) -> None:
    """As staging does."""
    with archive.open("rb") as file:
        unpack(iter(lambda: file.read(1 << 20), b""), into, label="code")


def standard(archive: Path, into: Path) -> None:
    """``tarfile`` alone."""
    with igzip.open(archive, "rb") as stream, tarfile.open(fileobj=stream, mode="r|") as members:
        members.extractall(into, filter="data")


def standard_and_crc(archive: Path, into: Path) -> None:
    """``tarfile``, with what staging needs to know of each file."""
    names = []
    with igzip.open(archive, "rb") as stream:
        with tarfile.open(fileobj=stream, mode="r|") as members:
            for member in members:
                members.extract(member, into, filter="data")
                names.append(member.name)
        while stream.read(1 << 20):
            pass
    for name in names:
        zlib.crc32((into / name).read_bytes())


WAYS: dict[str, Callable[[Path, Path], None]] = {
    "ours": ours,
    "tarfile": standard,
    "tarfile and CRC": standard_and_crc,
}


def _measure(root: Path, archive: Path, rounds: int) -> None:
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, way in WAYS.items():
            into = root / "tree"
            into.mkdir()
            before, began = _processor(), time.perf_counter()
            way(archive, into)
            taken[name].append((_processor() - before, time.perf_counter() - began))
            shutil.rmtree(into)
    print(f"{archive.stat().st_size} bytes packed; load {os.getloadavg()[0]:.1f}")
    for name, pairs in taken.items():
        processor, clock = zip(*pairs, strict=True)
        print(
            f"{name}: processor {min(processor):.2f} s least, {statistics.median(processor):.2f} s median; "
            f"clock {min(clock):.2f} s least, {statistics.median(clock):.2f} s median"
        )


def _processor() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
