"""Inside a rank: take the order, set up the environment, run the user's function, leave an outcome record.

A rank is told everything by its order file and reports by files; nothing crosses a network and no result is pickled:
inputs and outputs travel as Flyte literals, converted in the rank itself, so that files land in the rank's own scratch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .. import envvars, log, stopping
from ..compat import flytekit as flytekit_inside
from ..compat import horovod as horovod_inside
from ..flyte import storage_clients, task_context
from ..rank.evidence import Evidence
from ..record.profile import StepProfile
from ..record.writer import RECORDER, Recorder
from ..texts import encodable
from . import (
    context,
    debugger,
    importer,
    literals,
    preload,
    process_tree,
    recording,
    replicas,
    shared_page,
    users_code,
)
from .backends.torch import open_store_early
from .order import JobOrder, RankOrder, load_task
from .outcome import Raised, RankOutcome, Status, speaks_of_timeout
from .preload import Preloaded
from .shared_page import RankPage

if TYPE_CHECKING:
    from flytekit.core.python_function_task import PythonFunctionTask

EXIT_FAILED = 1


def be(order_file: Path, *, server: int, preloaded: Preloaded | None = None) -> NoReturn:
    """Be a rank, in a session of its own, and end as an interpreter would, without what libraries have to say then.

    Args:
        order_file: a :class:`RankOrder` as JSON.
        server: process id of the rank server. The rank dies with it.
        preloaded: what was imported before this process was forked; None in a fresh interpreter.
    """
    code = EXIT_FAILED
    try:
        os.setsid()
        _die_with(server)
        code = run(order_file, preloaded)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code if stopping.handlers_run() else code or EXIT_FAILED)


def run(order_file: Path, preloaded: Preloaded | None = None) -> int:
    """From the rank's order to its outcome record; the exit code for the process."""
    order = RankOrder.from_json(order_file.read_text())
    seconds: dict[str, float] = {}
    began = time.monotonic()
    shared = shared_page.open_page(order.page)
    try:
        evidence = _become(order, shared, preloaded)
        look = order.profile and StepProfile(*order.profile, draft=order.file.with_suffix(".profile.json"))
        RECORDER.value = Recorder(
            order.events, rank=order.context.rank, round_no=order.context.round, at=began, profile=look
        )
        _work(order, shared, evidence, seconds)
        # Not before the outputs are uploaded: a pod that is told to stop meanwhile has its time for that, and the job
        # may be done then.
        shared.leave()
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the rank has no result then
        shown = encodable(recording.own_frames_cut(error))
        _recorded(failed=True)
        raised = recording.record(error, shown, world_size=order.context.world_size)
        shared.end(_outcome(order, Status.RAISED, seconds, raised, shared.step))
        if not isinstance(error, KeyboardInterrupt):  # Ctrl-C: where each rank was is what nobody wants to read
            print(shown, file=sys.stderr, end="", flush=True)  # noqa: T201  (the rank's log is where a user looks first)
        return EXIT_FAILED
    _recorded(failed=False)
    shared.end(_outcome(order, Status.SUCCEEDED, seconds, None))
    return 0


def _recorded(*, failed: bool) -> None:
    if RECORDER.value is not None:
        RECORDER.value.close(failed=failed)


def _become(order: RankOrder, shared: RankPage, preloaded: Preloaded | None) -> Evidence:
    """Take on the rank's variables, output and identity."""
    _redirect_output(order.log)
    _take_environment(order)
    if preloaded is not None:
        preload.refresh(preloaded, order.environment)
    log.install()
    # By number: sys.stderr may be an object of the user's.
    faulthandler.enable(file=2)
    evidence = Evidence(order.stacks)
    context.enter(order.context, shared)
    debugger.take_breakpoints(order.terminal, order.context, shared)
    return evidence


def _work(order: RankOrder, shared: RankPage, evidence: Evidence, seconds: dict[str, float]) -> None:
    phase_ended = partial(_phase_ended, seconds, time.monotonic())
    job = JobOrder.from_json(order.job.read_text())
    sys.path[:] = job.sys_path
    sys.argv[:] = job.argv
    recording.flytes_errors()
    task = _loaded(job)
    open_store_early(order.environment)
    _have_collectives_seen(order, shared, evidence)
    from ..flyte.transfers import Transfers, patience_of  # and fsspec, for which no fork waits

    place = order.context
    transfers = Transfers(patience_of(job.upload_timeout), tells=place.local_rank == 0)
    with task_context.entered(job.flyte, place.scratch / "flyte", transfers.access(), restarted=place.round > 0) as ctx:
        phase_ended("import")
        shared.begin()
        with literals.decks_left(ctx, order.result):
            with users_code.without_children():
                inputs = transfers.outlast(
                    "fetching the task's inputs", lambda: literals.native_inputs(job.inputs, task, ctx)
                )
            phase_ended("inputs")
            with context.IN_ANY_CASE:
                with users_code.without_children():
                    returned = task.task_function(**inputs)
                flytekit_inside.no_warning_is_an_error()
                storage_clients.forget_dead_loops()
                # A save in flight must be committed before the job counts as done: Flyte takes the pod away then.
                context.finish()
            phase_ended("function")
            if place.rank == 0:
                with users_code.without_children():
                    literals.write_outputs(task, inputs, returned, order.result, transfers)
        phase_ended("outputs")


def _have_collectives_seen(order: RankOrder, shared: RankPage, evidence: Evidence) -> None:
    """From here on the agent sees from outside which collectives this rank is in."""
    if order.context.world_size > 1:
        evidence.follow(order.records)
    if envvars.HOROVOD_CONTROLLER in order.environment:
        with contextlib.suppress(ImportError):  # it is not needed where a rank does without it
            horovod_inside.around_waits(shared.wait_begins, shared.wait_ends)


def _phase_ended(seconds: dict[str, float], started: float, name: str) -> None:
    before = sum(seconds.values())
    seconds[name] = time.monotonic() - started - before
    if RECORDER.value is not None:
        RECORDER.value.phase(name, started + before, seconds[name])


def _loaded(job: JobOrder) -> PythonFunctionTask[Any]:
    # flytekit, which is imported by now, exits with a traceback at SIGINT. Ctrl-C ends an import at once: nothing is to
    # be cleared up yet.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with task_context.importing(job.flyte.mode), users_code.importing():
        task = load_task(job)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return task


def _die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the rank server ends, so that no rank outlives its agent."""
    process_tree.die_with_parent(signal.SIGKILL)
    # The server may have died between our birth and the prctl: then the signal will never come.
    if os.getppid() != parent:
        os._exit(EXIT_FAILED)


def _take_environment(order: RankOrder) -> None:
    os.environ.clear()
    os.environ.update(order.environment)
    tempfile.tempdir = None  # computed once and cached; a preloaded module may have asked before we had a TMPDIR


def _redirect_output(log: Path) -> None:
    """Send file descriptors 1 and 2 to the log file: native code and child processes write there as well."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    os.close(null)
    # A preloaded module may have put objects of its own in their place, with no more than a write(): those stay, and
    # the streams below them are what is set up.
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        # Whole lines at once, at once: the node's log is live, and a killed rank's last words are kept.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]


def _outcome(order: RankOrder, status: Status, seconds: dict[str, float], raised: Raised | None, step: int = -1) -> str:
    timed_out = raised is not None and raised.consequence and speaks_of_timeout(raised.message)
    outcome = RankOutcome.of(
        order.context,
        os.getpid(),
        status,
        time.time_ns(),
        raised=raised,
        timed_out=timed_out,
        seconds=seconds,
        step=step,
    )
    return outcome.fitting(shared_page.RECORD_BYTES, RankOutcome.to_json).to_json()


def main(arguments: list[str]) -> NoReturn:
    """Entry of a rank that is a fresh interpreter: ``python -m flytekitplugins_safedist.ranks.worker ORDER SERVER``."""
    order_file, server = arguments
    importer.install_from(os.environ)  # a forked rank has this, and the next, from the server
    replicas.install()
    be(Path(order_file), server=int(server))


if __name__ == "__main__":
    main(sys.argv[1:])
