"""Ranks and their outcomes for tests: one maker of each, and hypothesis strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from flytekitplugins_safedist.failures import ChainLink, Failure, of_exception
from flytekitplugins_safedist.rank.context import RankContext
from flytekitplugins_safedist.rank.outcome import Raised, RankOutcome, Status


def rank_at(scratch: Path, **facts: Any) -> RankContext:
    """The one rank of a job of one node, with this directory for all of its own, but for what is given."""
    zeros = dict.fromkeys(("rank", "local_rank", "node_rank", "round", "attempt"), 0)
    ones = dict.fromkeys(("world_size", "local_world_size", "nnodes"), 1)
    return RankContext(**{**zeros, **ones, "job": "f0-1234", "scratch": scratch, "node_dir": scratch, **facts})


SIXTH = {
    **{"rank": 5, "local_rank": 1, "node_rank": 2, "world_size": 6, "local_world_size": 2, "nnodes": 3},
    **{"round": 4, "attempt": 7},
}
"""Facts of a rank of which no two that could be taken for each other are equal."""


def outcome(rank: int = 0, status: Status = Status.SUCCEEDED, time_ns: int = 100, **more: Any) -> RankOutcome:
    fields: dict[str, Any] = {
        "rank": rank,
        "local_rank": rank,
        "node_rank": 0,
        "round": 0,
        "host": "n0",
        "pid": 4000 + rank,
        "status": status,
        "time_ns": time_ns,
    }
    return RankOutcome(**{**fields, **more})


def raised(type_: str = "ValueError", message: str = "bad", **more: Any) -> Raised:
    """An exception's record; its row is that of a rank without peers, unless it is given."""
    links = [
        ChainLink(type_.rpartition(".")[2], message),
        *(ChainLink("", "", errno=n) for n in more.get("errnos", ())),
    ]
    row = of_exception(links, world_size=1)
    more = {"failure": row, **more}
    return Raised(**{"type": type_, "message": message, "traceback": f"Traceback\n{type_}: {message}\n", **more})


def failed(rank: int = 0, time_ns: int = 100, *, of: Raised | None = None, **more: Any) -> RankOutcome:
    return outcome(rank, Status.RAISED, time_ns, raised=of or raised(), **more)


COUNTS = st.integers(0, 2**31)
TEXTS = st.text(st.characters(), max_size=30)  # lone surrogates too: file names of users hold them

RAISED = st.builds(
    Raised,
    type=TEXTS,
    message=TEXTS,
    traceback=TEXTS,
    failure=st.sampled_from(Failure),
    repeats=st.booleans(),
    errnos=st.lists(st.integers(0, 200), max_size=3).map(tuple),
    of_another=st.booleans(),
    code=TEXTS,
)

OUTCOMES = st.builds(
    RankOutcome,
    rank=COUNTS,
    local_rank=COUNTS,
    node_rank=COUNTS,
    round=COUNTS,
    host=TEXTS,
    pid=COUNTS,
    status=st.sampled_from(Status),
    time_ns=st.integers(0, 2**63),
    raised=st.none() | RAISED,
    exit_code=st.none() | st.integers(-64, 255),
    log_tail=st.lists(TEXTS, max_size=3).map(tuple),
    seconds=st.dictionaries(TEXTS, st.floats(allow_nan=False), max_size=3),
)
