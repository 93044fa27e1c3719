"""A node that cannot begin (no inputs, no scratch, no libraries) comes to the others with its error.

It is that error which ends the job, at once, on every node, and is uploaded once. What is needed to meet the others is
known without the task's own code: registration has pinned it into the pod.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
import traceback
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from .. import envvars, lastwords, topology
from ..agent import memory
from ..agent.rank_set import KILL_SECONDS, SETTLE_SECONDS
from ..config.options import Preflight, Timeouts
from ..config.registered import Registered
from ..errors import NodeLostError, SafedistError, TopologyError
from ..failures import Failure
from ..rank import recording, task_context
from ..rank.outcome import NO_RANK, RankOutcome, Status
from ..store.errors import Retry, one_line
from ..texts import ask, human, named, public
from ..topology import Topology
from . import ending, reports
from .facts import Rules
from .link import GivenUp
from .membership import Membership
from .messages import CannotBegin, Refused, TheEnd, Welcome
from .sign import SignPlace
from .verdict import Verdict, judge

logger = logging.getLogger(__name__)

_EXIT_INFRASTRUCTURE = 1

_LAST_CALL = 30.0
"""Seconds, at most, that a round of a range waits for further nodes when the minimum is there, as torch elastic's."""

NOT_STARTED = "no rank was started"
"""Why there is no restart after an error that keeps a node from beginning."""


@dataclass(frozen=True)
class Attempt:
    """One attempt of a job, and where this node belongs in it: as far as it takes to meet the others.

    Attributes:
        topology: this node's place.
        timeouts: how long nodes wait for each other.
        max_restarts, max_replacements: the budgets of the whole job.
        preflight: as configured.
        flyte: what flytekit knows of it.
        run_id: names it; the same on every node.
    """

    topology: Topology
    timeouts: Timeouts
    max_restarts: int
    max_replacements: int
    preflight: Preflight | None
    flyte: task_context.FlyteSnapshot
    run_id: str

    def rules(self) -> Rules:
        """What the coordinator of this job goes by."""
        place, timeouts, group = self.topology, self.timeouts, memory.cgroup()
        limit = None if group is None else group.limit
        return Rules(
            run=self.run_id,
            min_nodes=place.min_nodes,
            max_nodes=place.max_nodes,
            fixed=not place.is_elastic,
            max_restarts=self.max_restarts,
            max_replacements=self.max_replacements,
            timeout=timeouts.rendezvous,
            heartbeat=timeouts.heartbeat,
            settle=SETTLE_SECONDS,
            stop=timeouts.stop,
            kill=KILL_SECONDS,
            preflight=self.preflight,
            last_call=min(_LAST_CALL, timeouts.heartbeat / 2),
            about="" if limit is None else f"Its container's memory is limited to {human(limit)}.",
        )

    def verdict_is_there(self) -> bool:
        """Whether its outputs, or its one error, are in the store. Asks it."""
        return task_context.uploaded(self.flyte)

    def sign(self) -> SignPlace | None:
        """Where the leader's sign is; None where there is no other node, or no store."""
        prefix = self.flyte.output_metadata_prefix
        if prefix is None or self.topology.max_nodes == 1:
            return None
        return SignPlace.of(prefix, task_context.store(), self.timeouts.heartbeat)


def run_id(flyte: task_context.FlyteSnapshot, environment: Mapping[str, str]) -> str:
    """Names this attempt of the job, the same on every node, and no other job's of the execution."""
    return f"{_of_node(flyte) or flyte.execution_id[2]}-a{int(environment.get(envvars.FLYTE_ATTEMPT, '0'))}"


def job_name(flyte: task_context.FlyteSnapshot) -> str:
    """Names the task's node in its execution, for what outlives an attempt (a tracker's run): the same on every node of
    the job and in every attempt, in letters, digits and dashes. A local run has one attempt, and a random name."""
    return _of_node(flyte) or f"local-{uuid.uuid4().hex[:16]}"


def _of_node(flyte: task_context.FlyteSnapshot) -> str:
    prefix = flyte.output_metadata_prefix
    if flyte.mode != task_context.IN_POD or prefix is None:
        return ""
    # One prefix for each node of the workflow, and for each part of a mapped task; the attempt is its last part.
    of_node = prefix.rstrip("/").rpartition("/")[0]
    return f"{flyte.execution_id[2]}-{hashlib.sha256(of_node.encode()).hexdigest()[:8]}"


def of_no_task(error: Exception, environment: Mapping[str, str]) -> Verdict | None:
    """Deal with a task that has no inputs here, or with a pod that is not as it was registered.

    Args:
        error: why this node cannot begin.
        environment: its variables.

    Returns:
        What this node is to upload, the same whether one node cannot begin or all; None for a task that is none of
        ours, or where nobody knows which node this is: it says what it knows.

    Raises:
        SystemExit: another node uploads (code 0); or this node alone is in trouble, or cannot tell anybody (code 1).
    """
    attempt = _attempt(environment)
    if attempt is None:
        return None
    verdict = judge(_outcome(error, attempt.topology), NOT_STARTED, disk="", limit=None)
    if attempt.topology.max_nodes == 1:
        return verdict
    try:
        uploads = arrive_with(error, attempt)
    except SafedistError as trouble:
        if attempt.topology.node_rank == 0 and not isinstance(trouble, NodeLostError):
            return (
                verdict  # it is node 0's to upload, though the others could not be told; but not where the job goes on
            )
        lastwords.keep(error)
        logger.info(f"this node cannot begin: {named(error)}; and that does not end the job: {trouble}")
        raise SystemExit(_EXIT_INFRASTRUCTURE) from error
    if not uploads:
        raise SystemExit(0) from error
    return verdict


def _attempt(environment: Mapping[str, str]) -> Attempt | None:
    """Where this node belongs; None where it is no node of ours, or nobody can tell."""
    flyte = task_context.take()
    with suppress(TopologyError):
        job = Registered.from_env(environment)
        if job is not None:
            place = topology.from_env(environment, job)
            return Attempt(place, job.timeouts, 0, job.max_replacements, None, flyte, run_id(flyte, environment))
    return None


def is_told(error: SafedistError, attempt: Attempt) -> bool:
    """Tell the others what keeps this node from beginning, which ends the job.

    Returns:
        Whether it has been uploaded by another node; if not, it is for this one to raise.

    Raises:
        NodeLostError: nobody has, and this is not the node to do it.
    """
    if attempt.topology.max_nodes == 1 or error.is_platforms:
        return False
    try:
        return not arrive_with(error, attempt)
    except SafedistError as trouble:
        if attempt.topology.node_rank == 0 and not isinstance(trouble, NodeLostError):
            return False
        raise cannot_do_its_part(error, attempt.topology, f"that does not end the job: {trouble}") from error


def cannot_do_its_part(error: SafedistError, place: Topology, seen: str | None = None) -> NodeLostError:
    """What such an error comes to on a node that uploads nothing: it is told in its log and by its exit code."""
    name = "this node" if place.node_rank is None else f"node {place.node_rank}"
    what = f"{name} cannot do its part: {type(error).__name__}: {error}"
    return NodeLostError(what, seen=seen, hint="repair that on this node")


def arrive_with(error: Exception, attempt: Attempt) -> bool:
    """End the job of several nodes with this node's error.

    Returns:
        Whether this node is the one to upload the error; if not, the upload is done.

    Raises:
        RendezvousError: the others cannot be told, or go on without this node, or nothing is uploaded.
    """
    place, sign = attempt.topology, attempt.sign()
    if place.node_rank == 0:
        _must_be_first(sign, attempt.timeouts.upload)
    job = Membership(attempt.rules(), place, state="cannot", open_round=lambda _: {}, local=None, say=logger.info)
    shown, uploads = named(error), False
    try:
        if job.hosts and place.node_rank != 0:
            _must_be_first(sign, attempt.timeouts.upload)
        uploads = _told(job, CannotBegin(reports.fitting(_outcome(error, place)), NOT_STARTED))
        if uploads:
            logger.info(f"this node cannot begin, which ends the job: {shown}")
            ending.stay(job)
            return True
        logger.info(f"this node cannot begin, which ends the job; waiting until that is uploaded: {shown}")
        if not ending.follow(job, timeout=attempt.timeouts.upload, exists=attempt.verdict_is_there):
            raise NodeLostError("node 0 was lost before it could upload why this node cannot begin")
        return False
    finally:
        if not uploads:
            job.close(ended=False)


def _must_be_first(sign: SignPlace | None, patience: float) -> None:
    """Only the first leader of a job ends it for a node that cannot begin. Another one has left its sign.

    Raises:
        NodeLostError: there is one; or the store cannot be read for *patience* seconds.
    """
    retry = Retry(patience)
    while sign is not None:
        try:
            earlier = sign.read()
        except Exception as error:  # whatever the store's client raises
            pause = retry.pause(error)
            if pause is None:
                raise _leaves_it(f"the store cannot be read: {one_line(error)}") from error
            time.sleep(pause)
            continue
        if earlier is None:
            return
        raise _leaves_it(f"process {earlier.process} has led it before: its sign is at {public(sign.address)}")


def _leaves_it(seen: str) -> NodeLostError:
    return NodeLostError(
        "node 0 cannot begin, in a job that most likely has begun without it",
        where={"host": socket.gethostname()},
        seen=seen,
        hint="look for what is different on this machine; the job goes on when another pod is in this one's place",
    )


def _told(job: Membership, message: CannotBegin) -> bool:
    """Tell the coordinator; whether this node is the one to upload the end that comes of it."""
    while True:
        item = job.heard(1.0)
        if isinstance(item, Welcome):
            job.tell(message)
        elif isinstance(item, TheEnd):
            return item.uploads
        elif isinstance(item, Refused):
            raise ending.refusal(item, job.me)
        elif isinstance(item, GivenUp):
            raise item.error


def _outcome(error: Exception, place: Topology) -> RankOutcome:
    raised = recording.record(error, ask(lambda: _shown(error), lambda: _frames(error)))
    if isinstance(error, SafedistError) and not error.is_platforms:
        raised = replace(raised, failure=Failure.OWN)  # as it is where node 0 has it
    return RankOutcome(
        rank=NO_RANK,
        local_rank=NO_RANK,
        node_rank=-1 if place.node_rank is None else place.node_rank,
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
