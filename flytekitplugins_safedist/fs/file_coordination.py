"""A coordination store made of files, for ranks that have nothing in common but a directory. Correct, if slower.

One note is one file, written aside and linked (first wins) or renamed (replaced) into place: link(2) and rename(2)
arbitrate, also between machines. Waiting is polling, with the client's view refreshed at every look.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from ..errors import FsUnsupportedError
from .atomic import atomic_path
from .calls import NO_LINKS, Backoff, explain, retry_os_call
from .dirs import ensure_dir
from .mount_info import mount_of
from .stale_files import aside, discard
from .waiting import brisk_pauses, pauses, refresh


class FileCoordinationStore:
    """Args:
    root: a directory of this run of the job, on a file system that all its ranks share. Made if it is not there.
    ranks: how many will look at it; sets the pace of polling.
    """

    held_by_rank_0 = False

    def __init__(self, root: str | os.PathLike[str], ranks: int = 1) -> None:
        self.root = Path(root)
        self.where = f"files in {self.root}"
        self._ranks = ranks
        ensure_dir(self.root)
        self._local = mount_of(self.root).is_local
        # A note may take a minute to become visible to a network client; a pulse must not be taken for dead by that.
        self.lease_s = 30.0 if self._local else 180.0

    def _place(self, key: str) -> Path:
        parts = []
        for part in key.split("/"):
            name = quote(part, safe="").replace(".", "%2E") or "%"
            if len(name) > 150:  # NAME_MAX is 255, and drafts add to it
                name = name[:80] + "-" + hashlib.sha256(part.encode()).hexdigest()[:32]
            parts.append(name)
        return self.root.joinpath(*parts).with_suffix(".note")

    def get(self, key: str, *, within: float = 30.0) -> str | None:
        place = self._place(key)
        retry = Backoff(within)
        while True:
            try:
                return place.read_text()
            except FileNotFoundError:
                return None
            except OSError as error:
                if not retry.allows(error):
                    raise explain(error, place, "read a note of another rank") from error

    def put(self, key: str, text: str, *, within: float = 30.0) -> None:
        place = self._place(key)
        ensure_dir(place.parent)
        with atomic_path(place, durable=False) as draft:
            retry_os_call(lambda: draft.write_text(text), draft, "write a note for the other ranks")

    def put_once(self, key: str, text: str, *, within: float = 30.0) -> str:
        place = self._place(key)
        ensure_dir(place.parent)
        draft = aside(place)
        # Again from the top if it fails: nobody else knows this name.
        retry_os_call(lambda: draft.write_text(text), draft, "write a note for the other ranks")
        try:
            retry_os_call(lambda: self._link(draft, place), place, "leave a note for the other ranks")
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()
        # Mine or another's; and if another's, perhaps not visible to this client yet.
        deadline = time.monotonic() + max(within, 120.0)
        while (winner := self.wait(key, 5.0)) is None:
            if time.monotonic() > deadline:
                raise explain(FileNotFoundError(errno.ENOENT, ""), place, "read a note that exists")
        return winner

    def _link(self, draft: Path, place: Path) -> None:
        try:
            os.link(draft, place, follow_symlinks=False)
        except FileExistsError:
            return
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            raise FsUnsupportedError(
                "this file system has no hard links, so nothing on it can arbitrate between ranks",
                where={"path": self.root, "file_system": str(mount_of(self.root))},
                seen=errno.errorcode[error.errno],
                hint="point SAFEDIST_COORDINATION_DIR at another file system, or use a torch or Horovod group",
            ) from error

    def wait(self, key: str, seconds: float) -> str | None:
        place = self._place(key)
        deadline = time.monotonic() + seconds
        for pause in brisk_pauses(self._ranks) if self._local else pauses(self._ranks):
            note = self.get(key)
            left = deadline - time.monotonic()
            if note is not None or left <= 0:
                return note
            if not self._local:
                refresh(place)
            time.sleep(min(pause, left))
        return None

    def arrive(self, key: str, member: int, *, within: float = 30.0) -> int:
        self.put(f"{key}/came/{member}", "")
        return self.count(key)

    def count(self, key: str, *, within: float = 30.0) -> int:
        return len(self._came(key))

    def members(self, key: str, candidates: Iterable[int], *, within: float = 30.0) -> set[int]:
        return self._came(key) & set(candidates)

    def _came(self, key: str) -> set[int]:
        place = self._place(f"{key}/came/0").parent
        retry = Backoff()
        while True:
            try:
                names = os.listdir(place)  # noqa: PTH208
            except FileNotFoundError:
                return set()
            except OSError as error:
                if not retry.allows(error):
                    raise explain(error, place, "see which ranks have come") from error
            else:
                return {int(name[: -len(".note")]) for name in names if name.endswith(".note") and name[0] != "."}

    def forget(self, key: str, member: int) -> None:
        if member == 0:
            self.clear(key, self._ranks)

    def clear(self, key: str, ranks: int) -> None:
        discard(self._place(f"{key}/x").parent)
        with contextlib.suppress(OSError):
            self._place(key).unlink()
