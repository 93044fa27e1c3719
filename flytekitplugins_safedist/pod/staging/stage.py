"""From an archive's address to code in a directory: the order of the steps, and nothing else."""

# text paths: Path costs more than the call

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from ...errors import ArchiveError, FsError, PathBlockedError, SafedistError
from ...fs import ensure_dir
from ...store.patience import Patience
from ...texts import public
from . import points
from .fetch import Download, Source
from .place import Placing, Private, disk_failed
from .unpack import GZIP_MAGIC, Arriving, Options, Stream, Unpacking

PICKLE_NAME = "pkl.gz"
"""flytekit's distribution of notebook code: not an archive, but one file that the resolver reads from the working
directory (flytekit.core.python_auto_container.PICKLE_FILE_PATH)."""

_PIECE = 1 << 20

_STILL_SECONDS = 5.0
"""For a question whose answer only makes an error clearer."""


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


def stage(uri: str, dest: Path, options: Options | None = None) -> StagedCode:
    """Bring the code archive ``uri`` into ``dest``, whatever else happens at the same time.

    Any number of processes and nodes may do this at once.

    Raises:
        CodeNotFoundError: the archive does not exist.
        ArchiveError: the archive is refused, whole.
        PathBlockedError: a file of the destination stands where the code is to go.
        StagingError: anything else; infrastructure, worth a retry.
    """
    options = options or Options()
    patience = Patience(public(uri), options.deadline)
    dest = Path(os.path.realpath(dest))
    with _explained(dest, "put the code into the destination directory"):
        ensure_dir(dest)
        with closing(Private(dest)) as private:
            points.at("begun")
            tree = private.path / "code"
            code = _unpacked(Source(uri, patience), uri, tree, options)
            points.at("unpacked")
            placing = Placing(tree, dest)
            with _explained(dest, "put the code into the destination directory"):  # before the tree goes: what is free?
                placing.run()
            points.at("placed")
    return replace(code, new=code.files - placing.same)


def _unpacked(source: Source, uri: str, tree: Path, options: Options) -> StagedCode:
    """Fetch the archive, and unpack it into the new directory ``tree``."""
    pickled = urlsplit(uri).path.rpartition("/")[2] == PICKLE_NAME
    source.look()
    try:
        with closing(Download(source, tree.parent)) as download:
            code = _as_it_arrives(download, source, tree, options, pickled=pickled)
    except ArchiveError as refusal:
        source.patience.end_within(_STILL_SECONDS)
        changed = False
        with suppress(SafedistError):
            changed = source.differs()
        if changed:  # parts of two versions look like one damaged archive
            raise source.changed() from refusal
        raise
    if source.differs() and _fetched_again(source, tree.with_name("again")) != code.digest:
        raise source.changed()
    return code


def _fetched_again(source: Source, directory: Path) -> str:
    """The digest of what is there now: whoever registers the same code again puts the same archive over this one
    (flytekit's ``FlyteRemote.upload_file``, whose addresses are made of what an archive holds)."""
    digest, position = hashlib.sha256(), 0
    source.look()
    with _explained(directory, "download the code archive", source):
        directory.mkdir()
        with closing(Download(source, directory)) as download:
            download.finish()
            while piece := download.read(position, _PIECE):
                digest.update(piece)
                position += len(piece)
    return digest.hexdigest()


def _as_it_arrives(download: Download, source: Source, tree: Path, options: Options, *, pickled: bool) -> StagedCode:
    """Unpack while more arrives, where checksums tell whether these are the archive's bytes; and once more when all is
    there, where they are not (see :class:`.fetch.Download`), or where nothing tells."""
    with _explained(tree.parent, "download the code archive", source):
        packed = download.begins_with(GZIP_MAGIC)
        points.at("fetch")
        if packed and not pickled:
            with suppress(ArchiveError):
                return _read(download, source, tree, options, pickled=False)
            shutil.rmtree(tree)
        download.finish()
    return _read(download, source, tree, options, pickled=pickled)


def _read(download: Download, source: Source, tree: Path, options: Options, *, pickled: bool) -> StagedCode:
    digest = hashlib.sha256()
    packed = Arriving(download.read, digest.update)
    gzipped = pickled or download.begins_with(GZIP_MAGIC)
    stream = Stream(packed, source.patience.label, options, gzipped=gzipped)
    with _explained(tree, "unpack the code", source, stream):
        tree.mkdir()
        unpacking = Unpacking(stream, tree, options.max_files)
        if pickled:
            stream.through()  # a torn one must not be found by unpickling
            shutil.copyfile(download.path, tree / PICKLE_NAME)
            unpacking.files.add(PICKLE_NAME)
        else:
            unpacking.run()
    files = len(unpacking.files)
    return StagedCode(digest.hexdigest(), files, stream.raw, new=files)


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
