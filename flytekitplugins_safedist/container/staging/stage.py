"""From an archive's address to code in a directory: the order of the steps, and nothing else."""

# ruff: noqa: PTH103, PTH118, PTH120
# text paths: Path costs more than the call

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ...errors import ArchiveError, SafedistError
from ...texts import public
from .failures import disk_failed
from .fetch import Patience, Source
from .place import Placing, Private, make_directory, one_at_a_time
from .unpack import PICKLE_NAME, Limits, inspect, keep_pickle, unpack

_STILL_SECONDS = 5.0
"""For a question whose answer only makes an error clearer."""


def _nowhere(_point: str) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to stage.

    Attributes:
        limits: see :class:`~flytekitplugins_safedist.container.staging.Limits`.
        deadline: seconds for all waiting: for the store, and for another process.
        patience: seconds to wait for another process that stages into the same directory.
        answer: seconds that the first try of one call to a store may take; the n-th may take n times as long.
        pause: seconds before the second try; doubled for each further one.
        modules: an empty directory, in which this archive's Python modules stay whatever becomes of the destination.
        at: told each of :data:`~flytekitplugins_safedist.container.staging.POINTS`.
    """

    limits: Limits = field(default_factory=Limits)
    deadline: float = 1800.0
    patience: float = 900.0
    answer: float = 30.0
    pause: float = 0.5
    modules: Path | None = None
    at: Callable[[str], None] = _nowhere


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
    patience = Patience(public(uri), options.deadline, options.answer, options.pause)
    dest = Path(os.path.realpath(dest))
    try:
        make_directory(dest)
        with _alone(dest, options, patience), Private(dest) as private:
            options.at("locked")
            tree = private.path / "code"
            tree.mkdir()
            source = Source(uri, patience, private.path / "archive")
            digest, raw = _unpacked(source, uri, tree, options)
            files = inspect(tree, patience.label, options.limits)
            if options.modules is not None:
                _keep_modules(tree, files, options.modules)
            options.at("unpacked")
            placing = Placing(tree, dest, options.at)
            placing.run()
            options.at("placed")
    except OSError as error:
        raise disk_failed(error, dest, "Putting the code into the destination directory") from error
    return StagedCode(digest, len(files), raw, len(files) - placing.same)


def _keep_modules(tree: Path, files: Iterable[str], into: Path) -> None:
    """Link (or copy) the Python modules among ``files`` of ``tree`` into the empty directory ``into``."""
    made = {""}
    for name in files:
        if not name.endswith((".py", ".pyc")):
            continue
        parent = os.path.dirname(name)
        if parent not in made:
            os.makedirs(into / parent, exist_ok=True)
            made.add(parent)
        source, target = os.path.join(tree, name), os.path.join(into, name)
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:  # another disk, or one without links
            shutil.copy2(source, target, follow_symlinks=False)


def _alone(dest: Path, options: Options, patience: Patience) -> AbstractContextManager[None]:
    def waiting(seconds: float) -> None:
        options.at("waiting")
        patience.tell(lambda _: f"waiting for another process that stages into {dest}, {seconds:.0f} s")

    return one_at_a_time(dest, patience=min(options.patience, patience.remaining()), waiting=waiting)


def _unpacked(source: Source, uri: str, tree: Path, options: Options) -> tuple[str, int]:
    """Unpack into ``tree`` while it arrives; returns its digest and the bytes it was unpacked to."""
    digest = hashlib.sha256()

    def passing() -> Iterator[bytes]:
        for number, chunk in enumerate(source.whole()):
            if not number:
                options.at("fetch")
            digest.update(chunk)
            yield chunk

    label = source.patience.label
    pickled = urlsplit(uri).path.rpartition("/")[2] == PICKLE_NAME
    try:
        raw = (keep_pickle if pickled else unpack)(passing(), tree, label, options.limits)
    except ArchiveError as refusal:
        source.patience.end_within(_STILL_SECONDS)
        changed = False
        with suppress(SafedistError):
            changed = source.differs()
        if changed:  # ranges of two versions look like one damaged archive
            raise source.changed() from refusal
        raise
    return digest.hexdigest(), raw
