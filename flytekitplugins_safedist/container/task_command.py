"""The command behind ``--``: flytekit's in this very process, every other in a process of its own kind."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import envvars, lastwords, stopping, topology
from ..compat import flytekit as flytekit_inside
from ..config.registered import Registered
from ..errors import JobInterruptedError, RankFailedError, SafedistError, StorageError
from ..flyte.patience import Patience, Request, in_thread
from ..flyte.storage_errors import decisive, one_line
from ..pod.store import error_document
from ..rank.task import source_by
from ..texts import public
from . import other_command
from .invocation import resolver_of, without_users_resolver

if TYPE_CHECKING:
    from ..config.registered import Registered
    from ..rank.order import TaskSource
    from ..rank_server.client import RankServer

if TYPE_CHECKING:
    from ..pod.store.verdict import Verdicts

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_USAGE = 2
"""Exit codes of the user's own failures where nothing can be uploaded: Flyte takes one of the task's ``retries``."""

IN_PROCESS = {"pyflyte-execute": "execute_task_cmd", "pyflyte-map-execute": "map_execute_task_cmd"}
"""Commands whose click command of flytekit.bin.entrypoint runs in this process."""


def is_flytekits(command: Sequence[str]) -> bool:
    """Whether the command is run in this process."""
    return os.path.basename(command[0]) in IN_PROCESS  # noqa: PTH119


def execute_and_leave(command: list[str], registered: Registered | None, server: RankServer | None) -> int:
    """Run the task; if this is node 0 of several, let the others leave when the upload is done, or is not to come.

    Args:
        command: whose click command of flytekit runs in this process; another one takes this process's place.
        registered: the job that the task is; None for a task that is none of ours.
        server: of the job.
    """
    from ..job import ending

    uploaded = False
    try:
        code = execute(command, registered, server)
        uploaded = code == 0
        if uploaded:
            stopping.decided(code)
        return code
    finally:
        ending.leave(uploaded=uploaded)


def execute(command: list[str], registered: Registered | None = None, server: RankServer | None = None) -> int:
    """Run the task; see :func:`execute_and_leave`.

    Returns:
        The exit code. After the upload: flytekit returns only then.
    """
    function = IN_PROCESS.get(os.path.basename(command[0]))  # noqa: PTH119
    if function is None:
        return _replace_process(command)
    import click
    from flytekit.bin import entrypoint as flytekit_entrypoint

    if os.environ.pop(envvars.FLYTE_FAIL_ON_ERROR, None) is not None:
        logger.warning(
            "%s is not followed: a pod whose verdict is uploaded exits 0, and only then is it read",
            envvars.FLYTE_FAIL_ON_ERROR,
        )
    sys.argv = list(command)
    from ..flyte.transfers import LONGEST_SECONDS, patience_of  # and fsspec, for which no fork waits
    from ..pod.store.verdict import Verdicts

    verdicts = Verdicts(LONGEST_SECONDS if registered is None else patience_of(registered.timeouts.upload))
    dispatch, given = partial(_stoppable, verdicts), command
    resolver = resolver_of(command)
    if registered is not None and server is not None and resolver is not None:
        source = source_by(*resolver, mapped=function == "map_execute_task_cmd")
        dispatch = partial(_stoppable, verdicts, job=partial(_job_task, source, registered, server))
        given = without_users_resolver(command)
    flytekit_inside.adapt_entrypoint(access=verdicts.access(), traceback=cause_first, dispatch=dispatch)
    try:
        getattr(flytekit_entrypoint, function).main(args=given[1:], prog_name=command[0], standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.exceptions.Abort:
        return EXIT_FAILED
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
        if isinstance(value, SafedistError):
            return f"{value}\n\n{formatted(error)}"
        return formatted(error)

    return told


def _job_task(source: TaskSource, registered: Registered, server: RankServer, ctx: Any) -> Any:
    """What flytekit runs for a task that is a job."""
    from .job_task import JobTask

    return JobTask(ctx, source, registered, server)


def _stoppable(
    verdicts: Verdicts, dispatch: Callable[..., None], job: Callable[[Any], Any] | None = None
) -> Callable[..., None]:
    """flytekit's ``_dispatch_execute``; SIGTERM ends the process at once while a task is loaded, and unwinds the task
    itself. Where the platform has ended the attempt, that is what is uploaded.

    Args:
        verdicts: are uploaded by it.
        dispatch: flytekit's own.
        job: makes what stands for the task, from flytekit's context; None: the task itself is loaded here.
    """

    def dispatch_execute(
        ctx: Any, load_task: Callable[[], Any], inputs_path: str, output_prefix: str, **options: Any
    ) -> None:
        verdicts.prefix, verdicts.is_shared = output_prefix, not topology.is_alone(os.environ)
        with ExitStack() as running:

            def load() -> Any:
                stopping.listen_again()
                task = load_task() if job is None else job(ctx)
                flytekit_inside.no_warning_is_an_error()  # what follows is flytekit's and ours: ranks have the user's
                running.enter_context(stopping.unwinding())
                return task

            try:
                with stopping.unwinding():
                    inputs = _fetched(inputs_path, ctx)
                # flytekit would look for a mapped task's types in another place than ours has them.
                dispatch(ctx, load, inputs, output_prefix, **(options if job is None else {}))
            except error_document.Decided as ended:
                failure = ended.failure
            except stopping.StopRequested:
                if not topology.is_alone(os.environ):
                    raise
                failure = _stopped()
            else:
                return
            stopping.finish()
            error_document.upload(failure, ctx.file_access, output_prefix)

    return dispatch_execute


def _stopped() -> error_document.SystemFailure:
    """The verdict on a pod that nobody replaces, told to stop where it has no ranks."""
    text = "this pod was told to stop by SIGTERM; no rank was running. Nothing is wrong with the task"
    return error_document.SystemFailure(JobInterruptedError.platforms, text, time.time_ns())


def _fetched(inputs_path: str, ctx: Any) -> str:
    """The task's inputs, fetched: where that fails, flytekit would upload its own error, on every node.

    Raises:
        Decided: they cannot be fetched, and it is this node that uploads it.
        SystemExit: the same, and another node has (code 0), or nobody (code 1).
    """
    from flytekit.exceptions.system import FlyteDownloadDataException

    from ..job import arrival

    directory = ctx.execution_state.working_dir

    def fetch(attempt: int) -> Future[str]:
        here = os.path.join(directory, f"fetched-inputs-{attempt}.pb")  # noqa: PTH118
        return in_thread(lambda: (ctx.file_access.get_data(inputs_path, here), here)[1])

    try:
        return Request(Patience(f"the task's inputs, {public(inputs_path)}"), fetch).result()
    except Exception as error:  # whatever the store's client raises
        text = f"the task's inputs cannot be fetched from {public(inputs_path)}: {one_line(decisive(error))}"
        failure = error_document.SystemFailure(StorageError.platforms, text, time.time_ns())
        arrival.of_no_task(FlyteDownloadDataException(text), os.environ)
        raise error_document.Decided(failure) from error


def _replace_process(command: list[str]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        if os.getpid() == 1:
            return other_command.run_as_init(command)
        other_command.take_place(command)
    except OSError as error:
        logger.error(f"cannot run {command[0]}: {error.strerror}")
        return EXIT_USAGE
