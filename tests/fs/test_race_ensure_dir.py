"""Many processes make the same directories at once, on a file system that misbehaves."""

from __future__ import annotations

import os
import random
from pathlib import Path

from flytekitplugins_safedist.errors import FsError
from flytekitplugins_safedist.fs import ensure_dir
from tests.fs.ranks import Process, size, together
from tests.harness.fusefs import FuseMount, require

PROCESSES, DIRECTORIES = size(16, 64), size(60, 200)
LATE = size(1, 60)


def _names(seed: int) -> list[str]:
    names = [f"run/{index % 10}/step-{index:03d}/rank" for index in range(DIRECTORIES)]
    random.Random(seed).shuffle(names)  # each in its own order, so that everyone is first somewhere and last elsewhere
    return names


def _make_all(index: int, roots: list[Path]) -> list[str]:
    """Make every directory and put a file in each; return what went wrong."""
    root = roots[index % len(roots)]
    wrong = []
    for name in _names(index):
        try:
            ensure_dir(root / name)
            (root / name / f"by-{index}").write_text("here")
        except FsError as error:
            wrong.append(f"ours: {error}")
        except OSError as error:
            wrong.append(f"{type(error).__name__}: {error}")
    return wrong


def _all_make_all(roots: list[Path]) -> list[list[str]]:
    return [outcome.get() for outcome in together(PROCESSES, _make_all, roots)]


def _assert_all_there(backing: Path) -> None:
    everyone = sorted(f"by-{index}" for index in range(PROCESSES))
    for name in _names(0):
        assert sorted(os.listdir(backing / name)) == everyone


def test_many_processes_on_4_clients_that_see_late_and_fail_now_and_then(tmp_path):
    require()
    # ESTALE twice in a row on half of the strikes: the kernel retries the first one by itself.
    faults = [
        {"op": op, "errno": code, "chance": 0.01, "when": when}
        for op in ("mkdir", "opendir")
        for code in ("ESTALE", "EIO", "EINTR")
        for when in ("before", "after")
    ]
    mounts = [
        FuseMount(tmp_path / "server", tmp_path / f"client{index}", late=[0, LATE], seed=index, locks="dropped")
        for index in range(4)
    ]
    try:
        for mount in mounts:
            mount.set(faults=faults)
        wrong = Process(_all_make_all, [mount.path for mount in mounts], small=True).outcome().get()
    finally:
        for mount in mounts:
            mount.close()
    assert wrong == [[]] * PROCESSES
    _assert_all_there(tmp_path / "server")
