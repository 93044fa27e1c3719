"""From an archive's address to code in a directory: the order of the steps, and nothing else."""

# text paths: Path costs more than the call

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from urllib.parse import urlsplit

from ...errors import FsError, PathBlockedError
from ...fs import ensure_dir
from ...store.patience import Patience
from ...texts import public
from . import points
from .fetch import Download, Source
from .place import Placing, Private, disk_failed
from .unpack import GZIP_MAGIC, Stream, Unpacking

PICKLE_NAME = "pkl.gz"
"""flytekit's distribution of notebook code: not an archive, but one file that the resolver reads from the working
directory (flytekit.core.python_auto_container.PICKLE_FILE_PATH)."""

DEADLINE_SECONDS = 1800.0
"""For the store, where nobody says otherwise."""

_PIECE = 1 << 20


@dataclass(frozen=True)
class StagedCode:
    """Code that is there, its files among those that were in the destination before.

    Attributes:
        digest: sha256 of the archive: the version of the code.
        files: files and links.
        raw: bytes unpacked.
        new: how many of the files were not there before, just so.
    """

    digest: str
    files: int
    raw: int
    new: int


def stage(uri: str, dest: Path, deadline: float = DEADLINE_SECONDS) -> StagedCode:
    """Bring the code archive ``uri`` into ``dest``, whatever else happens at the same time.

    Any number of processes and nodes may do this at once.

    Args:
        uri: of the archive.
        dest: the directory.
        deadline: seconds for all waiting for the store.

    Raises:
        CodeNotFoundError: the archive does not exist.
        ArchiveError: the archive is refused, whole.
        PathBlockedError: a file of the destination stands where the code is to go.
        StagingError: anything else; infrastructure, worth a retry.
    """
    patience = Patience(public(uri), deadline)
    dest = Path(os.path.realpath(dest))
    with _explained(dest, "put the code into the destination directory"):
        ensure_dir(dest)
        with closing(Private(dest)) as private:
            points.at("begun")
            tree = private.path / "code"
            code = _unpacked(Source(uri, patience), uri, tree)
            points.at("unpacked")
            placing = Placing(tree, dest)
            with _explained(dest, "put the code into the destination directory"):  # before the tree goes: what is free?
                placing.run()
            points.at("placed")
    return replace(code, new=code.files - placing.same)


def _unpacked(source: Source, uri: str, tree: Path) -> StagedCode:
    """Fetch the archive, and unpack it into the new directory ``tree``."""
    archive = _fetched(source, tree.with_name("fetched"))
    points.at("fetch")
    digest = _digest_of(archive)
    # Parts of two versions look like one damaged archive. But whoever registers the same code again puts the same
    # archive over this one (flytekit's ``FlyteRemote.upload_file``, whose addresses are made of what an archive holds).
    if source.differs() and _digest_of(_fetched(source, tree.with_name("again"))) != digest:
        raise source.changed()
    with archive.open("rb") as packed:
        return _read(packed, digest, source, tree, pickled=urlsplit(uri).path.rpartition("/")[2] == PICKLE_NAME)


def _read(packed: BufferedReader, digest: str, source: Source, tree: Path, *, pickled: bool) -> StagedCode:
    gzipped = pickled or packed.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC)
    stream = Stream(packed, source.patience.label, gzipped=gzipped)
    with _explained(tree, "unpack the code", source, stream):
        tree.mkdir()
        unpacking = Unpacking(stream, tree)
        if pickled:
            stream.through()  # a torn one must not be found by unpickling
            shutil.copyfile(packed.name, tree / PICKLE_NAME)
            unpacking.files.add(PICKLE_NAME)
        else:
            unpacking.run()
    files = len(unpacking.files)
    return StagedCode(digest, files, stream.raw, new=files)


def _fetched(source: Source, directory: Path) -> Path:
    source.look()
    with _explained(directory, "download the code archive", source):
        directory.mkdir()
        return Download(source, directory).run()


def _digest_of(archive: Path) -> str:
    digest = hashlib.sha256()
    with archive.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _explained(place: Path, doing: str, source: Source | None = None, stream: Stream | None = None) -> Iterator[None]:
    """Inside, an error of a file system becomes the one error that says what it means, with what was free as it came.

    Args:
        place: where something was to be written, if the error does not say.
        doing: what was to be done there.
        source, stream: what is written, as far as it has come.

    Raises:
        StagingError: see above.
    """
    try:
        yield
    except PathBlockedError:
        raise
    except (OSError, FsError) as error:
        needed = ""
        if source is not None and source.size is not None:
            needed = f"room for the archive ({source.size} bytes)"
        if stream is not None:
            needed += f" and for what it holds (more than {stream.raw} bytes)"
        raise disk_failed(error, place, doing, needed) from error
