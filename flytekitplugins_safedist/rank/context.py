"""What a rank knows about itself: ``current_rank()``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from ..errors import NotInTaskError
from ..fs.identity import Identity
from ..handoff import Slot
from ..record.writer import RECORDER
from .shared_page import RankPage

_RANK: Slot[RankContext] = Slot()
"""Who this process is, and"""
_PAGE: Slot[RankPage] = Slot()
"""what it shares with its agent: from the rank to the user's function."""
_AT_END: list[Callable[[], object]] = []
"""See :func:`at_end`: from the user's function to the rank."""
IN_ANY_CASE = ExitStack()
"""See :func:`in_any_case`: the same way."""


@dataclass(frozen=True, kw_only=True)
class RankContext(Identity):
    """One rank of a running SafeHorovod or SafeTorch task; the same for both backends. What ``fs`` calls an identity,
    and more.

    Attributes:
        rank: this process among all of the job, 0..world_size-1.
        local_rank: this process among those of its node, 0..local_world_size-1; usually the GPU's index.
        node_rank: this node among the job's, 0..nnodes-1.
        world_size: processes of the job.
        local_world_size: processes of this node.
        nnodes: nodes of the job.
        round: which launch of the ranks this is within the attempt: 0 at first, one more after each restart.
        attempt: which Flyte attempt this is (0 at first, one more after each retry).
        job: names the task's node in its execution: the same in every rank, restart and attempt (a local run: random).
        scratch: this rank's private directory, mode 0700, gone after success.
        node_dir: a directory that all ranks of this node share, mode 0700. It is there from the first line of the task
            on, stays when the ranks are started again, and goes with the job.
    """

    job: str
    scratch: Path
    node_dir: Path

    @property
    def preempted(self) -> bool:
        """Whether a pod of the job, any of them, was told to stop: save what is worth keeping, and call :meth:`saved`.

        Costs a look at memory. ``Checkpoints`` sees to it by itself; this is for code that saves in its own way. A
        rank that has looked is waited for, at most ``Timeouts.preemption`` seconds. Ranks may see it at different
        steps; who saves with a collective agrees on the step first.
        """
        return page().preempted

    def progress(self, step: int, *, of: int = 0, **values: float) -> None:
        """Say that ``step`` is done, and what is known of it: ``progress(step, of=steps, loss=loss)``.

        For the record of the run: how long steps take on each rank, which one they came to, and the latest values; for
        the metrics, and for the line of a local run, which says with ``of`` how long it will take. And
        for what counts as a hang (:class:`~flytekitplugins_safedist.Hangs`): a job that tells steps moves while they
        end. It costs microseconds; a value that is a tensor on a GPU is waited for, so hand it over only where you
        would print it.

        Args:
            step: its number, counted over all epochs: steps that fall are in no error, and in no count of failures.
            of: how many steps there are, where that is known; after the last one this rank is in no step.
            values: numbers by name, eight names at most.
        """
        if RECORDER.value is not None:
            RECORDER.value.progress(step, values)
        if _PAGE.value is not None:
            _PAGE.value.progress(int(step), int(of))

    @property
    def values(self) -> dict[str, float]:
        """The latest of each value that :meth:`progress` was told on this rank: ``return current_rank().values`` makes
        them an output of the task, ``-> dict[str, float]``, that a sweep reads."""
        return RECORDER.value.values if RECORDER.value is not None else {}

    def saved(self) -> None:
        """After :attr:`preempted`: what this rank wants kept is kept, and its pod need not wait for it any longer."""
        page().saved()


def enter(context: RankContext, page: RankPage) -> None:
    """Make ``context`` this process's own, and ``page`` what it shares with its agent.

    Called once, by the rank, before the user's function.
    """
    _RANK.value, _PAGE.value = context, page  # a process is one rank for all its life; threads of it are the same rank


def page() -> RankPage:
    """What this rank shares with its agent.

    Raises:
        NotInTaskError: outside a running SafeHorovod or SafeTorch task.
    """
    current_rank()
    assert _PAGE.value is not None  # noqa: S101  (a rank has one)
    return _PAGE.value


@contextmanager
def saving(*, background: bool = False) -> Iterator[None]:
    """Inside, this process saves or restores a checkpoint, or a thread of it does; where it is a rank, its agent knows.

    How long that takes is the store's affair: it is no hang.
    """
    shared = _PAGE.value
    with shared.saving(background=background) if shared is not None else nullcontext():
        yield


def current_rank() -> RankContext:
    """The rank that this process is.

    Raises:
        NotInTaskError: outside a running SafeHorovod or SafeTorch task.
    """
    rank = _RANK.value
    if rank is None:
        raise NotInTaskError(
            "current_rank() was called outside a rank",
            hint="call it inside the function of a @task with task_config=SafeHorovod(...) or SafeTorch(...); "
            "at import of a module, and in the workflow, there is no rank yet, and in a process that the function "
            "spawns (as a DataLoader does its workers, multiprocessing_context='spawn' or 'forkserver') there is none: "
            "hand it over",
        )
    return rank


def run_script(run: Callable[[], object]) -> None:
    """Run a script. Where this process is a rank, an end of it with status 0 is the script's success."""
    shared = _PAGE.value
    if shared is None:
        run()
    else:
        shared.run_script(run)


def at_end(finish: Callable[[], object]) -> None:
    """Have ``finish`` called when the task's function has returned, before anything is uploaded; what it raises is the
    rank's error. In a process that is not a rank nothing calls it."""
    _AT_END.append(finish)


def finish() -> None:
    """What :func:`at_end` was given, in that order. Called once, by the rank."""
    for action in _AT_END:
        action()


def in_any_case(let_go: Callable[[], object]) -> None:
    """Have ``let_go`` called at the end of the task's function, also where it raises; ``let_go`` itself must not."""
    IN_ANY_CASE.callback(let_go)
