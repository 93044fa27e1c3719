"""One job on one node, from a task call to its literals: prepare, drive, finish."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import lastwords, log, stopping
from ..errors import JobInterruptedError, LaunchError, SafedistError
from ..rank import literals
from ..record import run_page
from ..store.errors import one_line
from . import arrival, checks, ending, prepare
from .membership import Membership
from .node import NodeAgent, Report
from .policy import DECIDED
from .prepare import Job, NodePlan, TaskCall
from .verdict import Verdict, of_error

if TYPE_CHECKING:
    from flytekit.models.literals import LiteralMap

logger = logging.getLogger(__name__)

INTERRUPTED = "interrupted (Ctrl-C): every rank has been ended"
"""The last line of a local run for which that is so."""


@dataclass(frozen=True)
class Done:
    """A job that succeeded: rank 0's outputs and decks, the page of the run first; and the outputs' declared types."""

    outputs: LiteralMap
    decks: tuple[dict[str, str], ...]
    types: dict[str, Any]


def run(call: TaskCall) -> Done | Verdict | None:
    """Run one job on this node.

    Args:
        call: the task, and how it is called.

    Returns:
        What rank 0 made, or the verdict on why the job failed; None where another node uploads that.

    Raises:
        SafedistError: the job could not be started (scratch, a missing package), or was told to stop. Nothing of it is
            left running.
        Undecided: the same, where the job goes on without this process; its pod is to be replaced.
    """
    log.install()
    job = Job.of(call)
    place = job.attempt.topology
    # Again: staging may have taken its time; and with a command of the user's own nobody has looked before it.
    if not place.alone and ending.is_decided(job.attempt.store().is_decided):
        with call.server or contextlib.nullcontext():
            logger.info(DECIDED)
        return None
    for note in place.notes:
        logger.warning(note)
    with ending.replaced_when_undecided(place), of_platform(), contextlib.ExitStack() as held:
        try:
            plan = prepare.prepare(job, held)
        except SafedistError as error:
            held.close()  # nothing of it is left when the others hear of it
            if error.is_platforms:
                arrival.mention(error, job.attempt)
            elif arrival.is_told(error, job.attempt):
                return None
            raise
        logger.info(_start_line(plan))
        report, is_ours = _attend(plan, held)
        plan.scratched.succeeded = report.has_succeeded
        result = _result(report) if is_ours else None
    # Last, when all is tidied up: a log is read from its end.
    by_hand = job.is_local and report.verdict is not None and is_ctrl_c(report.verdict.error)
    logger.info(INTERRUPTED + _where(report) if by_hand else _end_line(report, plan.seconds))
    if report.verdict is not None:
        lastwords.keep(report.verdict.error)
    return result


def _attend(plan: NodePlan, held: contextlib.ExitStack) -> tuple[Report, bool]:
    """Meet the other nodes, drive this one's ranks, and leave in order: what came of it, and whether this node is the
    one to upload that."""
    attempt, place = plan.job.attempt, plan.job.attempt.topology
    joined = Membership(
        attempt.rules(),
        place,
        attempt.store(),
        judge_reports=partial(checks.judge_reports, plan.settings.preflight),
        local=plan.meeting,
    )
    agent = NodeAgent(plan, joined)
    held.callback(agent.record.close)
    try:
        with of_platform():
            is_ours = agent.to_the_end()
        if is_ours:
            _show(agent)
    except BaseException as error:
        # This place stays free for the pod that takes it. Where a job ends in order, it has left, or stays until the
        # upload is done (:mod:`.ending`).
        joined.close(decided=False, why=one_line(error) if isinstance(error, SafedistError) else "")
        verdict = of_error(error) if isinstance(error, SafedistError) else None
        if verdict is not None and ending.is_the_end(verdict.error, place):
            stopping.finish()
            agent.report.verdict, agent.report.result = verdict, None
            _show(agent)
            return agent.report, True
        if joined.leads or not isinstance(error, SafedistError) or error.is_platforms:
            raise
        raise ending.cannot_do_its_part(error, place) from error
    return agent.report, is_ours


def _show(agent: NodeAgent) -> None:
    """Make the page of the run."""
    verdict = agent.report.verdict
    failure = {} if verdict is None else {"code": verdict.error.error_code, "cause": str(verdict.error)}
    agent.report.page, agent.report.file = agent.record.show(logger.info, **failure)


@contextlib.contextmanager
def of_platform() -> Iterator[None]:
    """Inside, no line of the user's runs in this process: what fails, and does not say whose error it is, is the
    platform's."""
    try:
        yield
    except SafedistError:
        raise
    except Exception as error:
        raise LaunchError(
            "the process that runs this node's ranks has failed by itself",
            where={"host": socket.gethostname()},
            seen=one_line(error),
            hint="look at the limits of this container (open files, processes and threads, memory); else report this "
            "as a bug of safedist, with the log",
        ) from error


def _result(report: Report) -> Done | Verdict:
    first = ({"name": run_page.NAME, "html": report.page},) if report.page else ()
    if report.verdict is not None:
        return replace(report.verdict, decks=(*first, *report.decks))
    if report.result is None:
        raise SafedistError("the agent ended without a result or a failure", hint="report this as a bug")
    left = report.result
    return Done(
        literals.read_literals(left.result),
        (*first, *literals.read_decks(left.decks)),
        literals.read_types(left.types),
    )


def _start_line(plan: NodePlan) -> str:
    job, settings, place = plan.job, plan.settings, plan.job.attempt.topology
    return (
        f"start: {settings.backend}, node {place.node_rank if place.node_rank is not None else '?'} of {place.nnodes} "
        f"({place.source}), {settings.nproc_per_node} rank(s) per node, world_size {place.world_size}, "
        f"start_method {'preload' if plan.unsafe is None else 'spawn'}, max_restarts {settings.max_restarts}, "
        f"attempt {job.number}, task {job.call.name}, code {job.version or 'local'}, scratch {plan.scratch.path}"
    )


def _end_line(report: Report, preparing: float) -> str:
    how = "succeeded" if report.has_succeeded else "failed"
    if report.verdict is None and not report.has_succeeded:
        how = "the attempt has ended, as its result says,"
    phases = {"prepare": preparing, **report.seconds}
    total = phases.pop("total") + preparing
    listed = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items())
    told = f"{how} after {report.rounds} round(s), {total:.1f} s ({listed}), node {report.node_rank}"
    return f"end: {told}{_where(report)}"


def _where(report: Report) -> str:
    return f"; the record of this run: {report.file}" if report.file else ""


def is_ctrl_c(error: SafedistError) -> bool:
    """Whether it ended a job because a person has pressed Ctrl-C."""
    return isinstance(error, JobInterruptedError) and error.number == signal.SIGINT
