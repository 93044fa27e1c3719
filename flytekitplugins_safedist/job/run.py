"""One job on one node, from a task call to its literals: prepare, drive, finish."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .. import lastwords, log, stopping
from ..config.options import Resolved
from ..errors import RendezvousError, SafedistError, StoreLostError
from ..flyte import uploads
from ..ranks import payload
from ..ranks.forkserver_client import RankServer
from . import arrival, comeback, ends, exit_order, prepare
from .ends import Duty
from .node_plan import NodePlan, Report
from .prepare import Job, Prepared
from .verdict import Verdict, of_error

if TYPE_CHECKING:
    from flytekit.core.python_function_task import PythonFunctionTask
    from flytekit.models.literals import LiteralMap

    from ..rendezvous.session import RendezvousSession
    from .node_agent import NodeAgent

logger = logging.getLogger(__name__)
say = logger.info
"""Takes a sentence of safedist's own for the node's log."""


@dataclass(frozen=True)
class Done:
    """A job that succeeded: rank 0's outputs and decks."""

    outputs: LiteralMap
    decks: tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Elsewhere:
    """The job has ended, and node 0 has uploaded how."""


@dataclass(frozen=True)
class _Attended:
    """How the job ended, as this node knows it: the report, whether it is the one to upload, and both as a line."""

    report: Report
    uploads: bool
    summary: str


@arrival.elsewhere_if_told(Elsewhere())
def run(
    task: PythonFunctionTask[Any],
    settings: Resolved,
    inputs: LiteralMap,
    environment: Mapping[str, str],
    *,
    server: RankServer | None = None,
) -> Done | Elsewhere | Verdict:
    """Run one job on this node.

    Args:
        task: the task to run.
        settings: its configuration, resolved.
        inputs: its inputs, as literals.
        environment: this process's variables.
        server: a rank server started earlier (the entrypoint does, beside staging), or None to start one.

    Returns:
        What rank 0 made; ``Elsewhere`` on every other node; or the verdict on why the job failed.

    Raises:
        SafedistError: the job could not be started (scratch, a missing package, an unpicklable task), or was told to
            stop. Nothing of it is left running.
        Undecided: the same, where the job goes on without this process; its pod is to be replaced.
    """
    log.install()
    job = Job.of(task, settings, environment)
    # Again: staging may have taken its time; and with a command of the user's own nobody has looked before it.
    if not job.place.alone and comeback.is_decided(job.verdict_is_there, say):
        with server or contextlib.nullcontext():
            say(comeback.LEAVES)
        return Elsewhere()
    with ends.replaced_when_undecided(job.place, say), job.voice:
        job.backend.check()
    for note in job.place.notes:
        logger.warning(note)
    uploads.be_patient(settings.timeouts.upload)
    with contextlib.ExitStack() as held:
        prepared = prepare.prepare(job, inputs, held, server)
        say(_start_line(prepared.plan, version=job.version))
        short = prepared.shortage()
        if short is not None:
            logger.warning(short)
        attended = _attend(job, prepared)
        prepared.scratch.succeeded = attended.report.verdict is None
        result = _result(attended)
    # Last, when all is tidied up: a log is read from its end.
    say(attended.summary)
    if attended.report.verdict is not None:
        lastwords.keep(attended.report.verdict.error)
    return result


def _attend(job: Job, prepared: Prepared) -> _Attended:
    """Meet the other nodes, drive this one's ranks, and leave in order."""
    from .node_agent import NodeAgent, to_stdout
    from .open_rendezvous import open_handler

    job.voice.is_agents = True
    plan = prepared.plan
    with _left_on_errors(open_handler(plan, job.backend, say)) as opened:
        agent = NodeAgent(plan, server=prepared.server, backend=job.backend, handler=opened, show=to_stdout, say=say)
        while True:
            try:
                with _leaving_when_decided(job, agent, opened):
                    report, part = _driven(agent, opened)
                summary = _end_line(report, prepared.seconds, opened.node_rank)
                uploads_here, open_still = _in_order(job, part, opened)
                break
            except StoreLostError as lost:
                # Wherever that was found out: this node's ranks have ended, and nothing is uploaded.
                if not opened.outlive(lost):
                    raise
                say(f"the node with the job's store is lost ({lost.what}: {lost.seen}); waiting for its replacement")
    if open_still is not None:
        open_still.shutdown()
    return _Attended(report, uploads_here, summary)


@contextlib.contextmanager
def _left_on_errors(handler: RendezvousSession) -> Iterator[RendezvousSession]:
    """Where a job ends in order, it has left, or stays until the upload is done (:mod:`.exit_order`)."""
    try:
        yield handler
    except BaseException:
        # Not shutdown, which ends the job for every node: this place stays free for the pod that takes it.
        with contextlib.suppress(SafedistError):
            handler.leave()
        raise


def _driven(agent: NodeAgent, handler: RendezvousSession) -> tuple[Report, Duty]:
    """Drive this node's ranks to the job's end; what it came to, and what falls to this node then.

    Raises:
        SafedistError: the agent was ended by an error that is not the job's end.
    """
    try:
        report = agent.drive()
    except RendezvousError as error:
        part, verdict = ends.part_of(error, handler), of_error(error)
        if part is None or verdict is None:
            raise
        agent.report.result, agent.report.verdict = None, verdict
        return agent.report, part
    if not handler.uploads:
        return report, Duty.FOLLOWS
    stopping.finish()
    return report, Duty.UPLOADS


def _leaving_when_decided(
    job: Job, agent: NodeAgent, handler: RendezvousSession
) -> contextlib.AbstractContextManager[None]:
    if job.place.max_nodes == 1:
        return contextlib.nullcontext()
    return comeback.leaving_when_decided(
        job.verdict_is_there, say, begun=lambda: agent.report.rounds > 0 and not handler.searching
    )


def _in_order(job: Job, part: Duty, handler: RendezvousSession) -> tuple[bool, RendezvousSession | None]:
    """With several nodes, leave when the verdict is uploaded; whether this node is the one to do it, and the handler
    where it is for the caller to close."""
    if job.place.max_nodes == 1:
        return True, handler
    if part is Duty.UPLOADS:
        exit_order.stay(handler)
        return True, None
    if part is Duty.SPEAKS:
        turn = ends.turn_of(handler)
        handler.leave()
        return not ends.is_reported_by_another(turn, job.verdict_is_there), None
    say("done here; waiting until node 0 has uploaded")
    exit_order.follow(handler, timeout=job.settings.timeouts.upload, exists=job.verdict_is_there)
    return False, None


def _result(attended: _Attended) -> Done | Elsewhere | Verdict:
    report = attended.report
    if not attended.uploads:
        return Elsewhere()
    if report.verdict is not None:
        return replace(report.verdict, decks=report.decks)
    if report.result is None:
        raise SafedistError("the agent ended without a result or a failure", hint="report this as a bug")
    return Done(payload.read_literals(report.result), tuple(payload.read_decks(report.result)))


def _start_line(plan: NodePlan, *, version: str) -> str:
    settings, place = plan.settings, plan.topology
    return (
        f"start: {settings.backend}, node {place.node_rank if place.node_rank is not None else '?'} of {place.nnodes} "
        f"({place.source}), {settings.nproc_per_node} rank(s) per node, world_size {place.world_size}, "
        f"start_method {'preload' if plan.fork else 'spawn'}, max_restarts {settings.max_restarts}, "
        f"attempt {plan.attempt}, code {version or 'local'}, scratch {plan.scratch.path}"
    )


def _end_line(report: Report, preparing: float, node_rank: int) -> str:
    how = "failed" if report.verdict is not None else "succeeded"
    phases = {"prepare": preparing, **report.seconds}
    total = phases.pop("total") + preparing
    listed = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items())
    return f"end: {how} after {report.rounds} round(s), {total:.1f} s ({listed}), node {node_rank}"
