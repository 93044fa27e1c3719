"""Three races on shared file systems, each shown and then cured: ``python examples/fs_races.py``.

Needs no Flyte and no network file system: processes of this machine play the ranks, and a stand-in
(``late_client``) plays the client of a network file system that does not see yet what another client has made. It
answers the looks of one process, from Python, with "no such file"; making and renaming go to the real file system, as
they go to the real server. Seconds are a twentieth of those that users reported. (``tests/fs`` shows the same over
FUSE mounts, with nothing patched.)
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flytekitplugins_safedist.errors import FsError
from flytekitplugins_safedist.fs import barrier, ensure_dir, once_per_job, wait_for

RANKS = 4
_fork = multiprocessing.get_context("fork")


# --- the stand-ins -------------------------------------------------------------------------------------------------
@contextmanager
def late_client(hidden: Path, seconds: float) -> Iterator[None]:
    """For ``seconds``, this process does not see ``hidden`` or anything below it, though others have made it."""
    plain = {name: getattr(os, name) for name in ("stat", "lstat", "open")}
    shown_at = time.monotonic() + seconds

    def late(look: Callable[..., Any]) -> Callable[..., Any]:
        def answer(path: Any, *args: Any, **options: Any) -> Any:
            place = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
            if (place + "/").startswith(f"{hidden}/") and time.monotonic() < shown_at:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)
            return look(path, *args, **options)

        return answer

    try:
        for name, look in plain.items():
            setattr(os, name, late(look))
        yield
    finally:
        for name, look in plain.items():
            setattr(os, name, look)


def on_ranks(work: Callable[[int], str], patience_s: float) -> list[str]:
    """Run ``work(rank)`` in RANKS processes; return what each says, or that it hung for ``patience_s`` seconds."""
    ends = []
    for rank in range(RANKS):
        here, there = _fork.Pipe(duplex=False)
        process = _fork.Process(target=_rank, args=(rank, work, there), daemon=True)
        process.start()
        there.close()
        ends.append((process, here))
    deadline = time.monotonic() + patience_s
    said = []
    for process, here in ends:
        in_time = here.poll(max(0.0, deadline - time.monotonic()))
        said.append(str(here.recv()) if in_time else f"HUNG for {patience_s:g} s, and would for ever")
        process.kill()
        process.join()
    return said


def init_process_group(rank: int, place: Path) -> None:
    """What the ranks of a training have anyway."""
    import torch.distributed  # not at the top: whoever packages the examples needs no torch

    torch.distributed.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=RANKS)


def _rank(rank: int, work: Callable[[int], str], there: Any) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")  # as torchrun
    os.environ.update(zip(names, map(str, (rank, RANKS, rank, RANKS, 0, 1)), strict=True))
    began = time.monotonic()
    try:
        said = work(rank)
    except Exception as error:
        what = error.what if isinstance(error, FsError) else str(error)
        said = f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {what}"
    there.send(said)


# --- 1. makedirs(exist_ok=True) ------------------------------------------------------------------------------------
def race_of_makedirs(shared: Path) -> tuple[str, str]:
    """Every rank makes the output directory. On a client that is behind, EEXIST is followed by "it is no directory".

    facebookresearch/lingua#49.
    """
    (shared / "dump").mkdir()  # by another client, a moment ago
    with late_client(shared / "dump", seconds=1.5):
        try:
            os.makedirs(shared / "dump", exist_ok=True)  # noqa: PTH103  (their way)
            theirs = "no error"
        except FileExistsError as error:
            theirs = f"FileExistsError: {error.filename} (exist_ok=True!)"
        ours = f"made and usable: {ensure_dir(shared / 'dump').is_dir()}"
    return theirs, ours


# --- 2. wait_for(..., timeout=10) ----------------------------------------------------------------------------------
def race_of_patience(shared: Path) -> tuple[str, str]:
    """Others wait 10 s (here 0.5) for a directory that a parallel file system shows after 29 to 60 s (here 3).

    allenai/OLMo#829, allenai/OLMo#894.
    """
    (shared / "step100").mkdir()
    with late_client(shared / "step100", seconds=3):
        began = time.monotonic()
        while not os.path.exists(shared / "step100") and time.monotonic() - began < 0.5:  # noqa: PTH110  (their way)
            time.sleep(0.05)
        theirs = f"seen within their patience: {os.path.exists(shared / 'step100')}"  # noqa: PTH110
        wait_for(shared / "step100", kind="dir", made_by="rank 0")
        ours = f"seen after {time.monotonic() - began:.1f} s, of five minutes' patience"
    return theirs, ours


# --- 3. mkdir by the master, and a barrier -------------------------------------------------------------------------
def race_of_the_master(shared: Path) -> tuple[list[str], list[str]]:
    """Rank 0 makes the directory, all meet at a barrier; but rank 0 fails, and nobody else ever learns of it."""
    (shared / "out").write_text("a file, where the directory should be")
    gate = _fork.Barrier(RANKS)  # stands for torch's or Horovod's barrier, whose time-out is half an hour, or none

    def theirs(rank: int) -> str:
        if rank == 0:
            os.makedirs(shared / "out", exist_ok=True)  # noqa: PTH103  (their way)
        gate.wait()
        return "passed"

    def ours(rank: int) -> str:
        init_process_group(rank, shared / ".run-1")  # under torchrun or Flyte this line is not needed
        return f"has {once_per_job('out', lambda: ensure_dir(shared / 'out'))}"

    return on_ranks(theirs, patience_s=5), on_ranks(ours, patience_s=120)


def barrier_that_names_who_is_missing(shared: Path) -> list[str]:
    """Rank 2 returns early: a barrier with a bound says so, to everyone at once."""

    def work(rank: int) -> str:
        init_process_group(rank, shared / ".run-2")
        barrier()
        if rank == 2:
            return "returns early"
        barrier(timeout=1.0)
        return "passed"

    return on_ranks(work, patience_s=120)


def _check(title: str, theirs: str | list[str], ours: str | list[str], *, right: bool) -> bool:
    print(f"\n{title}")
    for name, said in (("usual way", theirs), ("safedist", ours)):
        for line in [said] if isinstance(said, str) else [f"rank {rank} {text}" for rank, text in enumerate(said)]:
            print(f"  {name:10} {line}")
    if not right:
        print("  NOT AS IT SHOULD BE")
    return right


def main() -> None:
    """Show all; the exit status is 1 if a race does not show, or a cure does not cure."""
    import torch.distributed  # noqa: F401  (once, for all that are forked)

    with tempfile.TemporaryDirectory() as place:
        shared = Path(place).resolve()
        theirs, ours = race_of_makedirs(shared)
        cured = "FileExistsError" in theirs and ours.endswith("True")
        right = _check("1. makedirs on a client that is behind", theirs, ours, right=cured)
        theirs, ours = race_of_patience(shared)
        cured = theirs.endswith("False") and ours.startswith("seen")
        right &= _check("2. ten seconds of patience", theirs, ours, right=cured)
        their_ranks, our_ranks = race_of_the_master(shared)
        cured = all("HUNG" in said for said in their_ranks[1:]) and all("WorkFailed" in said for said in our_ranks)
        right &= _check("3. the master makes it, all wait, the master fails", their_ranks, our_ranks, right=cured)
        met = barrier_that_names_who_is_missing(shared)
        cured = all("did not come to the meeting point: 2" in said for rank, said in enumerate(met) if rank != 2)
        right &= _check("   and a barrier that somebody never reaches", "hangs, as above", met, right=cured)
    raise SystemExit(0 if right else 1)


if __name__ == "__main__":
    main()
