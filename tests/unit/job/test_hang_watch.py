"""When a node has a rank fail for a hang that was confirmed, and with what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from flytekitplugins_safedist import Hangs
from flytekitplugins_safedist.errors import HangError
from flytekitplugins_safedist.hangs.judge import Hang
from flytekitplugins_safedist.job.hang_messages import Hung
from flytekitplugins_safedist.job.hang_watch import HangWatch

HANG = Hang(
    kind="missing",
    culprits=(3,),
    waiting=(0,),
    why="rank 3 does not come",
    key="",
    rank=3,
    what="a collective",
    seconds=400.0,
    is_endless=False,
    step=7,
    picture="the picture",
    evidence="all that was seen",
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


def watching(tmp_path: Path, hangs: Hangs, found: list[Blamed]) -> HangWatch:
    """A watch over ranks that are not there."""
    ranks = SimpleNamespace(
        running={},
        blame=lambda rank, error, *, repeats, **_: Blamed(rank, error, repeats),
        gpus=SimpleNamespace(behind=lambda _: None),
    )
    return HangWatch(
        0,
        ranks,  # type: ignore[arg-type]
        server=None,  # type: ignore[arg-type]
        hangs=hangs,
        tell=lambda _: None,
        fail=found.append,  # type: ignore[arg-type]
        leave=lambda name, _: str(tmp_path / name),
    )


@pytest.mark.parametrize(
    ("hangs", "round_no", "fails"),
    [(Hangs(), 0, True), (Hangs(), 1, False), (Hangs(action="report"), 0, False), (Hangs(action="fail"), 0, True)],
)
def test_a_rank_fails_for_a_hang_or_the_log_alone_tells_of_it(
    tmp_path: Path, hangs: Hangs, round_no: int, fails: bool
) -> None:
    found: list[Blamed] = []
    watching(tmp_path, hangs, found).heard(Hung(round_no, HANG))
    assert [blamed.rank for blamed in found] == ([3] if fails else [])
    for blamed in found:
        assert "the job does not move: rank 3 does not come" in str(blamed.error)
        assert "[kind=missing, step=7]" in str(blamed.error)
        assert "a collective that has not ended for 400 s" in str(blamed.error)
        assert f"{tmp_path}/hang-round-0.txt" in blamed.others
        assert blamed.repeats == (hangs.action == "fail")
