"""What ``tar --extract --file=- --directory=INTO`` does, for images without GNU tar: a script that needs only Python.

python -I untar.py --directory=INTO < archive.tar
"""

from __future__ import annotations

import os
import sys
import tarfile
import time
from typing import Any


class _Header(tarfile.TarInfo):
    """A header; one that is damaged is an error. ``tarfile`` takes it for the archive's end."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> _Header:
        try:
            return super().frombuf(buf, encoding, errors)
        except (tarfile.EOFHeaderError, tarfile.EmptyHeaderError):  # type: ignore[attr-defined]  # of its own
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"Skipping to next header ({error})") from None


def main(into: str) -> int:
    """Unpack standard input; 0, or 2 after a line that begins as GNU tar's does."""
    if not hasattr(tarfile, "data_filter"):
        sys.stderr.write(
            "tar: this image has neither GNU tar nor a Python with tarfile's filters (from 3.10.12, 3.11.4)\n"
        )
        return 2
    last = ""
    now = time.time()

    def carried(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        """As the filter "data", with every symbolic link as it is: nothing is written through one."""
        nonlocal last
        last = member.name
        if member.issym():
            return tarfile.data_filter(member.replace(linkname="."), path).replace(linkname=member.linkname, mtime=now)
        safe = tarfile.data_filter(member, path)
        if member.islnk():
            safe.mode = None  # type: ignore[assignment]  # as data_filter does for directories: it is the first one's
        return safe.replace(mtime=now)

    try:
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|", tarinfo=_Header) as archive:
            archive.extractall(into, filter=carried)  # noqa: S202  (filtered)
    except (tarfile.TarError, OSError, EOFError, KeyError) as error:
        why = f"Cannot write: {os.strerror(error.errno)}" if isinstance(error, OSError) and error.errno else str(error)
        sys.stderr.write(f"tar: {last!r}: {why}\n" if last else f"tar: {why}\n")
        return 2
    while sys.stdin.buffer.read(1 << 20):
        pass  # whoever writes verifies the rest
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1].removeprefix("--directory=")))
