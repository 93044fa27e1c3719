"""When a node has a rank fail for a hang that was confirmed, and with what."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flytekitplugins_safedist import Hangs
from flytekitplugins_safedist.agent.hang_watch import HangWatch
from flytekitplugins_safedist.coordinator.messages import HangNotice
from flytekitplugins_safedist.errors import HangError
from flytekitplugins_safedist.hangs.judge import Hang

OF_HANG: dict[str, Any] = {"what": "a collective", "seconds": 400.0, "is_endless": False, "may_come": False, "step": 7}
HANG = Hang("missing", (3,), (0,), "rank 3 does not come", "", 3, **OF_HANG, picture="the picture")


@dataclass(frozen=True)
class Blamed:
    """What a rank that is to fail for a hang fails with."""

    rank: int
    error: HangError
    repeats: bool
    local_rank: int = 0
    others: str = ""
    gpu: None = None


def watching(tmp_path: Path, hangs: Hangs, rank: int) -> HangWatch:
    """A watch over a rank that is not there."""
    ranks = SimpleNamespace(
        running=[],
        plan=SimpleNamespace(settings=SimpleNamespace(hangs=hangs)),
        pages={rank: None},
        blame=lambda rank, error, *, repeats, **_: Blamed(rank, error, repeats),
        gpus=SimpleNamespace(behind=lambda _: None),
    )
    return HangWatch(ranks, 0, tell=lambda *_: None, leave=lambda name, _: str(tmp_path / name))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hangs", "rank", "fails"),
    [(Hangs(), 3, True), (Hangs(), 1, False), (Hangs(action="report"), 3, False), (Hangs(action="fail"), 3, True)],
)
def test_a_rank_fails_for_a_hang_or_the_log_alone_tells_of_it(
    tmp_path: Path, hangs: Hangs, rank: int, fails: bool
) -> None:
    watch, notice = watching(tmp_path, hangs, rank), HangNotice(2, "", 3, json.dumps(HANG.__dict__), HANG.seconds)
    assert watch.shown(notice) == "the job does not move, for 400 s now: rank 3 does not come\nthe picture"
    blamed: Any = watch.failure(notice)
    assert (blamed is not None) == fails
    if fails:
        assert blamed.rank == 3
        assert "the job does not move: rank 3 does not come" in str(blamed.error)
        assert "[kind=missing, step=7]" in str(blamed.error)
        assert "a collective that has not ended for 400 s" in str(blamed.error)
        assert f"{tmp_path}/hang-round-0.txt" in blamed.others
        assert blamed.repeats == (hangs.action == "fail")
