"""``atomic_write`` and ``atomic_dir``: readers see the old or the new, whole; never a part, also after a crash.

Write aside in the same directory, fsync, one rename, fsync the parent. rename(2) replaces a name in one step, on
network file systems too (RFC 1813 3.3.14, RFC 8881 18.26: atomic to clients).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from ..errors import FsError, FsUnsupportedError, PathBlockedError
from .calls import Backoff, explain, retry_os_call
from .dirs import listed
from .mount_info import mount_of
from .stale_files import aside, discard
from .waiting import wait_for

Exists = Literal["fail", "keep", "replace"]

_BUFFER = 1 << 17  # larger writes go past it, without a copy
_RENAME_EXCHANGE = 2  # linux/fs.h


@contextmanager
def atomic_write(
    path: str | os.PathLike[str],
    mode: Literal["w", "wb"] = "wb",
    *,
    encoding: str = "utf-8",
    permissions: int | None = None,
    durable: bool = True,
) -> Iterator[IO[Any]]:
    """Open a file for writing that becomes ``path`` when the block ends without an error, and not before.

    Args:
        path: the file to make or replace. Its directory must exist. A symbolic link is replaced, not followed.
        mode: "wb" or "w".
        encoding: of text.
        permissions: mode bits of the new file, less the umask; without them those of the file that it replaces, so that
            a private file stays private, and 0o666 less the umask for a new one.
        durable: fsync file and directory; without it a crash of the *machine* may lose the file or leave it empty.

    Raises:
        FsError: the subclass that fits; nothing is left behind, and ``path`` is as it was.
    """
    target = Path(path)
    draft = aside(target)
    kept = (
        None if permissions is not None else retry_os_call(lambda: _mode_of(target), target, "look at what is replaced")
    )
    raw = _Raw(retry_os_call(lambda: _create(draft, permissions, kept), draft, "create the file"), draft)
    buffered = io.BufferedWriter(raw, _BUFFER)
    file: IO[Any] = buffered if mode == "wb" else io.TextIOWrapper(buffered, encoding=encoding)
    try:
        try:
            yield file
            if not file.closed:  # else by the block's own code, which flushed it
                file.flush()
            inode = raw.finish(durable=durable)
        finally:
            # The raw file first: once it is closed, the buffer does not try again to write what could not be written.
            raw.abandon()
        _rename(draft, target, inode)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    if durable:
        fsync_dir(target.parent)


@contextmanager
def atomic_path(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[Path]:
    """As ``atomic_write``, for code that wants a path to write to (``torch.save``, a download), not an open file.

    The block gets the path of a file that does not exist yet, and must make it.

    Raises:
        FsError: the subclass that fits; also when the block has made no file.
    """
    target = Path(path)
    draft = aside(target)
    try:
        yield draft
        handle = retry_os_call(lambda: os.open(draft, os.O_RDONLY | os.O_CLOEXEC), draft, "open what was to be written")
        try:
            status = retry_os_call(lambda: os.fstat(handle), draft, "look at what was written")
            if stat.S_ISDIR(status.st_mode):
                raise PathBlockedError(
                    "a directory was made where a file was to be written",
                    where={"path": target},
                    hint="write a file to the path that atomic_path gives, or use atomic_dir",
                )
            if durable:
                _fsync(handle, draft)
        finally:
            os.close(handle)
        _rename(draft, target, status.st_ino)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        discard(draft)  # the block made a directory
        raise
    if durable:
        fsync_dir(target.parent)


@contextmanager
def atomic_dir(path: str | os.PathLike[str], *, exists: Exists = "fail", durable: bool = True) -> Iterator[Path]:
    """Fill a directory that becomes ``path`` when the block ends without an error, and not before.

    Args:
        path: the directory to publish. Its parent must exist.
        exists: when ``path`` exists and holds something: "fail"; "keep" it and drop what was made (right for names that
            stand for their content); "replace" it, in one step, where the file system can (not on NFS).
        durable: fsync every file and directory; without it a crash of the *machine* may lose contents.

    Raises:
        PathBlockedError: it exists, and ``exists="fail"``.
        FsUnsupportedError: the file system cannot exchange two directories.
        FsError: the subclass that fits; nothing is left behind, and ``path`` is as it was.
    """
    target = Path(path)
    draft = aside(target)
    retry_os_call(lambda: _mkdir_new(draft), draft, "make the directory")
    try:
        yield draft
        if durable:
            fsync_tree(draft)
        publish_dir(draft, target, exists=exists)
    finally:
        discard(draft)
    if durable:
        fsync_dir(target.parent)


def publish_dir(draft: Path, target: Path, *, exists: Exists) -> None:
    """Give ``draft`` the name ``target`` by one rename. The kernel decides between two that try."""
    inode = retry_os_call(draft.stat, draft, "look at the draft").st_ino
    try:
        _rename(draft, target, inode)
    except PathBlockedError as error:
        cause = error.__cause__
        if not (isinstance(cause, OSError) and cause.errno in (errno.ENOTEMPTY, errno.EEXIST)) or exists == "fail":
            raise
        if exists == "replace":
            _exchange(draft, target)
            return
    wait_for(target, kind="dir")  # "keep": made by another client, perhaps not yet visible to this one


class _Raw(io.FileIO):
    """A file whose errors say what they mean, and that can be made durable after its user has closed it."""

    def __init__(self, handle: int, path: Path) -> None:
        super().__init__(os.dup(handle), "wb")
        self._handle, self._path = handle, path

    def finish(self, *, durable: bool) -> int:
        """Close, after fsync if ``durable``; return the inode number."""
        if durable:
            _fsync(self._handle, self._path)
        handle, self._handle = self._handle, -1
        try:
            try:
                inode = retry_os_call(lambda: os.fstat(handle).st_ino, self._path, "look at what was written")
                super().close()  # NFS reports on close what it could not write before
            finally:
                os.close(handle)
        except OSError as error:
            raise explain(error, self._path, "write") from error
        return inode

    def abandon(self) -> None:
        """Close, whatever that says."""
        for close in (super().close, lambda: os.close(self._handle) if self._handle >= 0 else None):
            with contextlib.suppress(OSError):
                close()
        self._handle = -1

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            raise explain(error, self._path, "write") from error


def _mode_of(path: Path) -> int | None:
    """The permission bits of a regular file; None where there is none."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return stat.S_IMODE(status.st_mode) if stat.S_ISREG(status.st_mode) else None


def _create(path: Path, permissions: int | None, kept: int | None) -> int:
    """Open a new file; its bits are ``kept`` whatever the umask, or ``permissions`` less the umask."""
    bits = permissions if permissions is not None else 0o666
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, bits if kept is None else 0o600)
    except FileExistsError:
        # The name is random and ours: an earlier try of this same call has made it, and the reply was lost.
        handle = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    if kept is not None:
        try:
            os.fchmod(handle, kept)
        except BaseException:
            os.close(handle)
            raise
    return handle


def _mkdir_new(path: Path) -> None:
    with contextlib.suppress(FileExistsError):  # as in _create
        path.mkdir()


def _fsync(handle: int, path: Path) -> None:
    # Never again after EIO: the kernel has dropped the pages, and a second fsync would lie (fsync(2), "Bugs").
    while True:
        try:
            return os.fsync(handle)
        except InterruptedError:
            continue
        except OSError as error:
            raise explain(error, path, "bring the file to stable storage") from error


def fsync_dir(path: Path) -> None:
    """Bring the names in a directory to stable storage. File systems that cannot (EINVAL) promise nothing there."""

    def sync() -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        finally:
            os.close(handle)

    retry_os_call(sync, path, "bring the directory to stable storage")


def fsync_tree(root: Path) -> None:
    """Bring every file and directory below ``root`` to stable storage."""
    for entry in listed(root):
        if entry.is_dir:
            fsync_tree(entry.path)
        elif entry.is_file:
            _fsync_file(entry.path)
    fsync_dir(root)


def _fsync_file(path: Path) -> None:
    handle = retry_os_call(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC), path, "open the file")
    try:
        _fsync(handle, path)
    finally:
        os.close(handle)


def _rename(source: Path, target: Path, inode: int) -> None:
    retry = Backoff()
    while True:
        try:
            source.rename(target)
        except OSError as error:
            if _is_now(target, inode):
                return  # done by an earlier try, ours or the kernel's own after ESTALE, whose reply was lost
            if not retry.allows(error):
                raise explain(error, target, f"rename {source.name} to it") from error
        else:
            return


def _is_now(target: Path, inode: int) -> bool:
    try:
        # Again where that can help: a look that fails for a moment would make a rename that was done look like none.
        return retry_os_call(target.lstat, target, "look at it").st_ino == inode
    except FsError:
        return False


def _exchange(draft: Path, target: Path) -> None:
    """Swap two directories in one step: renameat2(RENAME_EXCHANGE), Linux local file systems."""
    renameat2: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    code = errno.ENOSYS
    if renameat2 is not None:
        if renameat2(-100, os.fsencode(draft), -100, os.fsencode(target), _RENAME_EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        raise FsUnsupportedError(
            "this file system cannot replace a directory in one step",
            where={"path": target, "file_system": str(mount_of(target.parent))},
            seen=errno.errorcode[code],
            hint="publish under a new name and switch a symbolic link or a file that names it (atomic_write)",
        )
    raise explain(OSError(code, os.strerror(code)), target, "replace the directory")
