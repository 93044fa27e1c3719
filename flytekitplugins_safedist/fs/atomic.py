"""``atomic_write`` and ``atomic_path``: readers see the old or the new, whole; never a part, also after a crash.

Write aside in the same directory, fsync, one rename, fsync the parent. rename(2) replaces a name in one step, on
network file systems too (RFC 1813 3.3.14, RFC 8881 18.26: atomic to clients).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from ..errors import FsError
from .oserrors import explain, retry_os_call

NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""What link(2) says where there are no hard links, or not enough of them."""

_BUFFER = 1 << 17  # larger writes go past it, without a copy


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
        FsError: the subclass that fits; nothing is left behind, and ``path`` is as it was; or it is the new file, and
            its directory could not be brought to stable storage.
    """
    target = from_here(path)
    with made_aside(target, durable=durable) as draft:
        handle = retry_os_call(lambda: _create(draft, target, permissions), draft, "create the file")
        raw = _Raw(handle, draft)
        buffered = io.BufferedWriter(raw, _BUFFER)
        file: IO[Any] = buffered if mode == "wb" else io.TextIOWrapper(buffered, encoding=encoding)
        try:
            yield file
            file.close()
        except BaseException:
            with contextlib.suppress(FsError):  # raw first: the buffer's close would write again what could not be
                raw.close()
            raise


@contextmanager
def atomic_path(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[Path]:
    """As ``atomic_write``, for code that wants a path to write to (``torch.save``, a download), not an open file.

    The block gets a path where nothing is yet, and must make a file or a directory there. A file replaces the file that
    is there; a directory replaces nothing but an empty directory: give each its own name.

    Args:
        path: the file or directory to make. Its parent must exist.
        durable: as for ``atomic_write``, of every file and directory in it.

    Raises:
        PathBlockedError: something is there already: a directory with contents before the block runs; after it, if the
            block has made a directory, anything else, or one that others have made meanwhile.
        FsError: as ``atomic_write``. Also when the block has made nothing.
    """
    target = from_here(path)
    with contextlib.suppress(OSError):  # there is none, or the rename will say what is wrong with it
        if not target.is_symlink() and next(target.iterdir(), None) is not None:
            raise explain(OSError(errno.ENOTEMPTY, ""), target, "make it")
    with made_aside(target, durable=durable) as draft:
        yield draft


def from_here(path: str | os.PathLike[str]) -> Path:
    """The path, wherever the working directory is later: the block, or another thread, may change it."""
    with contextlib.suppress(OSError):  # it is gone: whatever is done there will say so
        return Path(path).absolute()
    return Path(path)


@contextmanager
def made_aside(target: Path, *, durable: bool) -> Iterator[Path]:
    """As ``atomic_path``; what is there may be in the way until the block has ended."""
    draft = aside(target)
    try:
        yield draft
        status = retry_os_call(draft.lstat, draft, "look at what was to be written")
        if durable:
            fsync_tree(draft)
        _rename(draft, target, status)
    except BaseException:
        discard(draft)
        raise
    if durable:
        fsync_dir(target.parent)


def aside(target: Path) -> Path:
    """A fresh name beside ``target``: in the same directory, so that one rename can publish it; never used before."""
    tail = f".safedist-{secrets.token_hex(12)}"
    stem = os.fsencode(target.name)[: 255 - len(tail) - 1].decode(errors="ignore")  # NAME_MAX, in bytes
    return target.parent / f".{stem}{tail}"


def link_new(draft: Path, target: Path) -> bool:
    """Give a file that is whole its name, where that is free; False where it is not. One try.

    On a file system without hard links the last of two that come at once stays; it is whole there, too.
    """
    try:
        os.link(draft, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        draft.replace(target)
    return True


def discard(place: Path) -> None:
    """Remove a file or a directory, as far as that can be done; read-only directories in it too."""
    with contextlib.suppress(OSError):
        place.unlink()
    # Top-down: a directory is made readable before os.walk looks into it. Links are not followed.
    for parent, names, _ in os.walk(place):
        for inside in (Path(parent), *(Path(parent, name) for name in names)):
            with contextlib.suppress(OSError):
                if not inside.is_symlink():
                    inside.chmod(0o700)
    with contextlib.suppress(OSError):  # ignore_errors leaves some out, such as ESTALE from a handle it has just opened
        shutil.rmtree(place, ignore_errors=True)


class _Raw(io.FileIO):
    """A file whose errors say what they mean: of the file system alone, not of the code that writes."""

    def __init__(self, handle: int, path: Path) -> None:
        super().__init__(handle, "wb")
        self._path = path

    def write(self, data: Any, /) -> int:
        with _explained(self._path, "write"):
            return super().write(data) or 0

    def close(self) -> None:
        with _explained(self._path, "write"):  # NFS reports on close what it could not write before
            super().close()


@contextmanager
def _explained(path: Path, doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise explain(error, path, doing) from error


def _create(draft: Path, target: Path, permissions: int | None) -> int:
    """Open a new file with ``permissions`` less the umask; without them with those of the file that it replaces."""
    kept = None
    if permissions is None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            there = target.lstat().st_mode
            kept = stat.S_IMODE(there) if stat.S_ISREG(there) else None
    bits = 0o600 if kept is not None else 0o666 if permissions is None else permissions
    try:
        handle = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, bits)
    except FileExistsError:
        # The name is random and ours: an earlier try of this same call has made it, and the reply was lost.
        handle = os.open(draft, os.O_WRONLY | os.O_TRUNC)
    if kept is not None:
        try:
            os.fchmod(handle, kept)
        except BaseException:
            os.close(handle)
            raise
    return handle


def fsync_dir(path: Path) -> None:
    """Bring the names in a directory to stable storage. File systems that cannot (EINVAL) promise nothing there."""
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY, "directory", spared=(errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP))


def fsync_tree(root: Path) -> None:
    """Bring a file, or every file and directory below a directory, to stable storage; what else is there has none."""
    mode = retry_os_call(root.lstat, root, "look at what is to be durable").st_mode
    if stat.S_ISREG(mode):
        readable = mode & stat.S_IRUSR or not mode & stat.S_IWUSR
        _fsync(root, os.O_RDONLY if readable else os.O_WRONLY, "file")
    elif stat.S_ISDIR(mode):
        # os.walk would leave out, without a word, a directory that cannot be read.
        for name in retry_os_call(lambda: os.listdir(root), root, "list the directory"):  # noqa: PTH208
            fsync_tree(root / name)
        fsync_dir(root)


def _fsync(path: Path, flags: int, kind: str, spared: Collection[int] = ()) -> None:
    doing = f"bring the {kind} to stable storage"
    handle = retry_os_call(lambda: os.open(path, flags), path, doing)
    try:
        os.fsync(handle)  # never again after EIO: the kernel has dropped the pages, and would lie (fsync(2))
    except OSError as error:
        if error.errno not in spared:
            raise explain(error, path, doing) from error
    finally:
        os.close(handle)


def _rename(source: Path, target: Path, status: os.stat_result) -> None:
    def rename() -> None:
        try:
            source.rename(target)
        except OSError:
            # Else done by an earlier try, ours or the kernel's own after ESTALE, whose reply was lost.
            if not _is_now(target, status):
                raise

    retry_os_call(rename, target, f"rename {source.name} to it")


def _is_now(target: Path, status: os.stat_result) -> bool:
    try:
        # Again where that can help: a look that fails for a moment would make a rename that was done look like none.
        return os.path.samestat(retry_os_call(target.lstat, target, "look at it"), status)
    except FsError:
        return False
