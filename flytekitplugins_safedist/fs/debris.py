"""Names for what is being made, and its removal once its maker is provably dead.

A process killed with SIGKILL leaves its drafts behind. Their names say whose they are, so that ``sweep`` can tell the
dead one's from those still being written.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path

from .dirs import listed
from .process import ProcessRecord, is_provably_dead, this_process

_NAME = re.compile(r"^\..*\.safedist-(?P<boot>[0-9a-f]+)-(?P<ns>\d+)-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]{12}$")


def _stamp(record: ProcessRecord) -> str:
    boot = record.boot_id.replace("-", "") or "0"
    namespace = re.sub(r"\D", "", record.pid_ns) or "0"
    return f"{boot}-{namespace}-{record.pid}-{max(record.started, 0)}"


def aside(target: Path) -> Path:
    """A fresh name beside ``target`` (same directory, so one rename can publish it), stamped with its maker.

    Never used before: 48 random bits after a stamp that is unique to this process.
    """
    tail = f".safedist-{_stamp(this_process())}-{secrets.token_hex(6)}"
    room = 255 - len(tail) - 1  # NAME_MAX, in bytes
    stem = os.fsencode(target.name)[:room].decode(errors="ignore")
    return target.parent / f".{stem}{tail}"


def discard(directory: Path) -> None:
    """Remove a directory and what it holds, as far as that can be done."""
    with contextlib.suppress(OSError):  # ignore_errors leaves some out, such as ESTALE from a handle it has just opened
        shutil.rmtree(directory, ignore_errors=True)


def sweep(directory: str | os.PathLike[str]) -> list[Path]:
    """Remove the drafts in ``directory`` whose makers are provably dead; return what was removed.

    Drafts of other machines and containers stay: nobody here can know.

    Raises:
        FsError: the subclass that fits, if the directory cannot be listed.
    """
    removed = []
    mine = this_process()
    for entry in listed(Path(directory)):
        match = _NAME.match(entry.path.name)
        if not match or match["started"] == "0":
            continue
        record = ProcessRecord("", mine.boot_id, mine.pid_ns, int(match["pid"]), int(match["started"]))
        same_machine = _stamp(record).split("-")[:2] == [match["boot"], match["ns"]]
        if not same_machine or not is_provably_dead(record):
            continue
        if entry.is_dir:
            discard(entry.path)
        else:
            with contextlib.suppress(OSError):
                entry.path.unlink()
        removed.append(entry.path)
    return removed
