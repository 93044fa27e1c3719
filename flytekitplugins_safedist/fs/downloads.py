"""``download_once``: a dataset or model fetched once for all who share the place, with progress, or not at all."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import DownloadError, FsError
from .atomic import atomic_dir, atomic_path
from .dirs import ensure_dir
from .group import Group, default_group
from .mount_info import host
from .once import OnDeath, once_per_part
from .scope import shared_scope
from .waiting import wait_for

log = logging.getLogger("flytekitplugins_safedist.fs")

LONG_S = 3600.0
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Progress:
    """How far a download is: bytes on disk, bytes expected (None if not known), seconds since it began."""

    done: int
    total: int | None
    seconds: float

    def __str__(self) -> str:
        rate = self.done / self.seconds / 1e6 if self.seconds > 0 else 0.0
        share = f" of {self.total / 1e6:.1f} MB ({self.done / self.total:.0%})" if self.total else " MB"
        return f"{self.done / 1e6:.1f}{share}, {rate:.1f} MB/s, {self.seconds:.0f} s"


def download_once(
    source: Any,
    destination: str | os.PathLike[str],
    *,
    scope: Literal["job", "node", "rank"] | None = None,
    sha256: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    report_every_s: float = 5.0,
    on_death: OnDeath = "takeover",
    timeout: float = LONG_S,
    group: Group | None = None,
) -> Path:
    """Fetch ``source`` to ``destination`` once per file system that the ranks share; return the path in every rank.

    What is there already is complete (it was published by one rename) and is not fetched again, unless it is a file
    whose digest is not the one that is asked for.

    Args:
        source: a URL or path that fsspec knows (a directory if it ends in "/"), an http(s) URL, a ``FlyteFile`` or a
            ``FlyteDirectory`` (fetched with Flyte's own credentials).
        destination: the file or directory to make. Its parent is made if need be.
        scope: who shares the parent: "job", "node", "rank"; without it the ranks find out (``shared_scope``).
        sha256: the digest (hexadecimal) that a file must have, also one that is there already.
        progress: called every ``report_every_s`` seconds in the rank that fetches; without it, log lines.
        on_death: when the fetching rank dies, another takes over, or all fail.
        timeout: seconds for the whole download; an hour without it.
        group: the ranks; without it ``default_group()``.

    Raises:
        DownloadError: the source is nothing that can be fetched, or a directory is to have a digest.
        WorkFailedError: the download failed; every rank of the part gets the one error (a DownloadError within).
        FsTimeoutError: it took longer than ``timeout``.
    """
    target = Path(destination)
    group = group or default_group()
    fetch = plan_fetch(source)
    if fetch.is_dir and sha256 is not None:
        raise DownloadError(
            "a directory has no digest of its own",
            where={"source": fetch.name},
            seen=f"sha256={sha256}",
            hint="fetch an archive or a file, or compare the files' digests yourself",
        )
    key = hashlib.sha256(f"{fetch.name}\0{target.name}".encode()).hexdigest()[:32]
    part = _part(target.parent, scope, key, group)

    def work() -> str:
        if not _is_there(target, sha256):
            _fetch(fetch, target, sha256, _Reporter(fetch.name, progress, report_every_s))
        return str(target)

    turn = group.turn(f"download/{key}")
    once_per_part(f"download/{part}", f"{key}/{turn}", work, on_death=on_death, timeout=timeout, group=group)
    return wait_for(target, kind="dir" if fetch.is_dir else "file", made_by=f"the download of {fetch.name}")


def _is_there(target: Path, sha256: str | None) -> bool:
    if not target.exists():
        return False
    if sha256 is None or _digest(target) == sha256.lower():
        return True
    log.warning("%s is there with another digest than asked for; it is fetched anew", target)
    return False


def _part(place: Path, scope: Literal["job", "node", "rank"] | None, key: str, group: Group) -> str:
    me = group.identity
    if scope is None:
        return f"part{shared_scope(place, key=f'download/{key}', group=group).part}"
    ensure_dir(place)
    return {"job": "job", "node": f"node{me.node_rank}", "rank": f"rank{me.rank}"}[scope]


@dataclass(frozen=True)
class Fetch:
    """How to get a source: its name for people, whether it is a directory, and the function that brings it."""

    name: str
    is_dir: bool
    bring: Callable[[Path, _Reporter], None]


def plan_fetch(source: Any) -> Fetch:
    """Decide how ``source`` is fetched; touches neither network nor disk.

    Raises:
        DownloadError: it is nothing that can be fetched.
    """
    kind = type(source).__name__
    if hasattr(source, "remote_source") and hasattr(source, "download"):  # FlyteFile, FlyteDirectory
        uri, is_dir = str(source.remote_source or source.path), "Directory" in kind
        return Fetch(uri, is_dir, lambda draft, _: _by_flyte(uri, draft, is_dir=is_dir))
    if not isinstance(source, (str, os.PathLike)):
        raise DownloadError("this cannot be downloaded", seen=kind, expected="a URL, a path, FlyteFile, FlyteDirectory")
    uri = os.fspath(source)
    if uri.startswith(("http://", "https://")):
        return Fetch(_without_secrets(uri), is_dir=False, bring=lambda draft, reporter: _by_http(uri, draft, reporter))
    is_dir = uri.endswith("/") or ("://" not in uri and os.path.isdir(uri))  # noqa: PTH112  (raises nothing)
    return Fetch(_without_secrets(uri), is_dir, lambda draft, _: _by_fsspec(uri, draft, is_dir=is_dir))


def _without_secrets(uri: str) -> str:
    """A signed URL's query and a user's password are secrets: they appear in no message."""
    head, _, _ = uri.partition("?")
    scheme, separator, rest = head.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else head


def _fetch(fetch: Fetch, target: Path, sha256: str | None, reporter: _Reporter) -> None:
    try:
        if fetch.is_dir:
            with atomic_dir(target, exists="keep") as draft, reporter.watching(draft):
                fetch.bring(draft, reporter)
            return
        with atomic_path(target) as draft, reporter.watching(draft):
            fetch.bring(draft, reporter)
            _verify(draft, sha256, fetch.name)
    except FsError:
        raise
    except Exception as error:
        raise DownloadError(
            "the download failed",
            where={"source": fetch.name, "to": target, "host": host()},
            seen=f"{type(error).__name__}: {error}",
            hint="see whether the source exists and this task may read it",
        ) from error


def _verify(draft: Path, sha256: str | None, name: str) -> None:
    if sha256 is None:
        return
    digest = _digest(draft)
    if digest != sha256.lower():
        raise DownloadError(
            "the download is not what was expected",
            where={"source": name},
            seen=f"sha256 {digest}, {draft.stat().st_size} bytes",
            expected=f"sha256 {sha256.lower()}",
        )


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


# --- ways to fetch -------------------------------------------------------------------------------------------------
def _by_http(url: str, draft: Path, reporter: _Reporter) -> None:
    with urllib.request.urlopen(url, timeout=60) as answer, draft.open("wb") as file:  # noqa: S310  (http or https)
        length = answer.headers.get("Content-Length")
        reporter.total = int(length) if length else None
        shutil.copyfileobj(answer, file, _BLOCK)
        size = file.tell()
    if reporter.total is not None and size != reporter.total:
        raise OSError(f"the connection ended after {size} of {reporter.total} bytes")


def _by_fsspec(uri: str, draft: Path, *, is_dir: bool) -> None:
    import fsspec

    filesystem, path = fsspec.core.url_to_fs(uri)
    if is_dir:
        filesystem.get(path.rstrip("/") + "/", str(draft) + "/", recursive=True)
    else:
        filesystem.get_file(path, str(draft))


def _by_flyte(uri: str, draft: Path, *, is_dir: bool) -> None:
    from flytekit import FlyteContextManager

    access = FlyteContextManager.current_context().file_access
    if is_dir:
        access.get_data(uri.rstrip("/") + "/", str(draft) + "/", is_multipart=True)
    else:
        access.get_data(uri, str(draft))


# --- progress ------------------------------------------------------------------------------------------------------
class _Reporter:
    """Looks at the draft from a thread now and then and says how large it has become."""

    def __init__(self, name: str, say: Callable[[Progress], None] | None, every_s: float) -> None:
        self.total: int | None = None
        self._say = say or (lambda progress: log.info("downloading %s: %s", name, progress))
        self._every_s = every_s

    def watching(self, draft: Path) -> _Watching:
        return _Watching(self, draft)

    def report(self, draft: Path, began: float) -> None:
        self._say(Progress(_size(draft), self.total, time.monotonic() - began))


class _Watching:
    def __init__(self, reporter: _Reporter, draft: Path) -> None:
        self._reporter, self._draft = reporter, draft
        self._began = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="safedist-fs-progress", daemon=True)

    def _run(self) -> None:
        while not self._done.wait(self._reporter._every_s):
            self._reporter.report(self._draft, self._began)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: object, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if kind is None:
            self._reporter.report(self._draft, self._began)


def _size(place: Path) -> int:
    try:
        if not place.is_dir():
            return place.stat().st_size
        return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    except OSError:  # files come and go while they are fetched
        return 0
