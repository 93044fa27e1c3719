"""The fuzz target over archives. In CI for some hundred examples (test_archive_fuzz.py), by hand for as long as wished:

    python -m tests.harness.archive_fuzz --seconds 3600            # as root, and again with --uid 65534

Ordinary archives, packed in any way, are unpacked, staged and merged over one another, and compared with what
``tar -xf`` leaves, byte by byte and mode by mode; damaged and forged ones are unpacked or refused with a message,
and nothing else.
What fails is printed with the example, made small, and the seed to see it again.
"""

from __future__ import annotations

import argparse
import gzip
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backports import zstd
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from flytekitplugins_safedist.container.archive import Limits, unpack
from flytekitplugins_safedist.container.staging import Options, stage
from flytekitplugins_safedist.errors import ArchiveError
from flytekitplugins_safedist.ranks.scratch import remove
from tests.harness.archives_made import EDIT, ITEM, SEEDS, mutated, ordinary
from tests.harness.tarballs import snapshot, tar

PACKINGS = {"gzip": lambda raw: gzip.compress(raw, 1), "zstd": zstd.compress, "plain": lambda raw: raw}
FORMS = [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]
ARCHIVE = st.tuples(
    st.lists(ITEM, max_size=10), st.sampled_from(FORMS), st.sampled_from(sorted(PACKINGS)), st.sampled_from(["", "./"])
)


@contextmanager
def place() -> Iterator[str]:
    """A directory of its own, removed with the read-only directories in it, which tempfile's leaves to a user."""
    made = tempfile.mkdtemp()
    try:
        yield made
    finally:
        remove(Path(made))


def packed(made: tuple) -> tuple[bytes, bytes]:
    """An archive of ``ARCHIVE``: raw, and packed."""
    items, form, packing, prefix = made
    members = ordinary(items)
    for info, _ in members:
        info.name = prefix + info.name
        if info.islnk():
            info.linkname = prefix + info.linkname
    raw = tar(members, form)
    return raw, PACKINGS[packing](raw)


def by_tar(raw: bytes, into: Path) -> bool:
    """Whether tar could: it puts no file where a directory is, and without being root nothing into a read-only one."""
    return not subprocess.run(["tar", "-xf", "-", "-C", into], input=raw, capture_output=True, check=False).returncode


def unpacks_as_tar(made: tuple, chunk: int) -> None:
    """One archive into an empty directory."""
    raw, data = packed(made)
    with place() as scratch:
        theirs, ours = Path(scratch, "theirs"), Path(scratch, "ours")
        theirs.mkdir()
        ours.mkdir()
        if not by_tar(raw, theirs):
            assert os.geteuid() != 0
            return
        unpack([data[at : at + chunk] for at in range(0, len(data), chunk)], ours, label="x")
        assert snapshot(ours) == snapshot(theirs)


def merges_as_tar(first: tuple, second: tuple) -> None:
    """Two archives over one another, the second one twice: what is in place already stays right."""
    with place() as scratch:
        root = Path(scratch)
        theirs = root / "theirs"
        theirs.mkdir()
        for number, made in enumerate((first, second, second)):
            raw, data = packed(made)
            if not by_tar(raw, theirs):
                return
            uri = root / f"{number}.tar.gz"
            uri.write_bytes(data)
            stage(str(uri), root / "ours", Options(store=root / "store"))
        assert snapshot(root / "ours") == snapshot(theirs)


def survives(raw: bytes, edits: list, packing: str, fix_checksums: bool) -> None:
    """Unpacked or refused with a message, and nothing outside is touched."""
    data = PACKINGS[packing](mutated(raw, edits, fix_checksums=fix_checksums))
    with place() as scratch:
        root = Path(scratch)
        (root / "in").mkdir()
        (root / "canary").write_text("as it was")
        said = "[archive=fuzzed]"
        try:
            unpack([data], root / "in", label="fuzzed", limits=Limits(max_bytes=1 << 22, max_files=200))
        except ArchiveError as refusal:
            said = str(refusal)
        assert "archive=fuzzed" in said
        assert sorted(path.name for path in root.iterdir()) == ["canary", "in"]
        assert (root / "canary").read_text() == "as it was"


def round_of(examples: int, number: int) -> None:
    """Every property, with ``examples`` examples each, from the seed ``number``."""
    chosen = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    damage = (st.sampled_from(SEEDS), st.lists(EDIT, min_size=1, max_size=4), st.sampled_from(sorted(PACKINGS)))
    for check in (
        given(ARCHIVE, st.sampled_from([1 << 20, 777, 4096]))(unpacks_as_tar),
        given(ARCHIVE, ARCHIVE)(merges_as_tar),
        given(*damage, st.booleans())(survives),
    ):
        seed(number)(chosen(check))()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.0, help="go on for this long (default: one round)")
    parser.add_argument("--examples", type=int, default=100, help="of each kind in a round")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--uid", type=int, help="become this user first")
    order = parser.parse_args()
    if order.uid is not None:
        round_of(1, 0)  # what is imported late is imported now: the interpreter may lie where that user cannot read
        home = tempfile.mkdtemp()
        os.chown(home, order.uid, order.uid)
        os.chdir(home)
        tempfile.tempdir = home
        os.setgroups([])
        os.setgid(order.uid)
        os.setuid(order.uid)
    end = time.monotonic() + order.seconds
    number = order.seed
    while True:
        sys.stdout.write(f"uid {os.geteuid()}, seed {number}, {order.examples} examples of each kind\n")
        sys.stdout.flush()
        round_of(order.examples, number)
        number += 1
        if time.monotonic() >= end:
            return


if __name__ == "__main__":
    main()
