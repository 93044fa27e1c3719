"""Names for what is being made, and its removal once its maker is provably dead.

A process killed with SIGKILL leaves its drafts behind. Their names say whose they are, so that ``sweep`` can tell the
dead one's from those still being written.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .dirs import listed
from .mount_info import mount_of
from .process import ProcessRecord, is_provably_dead, this_process

_NAME = re.compile(
    r"^\..*\.safedist-(?P<boot>[0-9a-f]+)-(?P<ns>\d+)-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]{12}(?P<group>-all)?$"
)


def _stamp(record: ProcessRecord) -> str:
    boot = record.boot_id.replace("-", "") or "0"
    namespace = re.sub(r"\D", "", record.pid_ns) or "0"
    return f"{boot}-{namespace}-{record.pid}-{max(record.started, 0)}"


def aside(target: Path, *, of_group: bool = False) -> Path:
    """A fresh name beside ``target`` (same directory, so one rename can publish it), stamped with its maker.

    Never used before: 48 random bits after a stamp that is unique to this process.

    Args:
        of_group: other processes will write there too, and may outlive the one that chose the name (:func:`living`).
    """
    tail = f".safedist-{_stamp(this_process())}-{secrets.token_hex(6)}{'-all' if of_group else ''}"
    room = 255 - len(tail) - 1  # NAME_MAX, in bytes
    stem = os.fsencode(target.name)[:room].decode(errors="ignore")
    return target.parent / f".{stem}{tail}"


@contextmanager
def living(draft: Path) -> Iterator[None]:
    """Keep ``sweep`` from a directory that several processes fill, for as long as this one is in the block.

    By a lock that all of them share and the kernel drops with its holder. Where a file system has none, ``sweep``
    leaves such directories alone.
    """
    handle = -1
    with contextlib.suppress(OSError):
        handle = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    try:
        yield
    finally:
        if handle >= 0:
            os.close(handle)


def discard(directory: Path) -> None:
    """Remove a directory and what it holds, as far as that can be done; read-only directories in it too."""
    with contextlib.suppress(OSError):  # ignore_errors leaves some out, such as ESTALE from a handle it has just opened
        shutil.rmtree(directory, ignore_errors=True)
        if directory.is_symlink() or not directory.is_dir():
            return
        # Top-down: a directory is opened before os.walk looks into it. Links are not followed.
        for parent, names, _ in os.walk(directory):
            for name in (".", *names):
                place = os.path.join(parent, name)  # noqa: PTH118
                with contextlib.suppress(OSError):
                    if not os.path.islink(place):  # noqa: PTH114
                        os.chmod(place, 0o700)  # noqa: PTH101
        shutil.rmtree(directory, ignore_errors=True)


def sweep(directory: str | os.PathLike[str]) -> list[Path]:
    """Remove the drafts and probes in ``directory`` whose makers are provably dead; return what was removed.

    What several ranks write goes when all of them have ended, on a local file system. What was made on other machines
    and in other containers stays: nobody here can know.

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
        if match["group"] and not _abandoned(entry.path):
            continue
        if entry.is_dir:
            discard(entry.path)
        else:
            with contextlib.suppress(OSError):
                entry.path.unlink()
        if not os.path.lexists(entry.path):
            removed.append(entry.path)
    return removed


def _abandoned(draft: Path) -> bool:
    """Whether no process is in :func:`living` there any more; only one kernel's locks can tell."""
    if not mount_of(draft).is_local:
        return False
    try:
        handle = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
