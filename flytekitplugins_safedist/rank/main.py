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
from collections.abc import Collection
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .. import envvars, log, meeting, package, stopping
from ..compat import flytekit as flytekit_inside
from ..compat import horovod as horovod_inside
from ..compat import torch as torch_inside
from ..failures import Failure
from ..fs import identity
from ..hangs.evidence import Evidence
from ..record.profile import StepProfile
from ..record.writer import RECORDER, Recorder
from . import context, debugger, recording, replicas, shared_page, task, users_code
from .backends.horovod import refuse_unknown_address
from .backends.torch import prepare_store
from .fork import Reads, Sets, add_sets, as_fresh, die_with_parent, elsewhere
from .order import JobOrder, RankOrder
from .outcome import RECORD_BYTES, Raised, RankOutcome, Status

if TYPE_CHECKING:
    from .shared_inputs import RankTransfers

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
_BOOT = "from flytekitplugins_safedist.rank.main import fresh; fresh(int(sys.argv[1]))"
"""The argument is the rank server's process id."""
_PATH = "sys.path[:1] == [''] and sys.path.pop(0); home in sys.path or sys.path.append(home)"
"""The working directory is not on it before the rank says so."""


# --- two ways to be one -----------------------------------------------------------------------------------------------
def be(job: JobOrder, order: RankOrder, *, server: int, sets: Sets, reads: Reads | None) -> NoReturn:
    """Be a rank, in a session of its own, up to an end as an interpreter's, without what libraries have to say then.

    Args:
        job, order: what it is told.
        server: process id of the rank server, which forked this process or started it. The rank dies with it.
        sets: variables that libraries have set as they were imported for all ranks.
        reads: what they have read; None in a fresh interpreter.
    """
    code = EXIT_FAILED
    try:
        if os.getpid() != os.getsid(0):
            os.setsid()
        die_with_parent(signal.SIGKILL)
        # The server may have died between our birth and that: then the signal will never come.
        if os.getppid() != server:
            os._exit(EXIT_FAILED)
        _go_first_when_memory_is_out(server)
        code = RankProcess(job, order, server, sets, reads).run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        written = stopping.handlers_run()
        ctypes.CDLL(None).fflush(None)  # what C code has printed
        os._exit(code if written else code or EXIT_FAILED)


def fresh(server: int) -> NoReturn:
    """Be a rank, in a fresh interpreter, which has its orders as its standard input."""
    orders = json.load(sys.stdin)
    replicas.install()  # a forked rank has this from the server
    job, order = JobOrder.from_dict(orders["job"]), RankOrder.from_dict(orders["rank"])
    be(job, order, server=server, sets={}, reads=None)


def start_fresh(job: JobOrder, order: RankOrder) -> int:
    """Start one, from the rank server: not by a fork of ours, for this process may run threads by now. Returns its
    process id."""
    with order.log.open("ab") as output, order.logs[-1].open("ab") as errors, open(_orders(job, order)) as orders:
        child = subprocess.Popen(
            _command(os.getpid()), env=order.environment, cwd=job.cwd, stdin=orders, stdout=output, stderr=errors
        )
    child.returncode = 0  # reaped by the server, not by subprocess
    return child.pid


def _command(server: int) -> list[str]:
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, *package.program(_BOOT, str(server), path=_PATH)]


def _orders(job: JobOrder, order: RankOrder) -> int:
    """A descriptor from which a fresh interpreter reads its orders: in memory, for they hold secrets."""
    try:
        file = os.memfd_create("orders", 0)
    except OSError:  # a sandbox refuses that, or the kernel (vm.memfd_noexec=2)
        file = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)  # noqa: S108  (it has no name)
    with open(file, "w", closefd=False) as text:
        json.dump({"job": job.to_dict(), "rank": order.to_dict()}, text)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _go_first_when_memory_is_out(server: int) -> None:
    """Have the kernel's out-of-memory killer take this process, or what it starts, before the agent and the server:
    somebody must be left to say why. By half the scale, not all of it: where the machine is out of memory, a pod that
    the kubelet protects stays better protected than those that it does not."""
    with contextlib.suppress(OSError, ValueError):  # raising one's own needs no right, but /proc may be read-only
        servers = int(Path(f"/proc/{server}/oom_score_adj").read_text())
        Path("/proc/self/oom_score_adj").write_text(str(min(1000, servers + 500)))


# --- from its orders to its outcome -----------------------------------------------------------------------------------
class RankProcess:
    """This process as a rank.

    Args:
        job, order, server, sets, reads: as of :func:`be`.

    Attributes:
        seconds: how long each phase took that has ended.
    """

    def __init__(self, job: JobOrder, order: RankOrder, server: int, sets: Sets, reads: Reads | None) -> None:
        self.seconds: dict[str, float] = {}
        self._job, self._order, self._server, self._sets, self._reads = job, order, server, sets, reads
        self._began = time.monotonic()
        self._page = shared_page.open_page(order.files.page)
        profile = None if order.profile is None else StepProfile(*order.profile, file=order.files.profile)
        self._recorder = Recorder(self._page.summary, at=self._began, profile=profile)

    def run(self) -> int:
        """Do what it is told, and leave the outcome; the exit code for the process."""
        try:
            evidence = self._become()
            if self._reads is not None and (why := as_fresh(self._order.environment, self._reads.draws)) is not None:
                self._start_again(why)
            RECORDER.value = self._recorder
            transfers = self._transfers()
            libraries = () if self._reads is None else self._reads.top_names()
            with ExitStack() as held:
                try:
                    entity, ctx = self._imported(transfers, held)
                finally:  # also where it has failed: perhaps for that
                    why = self._difference(libraries)
                    if why is not None:
                        self._start_again(why)
                self._phase_ended("import")
                self._have_collectives_seen(evidence)
                self._work(entity, ctx, transfers)
            # Not before the outputs are uploaded: a pod that is told to stop meanwhile has its time for that, and the
            # job may be done then.
            self._page.leave()
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: the rank has no result then
            self._fail(error.error if isinstance(error, users_code.UsersError) else error)
            return EXIT_FAILED
        users_code.undisturbed(self._succeed)
        return 0

    def _succeed(self) -> None:
        self._recorder.close(failed=False)
        self.end(Status.SUCCEEDED, time.time_ns())

    def end(self, status: Status, time_ns: int, raised: Raised | None = None, step: int = -1) -> RankOutcome:
        """Leave the outcome, and return it as it is left."""
        timed_out = raised is not None and raised.failure is Failure.TIMED_OUT
        facts = {"raised": raised, "timed_out": timed_out, "seconds": self.seconds, "step": step}
        outcome = RankOutcome.of(self._order.context, os.getpid(), status, time_ns, **facts)
        outcome = outcome.fitting(RECORD_BYTES, RankOutcome.to_json)
        self._page.end(outcome.to_json())
        return outcome

    def _fail(self, error: BaseException) -> None:
        now = time.time_ns()  # to say what has happened may take seconds
        left = users_code.undisturbed(lambda: self._record(error, now))
        if left is not None and not isinstance(error, KeyboardInterrupt):  # nobody wants to read where that was
            # The rank's log is where a user looks first; a text is cut there as it is in the verdict.
            print(recording.told_to_hook(error) + left.traceback, file=sys.stderr, end="", flush=True)  # noqa: T201

    def _record(self, error: BaseException, time_ns: int) -> Raised | None:
        shown = recording.shown(error)
        self._recorder.close(failed=True)
        me = self._order.context
        raised = recording.record(error, shown, rank=me.rank, world_size=me.world_size)
        return self.end(Status.RAISED, time_ns, raised, self._page.step).raised

    def _difference(self, libraries: Collection[str]) -> str | None:
        """Why a fresh interpreter, having imported the user's module, would be another than this one."""
        if self._reads is None:
            return None
        why = self._reads.difference(add_sets(self._order.environment, self._sets), os.environ)
        if why is not None or tuple(sys.path) == self._job.sys_path:
            return why
        return elsewhere(libraries, sys.path)

    def _become(self) -> Evidence:
        """Take on the rank's variables, output and identity."""
        order = self._order
        _redirect_output(order)
        os.environ.clear()
        os.environ.update(add_sets(order.environment, self._sets))
        log.install()
        # By number: sys.stderr may be an object of the user's.
        faulthandler.enable(file=2)
        evidence = Evidence(order.files.stacks)
        context.enter(order.context, self._page)
        identity.OF_RANK.value, meeting.OF_RANK.value = order.context, meeting.of_rank(order.environment)
        debugger.take_breakpoints(order.terminal, order.context, self._page)
        return evidence

    def _start_again(self, why: str) -> NoReturn:
        """As a fresh interpreter, in this very process: whoever waits for it need not know."""
        if self._order.context.local_rank == 0:
            logger.warning(f"ranks of this node start again, as fresh interpreters: {why}")
        self._page.want_fresh()
        os.chdir(self._job.cwd)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what is ignored stays so
            signal.signal(number, signal.SIG_DFL)
        os.dup2(_orders(self._job, self._order), 0)
        os.execve(sys.executable, _command(self._server), self._order.environment)  # noqa: S606

    def _transfers(self) -> RankTransfers:
        from ..store.transfers import patience_of  # and fsspec, which a rank server need not have
        from .shared_inputs import RankTransfers, SharedInputs

        job, me = self._job, self._order.context
        transfers = RankTransfers(patience_of(job.upload_timeout), tells=me.local_rank == 0)
        if job.shared_inputs is not None and me.local_world_size > 1:
            transfers.inputs = SharedInputs(job.shared_inputs, me.scratch / "flyte", self._page.fetched_for)
        return transfers

    def _imported(self, transfers: RankTransfers, held: ExitStack) -> tuple[Any, Any]:
        """The task, and flytekit's context, which *held* leaves."""
        job, order = self._job, self._order
        os.chdir(job.cwd)
        sys.path[:] = job.sys_path
        sys.argv[:] = job.argv
        from . import task_context  # and flytekit, from where the job has it

        sandbox = order.context.scratch / "flyte"
        entered = task_context.entered(job.flyte, sandbox, transfers.access(), restarted=order.ran_before)
        if job.flyte.mode == task_context.IN_POD:  # as flytekit does it: a module knows its execution
            ctx = held.enter_context(entered)
            return _loaded(job), ctx
        entity = _loaded(job)
        return entity, held.enter_context(entered)

    def _inputs(self, entity: Any, ctx: Any, transfers: RankTransfers) -> dict[str, Any]:
        from . import literals, task_context

        shared = transfers.inputs
        with nullcontext(ctx) if shared is None else task_context.downloading_to(shared.sandbox, ctx) as inside:
            return literals.native_inputs(self._job.inputs, entity, inside)

    def _work(self, entity: Any, ctx: Any, transfers: RankTransfers) -> None:
        from . import literals

        page, files, is_first = self._page, self._order.files, self._order.context.rank == 0
        page.begin()
        flytekit_inside.publish_decks_by(partial(literals.publish_decks, path=files.decks))
        with literals.decks_left(ctx, files.decks):
            with users_code.without_children():
                inputs = transfers.outlast("fetching the task's inputs", lambda: self._inputs(entity, ctx, transfers))
            self._phase_ended("inputs")
            page.may_end_anywhere = task.task_of(entity) is entity and not entity.python_interface.outputs
            if is_first and page.may_end_anywhere:
                literals.write_nothing(files)
            elif is_first:
                literals.keep_room(files)
            page.enter()
            with context.IN_ANY_CASE:
                with users_code.without_children():
                    returned = task.task_of(entity).task_function(**inputs)
                page.come_back()
                flytekit_inside.no_warning_is_an_error()
                self._note_others()
                # A save in flight must be committed before the job counts as done: Flyte takes the pod away then.
                context.finish()
            if transfers.inputs is not None:
                transfers.inputs.see_all_unchanged()
            self._phase_ended("function")
            if is_first:
                with users_code.without_children():
                    literals.write_outputs(entity, inputs, returned, files, transfers)
        self._phase_ended("outputs")

    def _have_collectives_seen(self, evidence: Evidence) -> None:
        """From here on the agent sees from outside which collectives this rank is in, and the others find its store."""
        order, page, meet = self._order, self._page, self._recorder.meet

        def makes_group(name: str) -> None:
            evidence.note_group(name)
            meet()

        def waits(about: str) -> None:
            page.wait_begins(about)
            meet()

        def begins() -> None:
            refuse_unknown_address()
            meet()

        prepare_store(order.environment, meet)
        torch_inside.call_at_groups(makes_group)
        if order.context.world_size > 1:
            evidence.follow(order.files.records, meet)
        if envvars.HOROVOD_CONTROLLER in order.environment:
            try:
                horovod_inside.around_waits(waits, page.wait_ends)
                horovod_inside.before_init(begins)
            except ImportError:  # not for torch, or not there: nobody can tell
                meet()

    def _note_others(self) -> None:
        """Whether this rank has worked with others, as far as can be seen at its end: in a group that nobody has called
        us at, or by Horovod."""
        try:
            began = [sys.modules.get(f"horovod.{name}") for name in ("torch", "tensorflow", "keras")]
            has_met = torch_inside.process_groups() or any(each is not None and each.is_initialized() for each in began)
        except Exception:  # of whatever the task has put in their place: nobody knows, and what it returned counts
            has_met = True
        if has_met:
            self._recorder.meet()

    def _phase_ended(self, name: str) -> None:
        before = sum(self.seconds.values())
        self.seconds[name] = time.monotonic() - self._began - before
        self._recorder.phase(name, self._began + before, self.seconds[name])


def _loaded(job: JobOrder) -> Any:
    # flytekit, which is imported by now, exits with a traceback at SIGINT. Ctrl-C ends an import at once: nothing is to
    # be cleared up yet.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    entity = users_code.imported(partial(task.load, job.source))
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return entity


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
