from __future__ import annotations

import os
import threading

import pytest

from flytekitplugins_safedist.errors import FsError, NoSpaceError
from flytekitplugins_safedist.fs import RankLog, merge_logs
from flytekitplugins_safedist.fs import ranklogs as module
from tests.harness.fusefs import FuseMount, require


def test_logs_of_ranks_merge_by_time_and_keep_each_ranks_order(tmp_path, monkeypatch):
    clock = iter([0, 0, 30, 10, 20, 5])  # two for the names; then rank 1 at 30, rank 0 at 10 and 20, rank 1 at 5
    monkeypatch.setattr(module.time, "time_ns", lambda: next(clock))
    with RankLog(tmp_path, rank=0) as zero, RankLog(tmp_path, rank=1) as one:
        one.append("first of 1")
        zero.append({"step": 1})
        zero.append([1, 2])
        one.append("its clock was set back")
    entries = list(merge_logs(tmp_path))
    assert [(entry.rank, entry.number, entry.value) for entry in entries] == [
        (0, 0, {"step": 1}),
        (0, 1, [1, 2]),
        (1, 0, "first of 1"),
        (1, 1, "its clock was set back"),
    ]


def test_threads_of_one_rank_do_not_tear_each_others_lines(tmp_path):
    with RankLog(tmp_path, rank=0) as log:
        threads = [threading.Thread(target=lambda: [log.append("x" * 5000) for _ in range(50)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [entry.number for entry in merge_logs(tmp_path)] == list(range(400))


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path):
    with RankLog(tmp_path, rank=0) as log:
        log.append("whole")
    with open(log.path, "ab") as file:
        file.write(b'{"t": 1, "r": 0, "n": 1, "v": "cut o')
    assert [entry.value for entry in merge_logs(tmp_path)] == ["whole"]


def test_a_rank_that_comes_back_writes_a_file_of_its_own(tmp_path):
    for _ in range(2):
        with RankLog(tmp_path, rank=7) as log:
            log.append("a\nb")
    assert len(os.listdir(tmp_path)) == 2
    assert [entry.value for entry in merge_logs(tmp_path)] == ["a\nb", "a\nb"]


def test_what_json_cannot_say_is_refused_and_costs_no_number(tmp_path):
    with RankLog(tmp_path, rank=0) as log:
        with pytest.raises(FsError):
            log.append(object())
        log.append("next")
    assert [entry.number for entry in merge_logs(tmp_path)] == [0]


def test_a_full_disk_is_our_error_and_the_next_line_is_whole_again(tmp_path):
    require()
    with FuseMount(tmp_path / "server", tmp_path / "client") as client, RankLog(client.path, rank=0) as log:
        log.append("before")
        client.set(faults=[{"op": "write", "errno": "ENOSPC"}])
        with pytest.raises(NoSpaceError):
            log.append("lost")
        client.set(faults=[])
        log.append("after")
        assert [entry.value for entry in merge_logs(client.path)] == ["before", "after"]


def test_a_line_of_which_the_disk_takes_only_a_part_is_an_error_and_the_next_line_is_its_own(tmp_path, monkeypatch):
    write, parts = os.write, []

    def part(handle: int, line: bytes) -> int:
        parts.append(line)
        return write(handle, line[:5] if len(parts) == 1 else line)

    monkeypatch.setattr(module.os, "write", part)
    with RankLog(tmp_path, rank=0) as log:
        with pytest.raises(NoSpaceError):
            log.append("cut off")
        log.append("after")
    assert [entry.value for entry in merge_logs(tmp_path)] == ["after"]


def test_a_clock_that_is_set_back_changes_no_order_of_a_rank(tmp_path, monkeypatch):
    clock = iter([9, 100, 50, 60])
    monkeypatch.setattr(module.time, "time_ns", lambda: next(clock))
    with RankLog(tmp_path, rank=0) as log:
        for value in "abc":
            log.append(value)
    assert [(entry.value, entry.time_ns) for entry in merge_logs(tmp_path)] == [("a", 100), ("b", 100), ("c", 100)]


@pytest.mark.parametrize(("asked", "synced"), [({}, 0), ({"durable": True}, 2), ({"durable": False}, 0)])
def test_lines_are_brought_to_stable_storage_only_where_that_is_asked_for(tmp_path, monkeypatch, asked, synced):
    calls: list[int] = []
    monkeypatch.setattr(module.os, "fsync", calls.append)
    with RankLog(tmp_path, rank=0, **asked) as log:
        log.append(1)
        log.append(2)
    assert len(calls) == synced
