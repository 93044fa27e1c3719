"""The ranks' limit on disk: the user's word, or less than the kubelet allows their pod."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist import SafeTorch, Scratch
from flytekitplugins_safedist.agent import disk
from flytekitplugins_safedist.agent.disk import DiskLimit, DiskWatch, Usage, limit_of, over_limit, usage
from flytekitplugins_safedist.agent.scratch import make_job
from flytekitplugins_safedist.config.options import SCRATCH_MOUNT
from flytekitplugins_safedist.errors import ScratchError
from tests.unit.config.plans import planned

GI, MI = 2**30, 2**20
USAGE = Usage(path=Path("/s/job"), by_rank=((0, 512), (1, 3 * GI)), free=5 * MI)
POD = {"SAFEDIST_EPHEMERAL_STORAGE": str(20 * GI), "SAFEDIST_SCRATCH_ROOT": SCRATCH_MOUNT}


def storage(size: int | str) -> dict[str, str]:
    return {**POD, "SAFEDIST_EPHEMERAL_STORAGE": str(size)}


@pytest.mark.parametrize(
    ("environment", "scratch", "size", "why"),
    [
        (POD, {"size_limit": "2Gi"}, 2 * GI, "2.0 GiB by Scratch(size_limit=...)"),
        # Else the pod's own, less what the rest of it needs.
        (storage(20 * GI), {}, 18 * GI, "by the pod's ephemeral storage of "),
        (storage(GI), {}, GI - 128 * MI, "by the pod's ephemeral storage of "),
        (storage(200 * MI), {}, 100 * MI, "by the pod's ephemeral storage of "),
        # Without a volume scratch is in the container, which Kubernetes counts.
        ({"SAFEDIST_EPHEMERAL_STORAGE": str(20 * GI)}, {"volume": None}, 18 * GI, "by the pod's"),
        # None where it is not on what Kubernetes counts, or nothing is said.
        ({}, {"volume": None}, None, ""),
        (storage("0"), {}, None, ""),
        (storage(""), {}, None, ""),
        (POD, {"claim": "team"}, None, ""),
        (POD, {"volume": "memory"}, None, ""),
        ({**POD, "SAFEDIST_SCRATCH_ROOT": "/mnt/big"}, {}, None, ""),
        (POD, {"path": "/mnt/big"}, None, ""),
    ],
)
def test_the_users_own_limit_counts_else_the_pods_where_scratch_is_on_what_that_counts(
    environment: dict[str, str], scratch: dict[str, Any], size: int | None, why: str
) -> None:
    found = limit_of(planned(SafeTorch(scratch=Scratch(**scratch))), environment)
    assert (found and found.size) == size
    assert why in str(found)


def test_a_limit_is_an_error_only_once_it_is_exceeded() -> None:
    assert over_limit(USAGE, DiskLimit(USAGE.total, "by me")) is None
    error = over_limit(USAGE, DiskLimit(2 * GI, "by me"))
    assert isinstance(error, ScratchError)
    assert str(error) == (
        f"the ranks of this node wrote more than their scratch limit [directory=/s/job] (seen: {USAGE}; "
        "expected: at most 2.0 GiB by me). Fix: write less to current_rank().scratch and temporary files, remove "
        "what is done with, or raise Scratch(size_limit=...) or the task's limit of ephemeral_storage"
    )


def test_what_a_look_fails_with_is_told(monkeypatch):
    failed: Future[Usage] = Future()
    failed.set_exception(OSError("gone"))
    monkeypatch.setattr(disk, "in_thread", lambda _measure: failed)
    watch = DiskWatch(DiskLimit(100, "by me"))
    monkeypatch.setattr(disk.time, "monotonic", lambda: float("inf"))
    with pytest.raises(OSError, match="gone"):
        watch.excess(lambda: USAGE)


def test_the_nearer_the_limit_the_more_often_it_is_looked_at_and_never_without_one(monkeypatch):
    now, looked = [100.0], []
    monkeypatch.setattr(disk.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(disk, "in_thread", at_once)

    def measure(size: int) -> Usage:
        looked.append(now[0])
        return replace(USAGE, by_rank=((0, size), (1, 0)))

    watch, found = DiskWatch(DiskLimit(100, "by me")), None
    for count, size in enumerate((10, 10, 60, 60, 101), 1):
        while len(looked) < count:
            now[0] += 0.5
            found = watch.excess(lambda size=size: measure(size))
    assert looked == [105.0, 110.0, 115.0, 116.0, 117.0]
    assert found is not None
    assert found[0] == 0
    assert DiskWatch(None).excess(lambda: measure(10**9)) is None


def at_once(measure: Callable[[], Usage]) -> Future[Usage]:
    answer: Future[Usage] = Future()
    answer.set_result(measure())
    return answer


def test_nobody_waits_for_a_look(monkeypatch):
    monkeypatch.setattr(disk, "CALM_SECONDS", 0.0)
    may_end, measured = threading.Event(), threading.Event()

    def measure() -> Usage:
        assert may_end.wait(60)
        measured.set()
        return USAGE

    watch = DiskWatch(DiskLimit(100, "by me"))
    while watch.excess(measure) is None and not measured.is_set():
        may_end.set()  # which a look in this very thread would never come to see
        time.sleep(0.01)


def test_the_longer_a_look_takes_the_rarer_it_is(monkeypatch):
    now, looks = [100.0], []
    monkeypatch.setattr(disk.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(disk, "in_thread", lambda measure: looks.append(Future()) or looks[-1])
    watch = DiskWatch(DiskLimit(100, "by me"))
    for now[0] in (104.0, 105.0, 108.0):
        assert watch.excess(lambda: USAGE) is None
    looks[0].set_result(replace(USAGE, by_rank=((0, 10),)))
    for now[0] in (108.0, 167.0):  # it took three seconds: the next is sixty later
        assert watch.excess(lambda: USAGE) is None
    assert len(looks) == 1
    now[0] = 168.0
    watch.excess(lambda: USAGE)
    assert len(looks) == 2


def test_measuring_what_is_gone_is_no_error(tmp_path):
    job = make_job(tmp_path)
    shutil.rmtree(job.path)
    found = usage(job, 0, [0, 1])
    assert (found.total, found.free) == (0, None)
    assert "unknown free on its file system" in str(found)
