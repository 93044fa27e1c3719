"""When a node has a rank fail for a hang that was confirmed: what the task's ``Hangs`` say, and what it hangs by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from flytekitplugins_safedist import Hangs
from flytekitplugins_safedist.errors import HangError
from flytekitplugins_safedist.job.hang_messages import Hung
from flytekitplugins_safedist.job.hang_watch import HangWatch

HUNG = Hung(
    round=0, rank=3, hang="missing", why="rank 3 does not come", waited=400.0, may_end=False, picture="", evidence=""
)


@dataclass(frozen=True)
class Blamed:
    """What a rank that is to fail for a hang fails with."""

    rank: int
    error: HangError
    repeats: bool
    local_rank: int = 0
    others: str = ""
    gpu: None = None


def failed(tmp_path: Path, hangs: Hangs, **hung: object) -> list[Blamed]:
    """Which ranks fail where the coordinator says that the job hangs."""
    found: list[Blamed] = []
    ranks = SimpleNamespace(
        blame=lambda rank, error, *, repeats, **_: Blamed(rank, error, repeats),
        gpus=SimpleNamespace(behind=lambda _: None),
    )
    watch = HangWatch(
        0,
        ranks,  # type: ignore[arg-type]
        server=None,  # type: ignore[arg-type]
        hangs=hangs,
        tell=lambda _: None,
        fail=found.append,  # type: ignore[arg-type]
        leave=lambda name, _: str(tmp_path / name),
    )
    watch.heard(Hung(**{**vars(HUNG), **hung}))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("hangs", "hung", "fails"),
    [
        (Hangs(), {}, True),
        (Hangs(), {"by_steps": True}, False),  # hours of evaluation after the last step are no hang
        (Hangs(floor=10), {"by_steps": True}, True),
        (Hangs(action="fail"), {}, True),
        (Hangs(action="report"), {}, False),
        (Hangs(ceiling=500), {"may_end": True}, False),
        (Hangs(ceiling=300), {"may_end": True}, True),
        (Hangs(), {"round": 1}, False),
    ],
)
def test_a_rank_fails_for_a_hang_or_the_log_alone_tells_of_it(tmp_path, hangs, hung, fails):
    found = failed(tmp_path, hangs, **hung)
    assert [blamed.rank for blamed in found] == ([3] if fails else [])
    for blamed in found:
        assert "the job does not move: rank 3 does not come" in str(blamed.error)
        assert f"{tmp_path}/hang-round-0.txt" in blamed.others
        assert blamed.repeats == (hangs.action == "fail")
