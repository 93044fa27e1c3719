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
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from .. import envvars, lastwords, stopping, topology
from ..config.registered import Registered
from ..coordinator.books import NO_ROUND
from ..coordinator.messages import Status as NodeStatus
from ..coordinator.messages import Want
from ..coordinator.rules import Rules
from ..errors import NodeLostError, SafedistError, TopologyError
from ..failures import Failure
from ..rank import recording, task_context
from ..rank.order import FlyteSnapshot
from ..rank.outcome import NO_RANK, RankOutcome, Status
from ..store.errors import one_line
from ..texts import named
from ..topology import Topology
from . import ending
from .leader_store import RENEW_SECONDS, LeaderStore, NoStore
from .loop import Loop
from .membership import Membership
from .verdict import cause_of

logger = logging.getLogger(__name__)

_EXIT_INFRASTRUCTURE = 1

_MENTION_SECONDS = 5.0
"""For the leader to be there and to hear of it: this pod is to be replaced soon."""

_SETTLE_SECONDS = 3.0
"""How long a failure that may be an echo ("connection closed by peer") waits for the failure it echoes."""

KILL_SECONDS = 30.0
"""That the kernel has to end ranks that SIGKILL was sent to."""

_LAST_CALL = 30.0
"""Seconds, at most, that a round of a range waits for further nodes when the minimum is there, as torch elastic's."""


@dataclass(frozen=True)
class Attempt:
    """One attempt of a job, and where this node belongs in it: as far as it takes to meet the others.

    Attributes:
        topology: this node's place.
        settings: the job's, with the number of ranks that this pod has room for.
        flyte: what flytekit knows of it.
        run_id: names it; the same on every node.
    """

    topology: Topology
    settings: Registered
    flyte: FlyteSnapshot
    run_id: str

    def rules(self) -> Rules:
        """What the coordinator of this job goes by."""
        place, settings, timeouts = self.topology, self.settings, self.settings.timeouts
        return Rules(
            self.run_id,
            place.min_nodes,
            place.max_nodes,
            is_fixed=not place.is_elastic,
            max_restarts=settings.max_restarts,
            max_replacements=settings.max_replacements,
            checks=settings.preflight is not None,
            rendezvous=timeouts.rendezvous,
            heartbeat=timeouts.heartbeat,
            settle=_SETTLE_SECONDS,
            stop=timeouts.stop,
            kill=KILL_SECONDS,
            last_call=min(_LAST_CALL, timeouts.heartbeat / 2),
            preemption=stopping.within_grace(timeouts.preemption, then=timeouts.stop),
            upload=timeouts.upload,
            renew=min(RENEW_SECONDS, timeouts.heartbeat),
        )

    def store(self) -> LeaderStore | NoStore:
        """Where the leader's sign is, and the verdict; nowhere, where there is no store."""
        prefix = self.flyte.output_metadata_prefix
        return NoStore() if prefix is None else LeaderStore(prefix, task_context.store())


def run_id(flyte: FlyteSnapshot, environment: Mapping[str, str]) -> str:
    """Names this attempt of the job, the same on every node, and no other job's of the execution."""
    return f"{_of_node(flyte) or flyte.execution_id[2]}-a{int(environment.get(envvars.FLYTE_ATTEMPT, '0'))}"


def job_name(flyte: FlyteSnapshot) -> str:
    """Names the task's node in its execution, for what outlives an attempt (a tracker's run): the same on every node of
    the job and in every attempt, in letters, digits and dashes. A local run has one attempt, and a random name."""
    return _of_node(flyte) or f"local-{uuid.uuid4().hex[:16]}"


def _of_node(flyte: FlyteSnapshot) -> str:
    prefix = flyte.output_metadata_prefix
    if flyte.mode != task_context.IN_POD or prefix is None:
        return ""
    # One prefix for each node of the workflow, and for each part of a mapped task; the attempt is its last part.
    of_node = prefix.rstrip("/").rpartition("/")[0]
    return f"{flyte.execution_id[2]}-{hashlib.sha256(of_node.encode()).hexdigest()[:8]}"


def of_no_task(error: SafedistError, environment: Mapping[str, str]) -> None:
    """Deal with a task that has no inputs here, or with a pod that is not as it was registered: where this returns, the
    error is for this node to upload.

    Args:
        error: why this node cannot begin.
        environment: its variables.

    Raises:
        SystemExit: another node uploads (code 0); or this node alone is in trouble, or cannot tell anybody (code 1).
    """
    attempt = attempt_of(environment)
    if attempt is None:
        return  # a task that is none of ours, or nobody knows which node this is: it says what it knows
    try:
        is_uploaded = is_told(error, attempt)
    except NodeLostError as trouble:
        lastwords.keep(trouble, ending.TO_BE_REPLACED)
        logger.info(f"this node cannot begin: {named(error)}; {trouble.seen}")
        raise SystemExit(_EXIT_INFRASTRUCTURE) from error
    if is_uploaded:
        raise SystemExit(0) from error


def attempt_of(environment: Mapping[str, str]) -> Attempt | None:
    """Where this node belongs; None where it is no node of ours, or nobody can tell."""
    flyte = task_context.take()
    with suppress(TopologyError):
        job = Registered.from_env(environment)
        if job is not None:
            place = topology.from_env(environment, job)
            return Attempt(place, job, flyte, run_id(flyte, environment))
    return None


def is_told(error: SafedistError, attempt: Attempt) -> bool:
    """Tell the others what keeps this node from beginning, which ends the job.

    Returns:
        Whether it has been uploaded by another node; if not, it is for this one to raise.

    Raises:
        NodeLostError: nobody has, and this is not the node to do it.
    """
    place = attempt.topology
    if place.max_nodes == 1:
        return False
    try:
        return not _arrive_with(error, attempt)
    except SafedistError as trouble:
        if place.node_rank == 0 and not isinstance(trouble, NodeLostError) and _has_no_leader(attempt):
            return False  # node 0's to upload, though the others could not be told; but not where the job goes on
        raise ending.cannot_do_its_part(error, place, f"that does not end the job: {trouble}") from error


def mention(error: SafedistError, attempt: Attempt) -> None:
    """Tell the leader, if one is there, why this pod is to be replaced: whoever waits for this node says so, too, and
    the job's end, where none comes that can begin."""
    place = attempt.topology
    if not place.node_rank:  # node 0 itself; and in a range no node in particular is waited for
        return
    with suppress(Exception):  # no thread, nobody there: what this pod's log says is that error, and not this one
        job = Membership(attempt.rules(), place, NoStore())
        try:
            job.link.begin(replace(job.first, leaving=one_line(error)))
            while not isinstance(job.inbox.get(timeout=_MENTION_SECONDS), Want):
                continue
        finally:
            job.close(decided=False)


def _has_no_leader(attempt: Attempt) -> bool:
    """Whether the store says that nobody has led the job: another process may have this one's port."""
    with suppress(Exception):  # whatever the store's client raises: it is no sign of anything
        return attempt.store().look().sign is None
    return False


def _arrive_with(error: SafedistError, attempt: Attempt) -> bool:
    """End the job of several nodes with this node's error.

    Returns:
        Whether this node is the one to upload the error; if not, the upload is done.

    Raises:
        RendezvousError: the others cannot be told, or go on without this node, or nothing is uploaded.
    """
    place, rules = attempt.topology, attempt.rules()
    at = NodeStatus(rules.job, "", place.node_rank, 0.0, socket.gethostname(), place.machine)
    cannot = cause_of(_outcome(error, place), NO_ROUND, at, limit=rules.text_bytes)
    job = Membership(rules, place, attempt.store(), cannot=cannot)
    try:
        logger.info(f"this node cannot begin, which the others are told: {named(error)}")
        return Loop(job).to_the_end()
    except BaseException:
        job.close(decided=False)
        raise


def _outcome(error: SafedistError, place: Topology) -> RankOutcome:
    raised = recording.record(error, "")  # no line of the user's runs here, and the error says what it is
    if not error.is_platforms:
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
