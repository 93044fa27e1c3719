"""The exception tree of safedist.

Every error is a value made of facts: *what* is wrong, *where* (a field, a path, a host, a rank), what was *seen* and
*expected*, and what to do (*hint*). The message is composed from them, so no caller can forget one, and a program can
read them back. All of them survive pickling: ranks, servers and agents are different processes.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .failures import Failure


class SafedistError(Exception):
    """Base of every error that safedist raises on purpose.

    Args:
        what: one sentence that says what is wrong.
        where: the place: a field, path, URI, host or rank, as ``{"path": ..., "rank": ...}``.
        seen: the value that was found, if a value is the trouble.
        expected: what would have been right.
        hint: what the reader can do; stands behind ``Fix:``.
        of_another: whether it only tells of another rank's failure, or that one did not do what it was waited for.

    Attributes:
        code: as Flyte shows it, where that is not its class's.
    """

    code: str = ""
    of_another: bool = False  # also of a class of the user's that does not call the constructor

    def __init__(
        self,
        what: str,
        *,
        where: Mapping[str, object] | None = None,
        seen: object = None,
        expected: object = None,
        hint: str = "",
        of_another: bool = False,
    ) -> None:
        self.what = what
        self.where = dict(where or {})
        self.seen = seen
        self.expected = expected
        self.hint = hint
        self.of_another = of_another
        super().__init__(str(self))

    # No attribute is called "message": of a class that has one, torch wants a constructor that takes it (a DataLoader
    # that raises its worker's error again; torch._utils.ExceptionWrapper.reraise).
    def __str__(self) -> str:
        """The facts as text: ``what [place] (seen …; expected …). Fix: hint``"""
        text = self.what
        if self.where:
            text += " [" + ", ".join(f"{key}={value}" for key, value in self.where.items()) + "]"
        facts = []
        if self.seen is not None:
            facts.append(f"seen: {self.seen}")
        if self.expected is not None:
            facts.append(f"expected: {self.expected}")
        if facts:
            text += " (" + "; ".join(facts) + ")"
        if self.hint:
            text += f"{'' if text.endswith('.') else '.'} Fix: {self.hint}"
        return text

    @property
    def failure(self) -> Failure:
        """Its row in the table of failures, by its class."""
        from .failures import kinds, of_kinds  # not loaded by those who only import flytekit

        return of_kinds(kinds(type(self)))

    @property
    def is_platforms(self) -> bool:
        """Whether no user can cause it, and another attempt may mend it: a free one."""
        from .failures import Payer

        return self.failure.row.payer is Payer.FLYTE

    @property
    def error_code(self) -> str:
        """What flytekit uploads as the error's code: it asks for this very name."""
        return self.code or self.failure.row.code or f"USER:{type(self).__name__}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own __reduce__ calls cls(*args), which loses keyword-only facts.
        return (copyreg.__newobj__, (type(self),), dict(self.__dict__))  # type: ignore[attr-defined]

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)
        Exception.__init__(self, str(self))


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration: the field, the value seen, why it cannot work, and the repair."""

    field: str
    value: object
    reason: str
    repair: str

    def __str__(self) -> str:
        return f"{self.field}={_shown(self.value)} {self.reason} ({self.repair})"


def _shown(value: object) -> str:
    """A user's value in a line of text: as much as one reads, and whatever its own ``__repr__`` does."""
    try:
        text = repr(value)
    except Exception:  # anyone's code; and Python refuses to print numbers of some thousand digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


_MOST_SHOWN = 500


class ConfigError(SafedistError):
    """A task configuration that cannot work. Lists every problem at once."""

    problems: tuple[Problem, ...]

    def __init__(self, problems: Iterable[Problem] | str, *, where: Mapping[str, object] | None = None) -> None:
        if isinstance(problems, str):  # raised again from its text alone, as torch's DataLoader does
            self.problems = ()
            super().__init__(problems, where=where)
            return
        self.problems = tuple(problems)
        count = len(self.problems)
        listed = "; ".join(str(problem) for problem in self.problems)
        super().__init__(f"{count} problem{'' if count == 1 else 's'}: {listed}", where=where)


class MissingDependencyError(SafedistError):
    """A package that the task needs (torch, horovod, a store's) is not installed or not importable on this machine."""


class TopologyError(SafedistError):
    """The environment does not say, or contradicts itself about, which node of how many this is; or a rank asks for a
    place among the others that there is not."""


class IncompatibleVersionError(SafedistError):
    """torch or flytekit, as installed, lacks something private that safedist needs. The text names the versions."""


class NotInTaskError(SafedistError):
    """Something that exists only inside a rank was asked for outside one."""


class NoTerminalError(SafedistError):
    """``breakpoint()`` was called in a rank of a job that was not started at a terminal."""


class PayloadError(SafedistError):
    """The task function, its inputs or its result cannot be moved between the agent and its ranks."""


class ScratchError(SafedistError):
    """A scratch directory cannot be made, written, or kept below its size limit."""


class LaunchError(SafedistError):
    """The ranks of this node could not be started, or the process that starts them has died."""


class LaunchTimeoutError(LaunchError, TimeoutError):
    """The process that starts the ranks is there, and has not answered in its time. A ``TimeoutError`` too."""


class RankFailedError(SafedistError):
    """A rank failed for what is the task's own. The message is the root cause of the job."""

    code = "USER:RankFailed"


class RankKilledError(SafedistError):
    """A rank failed for what is the platform's: a signal from outside, a disk, a store, a GPU. Flyte should retry."""

    code = "SYSTEM:SIGKILL"


class HangError(SafedistError):
    """Ranks wait in a collective, or are in a step, that does not end. The text names who holds them up, and where that
    rank stands."""


class JobInterruptedError(SafedistError):
    """The agent was told to stop (SIGTERM, SIGINT) and ended its ranks.

    Attributes:
        number: the signal.
    """

    number: int = 0

    def by(self, number: int) -> JobInterruptedError:
        """This very error, with its signal."""
        self.number = number
        return self


class RendezvousError(SafedistError):
    """The nodes of the job did not come together, or lost each other."""


class PreflightError(SafedistError):
    """Before the first rank a node was not fit for the job, or far slower than the others. The text names it. Flyte
    should retry: on other machines, if they are kept off this one."""


class StagingError(SafedistError):
    """The code archive could not be fetched, verified, unpacked or published. Infrastructure: Flyte should retry."""


class StorageError(SafedistError):
    """The store stayed away, or refused, while the task's inputs or outputs were to be moved. Infrastructure: Flyte
    should retry."""


class CodeNotFoundError(StagingError):
    """The store works, and the archive is not in it. Retrying will not help; registering again will."""


class ArchiveError(SafedistError):
    """A code archive is refused whole: damaged, hostile, or over its limits."""


class CheckpointError(SafedistError):
    """A checkpoint cannot be saved, or none can be resumed that should be there."""


class FsError(SafedistError):
    """A file-system helper could not keep its promise."""


class PathBlockedError(FsError):
    """Something else is in the way: a file where a directory is wanted, a link to nothing, a foreign lock file."""


class FsAccessError(FsError, PermissionError):
    """The caller may not do this here (EACCES, EPERM). Trying again does not help. A ``PermissionError`` too."""


class ReadOnlyFsError(FsError):
    """The file system is mounted read-only (EROFS)."""


class NoSpaceError(FsError):
    """The disk, the quota or the inodes are used up (ENOSPC, EDQUOT)."""


class StaleHandleError(FsError):
    """The server kept answering ESTALE: the directory was removed or re-exported under the caller."""


class FsIoError(FsError):
    """The file system or its server failed (EIO and its like), also after the retries that could have helped."""


class MeetingLostError(FsIoError):
    """This rank cannot ask the other ranks of its job any more: its round is over, or its agent has ended. It is no
    failure's cause."""


class FsUnsupportedError(FsError):
    """The file system lacks an operation without which the promise cannot be kept (hard links, exclusive rename)."""


class FsTimeoutError(FsError, TimeoutError):
    """The caller waited until its deadline. The message says for what, for whom, and what was there instead. A
    ``TimeoutError`` too."""


class WorkFailedError(FsError):
    """The one caller that did the work failed; every caller gets this error, with the worker's traceback."""


class DownloadError(FsError):
    """A dataset or model could not be fetched whole."""


class FsIdentityError(FsError, TopologyError):
    """The environment names this process's rank only in part, or contradicts itself."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """A deadline passed before every node was there. ``seen`` and the text name the nodes that are missing. A
    ``TimeoutError`` too."""


class NotReplacedError(RendezvousTimeoutError):
    """A node of a job that had begun was lost, and none took its place in time. Every node that survived raises it;
    where node 0 is the one, no two of them can talk to each other any more."""


class GroupClosedError(RendezvousError):
    """The job is over: nodes of it were lost more often than they may be, or one of them again and again."""


class FencedError(RendezvousError):
    """Another process took this node's place in the group: this one is fenced off, and must end its ranks."""


class NodeLostError(RendezvousError):
    """This node has no further part in its job, which goes on: it cannot reach the leader, was given up, or cannot do
    its part."""


PUBLIC = tuple(
    name for name, kind in list(globals().items()) if isinstance(kind, type) and issubclass(kind, SafedistError)
)
"""The names of all errors; every one has a row in docs/errors.md."""
