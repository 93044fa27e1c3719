"""``publish``: a directory made by many ranks that readers see whole, or not at all.

Every rank writes its part aside, says how that went, and one of them gives the whole its name by one rename. If a rank
fails or does not come, nothing is published and all ranks are told why.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import FsError, FsTimeoutError, FsUnsupportedError, PathBlockedError, PublishError
from .atomic import Exists, atomic_write, fsync_dir, fsync_tree, publish_dir
from .barriers import Occasion
from .calls import NO_LINKS, retry_os_call
from .dirs import ensure_dir, listed
from .group import Group, default_group
from .mount_info import mount_of
from .once import once_per_part
from .scope import shared_scope
from .stale_files import aside, discard, living
from .waiting import wait_for

MARKER = ".safedist-published"
PROOF = ".safedist-draft"
"""In a draft: by this the ranks know that they see one and the same."""


@dataclass(frozen=True)
class _How:
    """What the caller of ``publish`` has chosen."""

    commit: Literal["rename", "marker"]
    exists: Exists
    durable: bool
    timeout: float | None


@contextmanager
def publish(
    path: str | os.PathLike[str],
    *,
    commit: Literal["rename", "marker"] = "rename",
    exists: Exists = "fail",
    shared: Literal["probe", "yes"] = "probe",
    durable: bool = True,
    timeout: float | None = None,
    key: str | None = None,
    group: Group | None = None,
) -> Iterator[Path]:
    """Write this rank's part of the directory ``path``; all ranks call it, and all parts become visible together.

    The block gets a directory of this rank's own; what it leaves there ends up in ``path``, merged with the parts of
    the others. Two ranks that leave a file of the same name is an error. On return ``path`` is visible to the caller.

    Args:
        path: the directory to publish, on a file system that all ranks share. Its parent is made if need be.
        commit: "rename" publishes in one step. "marker" is for mounts of object stores, where renaming a directory is
            neither cheap nor atomic: parts are written into ``path`` itself, with names that must not collide, and a
            file named ``.safedist-published`` comes last: readers ask ``is_published`` before they read.
        exists: when ``path`` exists: "fail", "keep" it, or "replace" it; see ``atomic_dir``.
        shared: "yes" spares the probing whether all ranks see one file system (``shared_scope``).
        durable: fsync everything before it is published.
        timeout: seconds for the ranks to come together, at the beginning and at the end; see ``barrier``.
        key: names this publication; the same in all ranks. Without it the last part of ``path`` does (the place before
            it may have another name in each rank): threads that publish directories of one name at once must say keys.
        group: the ranks; without it ``default_group()``.

    Raises:
        PublishError: in every rank, when one of them failed; names the first of them and its error.
        FsTimeoutError: in every rank, when one of them did not come; names it.
        FsError: the subclass that fits the trouble of this rank.
    """
    target = Path(path)
    group = group or default_group()
    how = _How(commit, exists, durable, timeout)
    # By what is meant, not by order: threads of one rank may publish two directories at once.
    call = Occasion(f"publish/{key or target.name}", group, timeout)
    with contextlib.ExitStack() as held:
        try:
            draft = _begin(target, shared, how, key, call)
            held.enter_context(living(draft))
            part = draft if commit == "marker" else draft / f".part-{group.identity.rank}-{secrets.token_hex(4)}"
            ensure_dir(part)
        except BaseException as error:
            call.leave_word("end", _report(target, how, error))  # the others learn it at their end, and wait for nobody
            raise
        trouble: BaseException | None = None
        inode = 0
        try:
            yield part
            inode = _hand_in(part, draft, how)
        except BaseException as error:
            trouble = error
        _agree_on_end(target, draft, trouble, how, call)
        _commit_once(target, draft, inode, how, call)
    call.close()


def is_published(path: str | os.PathLike[str]) -> bool:
    """Whether a directory that is committed by marker is complete.

    Raises:
        FsError: the subclass that fits, if that cannot be found out.
    """
    return _inode(Path(path) / MARKER) is not None


def _require_one_file_system(target: Path, key: str, call: Occasion) -> None:
    scope = shared_scope(target.parent, timeout=call.timeout, key=f"publish/{key}", group=call.group)
    if scope.kind != "job":
        raise PublishError(
            "the ranks do not share the file system to publish on",
            where={"path": target, "file_system": str(mount_of(target.parent))},
            seen=f"one per {scope.kind}",
            hint="publish on a shared volume, or let each node publish its own directory with atomic_dir; threads that "
            "publish directories of one name at once must each say a key=",
        )


def _begin(target: Path, shared: str, how: _How, key: str | None, call: Occasion) -> Path:
    """See that this can be published, and agree on where the parts are collected."""
    if shared == "probe":  # which makes the parent, and tells all ranks if one cannot
        _require_one_file_system(target, key or target.name, call)
    else:
        ensure_dir(target.parent)
    if how.commit == "marker":
        if how.exists != "fail" or is_published(target):
            raise PathBlockedError(
                "a directory that is committed by marker cannot be published again",
                where={"path": target},
                hint="publish under a new name",
            )
        return ensure_dir(target)
    # A name without its directory: the ranks may see that under different names.
    mine = aside(target, of_group=True).name
    draft = ensure_dir(target.parent / call.agree("draft", mine))
    if shared == "yes" and key is None:
        _see_the_same(draft, mine, how)
    return draft


def _see_the_same(draft: Path, mine: str, how: _How) -> None:
    """Fail where ranks have met that mean directories of one name in different places: nothing else would tell."""
    proof = draft / PROOF
    if draft.name == mine:
        retry_os_call(proof.touch, proof, "mark the draft")
        return
    try:
        wait_for(proof, timeout=how.timeout)
    except FsTimeoutError as error:
        raise PublishError(
            "this rank does not see what the rank that began this publication has made",
            where={"path": draft},
            seen=error,
            hint="it may mean another directory of this name (say key=), or see another file system (shared='probe')",
        ) from error


def _report(target: Path, how: _How, trouble: BaseException | None) -> str:
    """What a rank tells the others at the end: what it meant, and what kept it from doing that."""
    error = "" if trouble is None else f"{type(trouble).__name__}: {trouble}"
    return json.dumps({"meant": f"{target.name}, commit={how.commit!r}, exists={how.exists!r}", "error": error})


def _hand_in(part: Path, draft: Path, how: _How) -> int:
    """Add this rank's part to the draft; return the draft's inode."""
    if how.durable:
        fsync_tree(part)
    if how.commit == "marker":
        return 0
    _merge(part, draft, durable=how.durable)
    # By this a second committer, after the death of the first, knows the deed as done. Looked up before this rank
    # says that it is ready: after that, another may rename the draft at any moment.
    return retry_os_call(lambda: draft.stat().st_ino, draft, "look at the draft")


def _agree_on_end(target: Path, draft: Path, trouble: BaseException | None, how: _How, call: Occasion) -> None:
    """Return when all ranks have handed in their parts; else remove the draft and raise, the own trouble first."""
    report = _report(target, how, trouble)
    if trouble is not None and not isinstance(trouble, Exception):  # Ctrl-C, exit: tell the others, and go
        call.leave_word("end", report)
        raise trouble
    absent: FsError | None = None
    reports: list[dict[str, str]] = []
    try:
        reports = [json.loads(text) for text in call.exchange("end", report)]
    except FsError as error:
        absent = error
    problem: BaseException | None = trouble or absent or _failed(target, reports)
    if problem is None:
        return
    if how.commit == "rename":
        discard(draft)
    raise problem


def _failed(target: Path, reports: list[dict[str, str]]) -> PublishError | None:
    """The error of a publication whose ranks have all spoken, if it is one."""
    failed = [(rank, report["error"]) for rank, report in enumerate(reports) if report["error"]]
    if failed:
        rank, error = failed[0]
        return PublishError(
            f"nothing was published: {len(failed)} of {len(reports)} ranks failed",
            where={"path": target, "first_failed_rank": rank},
            seen=error,
            hint="see that rank's own error",
        ).echoing()
    meant = {report["meant"]: rank for rank, report in reversed(list(enumerate(reports)))}
    if len(meant) > 1:
        return PublishError(
            "nothing was published: the ranks mean different things",
            where={"path": target},
            seen="; ".join(f"rank {rank}: {what}" for what, rank in sorted(meant.items(), key=lambda item: item[1])),
            hint="call publish with the same name and options in all ranks, and with one key for one directory",
        )
    return None


def _commit_once(target: Path, draft: Path, inode: int, how: _How, call: Occasion) -> None:
    once_per_part(
        "publish",
        f"commit/{call.place}",
        lambda: _commit(target, draft, inode, how),
        on_death="takeover",
        timeout=how.timeout,
        group=call.group,
    )
    wait_for(target / MARKER if how.commit == "marker" else target, timeout=how.timeout)


def _commit(target: Path, draft: Path, inode: int, how: _How) -> None:
    if how.commit == "marker":
        with atomic_write(target / MARKER, durable=how.durable):
            return
    retry_os_call(lambda: (draft / PROOF).unlink(missing_ok=True), draft, "remove the draft's mark")
    if _inode(target) != inode:  # else the committer before this one had done it when it died
        try:
            publish_dir(draft, target, exists=how.exists)
        except PathBlockedError:  # nobody else will publish it: all ranks fail with this error
            discard(draft)
            raise
    discard(draft)  # what was replaced, or is not needed
    if how.durable:
        fsync_dir(target.parent)


def _inode(path: Path) -> int | None:
    def look() -> int | None:
        try:
            return path.stat().st_ino
        except (FileNotFoundError, NotADirectoryError):
            return None

    return retry_os_call(look, path, "see what has the name now")


def _merge(part: Path, into: Path, *, durable: bool) -> None:
    """Move what is in ``part`` into the common draft. link(2) refuses a name that another rank has used."""
    for entry in listed(part):
        goal = into / entry.path.name
        if entry.is_dir:
            ensure_dir(goal)
            _merge(entry.path, goal, durable=durable)
        else:
            _move(entry.path, goal)
    retry_os_call(lambda: _remove_dir(part), part, "remove the emptied part")
    if durable:
        fsync_dir(into)  # by each rank: who commits may not see the directories of the others yet


def _remove_dir(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # by an earlier try whose reply was lost
        path.rmdir()


def _move(place: Path, goal: Path) -> None:
    inode = retry_os_call(lambda: place.lstat().st_ino, place, "look at this rank's part")
    retry_os_call(lambda: _link(place, goal, inode), goal, "move this rank's part in")
    retry_os_call(lambda: place.unlink(missing_ok=True), place, "remove the moved file's old name")


def _link(place: Path, goal: Path, inode: int) -> None:
    try:
        os.link(place, goal, follow_symlinks=False)
    except FileExistsError as error:
        wait_for(goal)  # it is there, but perhaps not yet for this client
        if goal.lstat().st_ino == inode:
            return  # by an earlier try whose reply was lost
        raise PathBlockedError(
            "two ranks left a file of the same name",
            where={"path": goal.name},
            hint="put the rank into the name",
        ) from error
    except OSError as error:
        # EXDEV, and BeeGFS's EPERM: links only within one directory.
        if error.errno not in {*NO_LINKS, errno.EXDEV}:
            raise
        raise FsUnsupportedError(
            "this file system has no hard links between directories, which keep two ranks from overwriting each "
            "other's files",
            where={"path": goal, "file_system": str(mount_of(goal.parent))},
            seen=errno.errorcode[error.errno],
            hint='use commit="marker"',
        ) from error
