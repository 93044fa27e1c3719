"""One job on one node, from a task call to its literals: scratch, rank server, agent, and tidying up."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import envvars, lastwords, log, stopping, topology
from ..config.options import Resolved
from ..errors import RendezvousError, SafedistError, ScratchError, StoreLostError
from ..flyte import task_context, uploads
from ..flyte.output_limits import OutputLimits, limits_from
from ..ranks import backends, disk_limit, main_module, memory, payload, scratch
from ..ranks.forkserver_client import RankServer
from ..ranks.payload import JobOrder
from ..ranks.scratch import JobScratch
from . import arrival, comeback, ends, exit_order
from .ends import Part
from .node_plan import NodePlan, Report
from .verdict import Verdict, of_error

if TYPE_CHECKING:
    from flytekit.core.python_function_task import PythonFunctionTask
    from flytekit.models.literals import LiteralMap

    from ..config.cluster import ScratchVolume
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
    backend = backends.create(settings.backend)
    place = topology.from_env(environment, settings, devices=[one.name for one in Path("/dev").iterdir()])
    flyte = task_context.take()
    run_id = arrival.run_id(flyte, environment)
    voice = arrival.Voice(arrival.Place(place, settings.timeouts, run_id, settings.max_replacements), flyte)
    # Again: staging may have taken its time; and with a command of the user's own nobody has looked before it.
    if not place.alone and comeback.is_decided(lambda: task_context.uploaded(flyte), say):
        with server or contextlib.nullcontext():
            say(comeback.LEAVES)
        return Elsewhere()
    with ends.replaced_when_undecided(place, say), voice:
        backend.check()
    settings = replace(settings, nproc_per_node=place.nproc_per_node)
    for note in place.notes:
        logger.warning(note)
    uploads.be_patient(settings.timeouts.upload)
    attempt = int(environment.get(envvars.FLYTE_ATTEMPT, "0"))
    # The server comes first, to guard scratch from its first moment; and ends first, for scratch goes when no rank can
    # write there any more.
    running = server or RankServer.spawn(_server_environment(settings, environment))
    volume = getattr(getattr(task.task_config, "cluster", None), "scratch_volume", None)
    root = _scratch_root(settings, environment, volume)
    scratched = _scratch(root, settings, execution=flyte.execution_id[2], attempt=attempt)
    with ends.replaced_when_undecided(place, say), voice, running, scratched as (job, keep):
        # Orders hold every rank's environment, and with it the task's secrets: they never stay.
        running.guard([job.path if settings.scratch.keep == "never" else job.orders])
        remote = flyte.mode == "TASK_EXECUTION"
        limits = limits_from({**environment, **dict(settings.environment)}) if remote else None
        order = _job_order(task, inputs, flyte, job, settings.timeouts.upload, limits=limits)
        order_file = job.orders / "job.json"
        order_file.write_text(order.to_json())
        started = time.monotonic()
        with running:
            running.enter(Path.cwd(), environment)
            fork = _preload(running, settings, backend, order)
            plan = NodePlan(
                settings=settings,
                topology=place,
                scratch=job,
                job_order=order_file,
                environment=environment,
                run_id=run_id,
                attempt=attempt,
                fork=fork,
                limit=disk_limit.limit_of(settings, environment, volume),
            )
            say(_start_line(plan, version=flyte.task_id[3] if flyte.task_id else ""))
            imported = max(running.imported(), 0 if fork else memory.anonymous())
            short = memory.shortage(memory.cgroup(), ranks=settings.nproc_per_node, imported=imported)
            if short is not None:
                logger.warning(short)
            voice.is_agents = True
            attended = _attend(plan, running, backend, flyte, preparing=time.monotonic() - started)
            keep.succeeded = attended.report.verdict is None
            result = _result(attended)
    # Last, when all is tidied up: a log is read from its end.
    say(attended.summary)
    if attended.report.verdict is not None:
        lastwords.keep(attended.report.verdict.error)
    return result


def _attend(
    plan: NodePlan,
    server: RankServer,
    backend: backends.RankBackend,
    flyte: task_context.FlyteSnapshot,
    *,
    preparing: float,
) -> _Attended:
    """Meet the other nodes, drive this one's ranks, and leave in order."""
    from .node_agent import NodeAgent, to_stdout
    from .open_rendezvous import open_handler

    opened = open_handler(plan, backend, say)
    try:
        agent = NodeAgent(plan, server=server, backend=backend, handler=opened, show=to_stdout, say=say)
        while True:
            try:
                with _leaving_when_decided(plan, agent, flyte, opened):
                    report, part = _driven(agent, opened)
                summary = _end_line(report, preparing, opened.node_rank)
                uploads, open_still = _in_order(plan, part, opened, flyte)
                break
            except StoreLostError as lost:
                # Wherever that was found out: this node's ranks have ended, and nothing is uploaded.
                if not opened.outlive(lost):
                    raise
                say(f"the node with the job's store is lost ({lost.what}: {lost.seen}); waiting for its replacement")
    except BaseException:
        # Not shutdown, which ends the job for every node: this place stays free for the pod that takes it.
        with contextlib.suppress(SafedistError):
            opened.leave()
        raise
    if open_still is not None:
        open_still.shutdown()
    return _Attended(report, uploads, summary)


def _driven(agent: NodeAgent, handler: RendezvousSession) -> tuple[Report, Part]:
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
        return report, Part.FOLLOWS
    stopping.finish()
    return report, Part.UPLOADS


def _leaving_when_decided(
    plan: NodePlan, agent: NodeAgent, flyte: task_context.FlyteSnapshot, handler: RendezvousSession
) -> contextlib.AbstractContextManager[None]:
    if plan.topology.max_nodes == 1:
        return contextlib.nullcontext()
    return comeback.leaving_when_decided(
        lambda: task_context.uploaded(flyte), say, begun=lambda: agent.report.rounds > 0 and not handler.searching
    )


def _in_order(
    plan: NodePlan, part: Part, handler: RendezvousSession, flyte: task_context.FlyteSnapshot
) -> tuple[bool, RendezvousSession | None]:
    """With several nodes, leave when the verdict is uploaded; whether this node is the one to do it, and the handler
    where it is for the caller to close."""
    if plan.topology.max_nodes == 1:
        return True, handler
    if part is Part.UPLOADS:
        exit_order.stay(handler)
        return True, None
    if part is Part.SPEAKS:
        turn = ends.turn_of(handler)
        handler.leave()
        return not ends.is_said_by_another(turn, lambda: task_context.uploaded(flyte)), None
    say("done here; waiting until node 0 has uploaded")
    exit_order.follow(handler, timeout=plan.settings.timeouts.upload, exists=lambda: task_context.uploaded(flyte))
    return False, None


def _result(attended: _Attended) -> Done | Elsewhere | Verdict:
    report = attended.report
    if not attended.uploads:
        return Elsewhere()
    if report.verdict is not None:
        return report.verdict
    if report.result is None:
        raise SafedistError("the agent ended without a result or a failure", hint="report this as a bug")
    return Done(payload.read_literals(report.result), tuple(payload.read_decks(report.result)))


def _preload(server: RankServer, settings: Resolved, backend: backends.RankBackend, order: JobOrder) -> bool:
    """Whether ranks may be forked; says why not where the user asked for it."""
    if settings.start_method != "preload":
        return False
    libraries = [*backend.libraries, "flytekit", "flytekitplugins_safedist.plugin.task"]
    modules = [order.module] if order.module is not None else []
    unsafe, _ = server.preload(libraries, modules, search_path=order.sys_path, timeout=settings.timeouts.start)
    if unsafe is not None:
        logger.warning(f"ranks start as fresh interpreters (start_method='spawn') instead of 'preload': {unsafe}")
    return unsafe is None


def _job_order(
    task: PythonFunctionTask[Any],
    inputs: LiteralMap,
    flyte: task_context.FlyteSnapshot,
    job: JobScratch,
    upload_timeout: float,
    *,
    limits: OutputLimits | None = None,
) -> JobOrder:
    module, name, pickled = payload.reference(task, sys.modules)
    # What travels by value may still refer to its module by name (a class, a helper): ranks must find that as well.
    home = task.task_function.__module__
    inputs_file = job.orders / "inputs.pb"
    payload.write_literals(inputs, inputs_file)
    return JobOrder(
        module=module,
        name=name,
        pickled=pickled,
        sys_path=payload.search_path(None if home == "__main__" else home, sys.modules, sys.path),
        argv=tuple(sys.argv),
        inputs=inputs_file,
        flyte=flyte,
        upload_timeout=upload_timeout,
        limits=limits,
        main=main_module.of(task.task_function, sys.modules),
    )


def _server_environment(settings: Resolved, environment: Mapping[str, str]) -> dict[str, str]:
    """What libraries read when they are loaded must be right in the preloading process already."""
    defaults = {envvars.OMP_NUM_THREADS: "1"} if settings.nproc_per_node > 1 else {}
    return {**defaults, **environment, **dict(settings.environment)}


class _Keep:
    succeeded = False


def _scratch_root(settings: Resolved, environment: Mapping[str, str], volume: ScratchVolume | None) -> Path:
    """Where scratch goes: a pod lacks the volume that registration named when a pod template replaced the task's."""
    named = environment.get(envvars.SCRATCH_ROOT)
    elsewhere = Path(settings.scratch.path or named or tempfile.gettempdir())
    is_ours = settings.scratch.path is None and volume is not None and named == volume.mount_path
    if not is_ours or elsewhere.is_dir():
        return elsewhere
    logger.warning(
        f"this pod has no scratch volume at {named} (with_overrides(pod_template=...) replaced the pod "
        f"template that brings it): scratch is in {tempfile.gettempdir()}, in the container's own file system"
    )
    return Path(tempfile.gettempdir())


@contextlib.contextmanager
def _scratch(root: Path, settings: Resolved, *, execution: str, attempt: int) -> Iterator[tuple[JobScratch, _Keep]]:
    _check_room(root, settings.size_limit)
    job = scratch.make_job(root, execution=execution, attempt=attempt)
    keep = _Keep()
    try:
        yield job, keep
    finally:
        mode = settings.scratch.keep
        if mode == "always" or (mode == "on_failure" and not keep.succeeded):
            scratch.remove(job.orders)  # they hold every rank's environment, and with it the task's secrets
            say(f"scratch is kept in {job.path} (Scratch(keep={mode!r}))")
        else:
            left = scratch.remove(job.path)
            if left is not None:
                logger.warning(f"scratch could not be removed whole: {left}")


def _check_room(root: Path, limit: int | None) -> None:
    try:
        free = shutil.disk_usage(root).free
    except OSError as error:
        raise ScratchError(
            "the directory for scratch cannot be used",
            where={"path": root},
            seen=str(error.strerror),
            expected="an existing directory that this user may write",
            hint="create it, or set Scratch(path=...) or SAFEDIST_SCRATCH_ROOT to another",
        ) from error
    if limit is not None and free < limit:
        logger.warning(
            f"Scratch(size_limit=...) allows {scratch.human(limit)}, but {root} has only "
            f"{scratch.human(free)} free: the disk will be full before the limit is reached"
        )


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
