"""Code archives for tests: ordinary ones as flytekit makes them, and hostile ones made by hand."""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

FLYTEKIT_MTIME = 315532800.0
"""flytekit.tools.script_mode.tar_strip_file_attributes gives every file this time, as a float: a pax header each."""


def member(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    """A member and its content; ``fields`` are attributes of TarInfo."""
    info = tarfile.TarInfo(name)
    info.mtime = FLYTEKIT_MTIME
    for key, value in fields.items():
        setattr(info, key, value)
    info.size = len(data)
    return info, data


def directory(name: str, mode: int = 0o755) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.DIRTYPE, mode=mode)


def symlink(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.SYMTYPE, linkname=target)


def hardlink(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.LNKTYPE, linkname=target)


def tar(members: Iterable[tuple[tarfile.TarInfo, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    """The raw tar stream, in the order given."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def targz(members: Iterable[tuple[tarfile.TarInfo, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    return gzip.compress(tar(members, form), mtime=0)


def project(files: Mapping[str, str | bytes]) -> bytes:
    """An archive as flytekit makes it: files only, no directories, one time for all."""
    return targz([member(name, data.encode() if isinstance(data, str) else data) for name, data in files.items()])


def snapshot(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything below ``root`` that makes two trees the same: names, kinds, modes, contents, links, hard links."""
    found: dict[str, tuple[object, ...]] = {}
    inodes: dict[tuple[int, int], str] = {}
    for directory_, names, files in os.walk(os.fsencode(root)):
        for name in sorted(names) + sorted(files):
            path = directory_ + b"/" + name
            relative = os.fsdecode(os.path.relpath(path, os.fsencode(root)))
            info = os.lstat(path)
            if stat.S_ISLNK(info.st_mode):
                found[relative] = ("link", os.readlink(path))
            elif stat.S_ISDIR(info.st_mode):
                found[relative] = ("directory", stat.S_IMODE(info.st_mode))
            else:
                with open(path, "rb") as reader:
                    found[relative] = ("file", stat.S_IMODE(info.st_mode), reader.read(), int(info.st_mtime))
    for relative in sorted(found):
        if found[relative][0] == "file":
            info = os.lstat(os.fsencode(root) + b"/" + os.fsencode(relative))
            found[relative] += (inodes.setdefault((info.st_dev, info.st_ino), relative),)
    return found
