"""A node that cannot begin (no code that loads, no inputs, no scratch) comes to the others with its error.

It is that error which ends the job, at once, on every node, and is uploaded once. What is needed to meet the others is
known without the task's own code: registration has pinned it into the pod.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

from .. import envvars, lastwords, topology
from ..config.options import Resolved, Timeouts
from ..config.registered import Registered
from ..errors import NodeLostError, SafedistError, TopologyError
from ..flyte import task_context
from ..ranks import recording
from ..ranks.outcome import NO_RANK, Fault, RankOutcome, Status
from ..texts import ask, named
from ..topology import Topology
from . import ending, reports
from .link import GivenUp
from .messages import CannotBegin, Refused, TheEnd, Welcome
from .opening import Membership, rules_of
from .verdict import Verdict, is_infrastructure, judge

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_EXIT_INFRASTRUCTURE = 1

NOT_STARTED = "no rank was started"
"""Why there is no restart after an error that keeps a node from beginning."""


@dataclass(frozen=True)
class JobPlace:
    """Where a node belongs, as far as it takes to tell the others.

    Attributes:
        topology: its place in the job.
        timeouts: how long nodes wait for each other.
        run_id: names the job; the same on every node.
        max_replacements: how often nodes may be lost, in the whole job.
    """

    topology: Topology
    timeouts: Timeouts
    run_id: str
    max_replacements: int


def run_id(flyte: task_context.FlyteSnapshot, environment: Mapping[str, str]) -> str:
    """Names this attempt of the job, the same on every node."""
    return f"{flyte.execution_id[2]}-a{int(environment.get(envvars.FLYTE_ATTEMPT, '0'))}"


def of_no_task(error: Exception, environment: Mapping[str, str], settings: Resolved | None = None) -> Verdict | None:
    """Deal with a task that cannot be loaded here, or has no inputs, or that is not as this pod was registered.

    Args:
        error: why this node cannot begin.
        environment: its variables.
        settings: the task's, where it is loaded.

    Returns:
        What this node is to upload, the same whether one node cannot begin or all; None for a task that is none of
        ours, or where nobody knows which node this is: it says what it knows.

    Raises:
        SystemExit: another node uploads (code 0); or this node alone is in trouble, or cannot tell anybody (code 1).
    """
    flyte = task_context.take()
    place = _place(environment, settings, run_id(flyte, environment))
    if place is None:
        return None
    verdict = judge(_outcome(error, place), NOT_STARTED, disk="", limit=None)
    if place.topology.max_nodes == 1:
        return verdict
    try:
        uploads = arrive_with(error, place, flyte)
    except SafedistError as trouble:
        if place.topology.node_rank == 0:
            return verdict  # it is node 0's to upload, whether or not the others could be told
        lastwords.keep(error)
        logger.info(f"this node cannot begin: {named(error)}; and the others cannot be told: {trouble}")
        raise SystemExit(_EXIT_INFRASTRUCTURE) from error
    if not uploads:
        raise SystemExit(0) from error
    return verdict


def _place(environment: Mapping[str, str], settings: Resolved | None, name: str) -> JobPlace | None:
    """Where this node belongs, as it was registered; or, where its operator contradicts that, as the code says."""
    as_coded = environment if settings is None else {**environment, **topology.pins(settings)}
    for variables, job in ((environment, Registered.from_env(environment)), (as_coded, settings)):
        if job is not None:
            with suppress(TopologyError):
                return JobPlace(topology.from_env(variables, job), job.timeouts, name, job.max_replacements)
    return None


def arrive_with(error: Exception, place: JobPlace, flyte: task_context.FlyteSnapshot) -> bool:
    """End the job of several nodes with this node's error.

    Returns:
        Whether this node is the one to upload the error; if not, the upload is done.

    Raises:
        RendezvousError: the others cannot be told, or go on without this node, or nothing is uploaded.
    """
    rules = rules_of(
        place.topology, place.timeouts, place.run_id, max_restarts=0, max_replacements=place.max_replacements
    )
    job = Membership(rules, place.topology, state="cannot", open_round=lambda _: {}, local=None, say=logger.info)
    shown, uploads = named(error), False
    try:
        uploads = _told(job, CannotBegin(reports.fitting(_outcome(error, place)), NOT_STARTED))
        if uploads:
            logger.info(f"this node cannot begin, which ends the job: {shown}")
            ending.stay(job)
        else:
            logger.info(f"this node cannot begin, which ends the job; waiting until that is uploaded: {shown}")
            _follow(job, place, flyte)
    finally:
        if not uploads:
            job.close(ended=False)
    return uploads


def _follow(job: Membership, place: JobPlace, flyte: task_context.FlyteSnapshot) -> None:
    if not ending.follow(job, timeout=place.timeouts.upload, exists=lambda: task_context.uploaded(flyte)):
        raise NodeLostError("node 0 was lost before it could upload why this node cannot begin")


def _told(job: Membership, message: CannotBegin) -> bool:
    """Tell the coordinator; whether this node is the one to upload the end that comes of it."""
    job.come()
    if job.hosts:
        job.tell(message)
    while True:
        item = job.heard(1.0)
        if isinstance(item, Welcome) and not job.hosts:
            job.tell(message)
        elif isinstance(item, TheEnd):
            return item.uploads
        elif isinstance(item, Refused):
            raise ending.refusal(item, job.me)
        elif isinstance(item, GivenUp):
            raise item.error


class ToldError(Exception):
    """This node's error has been told to the others, and uploaded by the one that uploads."""


class Voice:
    """A job's node speaks with one voice: one error is uploaded, not two. A context manager, to be entered again and
    again.

    What keeps a node from beginning is told to the others, and ends the job. Once its agent stands, the errors of a
    node other than node 0 are told in its log and by its exit code.

    Attributes:
        is_agents: whether the agent stands.
    """

    def __init__(self, place: JobPlace, flyte: task_context.FlyteSnapshot) -> None:
        self._place = place
        self._flyte = flyte
        self.is_agents = False

    def __enter__(self) -> Voice:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """
        Raises:
            ToldError: another node has uploaded this error.
            NodeLostError: nobody has, and this is not the node to do it.
        """
        topology = self._place.topology
        if not isinstance(error, SafedistError) or topology.max_nodes == 1 or is_infrastructure(error):
            return
        untold = None
        if not self.is_agents:
            try:
                if arrive_with(error, self._place, self._flyte):
                    return
            except SafedistError as trouble:
                untold = trouble
            else:
                raise ToldError from error
        if topology.node_rank == 0 or (topology.node_rank is None and self.is_agents):
            return
        name = "this node" if topology.node_rank is None else f"node {topology.node_rank}"
        raise NodeLostError(
            f"{name} cannot do its part: {type(error).__name__}: {error}",
            seen=None if untold is None else f"the others cannot be told: {untold}",
            hint="repair that on this node",
        ) from error


def elsewhere_if_told(elsewhere: T) -> Callable[[Callable[P, R]], Callable[P, R | T]]:
    """Decorate what uses a :class:`Voice`: it returns *elsewhere* where another node has uploaded."""

    def decorated(function: Callable[P, R]) -> Callable[P, R | T]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | T:
            try:
                return function(*args, **kwargs)
            except ToldError:
                return elsewhere

        return wrapper

    return decorated


def _outcome(error: Exception, place: JobPlace) -> RankOutcome:
    node_rank = place.topology.node_rank
    raised = recording.record(error, ask(lambda: _shown(error), lambda: _frames(error)))
    if isinstance(error, SafedistError):
        raised = replace(raised, fault=Fault.USER)  # as it is where node 0 has it
    return RankOutcome(
        rank=NO_RANK,
        local_rank=NO_RANK,
        node_rank=-1 if node_rank is None else node_rank,
        round=-1,
        host=socket.gethostname(),
        pid=os.getpid(),
        status=Status.RAISED,
        time_ns=time.time_ns(),
        raised=raised,
    )


def _shown(error: Exception) -> str:
    """The traceback, and those of its causes, with the user's frames only."""
    told: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    lines: list[str] = []
    while told is not None:
        lines[:0] = [*_head(told.stack), *told.format_exception_only(), "\n"]
        told = told.__cause__ or (None if told.__suppress_context__ else told.__context__)
    return "".join(lines)


def _frames(error: Exception) -> str:
    """The same of an error that does not say what it is."""
    return "".join([*_head(traceback.extract_tb(error.__traceback__)), f"{type(error).__name__}\n"])


def _head(stack: traceback.StackSummary) -> list[str]:
    users = traceback.StackSummary.from_list([frame for frame in stack if _is_users(frame.filename)])
    return ["Traceback (most recent call last):\n", *users.format()] if users else []


def _is_users(file: str) -> bool:
    here = str(Path(__file__).parents[1])
    return not (file.startswith((here, "<frozen ")) or "/flytekit/" in file or "/importlib/" in file)
