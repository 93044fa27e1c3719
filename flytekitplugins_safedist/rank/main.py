"""Inside a rank: take the order, be what it says, run the user's function, leave an outcome record.

A rank is told everything by its orders and reports by files; nothing crosses a network and no result is pickled:
inputs and outputs travel as Flyte literals, converted in the rank itself, so that files land in the rank's own scratch.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .. import envvars, log, meeting, stopping
from ..compat import flytekit as flytekit_inside
from ..compat import horovod as horovod_inside
from ..compat import torch as torch_inside
from ..failures import Failure
from ..fs import identity
from ..hangs.evidence import Evidence
from ..record.profile import StepProfile
from ..record.writer import RECORDER, Recorder
from ..texts import encodable
from . import context, debugger, literals, recording, replicas, shared_page, task, task_context, users_code
from .backends.horovod import refuse_unknown_host
from .backends.torch import prepare_store
from .fork import Reads, as_fresh, die_with_parent, elsewhere, top_names
from .order import JobOrder, RankOrder
from .outcome import TEXT_BYTES, Raised, RankOutcome, Status
from .shared_page import RankPage

if TYPE_CHECKING:
    from .shared_inputs import RankTransfers

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
_BOOT = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); sys.argv[1] in sys.path or sys.path.append(sys.argv[1]); "
    "from flytekitplugins_safedist.rank.main import fresh; fresh(int(sys.argv[2]))"
)
"""For ``python -c``: arguments are where this package is, and the rank server's process id. The working directory is
not on the path before the rank says so."""


# --- two ways to be one -----------------------------------------------------------------------------------------------
def forked(job: JobOrder, order: RankOrder, *, server: int, sets: Mapping[str, str], reads: Reads) -> NoReturn:
    """Be a rank, in a process that was just forked from the rank server.

    Args:
        job, order: what it is told.
        server: process id of the rank server. The rank dies with it.
        sets: variables that libraries have set as they were imported.
        reads: what they have read.
    """
    _be(job, order, server, sets, reads)


def fresh(server: int) -> NoReturn:
    """Be a rank, in a fresh interpreter, which has its orders as its standard input."""
    orders = json.load(sys.stdin)
    replicas.install()  # a forked rank has this from the server
    _be(JobOrder.from_dict(orders["job"]), RankOrder.from_dict(orders["rank"]), server, {}, None)


def start_fresh(job: JobOrder, order: RankOrder) -> int:
    """Start one, from the rank server: not by a fork of ours, for this process may run threads by now. Returns its
    process id."""
    with order.log.open("ab") as output, order.logs[-1].open("ab") as errors, open(_orders(job, order)) as orders:
        child = subprocess.Popen(
            _command(os.getpid()), env=order.environment, cwd=job.cwd, stdin=orders, stdout=output, stderr=errors
        )
    child.returncode = 0  # reaped by the server, not by subprocess
    return child.pid


def _become_fresh(job: JobOrder, order: RankOrder, server: int) -> NoReturn:
    """Start anew, as a fresh interpreter, in this very process: whoever waits for it need not know."""
    os.chdir(job.cwd)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what is ignored stays so
        signal.signal(number, signal.SIG_DFL)
    os.dup2(_orders(job, order), 0)
    os.execve(sys.executable, _command(server), order.environment)  # noqa: S606


def _command(server: int) -> list[str]:
    own: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *own, "-c", _BOOT, str(Path(__file__).parents[2]), str(server)]


def _orders(job: JobOrder, order: RankOrder) -> int:
    """A descriptor from which a fresh interpreter reads its orders: in memory, for they hold secrets."""
    file = os.memfd_create("orders", 0)
    with open(file, "w", closefd=False) as text:
        json.dump({"job": job.to_dict(), "rank": order.to_dict()}, text)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _be(job: JobOrder, order: RankOrder, server: int, sets: Mapping[str, str], reads: Reads | None) -> NoReturn:
    """In a session of its own, up to an end as an interpreter's, without what libraries have to say then."""
    code = EXIT_FAILED
    try:
        if os.getpid() != os.getsid(0):
            os.setsid()
        die_with_parent(signal.SIGKILL)
        # The server may have died between our birth and that: then the signal will never come.
        if os.getppid() != server:
            os._exit(EXIT_FAILED)
        _go_first_when_memory_is_out(server)
        code = _run(job, order, server, sets, reads)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        written = stopping.handlers_run()
        ctypes.CDLL(None).fflush(None)  # what C code has printed
        os._exit(code if written else code or EXIT_FAILED)


def _go_first_when_memory_is_out(server: int) -> None:
    """Have the kernel's out-of-memory killer take this process, or what it starts, before the agent and the server:
    somebody must be left to say why. By half the scale, not all of it: where the machine is out of memory, a pod that
    the kubelet protects stays better protected than those that it does not."""
    with contextlib.suppress(OSError, ValueError):  # raising one's own needs no right, but /proc may be read-only
        servers = int(Path(f"/proc/{server}/oom_score_adj").read_text())
        Path("/proc/self/oom_score_adj").write_text(str(min(1000, servers + 500)))


# --- from its orders to its outcome -----------------------------------------------------------------------------------
def _run(job: JobOrder, order: RankOrder, server: int, sets: Mapping[str, str], reads: Reads | None) -> int:
    """The exit code for the process."""
    seconds: dict[str, float] = {}
    began = time.monotonic()
    shared = shared_page.open_page(order.files.page)
    try:
        evidence = _become(order, shared, sets)
        if reads is not None and (why := as_fresh(order.environment, reads.draws)) is not None:
            _start_again(job, order, server, why)
        RECORDER.value = _recorder(order, shared, began)
        transfers = _transfers(job, order)
        libraries = top_names()
        with ExitStack() as held:
            try:
                entity, ctx = _imported(job, order, transfers, held)
            finally:  # also where it has failed: perhaps for that
                why = None if reads is None else _difference(job, order, sets, reads, libraries)
                if why is not None:
                    _start_again(job, order, server, why)
            _phase_ended(seconds, began, "import")
            _have_collectives_seen(order, shared, evidence)
            _work(job, order, entity, ctx, transfers, phase_ended=partial(_phase_ended, seconds, began))
        # Not before the outputs are uploaded: a pod that is told to stop meanwhile has its time for that, and the job
        # may be done then.
        shared.leave()
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the rank has no result then
        _fail(order, shared, seconds, error.error if isinstance(error, users_code.UsersError) else error)
        return EXIT_FAILED
    _recorded(failed=False)
    shared.end(_outcome(order, Status.SUCCEEDED, seconds, None).to_json())
    return 0


def _fail(order: RankOrder, shared: RankPage, seconds: dict[str, float], error: BaseException) -> None:
    """Leave the outcome of a rank that ends with an error."""
    shown = encodable(recording.shown(error))
    _recorded(failed=True)
    raised = recording.record(error, shown, world_size=order.context.world_size)
    outcome = _outcome(order, Status.RAISED, seconds, raised, shared.step)
    shared.end(outcome.to_json())
    if outcome.raised is not None and not isinstance(error, KeyboardInterrupt):  # nobody wants to read where that was
        # The rank's log is where a user looks first; a text is cut there as it is in the verdict.
        print(outcome.raised.traceback, file=sys.stderr, end="", flush=True)  # noqa: T201


def _difference(
    job: JobOrder, order: RankOrder, sets: Mapping[str, str], reads: Reads, libraries: Collection[str]
) -> str | None:
    """Why a fresh interpreter, having imported the user's module, would be another than this one."""
    why = reads.difference({**sets, **order.environment}, os.environ)
    if why is not None:
        return f"{why}; @task(environment=...) would spare that"
    return None if tuple(sys.path) == job.sys_path else elsewhere(libraries, sys.path)


def _recorder(order: RankOrder, shared: RankPage, began: float) -> Recorder:
    profile = None if order.profile is None else StepProfile(*order.profile, file=order.files.profile)
    return Recorder(shared.summary, at=began, profile=profile)


def _recorded(*, failed: bool) -> None:
    if RECORDER.value is not None:
        RECORDER.value.close(failed=failed)


def _become(order: RankOrder, shared: RankPage, sets: Mapping[str, str]) -> Evidence:
    """Take on the rank's variables, output and identity."""
    _redirect_output(order)
    os.environ.clear()
    os.environ.update({**sets, **order.environment})
    log.install()
    # By number: sys.stderr may be an object of the user's.
    faulthandler.enable(file=2)
    evidence = Evidence(order.files.stacks)
    context.enter(order.context, shared)
    identity.OF_RANK.value, meeting.OF_RANK.value = order.context, meeting.of_rank(order.environment)
    debugger.take_breakpoints(order.terminal, order.context, shared)
    return evidence


def _imported(job: JobOrder, order: RankOrder, transfers: RankTransfers, held: ExitStack) -> tuple[Any, Any]:
    """The task, and flytekit's context, which *held* leaves."""
    os.chdir(job.cwd)
    sys.path[:] = job.sys_path
    sys.argv[:] = job.argv
    place = order.context
    entered = task_context.entered(job.flyte, place.scratch / "flyte", transfers.access(), restarted=order.ran_before)
    if job.flyte.mode == task_context.IN_POD:  # as flytekit does it: a module knows its execution
        ctx = held.enter_context(entered)
        return _loaded(job), ctx
    entity = _loaded(job)
    return entity, held.enter_context(entered)


def _loaded(job: JobOrder) -> Any:
    # flytekit, which is imported by now, exits with a traceback at SIGINT. Ctrl-C ends an import at once: nothing is to
    # be cleared up yet.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    entity = users_code.imported(partial(task.load, job.source))
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return entity


def _start_again(job: JobOrder, order: RankOrder, server: int, why: str) -> NoReturn:
    if order.context.local_rank == 0:
        logger.warning(f"ranks of this node start again, as fresh interpreters: {why}")
    context.page().want_fresh()
    _become_fresh(job, order, server)


def _transfers(job: JobOrder, order: RankOrder) -> RankTransfers:
    from ..store.transfers import patience_of  # and fsspec, which a rank server need not have
    from .shared_inputs import RankTransfers, SharedInputs

    me, inputs = order.context, None
    if job.shared_inputs is not None and me.local_world_size > 1:
        inputs = SharedInputs(job.shared_inputs, me.scratch / "flyte", context.page().fetched_for)
    return RankTransfers(patience_of(job.upload_timeout), tells=me.local_rank == 0, inputs=inputs)


def _inputs(job: JobOrder, entity: Any, ctx: Any, transfers: RankTransfers) -> dict[str, Any]:
    if transfers.inputs is None:
        return literals.native_inputs(job.inputs, entity, ctx)
    with task_context.downloading_to(transfers.inputs.sandbox, ctx) as inside:
        return literals.native_inputs(job.inputs, entity, inside)


def _work(
    job: JobOrder,
    order: RankOrder,
    entity: Any,
    ctx: Any,
    transfers: RankTransfers,
    *,
    phase_ended: Callable[[str], object],
) -> None:
    context.page().begin()
    with literals.decks_left(ctx, order.files.decks):
        with users_code.without_children():
            inputs = transfers.outlast("fetching the task's inputs", lambda: _inputs(job, entity, ctx, transfers))
        phase_ended("inputs")
        if task.task_of(entity) is entity and not entity.python_interface.outputs:
            context.page().may_end_anywhere = True
            if order.context.rank == 0:
                literals.write_nothing(order.files)
        elif order.context.rank == 0:
            literals.keep_room(order.files)
        context.page().enter()
        with context.IN_ANY_CASE:
            with users_code.without_children():
                returned = task.task_of(entity).task_function(**inputs)
            context.page().come_back()
            flytekit_inside.no_warning_is_an_error()
            _note_others()
            # A save in flight must be committed before the job counts as done: Flyte takes the pod away then.
            context.finish()
        if transfers.inputs is not None:
            transfers.inputs.see_all_unchanged()
        phase_ended("function")
        if order.context.rank == 0:
            with users_code.without_children():
                literals.write_outputs(entity, inputs, returned, order.files, transfers)
    phase_ended("outputs")


def _have_collectives_seen(order: RankOrder, shared: RankPage, evidence: Evidence) -> None:
    """From here on the agent sees from outside which collectives this rank is in, and the others find its store."""
    prepare_store(order.environment)
    torch_inside.call_at_groups(partial(_makes_group, evidence))
    if order.context.world_size > 1:
        evidence.follow(order.files.records, RECORDER.value.meet if RECORDER.value is not None else bool)
    if envvars.HOROVOD_CONTROLLER in order.environment:
        with contextlib.suppress(ImportError):  # it is not needed where a rank does without it
            horovod_inside.around_waits(partial(_waits_with_others, shared), shared.wait_ends)
            horovod_inside.before_init(refuse_unknown_host)


def _makes_group(evidence: Evidence, name: str) -> None:
    evidence.note_group(name)
    if RECORDER.value is not None:
        RECORDER.value.meet()


def _waits_with_others(shared: RankPage, about: str) -> None:
    shared.wait_begins(about)
    if RECORDER.value is not None:
        RECORDER.value.meet()


def _note_others() -> None:
    """Whether this rank has worked with others, as far as can be seen at its end: in a group that nobody has called us
    at, or by Horovod."""
    if RECORDER.value is None:
        return
    try:
        began = [sys.modules.get(f"horovod.{name}") for name in ("torch", "tensorflow", "keras")]
        if torch_inside.process_groups() or any(each is not None and each.is_initialized() for each in began):
            RECORDER.value.meet()
    except Exception:  # of whatever the task has put in their place: nobody knows, and what it returned counts
        RECORDER.value.meet()


def _phase_ended(seconds: dict[str, float], started: float, name: str) -> None:
    before = sum(seconds.values())
    seconds[name] = time.monotonic() - started - before
    if RECORDER.value is not None:
        RECORDER.value.phase(name, started + before, seconds[name])


def _redirect_output(order: RankOrder) -> None:
    """Send file descriptors 1 and 2 to the log files: native code and child processes write there as well."""
    writing = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, path, how in ((0, os.devnull, os.O_RDONLY), (1, order.log, writing), (2, order.logs[-1], writing)):
        file = os.open(path, how, 0o600)
        os.dup2(file, number)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        # Whole lines at once, at once: the node's log is live, and a killed rank's last words are kept.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]


def _outcome(
    order: RankOrder, status: Status, seconds: dict[str, float], raised: Raised | None, step: int = -1
) -> RankOutcome:
    timed_out = raised is not None and raised.failure is Failure.TIMED_OUT
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
    return outcome.as_told(TEXT_BYTES // 2)  # the other half is for what its agent knows besides
