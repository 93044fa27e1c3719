"""How a rank ended, as people read it. Pure."""

from __future__ import annotations

import re

from ..failures import Failure, how_ended, name_of, worker_killed
from .outcome import NO_RANK, Raised, RankOutcome, Status

_OUT_OF_MEMORY = "SIGKILL: the kernel's out-of-memory killer"


def how(outcome: RankOutcome) -> str:
    """How a rank ended, in two words, for the record of the run."""
    gpu = f", {outcome.gpu.what}" if outcome.gpu is not None else ""
    if outcome.raised is not None and outcome.status is Status.RAISED:
        return f"{'' if outcome.raised.is_agents else 'raised '}{_class(outcome.raised)}{gpu}"
    if outcome.status is Status.KILLED:
        return name_of(outcome.killed_by) + gpu
    words = {Status.SUCCEEDED: "returned", Status.STOPPED: "ended with the others"}
    return words.get(outcome.status, f"exit code {outcome.exit_code}{gpu}")


def _class(raised: Raised) -> str:
    """Its class: of flytekit's and ours, whose modules would take what a list of executions shows, without them."""
    return raised.type.rpartition(".")[2] if raised.type.startswith("flytekit") else raised.type


_CAUGHT = re.compile(r"Caught (\w+) in DataLoader worker process (\d+)\.\n")


def _message(raised: Raised) -> str:
    """What it says; of what torch raises again for a DataLoader's worker, or for a rank in a checkpoint, their own
    words, which are the last of many lines: the traceback has them all."""
    if raised.message.startswith("CheckpointException ranks:"):
        return raised.message.rstrip().rpartition("\n")[2]
    caught = _CAUGHT.match(raised.message)
    if caught is None:
        return raised.message
    own = list(re.finditer(rf"^(?:[\w.]+\.)?{caught[1]}: ", raised.message, re.MULTILINE))
    if not own:
        return raised.message
    return f"{raised.message[own[-1].end() :].strip()} (in DataLoader worker process {caught[2]})"


def _loss(outcome: RankOutcome) -> str:
    """Of a rank that lost a process of its own, that it did, where the exception does not say so itself, or it was to
    the kernel; of a DataLoader's, which ones."""
    raised = outcome.raised
    if raised is None or raised.failure is not Failure.WORKER_KILLED:
        return ""
    of_message = worker_killed(raised.message)
    workers = of_message or worker_killed(raised.traceback)
    lost = f"lost DataLoader worker(s) {workers} (process ids)" if workers else "lost a process that it had started"
    if outcome.failure is Failure.OUT_OF_MEMORY:
        return f"{lost} to the kernel's out-of-memory killer, and "
    return f"{lost}, and " if of_message is None else ""


def _frames(raised: Raised) -> str:
    """Its traceback; of ours, whose messages are long, without the message that has just been told."""
    trace, said = raised.traceback.rstrip(), f": {raised.message}"
    return trace.removesuffix(said) if raised.type.startswith("flytekitplugins_safedist.") else trace


def describe(outcome: RankOutcome) -> str:
    """The failure as the user should read it: who, what, traceback, last log lines."""
    place = f"rank {outcome.rank} (local_rank {outcome.local_rank}) on node {outcome.node_rank} ({outcome.host})"
    if outcome.rank == NO_RANK:
        node = "a node" if outcome.node_rank < 0 else f"node {outcome.node_rank}"
        place = f"{node} ({outcome.host}) cannot begin: it"
    if outcome.raised is not None:
        raises = f" {_loss(outcome)}raised {_class(outcome.raised)}"
        said, frames = _message(outcome.raised), _frames(outcome.raised)
        text = f"{place}{'' if outcome.raised.is_agents else raises}{said and f': {said}'}"
        text += f"\n\n{frames}" if frames not in said else ""  # of sys.exit("text") they are that text
    elif outcome.status is Status.KILLED:
        reason = _OUT_OF_MEMORY if outcome.out_of_memory else how_ended(outcome.exit_code)
        name, colon, why = reason.partition(": ")
        text = f"{place} was killed by {name}{f' at {outcome.at}' if outcome.at else ''}{colon}{why}"
    else:
        text = f"{place} ended with exit code {outcome.exit_code} and no result (os._exit, or a native crash)"
    if outcome.gpu is not None:
        text = f"{outcome.gpu.what}, reported by {outcome.gpu.gpu}: {text}"
    if outcome.others:
        text += f"\n\n{outcome.others}"
    if outcome.memory:
        text += f"\n\n{outcome.memory}"
    if outcome.round > 0:
        text += f"\n\nThis was round {outcome.round}: the ranks had been started before (rounds count from 0)."
    if outcome.log_tail:
        text += f"\n\nLast {len(outcome.log_tail)} line(s) that rank {outcome.rank} printed:\n"
        text += "\n".join(f"    {line}" for line in outcome.log_tail)
    return text
