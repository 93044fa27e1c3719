"""From an archive's address to code in a directory: the order of the steps, and nothing else."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ...errors import ArchiveError, StagingError
from ..archive import DIRECTORY, FILE, Inflate, Limits, TreeEntry, crc32, unpack_tar
from .ahead import Ahead
from .failures import disk_failed
from .keeping import Keep, Lease, is_local, lease
from .locks import one_at_a_time
from .merge import fingerprint, merge
from .places import USUAL, absolute, choose, noexec, swappable
from .progress import StagingProgress
from .source import ObjectIdentity, Retry, ShortAnswerError, Source, open_source
from .store import CodeStore, Tree, describe, key_of
from .watch import Watch

PICKLE_NAME = "pkl.gz"
"""flytekit's distribution of notebook code: not an archive, but one file that the resolver reads from the working
directory (flytekit.core.python_auto_container.PICKLE_FILE_PATH)."""

_SMALL = 1 << 17
"""Compressed bytes up to which one thread does it all: they are written before a second one would have got going."""

_ONCE = Retry(attempts=1, answer=5.0)
"""For a question whose answer only makes an error clearer."""

POINTS = ("waiting", "locked", "fetch", "unpack", "before_publish", "after_publish", "before_merge", "merge", "merged")
"""Named points that :attr:`Options.at` is told about, in order. Tests stop processes there."""


def _nowhere(_point: str) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to stage.

    Attributes:
        store: the node's store; default: one per user in the best directory of ``temporary``.
        temporary: directories for temporary files, the wished-for first (:func:`.places.choose`).
        keep: how much of earlier archives stays in the store.
        limits: see :class:`~flytekitplugins_safedist.container.archive.Limits`.
        retry: for errors of the remote store that may pass.
        patience: seconds to wait for another process of the node before doing its work again.
        deadline: seconds for all waiting: for that other process, and for the store.
        progress: makes the :class:`StagingProgress` that speaks to people.
        at: told each of :data:`POINTS`.
    """

    store: Path | None = None
    temporary: tuple[Path, ...] = USUAL
    keep: Keep = field(default_factory=Keep)
    limits: Limits = field(default_factory=Limits)
    retry: Retry = field(default_factory=Retry)
    patience: float = 900.0
    deadline: float = 1800.0
    progress: Callable[[], StagingProgress] = StagingProgress
    at: Callable[[str], None] = _nowhere


@dataclass(frozen=True)
class StagedCode:
    """Code that is there.

    Attributes:
        tree: the immutable, content-addressed directory that imports come from.
        dest: the destination directory, where the same files lie among those that were there.
        digest: sha256 of the archive: the version of the code.
        files: entries that are not directories.
        raw: bytes unpacked.
        fetched: whether this process fetched it; otherwise it was there, or another process did.
        lease: keeps ``tree`` from being removed, as long as this value is there.
    """

    tree: Path
    dest: Path
    digest: str
    files: int
    raw: int
    fetched: bool
    lease: Lease = field(repr=False, compare=False)


def stage(uri: str, dest: Path, options: Options | None = None) -> StagedCode:
    """Make the code archive ``uri`` available on this node and in ``dest``, whatever else happens at the same time.

    Any number of processes and nodes may do this at once. One per node fetches, the others wait for it.

    Raises:
        CodeNotFoundError: the archive does not exist.
        ArchiveError: the archive is refused, whole.
        StagingError: anything else; infrastructure, worth a retry.
    """
    options = options or Options()
    progress = options.progress()
    watch = Watch(options.deadline, options.retry.say)
    dest = Path(os.path.realpath(dest))
    try:
        store = _open_store(options)
        run = _Run(store, open_source(uri, options.retry, watch), options, progress, watch)
        tree, fetched, held = _tree(run)
        options.at("before_merge")
        _merge(run, tree, dest)
        _warn_of_noexec(run, tree)
        options.at("merged")
    finally:
        watch.cancel()
        progress.end()
    files = sum(1 for entry in tree.entries.values() if entry.kind != DIRECTORY)
    return StagedCode(tree.path, dest, tree.digest, files, tree.raw, fetched, held)


def _open_store(options: Options) -> CodeStore:
    if options.store is not None:
        root = absolute(options.store)
        if who := swappable(root):
            raise StagingError(
                "The store for staged code could be replaced by another user",
                where={"path": root},
                seen=who,
                expected="only this user and root to be able to rename it",
                hint="chmod +t or go-w that directory, or name another with SAFEDIST_CODE_STORE",
            )
    else:
        place = choose(options.temporary)
        root = CodeStore.default_root(place.directory)
        if place.against:
            options.retry.say(
                f"staged code is kept in {root}, for want of a better place: {place.against};"
                " name one with SAFEDIST_CODE_STORE"
            )
    with _explained(root, "Opening the store for staged code"):
        return CodeStore(root)


def _warn_of_noexec(run: _Run, tree: Tree) -> None:
    """Compiled extensions are loaded from the staged tree."""
    if not noexec(tree.path):
        return
    extension = next((name for name in tree.entries if name.endswith(b".so")), None)
    if extension is not None:
        run.options.retry.say(
            f"{run.store.root} is mounted noexec: {os.fsdecode(extension)} and other compiled extensions of"
            " the archive cannot be imported from there; name another directory with SAFEDIST_CODE_STORE"
        )


@dataclass
class _Run:
    """What the steps of one staging share."""

    store: CodeStore
    source: Source
    options: Options
    progress: StagingProgress
    watch: Watch

    def waiting(self, owner: str, waited: float) -> None:
        """Somebody else holds the lock."""
        self.options.at("waiting")
        self.progress.waiting(owner, waited)

    def alone(self, key: str) -> AbstractContextManager[bool]:
        """One process of the node at a time, as far as locks work here."""
        patience = min(self.options.patience, self.watch.remaining())
        return one_at_a_time(self.store.lock(key), patience=patience, waiting=self.waiting)


def _tree(run: _Run) -> tuple[Tree, bool, Lease]:
    identity = run.source.identity()
    key = key_of(identity.uri, identity.size, identity.validator)
    found = _known(run, identity, key)
    if found is not None:
        return found[0], False, found[1]
    needed = f"{identity.size} bytes, the archive as it is packed, and what it unpacks to" if identity.size else ""
    with _explained(run.store.root, "Unpacking the code archive", needed), run.alone(key):
        run.options.at("locked")
        found = _known(run, identity, key)  # while we waited, the one we waited for made it
        if found is not None:
            return found[0], False, found[1]
        tree, held = _make(run, identity, key)
        run.store.prune(run.options.keep)
        return tree, True, held


def _known(run: _Run, identity: ObjectIdentity, key: str) -> tuple[Tree, Lease] | None:
    """The tree that this object became; never by its size alone, which a changed one may share."""
    tree = run.store.by_source(key) if identity.validator else None
    # First looked at and then held: what is held still has its name, so nobody had begun to remove it.
    held = lease(tree.path.parent) if tree is not None else None
    return None if tree is None or held is None else (tree, held)


def _make(run: _Run, identity: ObjectIdentity, key: str) -> tuple[Tree, Lease]:
    with run.store.work() as work:
        work.sweep(everybodys=is_local(run.store.root))
        code = work.path / "code"
        code.mkdir(mode=0o755)
        making = _Making(run, identity)
        try:
            entries, raw = making.pickled(code) if _is_pickle(identity.uri) else making.unpacked(code)
        except (ArchiveError, StagingError) as refusal:
            # Ranges of two versions look like one damaged archive, or like answers that always break off.
            torn = isinstance(refusal, ArchiveError) or isinstance(refusal.__cause__, ShortAnswerError)
            if torn and making.changed_meanwhile():
                raise making.changed() from refusal
            raise
        tree = describe(work.path, making.digest, raw, entries)
        run.options.at("before_publish")
        work.share()
        tree = run.store.publish(work.path, tree)
        held = lease(tree.path.parent)
        if held is None:
            raise StagingError(
                "The staged code disappeared as soon as it was published",
                where={"path": tree.path.parent},
                hint="Flyte will retry; do not remove the store of staged code while tasks run",
            )
        run.options.at("after_publish")
        run.store.remember_source(key, tree.digest)
        return tree, held


def _is_pickle(uri: str) -> bool:
    return urlsplit(uri).path.rpartition("/")[2] == PICKLE_NAME


class _Making:
    """The stream of one archive, watched while it passes: digest, progress, named points.

    Attributes:
        digest: sha256 of all that has passed; not there before the end.
    """

    digest: str

    def __init__(self, run: _Run, identity: ObjectIdentity) -> None:
        self._source = run.source
        self._identity = identity
        self._size = identity.size
        self._options = run.options
        self._progress = run.progress
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._files = 0

    def unpacked(self, code: Path) -> tuple[dict[bytes, TreeEntry], int]:
        """Unpack into ``code`` while it arrives."""
        label, limits = self._source.label, self._options.limits
        inflate = Inflate(label, limits)
        pieces = inflate.run(self._chunks())
        with Ahead(pieces) if self._worth_a_thread() else nullcontext(pieces) as pieces:
            entries = unpack_tar(pieces, code, label=label, limits=limits, on_member=self._member)
        return entries, inflate.raw

    def _worth_a_thread(self) -> bool:
        return self._size is None or self._size > _SMALL

    def pickled(self, code: Path) -> tuple[dict[bytes, TreeEntry], int]:
        """Keep the file as it is, after reading it through as gzip: a torn one must not be found by unpickling."""
        inflate = Inflate(self._source.label, self._options.limits, plain=False)
        path = code / PICKLE_NAME
        crc = 0
        with open(path, "wb") as kept:

            def keeping() -> Iterator[bytes]:
                nonlocal crc
                for chunk in self._chunks():
                    kept.write(chunk)
                    crc = crc32(chunk, crc)
                    yield chunk

            for _ in inflate.run(keeping()):
                pass
        found = path.stat()
        entry = TreeEntry(FILE, found.st_size, found.st_mtime_ns, found.st_mode & 0o777, b"", crc)
        return {PICKLE_NAME.encode(): entry}, inflate.raw

    def _chunks(self) -> Iterator[bytes]:
        for chunk in self._source.chunks():
            self._hash.update(chunk)
            if not self._bytes:
                self._options.at("fetch")
            self._bytes += len(chunk)
            self._progress.fetching(self._bytes, self._size, self._files)
            yield chunk
        self._end()  # here, where files are still being written: asking again costs a round trip

    def _end(self) -> None:
        """Only an archive that did not change has a digest."""
        if self._source.identity() != self._identity:
            raise self.changed()
        self.digest = self._hash.hexdigest()

    def changed(self) -> StagingError:
        """The error for an object that is not the same any more."""
        return StagingError(
            "The code archive changed while it was fetched",
            where={"uri": self._source.label},
            hint="Flyte will retry; do not overwrite archives of running executions",
        )

    def changed_meanwhile(self) -> bool:
        """Ask the store once more, shortly; whoever does not answer has not said so."""
        source = open_source(self._identity.uri, _ONCE, Watch(_ONCE.answer, _ONCE.say))
        with suppress(StagingError):
            return source.identity() != self._identity
        return False

    def _member(self, count: int) -> None:
        self._files = count
        if count == 1:
            self._options.at("unpack")


def _merge(run: _Run, tree: Tree, dest: Path) -> None:
    key = key_of("dest", dest)
    with _explained(dest, "Putting the code into the destination directory", f"{tree.raw} bytes free"), run.alone(key):
        before = run.store.merged(key)
        if before is not None and before == fingerprint(tree, dest):
            return
        merge(tree, dest, at=run.options.at)
        after = fingerprint(tree, dest)
        if after is not None:
            run.store.remember_merged(key, after)


@contextmanager
def _explained(directory: Path, doing: str, needed: str = "") -> Iterator[None]:
    try:
        yield
    except ArchiveError as error:
        where = {**error.where, "host": os.uname().nodename}
        raise ArchiveError(
            error.what, where=where, seen=error.seen, expected=error.expected, hint=error.hint
        ) from error
    except OSError as error:
        raise disk_failed(error, directory, needed, doing) from error
