"""One job on one node, from a task call to its literals: prepare, drive, finish."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .. import lastwords, log, stopping
from ..config.options import Resolved
from ..errors import SafedistError
from ..flyte import uploads
from ..ranks import payload
from ..ranks.forkserver_client import RankServer
from . import arrival, comeback, ending, prepare
from .agent import NodeAgent
from .ending import Finish
from .node_plan import NodePlan, Report
from .opening import Membership, rules_of
from .prepare import Job, Prepared
from .verdict import Verdict

if TYPE_CHECKING:
    from flytekit.core.python_function_task import PythonFunctionTask
    from flytekit.models.literals import LiteralMap

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
    with ending.replaced_when_undecided(job.place, say), job.voice:
        job.backend.find()
    for note in job.place.notes:
        logger.warning(note)
    uploads.be_patient(settings.timeouts.upload)
    with contextlib.ExitStack() as held:
        prepared = prepare.prepare(job, inputs, held, server)
        if not prepared.plan.fork:
            job.backend.check()  # nobody has imported it yet: one error here, instead of one from every rank
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
    job.voice.is_agents = True
    plan = prepared.plan
    with _left_on_errors(_joined(plan, job)) as joined:
        agent = NodeAgent(plan, server=prepared.server, backend=job.backend, job=joined, show=to_stdout, say=say)
        while True:
            with _leaving_when_decided(job, agent, joined):
                finish = agent.drive()
            uploads = _in_order(job, finish, joined)
            if uploads is not None:
                break
            say("node 0 was lost before its upload: the job goes on")
        summary = _end_line(agent.report, prepared.seconds)
    return _Attended(agent.report, uploads, summary)


def _joined(plan: NodePlan, job: Job) -> Membership:
    settings, place = plan.settings, plan.topology
    rules = rules_of(
        place,
        settings.timeouts,
        plan.run_id,
        max_restarts=settings.max_restarts,
        max_replacements=settings.max_replacements,
    )
    nproc = settings.nproc_per_node
    return Membership(
        rules,
        place,
        open_round=lambda nnodes: job.backend.open_round(nnodes=nnodes, nproc_per_node=nproc),
        local=plan.scratch.short / plan.scratch.orders.name / "meeting" if nproc > 1 else None,
        say=say,
    )


@contextlib.contextmanager
def _left_on_errors(joined: Membership) -> Iterator[Membership]:
    """Where a job ends in order, it has left, or stays until the upload is done (:mod:`.ending`)."""
    try:
        yield joined
    except BaseException:
        # This place stays free for the pod that takes it.
        joined.close(ended=False)
        raise


def _leaving_when_decided(job: Job, agent: NodeAgent, joined: Membership) -> contextlib.AbstractContextManager[None]:
    if job.place.max_nodes == 1:
        return contextlib.nullcontext()
    return comeback.leaving_when_decided(
        job.verdict_is_there, say, begun=lambda: agent.report.rounds > 0 and not joined.searching
    )


def _in_order(job: Job, finish: Finish, joined: Membership) -> bool | None:
    """Leave when the verdict is uploaded. Whether this node is the one to do it; None where the job goes on."""
    if finish.uploads:
        stopping.finish()
    if job.place.max_nodes == 1:
        joined.close(ended=True)
        return True
    if finish.uploads:
        ending.stay(joined)
        return True
    if finish.end is None:
        joined.close(ended=False)
        return not ending.is_reported_by_another(max(1, joined.me.node or 0), job.verdict_is_there)
    say("done here; waiting until node 0 has uploaded")
    if not ending.follow(joined, timeout=job.settings.timeouts.upload, exists=job.verdict_is_there):
        return None
    joined.close(ended=False)
    return False


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


def _end_line(report: Report, preparing: float) -> str:
    how = "failed" if report.verdict is not None else "succeeded"
    phases = {"prepare": preparing, **report.seconds}
    total = phases.pop("total") + preparing
    listed = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items())
    return f"end: {how} after {report.rounds} round(s), {total:.1f} s ({listed}), node {report.node_rank}"


def to_stdout(text: str) -> None:
    """Ranks' output goes where the task's own would."""
    # A user's module may have put an object in its place that has no more than a write().
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    # A log in ASCII shows other letters escaped; they must not end the thread that shows them.
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    with contextlib.suppress(AttributeError):
        sys.stdout.flush()
