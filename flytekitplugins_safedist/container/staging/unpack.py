"""A code archive into one private, empty directory: isal (or zlib) inflates and verifies, ``tar`` writes.

How it is packed is told by its content and never by its name: ``flytectl register files`` un-gzips the archive while
it uploads it and keeps its name (flytectl/cmd/register/register_util.go, ``uploadFastRegisterArtifact``), so that a
plain tar is called ``.tar.gz``. ``tar`` and ``tarfile`` stop at the end mark and never look at the checksum behind it;
here the stream is read to its end, and CRC and length of every gzip member are verified.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import stat
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ArchiveError
from . import untar
from .failures import DISK

_engine: Any = zlib
with suppress(ImportError):  # no wheels for every platform; same interface, same checks, two to four times the speed
    from isal import isal_zlib as _engine

PICKLE_NAME = "pkl.gz"
"""flytekit's distribution of notebook code: not an archive, but one file that the resolver reads from the working
directory (flytekit.core.python_auto_container.PICKLE_FILE_PATH)."""

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WBITS = 31  # zlib.decompressobj: 16 + 15, a gzip header and trailer, both verified
_PIECE = 1 << 20
_BLOCK = 512
_MOST_SAID = 1 << 16
_TAR = (
    "--extract",
    "--file=-",
    "--no-same-owner",
    "--delay-directory-restore",
    "--touch",
    "--warning=no-timestamp",
    "--quoting-style=shell-always",
)
"""Of GNU tar. Times are those of the staging: flytekit gives every file the same, by which Python would take bytecode
of an earlier version of equal length for current."""

_SAID = re.compile(r"^tar: (?:('.*?'): )?(.*)$", re.MULTILINE)
_NO_CAUSE = ("Removing leading", "Exiting with failure", "Error is not recoverable")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on one archive. The defaults leave room for any real project and stop a bomb before the disk is full.

    Attributes:
        max_bytes: bytes of the unpacked stream, headers and padding included.
        max_files: files and links; looked at when they are unpacked, and before any is put in its place.
        max_ratio: unpacked bytes per compressed byte, looked at only beyond ``ratio_from`` unpacked bytes: small
            archives of empty files compress far better than that and hurt nobody.
        ratio_from: unpacked bytes from which the ratio counts.
    """

    max_bytes: int = 64 << 30
    max_files: int = 1_000_000
    max_ratio: float = 200.0
    ratio_from: int = 1 << 28


class Inflate:
    """One pass over an archive: gzip, or a stream that is not packed.

    Attributes:
        raw: bytes produced so far.
    """

    def __init__(self, label: str, limits: Limits) -> None:
        self.raw = 0
        self._label, self._limits = label, limits
        self._compressed = 0
        self._tail = b""

    def run(self, chunks: Iterable[bytes], *, pickled: bool = False) -> Iterator[bytes]:
        """Yield the raw bytes in pieces.

        Args:
            pickled: whether this is a gzipped pickle and no tar.

        Raises:
            ArchiveError: not an archive, damaged, truncated, or over the limits.
        """
        chunks = iter(chunks)
        start = b""
        while len(start) < len(_GZIP_MAGIC) and (chunk := next(chunks, b"")):
            start += chunk
        packed = start.startswith(_GZIP_MAGIC) or pickled
        arriving = self._counted(itertools.chain([start], chunks))
        for piece in self._inflated(arriving) if packed else arriving:
            self._check(piece)
            yield piece
        if not pickled and (self.raw < _BLOCK or self._tail.strip(b"\0")):
            raise self._damaged("The archive is no tar archive, or truncated: it ends without its end mark")

    def _counted(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._compressed += len(chunk)
            yield chunk

    def _inflated(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        member: Any = None
        ended = False
        for data in chunks:
            more = bool(data)
            while more:
                if ended and member is None and not (data := data.lstrip(b"\0")):
                    break  # gzip allows zero bytes behind a member (tapes)
                member = member or _engine.decompressobj(wbits=_GZIP_WBITS)
                try:
                    piece = member.decompress(data, _PIECE)
                except _engine.error as error:
                    raise self._damaged(
                        "The archive is damaged: its gzip stream does not decode, fails its checksum, or has something"
                        " else behind it",
                        str(error),
                    ) from error
                yield piece
                data = member.unconsumed_tail  # noqa: PLW2901
                more = bool(data) or len(piece) == _PIECE  # a full piece may leave output inside the engine
                if member.eof:
                    data, member, ended = member.unused_data, None, True  # noqa: PLW2901
                    more = bool(data)
        if member is not None or not self._compressed:
            raise self._damaged("The archive is truncated: its gzip stream ends early")

    def _check(self, piece: bytes) -> None:
        self.raw += len(piece)
        self._tail = (self._tail + piece)[-_BLOCK:] if len(piece) < _BLOCK else piece[-_BLOCK:]
        limits = self._limits
        if self.raw > limits.max_bytes:
            raise _refused(
                self._label,
                "The archive unpacks to more than the limit",
                seen=f"more than {limits.max_bytes} bytes",
                hint="keep data out of the code archive (.flyteignore), or raise SAFEDIST_CODE_MAX_BYTES",
            )
        if self.raw > limits.ratio_from and self.raw > limits.max_ratio * self._compressed:
            raise _refused(
                self._label,
                "The archive unpacks to suspiciously much for its size",
                seen=f"{self.raw} bytes from {self._compressed}",
                expected=f"at most {limits.max_ratio:g} times",
                hint="if it is meant to be so, raise SAFEDIST_CODE_MAX_RATIO",
            )

    def _damaged(self, what: str, seen: str = "") -> ArchiveError:
        return _refused(
            self._label,
            what,
            seen=seen or f"{self._compressed} bytes, {self.raw} unpacked",
            expected="tar, plain or packed with gzip",
            hint="register the task again; if it repeats, the upload or a proxy cuts objects short",
        )


def unpack(chunks: Iterable[bytes], into: Path, label: str, limits: Limits) -> int:
    """Unpack the archive into the empty, private directory ``into``; returns the bytes of the raw stream.

    Raises:
        ArchiveError: it is refused, whole; what stands in ``into`` is to be thrown away.
        OSError: the disk is full, or cannot be written.
    """
    inflate = Inflate(label, limits)
    pieces = inflate.run(chunks)
    said = os.memfd_create("tar")  # not a pipe, which could fill up, and not a file, for which the disk may be too full
    child = subprocess.Popen(
        [*_tar(), f"--directory={into}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=said,
        env={**os.environ, "LC_ALL": "C"},
        pipesize=_PIECE,
    )
    try:
        for piece in pieces:
            with suppress(BrokenPipeError):  # it has ended, and says why below; the rest is verified all the same
                child.stdin.write(piece)  # type: ignore[union-attr]  # it is a pipe
            if os.fstat(said).st_size > _MOST_SAID:
                break
        with suppress(BrokenPipeError):
            child.stdin.close()  # type: ignore[union-attr]
        if child.wait():
            raise _complaint(os.pread(said, _MOST_SAID, 0).decode(errors="backslashreplace"), child.returncode, label)
    finally:
        os.close(said)
        if child.returncode is None:
            child.kill()
            child.wait()
        with suppress(BrokenPipeError):
            child.stdin.close()  # type: ignore[union-attr]
    return inflate.raw


def keep_pickle(chunks: Iterable[bytes], into: Path, label: str, limits: Limits) -> int:
    """Keep the file as it is, after reading it through as gzip: a torn one must not be found by unpickling."""
    inflate = Inflate(label, limits)
    with open(into / PICKLE_NAME, "wb") as kept:

        def keeping() -> Iterator[bytes]:
            for chunk in chunks:
                kept.write(chunk)
                yield chunk

        for _ in inflate.run(keeping(), pickled=True):
            pass
    return inflate.raw


def _refused(label: str, what: str, member: str = "", **facts: Any) -> ArchiveError:
    """The archive's refusal, with the member where it is one's."""
    where = {"archive": label, **({"member": member} if member else {}), "host": os.uname().nodename}
    return ArchiveError(what, where=where, **facts)


def _tar() -> list[str]:
    """GNU tar, which has that name: others (busybox, bsdtar) are links. Without it Python's ``tarfile`` in a process of
    its own, which does the same."""
    found = shutil.which("tar")
    if found is not None and Path(found).resolve().name == "tar":
        return ["tar", *_TAR]
    return [sys.executable, "-I", untar.__file__]


def _complaint(said: str, status: int, label: str) -> Exception:
    """What tar's last words mean: the disk's trouble, or the archive's."""
    lines = [(member, why) for member, why in _SAID.findall(said) if not why.startswith(_NO_CAUSE)]
    member, why = lines[0] if lines else ("", f"tar ended with status {status}: {said.strip()[-300:]}")
    for number in DISK:
        if any(text.endswith(os.strerror(number)) for _, text in lines):
            return OSError(number, os.strerror(number))
    return _refused(
        label,
        "The archive is refused: tar cannot unpack it",
        member,
        seen=why,
        hint="leave that out of the code (.flyteignore), or register the task again if the archive is damaged",
    )


def inspect(tree: Path, label: str, limits: Limits) -> list[str]:
    """The paths of all files and links below ``tree``, relative to it. Directories are made writable for their owner:
    renaming needs it.

    Raises:
        ArchiveError: there is something else (a device, a pipe), or more than the limit.
    """
    found: list[str] = []
    pending = [""]
    while pending:
        inside = pending.pop()
        with os.scandir(tree / inside) as entries:
            for entry in entries:
                path = os.path.join(inside, entry.name)  # noqa: PTH118  (a Path costs more than the call)
                if entry.is_dir(follow_symlinks=False):
                    mode = entry.stat(follow_symlinks=False).st_mode
                    if mode & stat.S_IRWXU != stat.S_IRWXU:
                        os.chmod(entry.path, stat.S_IMODE(mode) | stat.S_IRWXU)  # noqa: PTH101
                    pending.append(path)
                elif entry.is_symlink() or entry.is_file():
                    found.append(path)
                else:
                    raise _refused(
                        label,
                        "The archive holds a device or a named pipe",
                        repr(path),
                        hint="leave it out of the code (.flyteignore)",
                    )
    if len(found) > limits.max_files:
        raise _refused(
            label,
            "The archive holds more files than the limit",
            seen=len(found),
            expected=f"at most {limits.max_files}",
            hint="keep data out of the code archive (.flyteignore), or raise SAFEDIST_CODE_MAX_FILES",
        )
    return found
