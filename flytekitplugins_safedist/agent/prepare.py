"""Before a job's ranks on this node: its place, its scratch, its rank server, and what all of them are told."""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .. import envvars, topology
from ..config.options import SCRATCH_MOUNT, Scratch
from ..config.registered import Registered
from ..errors import TopologyError
from ..hangs.gpus import GpuWatch
from ..rank import backends, literals, task_context
from ..rank.order import JobOrder, TaskSource
from ..rank.places import JobScratch
from ..rank.shared_inputs import amount
from ..rank_server.cleanup import remove
from ..rank_server.client import RankServer
from ..rank_server.scan import Scan, scan
from ..record.run import RunRecord
from ..record.run_page import ConsoleDeck
from ..store.patience import within
from . import arrival, disk, scratch, standby
from .disk import DiskLimit
from .membership import Membership

if TYPE_CHECKING:
    from flytekit.models.literals import LiteralMap


logger = logging.getLogger(__name__)

_SLOW_SECONDS = 5.0
"""An import that takes longer is told."""

_OF_UPLOAD = 6
"""Part of the time that the other nodes wait for the upload, to remove scratch before it."""


@dataclass(frozen=True)
class TaskCall:
    """A task that is called on this node.

    Attributes:
        name: of the task.
        source: where ranks get it from.
        settings: as it is configured; in a pod as it was registered.
        variables: the task's own. They win over safedist's defaults.
        inputs: as literals.
        environment: this process's variables.
        sys_path: the module search path of its ranks.
        server: that was started before, and has begun to import the libraries.
    """

    name: str
    source: TaskSource
    settings: Registered
    variables: Mapping[str, str]
    inputs: LiteralMap
    environment: Mapping[str, str]
    sys_path: Sequence[str]
    server: RankServer | None = None


@dataclass(frozen=True)
class Job:
    """One job as this node is called for it.

    Attributes:
        call: the task, and how it is called.
        backend: how its ranks meet.
        attempt: Flyte's, and this node's place in it.
        name: see :func:`.arrival.job_name`.
    """

    call: TaskCall
    backend: backends.TorchBackend
    attempt: arrival.Attempt
    name: str

    @classmethod
    def of(cls, call: TaskCall) -> Job:
        """What this process's variables, devices and flytekit say.

        Raises:
            TopologyError: nobody says which node this is, or two contradict each other.
        """
        settings = call.settings
        devices = [device.name for device in Path("/dev").iterdir()]
        try:
            place = topology.from_env(call.environment, settings, devices=devices)
        except TopologyError as error:
            # Uploaded by this node alone it would end, for Flyte, a job that goes on.
            arrival.of_no_task(error, call.environment)
            raise
        flyte = task_context.take()
        settings = replace(settings, nproc_per_node=place.nproc_per_node)
        attempt = arrival.Attempt(place, settings, flyte, arrival.run_id(flyte, call.environment))
        return cls(call, backends.create(settings.backend), attempt, arrival.job_name(flyte))

    @property
    def ranks_environment(self) -> dict[str, str]:
        """What ranks inherit."""
        return {**backends.inherited(self.attempt.settings, self.call.environment), **self.call.variables}

    @property
    def is_local(self) -> bool:
        """Whether it runs on the user's own machine."""
        return self.attempt.flyte.mode != task_context.IN_POD

    @property
    def number(self) -> int:
        """Of Flyte's attempt, from 0."""
        return int(self.call.environment.get(envvars.FLYTE_ATTEMPT, "0"))

    @property
    def version(self) -> str:
        """Of the task as it is registered; "" in a local run."""
        flyte = self.attempt.flyte
        return flyte.task_id[3] if flyte.task_id else ""

    @property
    def labels(self) -> dict[str, str]:
        """Of this node's metrics, with OpenTelemetry's names."""
        node = self.attempt.topology.node_rank
        return {
            "service.name": self.call.name,
            "host.name": socket.gethostname(),
            "safedist.execution": self.attempt.flyte.execution_id[2],
            "safedist.task": self.call.name,
            "safedist.attempt": str(self.number),
            **({} if node is None else {"safedist.node": str(node)}),
        }


@dataclass
class Scratched:
    """The job's directory on this node; what stays of it depends on whether the job has ``succeeded``."""

    job: JobScratch
    succeeded: bool = False


@dataclass(frozen=True)
class NodePlan:
    """What a node's agent begins with.

    Attributes:
        job: what it is to run.
        server: starts ranks.
        order: what all ranks are told.
        scratched: the job's directory on this node.
        unsafe: why ranks are not forked from the server; None: they are.
        limit: how much they may write to disk.
        gpus: of this node.
        seconds: that preparing took.
    """

    job: Job
    server: RankServer
    order: JobOrder
    scratched: Scratched
    unsafe: str | None
    limit: DiskLimit | None
    gpus: GpuWatch
    seconds: float

    @property
    def settings(self) -> Registered:
        """The job's."""
        return self.job.attempt.settings

    @property
    def scratch(self) -> JobScratch:
        """The job's directory on this node."""
        return self.scratched.job

    def record(self, member: Membership, course: Callable[[], Mapping[str, Sequence[str]]]) -> RunRecord:
        """Of the run that begins; *course*: what the job has spent."""
        job, call, flyte = self.job, self.job.call, self.job.attempt.flyte
        has_deck, prefix = self.settings.decks is not None, flyte.output_metadata_prefix
        is_shown = not job.is_local and has_deck
        return RunRecord(
            call.name,
            is_local=job.is_local,
            has_deck=has_deck,
            console=ConsoleDeck(prefix, flyte.raw_output_prefix) if is_shown and prefix is not None else None,
            environment=job.ranks_environment,
            terminal=call.environment,
            metrics=self.settings.metrics,
            labels=job.labels,
            gpus=self.gpus.usage,
            inputs=partial(amount, self.scratch.inputs),
            prepared=self.seconds,
            nproc_per_node=self.settings.nproc_per_node,
            hosts=lambda: member.leads,
            send=member.note,
            others=member.notes,
            course=course,
        )

    @property
    def meeting(self) -> Path | None:
        """The socket at which the ranks here call the agent, to meet the others; None where there is one rank alone."""
        is_alone = self.job.attempt.topology.max_nodes == 1 and self.settings.nproc_per_node == 1
        return None if is_alone else self.scratch.short / self.scratch.orders.name / "meeting"


def prepare(job: Job, held: ExitStack) -> NodePlan:
    """Start what the ranks need; *held* ends it all, in the right order.

    Args:
        job: the job.
        held: takes over what is started.
    """
    settings, call = job.attempt.settings, job.call
    job.backend.find()
    # The server comes first, to guard scratch from its first moment; and ends first, for scratch goes when no rank can
    # write there any more.
    server = held.enter_context(call.server or standby.lent(job.ranks_environment))
    root = _scratch_root(settings.scratch, call.environment)
    scratched = held.enter_context(_scratch(root, settings))
    # What travels there is the task's: its inputs may be secrets, so they never stay. Nor does a link.
    made = scratched.job
    goes = [made.path if settings.scratch.keep == "never" else made.orders]
    server.guard(goes if made.short == made.path else [made.short, *goes])
    order = _order(job, made)
    started = time.monotonic()
    held.callback(server.end_ranks)  # before scratch goes
    forks = settings.start_method == "preload"
    if forks:
        if call.server is None:
            server.take_needed(job.backend.libraries, job.ranks_environment)
        caches = scratch.make_caches(made.preload, settings.scratch.shared_caches)
        found = _scanned(call)
        variables = {**job.ranks_environment, **caches, **call.variables}
        server.take(found.steps, environment=variables, path=list(map(os.path.abspath, call.sys_path)))
    with scratch.making("the task's inputs cannot be written to the scratch directory", order.inputs):
        literals.write_literals(call.inputs, order.inputs)
    if not server.is_ready(_SLOW_SECONDS):
        logger.info(f"libraries are imported for all ranks: {_SLOW_SECONDS:g} s so far")
    imported = server.ready(settings.timeouts.start)
    job.backend.check(imported.failed)
    unsafe = imported.unsafe if forks else "start_method='spawn'"
    if forks and unsafe is not None:
        logger.warning(f"ranks start as fresh interpreters (start_method='spawn') instead of 'preload': {unsafe}")
    for each in imported.left:
        logger.info(each)
    limit = disk.limit_of(settings, call.environment)
    gpus = held.enter_context(GpuWatch(logger.warning))
    return NodePlan(job, server, order, scratched, unsafe, limit, gpus, time.monotonic() - started)


def _order(job: Job, made: JobScratch) -> JobOrder:
    settings = job.attempt.settings
    return JobOrder(
        source=job.call.source,
        cwd=Path.cwd(),
        sys_path=tuple(job.call.sys_path),
        argv=tuple(sys.argv),
        inputs=made.orders / "inputs.pb",
        flyte=replace(job.attempt.flyte, enable_deck=settings.decks is not None),
        upload_timeout=settings.timeouts.upload,
        shared_inputs=made.inputs if settings.scratch.share_inputs else None,
    )


def _scanned(call: TaskCall) -> Scan:
    """What the task's files import from installed packages."""
    source = call.source
    modules = [name for name in (source.module, source.run_as, *source.imports) if name]
    files = [source.script] if source.script is not None and source.run_as is None else []
    found = scan(modules, files, call.sys_path, source.name)
    if found.stopped:
        logger.debug(f"what is imported after {found.stopped} is imported by each rank")
    return found


def _scratch_root(asked: Scratch, environment: Mapping[str, str]) -> Path:
    """Where scratch goes: a pod lacks the volume that registration named when a pod template replaced the task's."""
    named = environment.get(envvars.SCRATCH_ROOT)
    elsewhere = Path(asked.path or named or tempfile.gettempdir())
    is_ours = asked.path is None and asked.volume is not None and named == SCRATCH_MOUNT
    wanted = environment.get(envvars.TMPDIR)
    if wanted and elsewhere == Path(tempfile.gettempdir()) and elsewhere != Path(os.path.abspath(wanted)):  # noqa: PTH100
        why = "it is full, or cannot be written" if Path(wanted).is_dir() else "there is no such directory"
        logger.warning(f"TMPDIR={wanted} is not used ({why}): scratch is in {elsewhere}")
    if not is_ours or elsewhere.is_dir():
        return elsewhere
    logger.warning(
        f"this pod has no scratch volume at {named} (with_overrides(pod_template=...) replaced the pod "
        f"template that brings it): scratch is in {tempfile.gettempdir()}, in the container's own file system"
    )
    return Path(tempfile.gettempdir())


@contextmanager
def _scratch(root: Path, settings: Registered) -> Iterator[Scratched]:
    mode = settings.scratch.keep
    for path in scratch.sweep(root):  # first: it may be what fills the disk
        logger.info(f"removed the scratch of an earlier run here, which was killed: {path}")
    job = scratch.make_job(root)
    scratched = Scratched(job)
    try:
        with scratch.own(job, is_kept=mode != "never"):
            yield scratched
    finally:
        if job.short != job.path:
            remove(job.short)
        is_kept = mode == "always" or (mode == "on_failure" and not scratched.succeeded)
        # Of what is kept this: they hold every rank's environment, and with it the task's secrets.
        _remove(job.orders if is_kept else job.path, settings.timeouts.upload / _OF_UPLOAD)
        if is_kept:
            logger.info(f"scratch is kept in {job.path} (Scratch(keep={mode!r}))")


def _remove(path: Path, seconds: float) -> None:
    """The verdict is uploaded after that: a file server that does not answer must not keep it for ever."""
    try:
        left = within(seconds, lambda: remove(path))
    except TimeoutError:
        left = f"{path} is not gone after {seconds:g} s, and the job does not wait for that"
    if left is not None:
        logger.warning(f"scratch could not be removed completely: {left}")
