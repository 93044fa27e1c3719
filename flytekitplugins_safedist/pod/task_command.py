"""flytekit's command for a task, in this very process."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Any

from flytekit.core.data_persistence import FileAccessProvider

from .. import envvars, lastwords, stopping, topology
from ..agent import arrival, ending, life
from ..agent.policy import DECIDED
from ..compat import flytekit as flytekit_inside
from ..config.registered import Registered
from ..errors import JobInterruptedError, RankFailedError, SafedistError, StorageError
from ..failures import decisive
from ..rank.order import TaskSource
from ..rank.task import source_by
from ..rank_server.client import RankServer
from ..store.errors import one_line
from ..store.patience import Patience, Request, in_thread
from ..store.transfers import LONGEST_SECONDS, patience_of
from ..texts import encodable, public
from . import verdict
from .command_line import FUNCTIONS, program_of, resolver_of, without_users_resolver
from .verdict import Verdicts

logger = logging.getLogger(__name__)


def execute_and_leave(
    command: list[str], registered: Registered | None, server: RankServer | None, trouble: SafedistError | None
) -> int:
    """Run the task; if this is node 0 of several, let the others leave when the upload is done, or is not to come.

    Args:
        command: flytekit's.
        registered: the job that the task is; None for a task that is none of ours.
        server: of the job.
        trouble: what keeps this pod from beginning: the attempt is to end with it, once.

    Returns:
        The exit code.
    """
    uploaded = False
    try:
        code = _execute(command, registered, server, trouble)
        uploaded = code == 0
        if uploaded:
            stopping.decided(code)
            life.end(code)
        return code
    finally:
        ending.leave(uploaded=uploaded)


def _execute(
    command: list[str], registered: Registered | None, server: RankServer | None, trouble: SafedistError | None
) -> int:
    import click
    from flytekit.bin import entrypoint as flytekit_entrypoint

    gc.freeze()
    gc.enable()  # all that is large is imported
    if os.environ.pop(envvars.FLYTE_FAIL_ON_ERROR, None) is not None:
        logger.warning(
            "%s is not followed: a pod whose verdict is uploaded exits 0, and only then is it read",
            envvars.FLYTE_FAIL_ON_ERROR,
        )
    sys.argv, function = list(command), FUNCTIONS[program_of(command)]
    verdicts = Verdicts(LONGEST_SECONDS if registered is None else patience_of(registered.timeouts.upload))
    job, given, resolver = None, command, resolver_of(command)
    if registered is not None and server is not None and resolver is not None:
        source = source_by(*resolver, mapped=function == "map_execute_task_cmd")
        job, given = partial(_job_task, source, registered, server), without_users_resolver(command)
    flytekit_inside.adapt_entrypoint(
        access=verdicts.access(),
        traceback=cause_first,
        dispatch=partial(_around, verdicts=verdicts, trouble=trouble, job=job),
    )
    try:
        getattr(flytekit_entrypoint, function).main(args=given[1:], prog_name=command[0], standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.exceptions.Abort:
        return stopping.EXIT_FAILED
    if stopping.stop_requested():  # and somebody swallowed it
        stopping.end()
    return 0


def cause_first(formatted: Callable[[Exception], str]) -> Callable[[Exception], str]:
    """The text that flytekit uploads for an exception: ours begins with its cause, for that is all the console shows.

    Args:
        formatted: flytekit's own (1.16, flytekit.bin.entrypoint.get_traceback_str): the frames first that led from the
            container's command to us, the message under them.
    """

    def told(error: Exception) -> str:
        value = getattr(error, "value", error)
        lastwords.keep(value)
        if isinstance(value, RankFailedError):
            return str(value)  # the frames that matter are the rank's, and in its text
        text = f"{value}\n\n{formatted(error)}" if isinstance(value, SafedistError) else formatted(error)
        return encodable(text)  # of a file whose name is no UTF-8, say: protobuf would refuse it, and the error be lost

    return told


def _job_task(source: TaskSource, registered: Registered, server: RankServer, ctx: Any) -> Any:
    """What flytekit runs for a task that is a job. Imported when the task is loaded: what that raises is uploaded."""
    from .job_task import JobTask

    return JobTask(source, registered, server, ctx)


def _around(
    dispatch: Callable[..., None], verdicts: Verdicts, trouble: SafedistError | None, job: Callable[[Any], Any] | None
) -> Callable[..., None]:
    """flytekit's ``_dispatch_execute``; SIGTERM ends the process at once while a task is loaded, and unwinds the task
    itself. Where something else than the task has ended the attempt, that is what is uploaded.

    Args:
        dispatch: flytekit's own.
        verdicts: are uploaded by it.
        trouble: what keeps this pod from beginning.
        job: makes what stands for the task, from flytekit's context; None: the task itself is loaded here.
    """

    def dispatch_execute(
        ctx: Any, load_task: Callable[[], Any], inputs_path: str, output_prefix: str, **options: Any
    ) -> None:
        verdicts.prefix, verdicts.is_shared = output_prefix, not topology.is_alone(os.environ)
        with ExitStack() as running:

            def load() -> Any:
                stopping.listen_again()
                task = _with_room(load_task() if job is None else job(ctx), ctx.execution_state.working_dir)
                flytekit_inside.no_warning_is_an_error()  # what follows is flytekit's and ours: ranks have the user's
                running.enter_context(stopping.unwinding())
                return task

            try:
                with stopping.unwinding():
                    inputs = _inputs(inputs_path, ctx, verdicts, trouble)
                # flytekit would look for a mapped task's types in another place than ours has them.
                dispatch(ctx, load, inputs, output_prefix, **(options if job is None else {}))
            except verdict.Decided as ended:
                end = ended.verdict
            except stopping.StopRequested:
                if verdicts.is_shared:
                    raise
                what = "this pod was told to stop by SIGTERM; no rank was running. Nothing is wrong with the task"
                end = verdict.on(JobInterruptedError(what))
            else:
                return
            code = verdict.end_with(end, ctx.file_access, output_prefix)
            if code:
                raise SystemExit(code)

    return dispatch_execute


def _with_room(task: Any, beside: str) -> Any:
    """The task, which has room kept for its verdict, beside a directory, while it runs."""
    execute = task.dispatch_execute

    def dispatch_execute(*given: Any, **named: Any) -> Any:
        with verdict.room_kept(beside):
            return execute(*given, **named)

    task.dispatch_execute = dispatch_execute
    return task


def _inputs(address: str, ctx: Any, verdicts: Verdicts, trouble: SafedistError | None) -> str:
    """The task's inputs, fetched, where there is still something to do, and this pod can.

    Raises:
        Decided: it cannot, and it is this node that uploads that.
        SystemExit: there is nothing to do, or another node has uploaded it (code 0); or nobody has, and this pod is to
            be started again.
    """

    def is_over() -> bool:
        return verdict.is_there(str(verdicts.prefix), ctx.file_access)

    is_decided = ending.is_decided(is_over) if verdicts.is_shared else False
    if is_decided:
        logger.info(DECIDED)
        stopping.decided(0)
        raise SystemExit(0)
    attempt = None if is_decided is False or trouble is None else arrival.attempt_of(os.environ)
    if trouble is not None and attempt is not None and attempt.topology.node_rank == 0:
        # It would upload this for all. In a store that is away another start finds the code when it can upload, too.
        lastwords.keep(trouble, "this pod is to be started again: ")
        raise SystemExit(stopping.EXIT_UNDECIDED)
    try:
        if trouble is not None:
            raise trouble
        return _fetched(address, ctx.file_access, ctx.execution_state.working_dir)
    except SafedistError as error:
        # flytekit would upload its own error, on every node. A node that waits for the others to tell them finds out
        # when one of them has uploaded what they all meet.
        arrival.of_no_task(error, os.environ)
        raise verdict.Decided(verdict.on(error)) from error


def _fetched(address: str, access: FileAccessProvider, directory: str) -> str:
    """A file of the task's inputs.

    Raises:
        StorageError: they cannot be fetched.
    """

    def fetch(attempt: int) -> Future[str]:
        here = os.path.join(directory, f"fetched-inputs-{attempt}.pb")  # noqa: PTH118
        return in_thread(lambda: (access.get_data(address, here), here)[1])

    try:
        return Request(Patience(f"the task's inputs, {public(address)}"), fetch).result()
    except Exception as error:  # whatever the store's client raises
        what = f"the task's inputs cannot be fetched from {public(address)}"
        hint = "look at the store, the pod's network and credentials, or at the limit of this container that is named"
        raise StorageError(what, seen=one_line(decisive(error)), hint=hint) from error
