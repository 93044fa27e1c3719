"""Limits of the kernel's for some processes: control groups, of either version."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.harness import needs
from tests.harness.procs import until

ROOT = Path("/sys/fs/cgroup")


@contextmanager
def control_group(controller: str, v1: Mapping[str, str], v2: Mapping[str, str]) -> Iterator[Path]:
    """A new group, empty at its end; leaves the calling test out where there can be none.

    Args:
        controller: "memory", or "cpu".
        v1: what its files are to say, with cgroups of version 1.
        v2: the same of version 2.
    """
    needs.root("make control groups")
    of_v1 = (ROOT / controller).is_dir()
    path = (ROOT / controller if of_v1 else ROOT) / f"safedist-test-{os.getpid()}"
    try:
        path.mkdir()
        for name, text in (v1 if of_v1 else v2).items():
            (path / name).write_text(text)
    except OSError as error:
        what = f"control groups for {controller} ({errno.errorcode.get(error.errno or 0)})"
        needs.missing(what, bring="a machine with them")
    yield path
    until(lambda: not (path / "cgroup.procs").read_text(), "the control group is empty")
    path.rmdir()
