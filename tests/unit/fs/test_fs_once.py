"""What ``once_per_job`` does within one process: threads, signs of life, and how they are read."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from flytekitplugins_safedist.errors import FsError, WorkerLostError, WorkFailedError
from flytekitplugins_safedist.fs import Identity, once, once_per_job, once_per_node
from flytekitplugins_safedist.fs.coordination import MemoryCoordinationStore
from flytekitplugins_safedist.fs.group import Group
from flytekitplugins_safedist.fs.process import this_process
from tests.harness.procs import DEADLINE, until


def test_another_thread_of_the_worker_waits_for_the_work_and_has_its_result(monkeypatch):
    group = Group(MemoryCoordinationStore(), Identity())
    at_work, waits = threading.Event(), threading.Event()
    wait = once._await
    monkeypatch.setattr(once, "_await", lambda *args: waits.set() or wait(*args))

    def load() -> str:
        at_work.set()
        assert waits.wait(DEADLINE)
        return "loaded"

    def second() -> str:
        assert at_work.wait(DEADLINE)
        try:
            return once_per_job("load", lambda: "a second time", group=group)
        finally:
            waits.set()

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(once_per_job, "load", load, group=group), pool.submit(second)]
        assert [one.result(DEADLINE) for one in both] == ["loaded", "loaded"]


def test_the_thread_that_works_is_told_that_its_work_waits_for_itself():
    group = Group(MemoryCoordinationStore(), Identity())
    with pytest.raises(FsError, match="waits for itself"):
        once_per_job("load", lambda: once_per_job("load", int, group=group), group=group)


def test_a_worker_shows_that_it_lives_for_as_long_as_it_works(monkeypatch):
    monkeypatch.setattr(once, "PULSE_S", 0.001)
    coordination = MemoryCoordinationStore()

    def work() -> None:
        until(lambda: int(coordination.get("once/job/load/0/pulse") or 0) >= 3, "three signs of life")

    once_per_job("load", work, group=Group(coordination, Identity(world_size=2)))


def test_a_worker_elsewhere_is_lost_when_it_shows_no_life_for_a_lease_and_not_before(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    coordination = MemoryCoordinationStore()
    coordination.lease_s = 10.0
    elsewhere = once._Worker(replace(this_process(), boot_id="of another machine"), 0, 1, "token", "")
    watch = once._Watch(Group(coordination, Identity(1, 2)), "place", elsewhere)
    assert not watch.judges
    for beat in range(3):
        clock[0] += 9.0
        assert watch.lost() == ""
        coordination.put("place/pulse", str(beat))
        clock[0] += 9.0
        assert watch.lost() == "", "that beat was new"
    clock[0] += 10.0
    assert watch.lost() == ""
    clock[0] += 1.0
    assert watch.lost() == "no sign of life for 11 s"


def test_a_worker_on_this_machine_is_judged_by_the_kernel_whatever_it_shows(monkeypatch):
    coordination = MemoryCoordinationStore()
    coordination.lease_s = 0.0
    group = Group(coordination, Identity(1, 2))
    alive = once._Watch(group, "place", once._Worker(this_process(), 0, 1, "token", ""))
    assert alive.judges
    assert alive.lost() == ""
    ended = replace(this_process(), pid=2**22 + 1)
    assert once._Watch(group, "place", once._Worker(ended, 0, 1, "token", "")).lost() == f"{ended} has died"


@pytest.mark.parametrize("elsewhere", [{"boot_id": "another"}, {"pid_ns": "pid:[1]"}], ids=["machine", "container"])
def test_a_worker_of_another_machine_or_container_is_not_judged_by_this_kernel(elsewhere):
    worker = once._Worker(replace(this_process(), pid=2**22 + 1, **elsewhere), 0, 1, "token", "")
    watch = once._Watch(Group(MemoryCoordinationStore(), Identity(1, 2)), "place", worker)
    assert not watch.judges
    assert watch.lost() == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_who_is_told_to_end_while_it_works_ends_so(error):
    def work() -> None:
        raise error

    with pytest.raises(error):
        once_per_job("load", work, group=Group(MemoryCoordinationStore(), Identity()))


def test_after_a_worker_was_lost_the_next_call_is_another_try():
    coordination = MemoryCoordinationStore()
    ended = once._Worker(replace(this_process(), pid=2**22 + 1), 0, 1, "token", "")
    coordination.put_once("once/job/load/0/worker", ended.to_text())
    group = Group(coordination, Identity(1, 2))
    with pytest.raises(WorkerLostError):
        once_per_job("load", lambda: "loaded", group=group)
    assert once_per_job("load", lambda: "loaded", group=group) == "loaded"


def test_who_waits_is_woken_whether_the_work_was_done_or_failed(monkeypatch):
    woken: list[str] = []

    class WakeUp(once.WakeUp):
        def wake(self) -> None:
            woken.append("woken")
            super().wake()

    monkeypatch.setattr(once, "WakeUp", WakeUp)
    group = Group(MemoryCoordinationStore(), Identity())
    once_per_job("load", lambda: 1, group=group)
    assert woken == ["woken"]
    with pytest.raises(WorkFailedError):
        once_per_job("fail", lambda: 1 / 0, group=group)
    assert woken == ["woken"] * 2


def test_every_node_does_the_work_once_where_no_directory_is_shared():
    coordination, done = MemoryCoordinationStore(), []
    for rank, node in ((0, 0), (1, 0), (2, 1), (3, 1)):
        group = Group(coordination, Identity(rank, 4, rank % 2, 2, node, 2))
        assert once_per_node("fill", lambda node=node: done.append(node) or node, group=group) == node
    assert done == [0, 1]
