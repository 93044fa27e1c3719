"""What workers share is made once, and ended by whoever leaves last."""

from __future__ import annotations

import os
from pathlib import Path

from tests.harness.shared import shared


def test_it_is_made_once_and_ended_by_the_last_to_leave(tmp_path: Path) -> None:
    made, ended = iter(range(9)), []

    with shared(tmp_path, "thing", lambda: next(made), ended.append) as first:
        with shared(tmp_path, "thing", lambda: next(made), ended.append) as second:
            assert (first, second) == (0, 0)
        assert ended == []

    assert ended == [0]
    with shared(tmp_path, "thing", lambda: next(made), ended.append) as late:
        assert late == 1
    assert ended == [0, 1]


def test_what_a_killed_worker_left_is_ended_before_another_is_made(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        with shared(tmp_path, "thing", lambda: "of the killed one"):
            os._exit(0)
    os.waitpid(pid, 0)
    ended = []

    with shared(tmp_path, "thing", lambda: "another", ended.append) as thing:
        assert (thing, ended) == ("another", ["of the killed one"])


def test_a_forked_child_that_lives_on_does_not_count_as_a_worker(tmp_path: Path) -> None:
    ended, (stay, go) = [], os.pipe()
    with shared(tmp_path, "thing", lambda: 0, ended.append):
        pid = os.fork()
        if pid == 0:
            os.close(go)
            os.read(stay, 1)
            os._exit(0)
    assert ended == [0]
    os.close(go)
    os.waitpid(pid, 0)
    os.close(stay)
