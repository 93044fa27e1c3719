"""The pipe that wakes waiters of the worker's machine. In one process here; in real ones in tests/fs."""

from __future__ import annotations

import os
import threading

from flytekitplugins_safedist.fs.wakeups import Sleeper, WakeUp

NEVER = 3600.0  # seconds that no test waits


def test_a_wake_up_reaches_who_sleeps_already_and_who_comes_to_sleep_later():
    woken = []

    def wait(sleeper: Sleeper) -> None:
        sleeper.sleep(NEVER)
        woken.append(sleeper.can_be_woken)

    with WakeUp() as wakeup, Sleeper(wakeup.address) as early, Sleeper(wakeup.address) as late:
        thread = threading.Thread(target=wait, args=(early,))
        thread.start()
        wakeup.wake()
        thread.join()
        wait(late)
        with Sleeper(wakeup.address) as last:
            wait(last)
    assert woken == [False] * 3, "there is no second wake-up to sleep for"


def test_the_end_of_the_worker_wakes_too():
    with WakeUp() as wakeup:
        sleeper = Sleeper(wakeup.address)
    sleeper.sleep(NEVER)
    assert not sleeper.can_be_woken


def test_a_child_that_holds_the_pipe_open_keeps_nobody_waiting():
    with WakeUp() as wakeup, Sleeper(wakeup.address) as sleeper:
        held = [os.dup(end) for end in wakeup._ends]
        wakeup.wake()
        wakeup.__exit__(None, None, None)
        sleeper.sleep(NEVER)
        assert not sleeper.can_be_woken
        for end in held:
            os.close(end)


def test_a_pipe_that_was_closed_is_not_mistaken_for_what_has_its_number_now():
    with WakeUp() as wakeup:
        address, number = wakeup.address, wakeup._ends[1]
        assert Sleeper(address).can_be_woken
    assert not Sleeper(address).can_be_woken
    pipe = os.pipe()
    os.dup2(pipe[1], number)
    assert not Sleeper(address).can_be_woken
    for end in {*pipe, number}:
        os.close(end)


def test_what_has_the_number_of_a_closed_pipe_is_not_even_opened(tmp_path, monkeypatch):
    with WakeUp() as wakeup:
        address, number = wakeup.address, wakeup._ends[1]
    opened: list[str] = []
    with open(tmp_path / "the user's", "wb") as file:
        os.dup2(file.fileno(), number)
        monkeypatch.setattr(os, "open", lambda path, *flags: opened.append(path))
        assert not Sleeper(address).can_be_woken
        monkeypatch.undo()
    os.close(number)
    assert opened == []


def test_work_that_closes_all_files_gets_nothing_written_into_its_own(tmp_path):
    with WakeUp() as wakeup, open(tmp_path / "the user's", "wb") as file:
        number = wakeup._ends[1]
        for end in wakeup._ends:
            os.close(end)
        os.dup2(file.fileno(), number)
        wakeup.wake()
    os.close(number)  # and it is still open: the wake-up has closed nothing that is not its own
    assert (tmp_path / "the user's").read_bytes() == b""


def test_who_has_an_address_of_nowhere_cannot_be_woken():
    for address in ("", "1", "0:0:0", f"{os.getpid()}:9999:1", "nobody:1:2"):
        assert not Sleeper(address).can_be_woken
