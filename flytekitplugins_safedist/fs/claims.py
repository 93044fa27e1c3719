"""``claim``: a lock file with an owner record, broken only when the owner is provably dead.

link(2) arbitrates: the record is written aside and linked to the lock's name, so exactly one wins and nobody ever
reads half a record; this holds on NFS too (open(2), O_EXCL). Advisory locks (flock) are not relied on: network file
systems may drop them.

Breaking is where lock files usually go wrong: two find the same dead owner, the first breaks and takes the lock, the
second then removes the first one's fresh lock. Here the right to break *this* owner's lock is itself a claim, named
after the owner's unique token; and who holds it makes sure, through a hard link under a fresh name (no client can have
that cached), that the lock still is the dead owner's before removing it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from ..errors import ClaimLostError, FsError, FsTimeoutError, FsUnsupportedError, PathBlockedError
from . import mount_info
from .calls import NO_LINKS, Backoff, explain, retry_os_call
from .context import timeout_s, who
from .process import ProcessRecord, boot_id, is_provably_dead, this_process
from .stale_files import aside
from .waiting import job_pauses, refresh


@dataclass(frozen=True)
class Owner:
    """Who holds a claim: the process, since when (seconds since 1970, its own clock), and a token used once.

    ``locked`` says that the owner also holds a flock on this record for as long as it lives.
    """

    process: ProcessRecord
    since: float
    token: str
    locked: bool = False

    def to_text(self) -> str:
        values = {"since": self.since, "token": self.token, "locked": self.locked, **self.process.to_dict()}
        return json.dumps({"safedist_claim": 1, **values})

    @classmethod
    def from_text(cls, text: str) -> Owner:
        """Raises: ValueError if ``text`` is no such record."""
        try:
            values = json.loads(text)
            return cls(
                ProcessRecord.from_dict(values), float(values["since"]), str(values["token"]), values["locked"] is True
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"no owner record: {error}") from None

    def __str__(self) -> str:
        return f"{self.process}, since {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(self.since))} UTC by its clock"


class Claim:
    """Exclusive right to whatever ``path`` stands for; a context manager. Not re-entrant; one claim, one holder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.owner: Owner | None = None
        self._handle = -1

    # --- taking ----------------------------------------------------------------------------------------------------
    def acquire(self, timeout: float | None = None) -> Claim:
        """Take it, or wait up to ``timeout`` seconds (see ``wait_for``) until its owner lets go or is provably dead.

        Raises:
            FsTimeoutError: its owner still holds it, and lives as far as can be known here.
            PathBlockedError: something that is no claim lies at ``path``.
            FsUnsupportedError: the file system has no hard links, and so nothing that arbitrates.
        """
        if self.owner is not None:
            raise FsError("this claim is held already", where={"path": self.path}, hint="make a new one with claim()")
        limit = timeout_s(timeout)
        began = time.monotonic()
        mine = Owner(this_process(), time.time(), secrets.token_hex(16))
        draft = aside(self.path)
        self._handle = retry_os_call(lambda: _write_record(draft, mine), draft, "write the claim's owner record")
        try:
            self._take(draft, mine, began, limit)
            self.owner = mine
        except BaseException:
            with contextlib.suppress(FsError):
                self._remove(mine)  # taken after all, by a call whose reply was lost or that was interrupted
            self._drop_handle()
            raise
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()
        return self

    def _take(self, draft: Path, mine: Owner, began: float, limit: float) -> None:
        pause = job_pauses()
        retry = Backoff()
        while True:
            if self._linked(draft, retry):
                return
            owner = self._current()
            if owner is not None and owner.token == mine.token:
                return  # linked by an earlier try whose reply was lost
            left = limit - (time.monotonic() - began)
            if owner is not None and self._is_dead(owner):
                self._break(owner, left)
                continue
            if left <= 0:
                raise self._held_too_long(owner, limit - left)
            time.sleep(min(next(pause), left))

    def _linked(self, draft: Path, retry: Backoff) -> bool:
        try:
            os.link(draft, self.path, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in NO_LINKS:
                raise FsUnsupportedError(
                    "this file system has no hard links, so nothing on it can arbitrate a claim",
                    where={"path": self.path, "file_system": str(mount_info.mount_of(self.path.parent))},
                    seen=errno.errorcode[error.errno],
                    hint="put the claim on another file system, or coordinate the ranks with once_per_job",
                ) from error
            if not retry.allows(error):
                raise explain(error, self.path, "claim") from error
            return False
        return True

    def _current(self) -> Owner | None:
        """Who holds it, as far as this client sees; None if nobody, or not visible yet."""
        refresh(self.path)
        try:
            return _read_record(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            if Backoff(1.0).allows(error):
                return None
            raise explain(error, self.path, "read the claim's owner record") from error

    def _held_too_long(self, owner: Owner | None, waited: float) -> FsTimeoutError:
        return FsTimeoutError(
            f"waited {waited:.1f} s for a claim",
            where={"path": self.path, "rank": who(), **mount_info.describe(self.path)},
            seen=f"held by {owner}" if owner else "held, but its owner record is not visible here",
            hint=f"if that process is gone for good, with its machine or container, remove {self.path}",
        )

    # --- breaking --------------------------------------------------------------------------------------------------
    def _is_dead(self, owner: Owner) -> bool:
        return is_provably_dead(owner.process) or self._lock_is_free(owner)

    def _lock_is_free(self, owner: Owner) -> bool:
        """The owner keeps a flock on its record; where one kernel serves the file system, its absence is proof.

        This proves the death of processes of other containers on this machine, whose pids mean nothing here.
        """
        here = owner.locked and owner.process.boot_id == boot_id() != ""
        if not here or not mount_info.mount_of(self.path).is_local:
            return False
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return Owner.from_text(os.read(handle, 65536).decode()).token == owner.token
        except (OSError, ValueError):
            return False
        finally:
            os.close(handle)

    def _break(self, dead: Owner, left: float) -> None:
        stem = os.fsencode(self.path.name)[:150].decode(errors="ignore")  # NAME_MAX counts bytes
        marker = self.path.parent / f".{stem}.break-{dead.token}"
        with Claim(marker).acquire(max(left, 1.0)):
            # Only the holder of this marker removes this owner's lock: what the link shows stays so until we are done.
            self._remove(dead)

    def _remove(self, owner: Owner) -> Owner | None:
        """Remove ``owner``'s lock file, if it still is that; return who held it when we first looked."""
        first = holder = self._arbitrated()
        retry = Backoff()
        while holder is not None and holder.token == owner.token:
            try:
                self.path.unlink()
            except OSError as error:
                # Look again before trying again: if only the reply was lost, the file there now is somebody else's.
                holder = self._arbitrated()
                if holder is not None and holder.token == owner.token and not retry.allows(error):
                    raise explain(error, self.path, "remove the lock file") from error
            else:
                break
        return first

    def _arbitrated(self) -> Owner | None:
        """Who holds it, as the server says now: read through a hard link that no cache can know."""
        proof = aside(self.path)

        def read() -> Owner | None:
            with contextlib.suppress(FileExistsError):  # of an earlier try
                try:
                    os.link(self.path, proof, follow_symlinks=False)
                except FileNotFoundError:
                    return None
            return _read_record(proof)

        try:
            return retry_os_call(read, self.path, "verify the claim's owner")
        finally:
            with contextlib.suppress(OSError):
                proof.unlink()

    # --- letting go ------------------------------------------------------------------------------------------------
    def release(self) -> None:
        """Let go.

        Raises:
            ClaimLostError: somebody removed or replaced the lock file while it was held.
        """
        mine, self.owner = self.owner, None
        if mine is None:
            return
        if mine.process.pid != os.getpid():
            return  # a forked child holds nothing; its parent does
        try:
            owner = self._remove(mine)
            if owner is None or owner.token != mine.token:
                raise ClaimLostError(
                    "a claim was taken away while it was held",
                    where={"path": self.path, "host": mount_info.host()},
                    seen=f"held by {owner}" if owner else "gone",
                    expected=f"held by {mine}",
                    hint="do not remove lock files of live processes; what the claim protected may be damaged",
                )
        finally:
            self._drop_handle()

    def _drop_handle(self) -> None:
        with contextlib.suppress(OSError):  # of a file that is gone by now; network clients complain about that
            os.close(self._handle)
        self._handle = -1

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.release()
        except FsError:
            if error is None:
                raise  # else the block's own error is the one to report


def claim(path: str | os.PathLike[str], *, timeout: float | None = None) -> Claim:
    """Take the lock file at ``path``; use as ``with claim(path):``.

    Its directory must exist and be shared by those who compete. The file is removed on release, and broken when its
    owner is provably dead: ended, in the same boot of the same kernel. An owner on another machine is never judged.

    Args:
        path: the lock file.
        timeout: seconds; without it SAFEDIST_FS_TIMEOUT, without that five minutes.

    Raises:
        FsTimeoutError, PathBlockedError, FsUnsupportedError, FsError: see ``Claim.acquire``.
    """
    return Claim(Path(path)).acquire(timeout)


def _write_record(path: Path, owner: Owner) -> int:
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        with contextlib.suppress(OSError):  # only one more proof of death; many file systems cannot
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            owner = replace(owner, locked=True)
        os.write(handle, owner.to_text().encode())
        os.fsync(handle)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(handle)
        raise
    return handle


def _read_record(path: Path) -> Owner:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        text = os.read(handle, 65536).decode(errors="replace")
    finally:
        os.close(handle)
    try:
        return Owner.from_text(text)
    except ValueError:
        raise PathBlockedError(
            "something that is not a claim is in the way of one",
            where={"path": path},
            seen=repr(text[:80]),
            expected="an owner record",
            hint="move it away, or choose another path",
        ) from None
