"""``download_once``: a dataset or model fetched once for all who share the place, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any

from ..errors import DownloadError, FsError, FsTimeoutError, PathBlockedError
from ..failures import Outlook, outlook
from ..jitter import jittered
from ..texts import encodable
from .atomic import aside, atomic_write, discard, from_here, fsync_dir, fsync_tree, link_new, made_aside
from .collective import WORK_SECONDS, heed, once, plain, tell
from .identity import timeout_s
from .oserrors import mount_of, retry_os_call
from .paths import ensure_dir, is_link_to_nothing, refresh, wait_for
from .store import Group, bounded, ranks

log = logging.getLogger("flytekitplugins_safedist.fs")

_TRIES = 3


def download_once(
    source: Any,
    destination: str | os.PathLike[str],
    *,
    shared: bool | None = None,
    sha256: str | None = None,
    callback: Any = None,
    timeout: float | None = None,
) -> Path:
    """Fetch ``source`` to ``destination`` once for all ranks that share the place; return the path in every rank.

    What is there already is complete: it got its name by one rename. The source is recorded beside it
    (``.NAME.safedist-source``): another source, and be it by its query alone, is refused; what others have put there
    is taken as it is. Every rank must call this, with the same source; a URL may be signed anew.

    Args:
        source: a URL or path that fsspec knows, a ``FlyteFile`` or a ``FlyteDirectory``; in a task with Flyte's own
            credentials and endpoints, but for a chain (``zip://a.txt::s3://...``), which has fsspec's.
        destination: the file or directory to make. Its parent is made if need be.
        shared: whether all nodes see the same file system there; without it what rank 0 says by the type of its mount:
            a disk, tmpfs and overlay are each node's own.
        sha256: the digest (hexadecimal) that a file must have, also one that is there already.
        callback: an ``fsspec.callbacks.Callback``, told of the progress in the rank that fetches.
        timeout: seconds for all of it; without it SAFEDIST_FS_TIMEOUT, without that an hour.

    Raises:
        WorkFailedError: the download failed; every rank gets the one error (a ``DownloadError``, which a job of one
            process gets itself).
        FsTimeoutError: it took longer than ``timeout``.
        DownloadError: the source is nothing that can be fetched.
        PathBlockedError: what is there was fetched from another source, or is not what ``sha256`` says.
    """
    deadline = time.monotonic() + timeout_s(timeout, WORK_SECONDS)

    def left() -> float:
        return max(0.001, deadline - time.monotonic())

    group, target, uri = ranks(left()), from_here(destination), _address(source)
    name = _name_of(uri)
    key = hashlib.sha256(os.fsencode(f"{name}\0{target.name}")).hexdigest()[:32]

    def work() -> list[str]:
        ensure_dir(target.parent, timeout=left())
        if not _is_there(target, uri, sha256):
            _Fetch(uri, name, sha256, callback, deadline).to(target)
        return [gethostname(), "" if group is None else group.node, str(target)]

    if group is None:
        by, *_ = work()
    else:
        key = f"{key}/{group.turn(key)}"
        of_all = _stated(group, key, target, left()) if shared is None else shared
        by, node, place = once(group, f"download/{'job' if of_all else group.node}/{key}", work, left())
        if node == group.node:
            _see_that_it_is_there(target, Path(place), group)
    wait_for(target, made_by=f"the download of {name} on {by}", timeout=left())
    _see_that_it_is_of(target, uri)  # as this rank names it
    return target


def _address(source: Any) -> str:
    if hasattr(source, "remote_source"):  # FlyteFile, FlyteDirectory; os.fspath would fetch them
        return str(source.remote_source or source.path)
    if not isinstance(source, (str, os.PathLike)):
        raise DownloadError(
            "this cannot be downloaded",
            seen=type(source).__name__,
            expected="a URL, a path, FlyteFile, FlyteDirectory",
        )
    return os.fspath(source)


def _stated(group: Group, key: str, target: Path, seconds: float) -> bool:
    """Whether all nodes share the place, as rank 0 says: two that judge for themselves may judge differently."""
    place = f"download/{key}/shared"
    if group.rank == 0:
        tell(group, place, plain(not mount_of(target).is_local))
    return bool(heed(group, place, f"to say whether all nodes share {target.parent}", "rank 0", seconds))


def _see_that_it_is_there(target: Path, place: Path, group: Group) -> None:
    """Raise FsError where a rank of this node has fetched it to another place than this rank names: it would wait for
    what nobody makes."""
    if os.path.realpath(target) != os.path.realpath(place) and not os.path.lexists(target):
        raise FsError(
            "ranks of one node name different places for one download",
            where={"path": target, "rank": str(group)},
            seen=f"another rank has fetched it to {place}",
            hint="name one place for all of a node: current_rank().node_dir / NAME, say",
        )


# --- what is there ---------------------------------------------------------------------------------------------------
def _record(target: Path) -> Path:
    name = target.name
    if len(os.fsencode(name)) > 255 - len("..safedist-source"):  # NAME_MAX
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return target.parent / f".{name}.safedist-source"


def _recorded(target: Path) -> dict[str, Any] | None:
    """Name and digest of the address of what is there; None where somebody else has put it there."""
    try:
        return dict(json.loads(_record(target).read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return {"source": "a source that cannot be read"}


def _is_there(target: Path, uri: str, sha256: str | None) -> bool:
    """Whether it is there already. The record counts without it, too: another process may be about to rename.

    Raises:
        PathBlockedError: something else is.
    """

    def look() -> bool:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            target.lstat()
            return True
        return False

    refresh(target)  # this client may remember that record or target is not there, and see the other
    _see_that_it_is_of(target, uri)
    if is_link_to_nothing(target):
        raise _in_the_way(target, "a symbolic link to nothing", "a file, a directory, or nothing")
    if not retry_os_call(look, target, "see whether it is there"):
        return False
    if sha256 is not None and (digest := _digest(target)) != sha256.lower():
        raise _in_the_way(target, f"sha256 {digest}", f"sha256 {sha256.lower()}")
    return True


def _see_that_it_is_of(target: Path, uri: str) -> None:
    recorded = retry_os_call(lambda: _recorded(target), target, "see where it was fetched from")
    if recorded is not None and recorded.get("address") != _digest_of_address(uri):
        name, source = _name_of(uri), str(recorded.get("source"))
        raise _in_the_way(target, source + " with another query" * (source == name), name)


def _in_the_way(target: Path, seen: str, expected: str) -> PathBlockedError:
    return PathBlockedError(
        "something else is where the download is to be",
        where={"path": target, "host": gethostname()},
        seen=seen,
        expected=expected,
        hint=f"choose another destination for this source, or remove this one, with {_record(target).name} beside it",
    )


def _claim(target: Path, uri: str) -> None:
    """Record the source of a whole download before it gets its name: killed in between, nothing is there whose source
    is not known. Of two at once the first decides, by a link: the other is refused, unless its source is the same."""
    record = _record(target)
    draft = aside(record)

    with atomic_write(draft, "w", durable=False) as file:
        json.dump({"source": _name_of(uri), "address": _digest_of_address(uri)}, file)
    try:
        retry_os_call(lambda: link_new(draft, record), record, "record the source")
        refresh(record)  # which may be another's, or an earlier try's, whose reply was lost
        _see_that_it_is_of(target, uri)
    finally:
        discard(draft)


def _is_directory(path: Path) -> bool:
    return stat.S_ISDIR(retry_os_call(path.stat, path, "look at what was fetched").st_mode)


def _digest(path: Path) -> str:
    if _is_directory(path):
        return "of a directory, which has none"

    def of_all() -> str:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()

    return retry_os_call(of_all, path, "read it")


def _name_of(uri: str) -> str:
    """The source as messages and the record have it, whatever bytes it is made of."""
    return encodable(_without_secrets(uri))


def _without_secrets(uri: str) -> str:
    """A signed URL's query and a user's password are secrets: they appear in no message."""
    links = re.split(r"::(?=[\w+.-]+://)", uri)  # fsspec's chains, "zip://a.txt::https://host/archive.zip"
    if len(links) > 1:
        return "::".join(map(_without_secrets, links))
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return uri
    host, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


_SIGNED = re.compile(r"X-(Amz|Goog)-.*", re.IGNORECASE)
_SIGNED_BY = {
    "Signature": {"Signature", "Expires", "Policy", "Key-Pair-Id", "AWSAccessKeyId", "GoogleAccessId"},
    "sig": {
        *("sig", "sv", "ss", "srt", "sr", "st", "se", "sp", "spr", "sip", "si"),
        *("skoid", "sktid", "skt", "ske", "sks", "skv"),
    },
}
"""Parameters of a URL's query that belong to its signature: S3's and Google's; where the first is there, all of the
older form's and CloudFront's, and of Azure's shared access signatures."""


def _digest_of_address(uri: str) -> str:
    """Tells whether two addresses are one source. Not a part of it: who may read it (a user, a signature, which differs
    each time that a URL is signed, in each rank too), and a directory's slash at the end."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return hashlib.sha256(os.fsencode(Path(uri).absolute())).hexdigest()
    query = rest.partition("?")[2]
    given = [(each.partition("=")[0], each) for each in query.split("&") if each]
    signature = {name for by, names in _SIGNED_BY.items() if by in dict(given) for name in names}
    query = "&".join(each for name, each in given if name not in signature and not _SIGNED.fullmatch(name))
    place = _without_secrets(uri)
    if scheme not in ("http", "https"):  # whose servers may have another page there
        place = place.rstrip("/")
    return hashlib.sha256(os.fsencode(f"{place}?{query}")).hexdigest()


def _below(filesystem: Any, path: str, draft: Path) -> tuple[list[str], list[str]]:
    """The files below a directory, and where each goes, below directories that are made. Listed by their names: a text
    that fsspec is to fetch may be a pattern to it ("run-[lr=0.1]")."""
    root = str(filesystem.info(path.rstrip("/") or "/")["name"]).rstrip("/")
    files, places = [], []
    for name, about in sorted(filesystem.find(root or "/", withdirs=True, detail=True).items()):
        below = os.path.relpath(f"/{name.lstrip('/')}", f"/{root.lstrip('/')}")  # an archive's names have no root
        if below.partition("/")[0] == "..":
            raise DownloadError("a name in this directory leads out of it", seen=name, expected=f"a name below {root}")
        if below == ".":
            continue
        if about.get("islink") and filesystem.isdir(name):  # fsspec would make an empty directory of it
            if Path(name).parent.resolve().is_relative_to(Path(name).resolve()):
                raise DownloadError("a link in this directory goes round", seen=name, expected="a tree that ends")
            (draft / below).mkdir(parents=True, exist_ok=True)
            inner = _below(filesystem, name, draft / below)
            files += inner[0]
            places += inner[1]
        elif about["type"] == "directory" or name.endswith("/"):
            (draft / below).mkdir(parents=True, exist_ok=True)
        else:
            files.append(name)
            places.append(str(draft / below))
    return files, places


def _may_pass(error: Exception) -> bool:
    """Whether a download that failed with this is tried again. Nobody else writes to a draft: where fsspec says that
    something is in its way, it could not look at a directory that is there."""
    if isinstance(error, FileExistsError):
        return True
    is_wrong = isinstance(error, (FsTimeoutError, ValueError, NotImplementedError))
    return not is_wrong and outlook(error) is Outlook.TRANSIENT


# --- fetching --------------------------------------------------------------------------------------------------------
class _Fetch:
    def __init__(self, uri: str, name: str, sha256: str | None, callback: Any, deadline: float) -> None:
        self._uri, self._name, self._sha256, self._deadline = uri, name, sha256, deadline
        self._options = {} if callback is None else {"callback": callback}

    def to(self, target: Path) -> None:
        log.info("downloading %s to %s", self._name, target)
        try:
            with made_aside(target, durable=False) as draft:
                self._tried(draft)
                self._verify(draft)
                if not _is_directory(draft):  # a directory may have a million files
                    fsync_tree(draft)
                _claim(target, self._uri)
            fsync_dir(target.parent)
        except PathBlockedError:
            if not _is_there(target, self._uri, self._sha256):  # else another node's: it was faster
                raise
        except FsError:
            raise
        except Exception as error:
            secret = self._uri != self._name
            said = "see the source's own log: its address holds a secret" if secret else str(error)
            raise DownloadError(
                "the download failed",
                where={"source": self._name, "to": target, "host": gethostname()},
                seen=f"{type(error).__name__}: {said}",
                hint="see whether the source exists and this task may read it",
            ) from (None if secret else error)

    def _tried(self, draft: Path) -> None:
        """Fetch before the deadline, which not every store's client has."""
        late = FsTimeoutError(
            "the download was not done in time",
            where={"source": self._name, "host": gethostname()},
            hint="give it a longer timeout=, or see whether the source answers",
        )
        for tried in range(1, _TRIES + 1):
            left_behind = threading.Event()
            try:
                fetch = partial(self._get_unless, left_behind, draft)
                bounded(fetch, max(0.0, self._deadline - time.monotonic()), late)
                break
            except Exception as error:
                pause = jittered(tried, 0.5, 1.5)
                if not _may_pass(error) or tried == _TRIES or time.monotonic() + pause > self._deadline:
                    raise
                log.warning("%s is fetched again in %.1f s: %s", self._name, pause, type(error).__name__)
                discard(draft)
                time.sleep(pause)
            finally:  # whatever has ended this, Ctrl-C too
                left_behind.set()

    def _get_unless(self, left_behind: threading.Event, draft: Path) -> None:
        try:
            self._get(draft, left_behind)
        finally:
            if left_behind.is_set():  # the draft was removed before the last file was whole, which has made it anew
                discard(draft)

    def _get(self, draft: Path, left_behind: threading.Event) -> None:
        from fsspec.asyn import AsyncFileSystem
        from fsspec.callbacks import DEFAULT_CALLBACK
        from fsspec.core import url_to_fs

        if "flytekit" in sys.modules and "::" not in self._uri:  # it knows nothing of fsspec's chains
            from flytekit import FlyteContextManager

            access = FlyteContextManager.current_context().file_access
            filesystem, path = access.get_filesystem_for_path(self._uri), self._uri
        else:
            filesystem, path = url_to_fs(self._uri)
        options = dict(self._options)
        if isinstance(filesystem, AsyncFileSystem):  # else its own thread goes on for ever after the deadline
            options["timeout"] = max(0.0, self._deadline - time.monotonic()) + 1
        # To ask a web server whether a page is a directory would be to fetch it.
        if path.startswith(("http://", "https://")) or not (path.endswith("/") or filesystem.isdir(path)):
            filesystem.get_file(path, str(draft), **options)
            return
        draft.mkdir()
        files, places = _below(filesystem, path, draft)
        if len(count := Counter(places)) < len(places):
            same = [file for file, place in zip(files, places, strict=True) if count[place] > 1]
            raise DownloadError("two names in this directory are one path", seen=", ".join(same[:10]))
        if isinstance(filesystem, AsyncFileSystem):
            filesystem.get(files, places, **options)
            return
        # One by one, so that what is left behind stops: nothing can end another file system's own loop.
        callback = options.get("callback", DEFAULT_CALLBACK)
        callback.set_size(len(files))
        for file, place in callback.wrap(zip(files, places, strict=True)):
            if left_behind.is_set():
                return
            with callback.branched(file, place) as child:
                filesystem.get_file(file, place, callback=child)

    def _verify(self, draft: Path) -> None:
        if self._sha256 is not None and (digest := _digest(draft)) != self._sha256.lower():
            raise DownloadError(
                "the download is not what was expected",
                where={"source": self._name},
                seen=f"sha256 {digest}, {draft.stat().st_size} bytes",
                expected=f"sha256 {self._sha256.lower()}",
                hint="fetch an archive or a file, or compare the files' digests yourself"
                if _is_directory(draft)
                else "",
            )
