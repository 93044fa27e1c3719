"""The bell that wakes waiters of the worker's machine. In one process here; in real ones in tests/race/fs."""

from __future__ import annotations

import os
import threading

from flytekitplugins_safedist.fs.wakeups import Bell, Listener

NEVER = 3600.0  # seconds that no test waits


def test_a_ring_wakes_who_rests_already_and_who_comes_to_rest_later():
    woken = []

    def wait(listener: Listener) -> None:
        listener.rest(NEVER)
        woken.append(listener.hears)

    with Bell() as bell, Listener(bell.address) as early, Listener(bell.address) as late:
        thread = threading.Thread(target=wait, args=(early,))
        thread.start()
        bell.ring()
        thread.join()
        wait(late)
        with Listener(bell.address) as last:
            wait(last)
    assert woken == [False] * 3, "there is no second ring to rest for"


def test_the_end_of_the_worker_wakes_too():
    with Bell() as bell:
        listener = Listener(bell.address)
    listener.rest(NEVER)
    assert not listener.hears


def test_a_child_that_holds_the_pipe_open_keeps_nobody_waiting():
    with Bell() as bell, Listener(bell.address) as listener:
        held = [os.dup(end) for end in bell._ends]
        bell.ring()
        bell.__exit__(None, None, None)
        listener.rest(NEVER)
        assert not listener.hears
        for end in held:
            os.close(end)


def test_a_bell_that_was_closed_is_not_mistaken_for_what_has_its_number_now():
    with Bell() as bell:
        address, number = bell.address, bell._ends[1]
        assert Listener(address).hears
    assert not Listener(address).hears
    pipe = os.pipe()
    os.dup2(pipe[1], number)
    assert not Listener(address).hears
    for end in {*pipe, number}:
        os.close(end)


def test_what_has_the_number_of_a_closed_bell_is_not_even_opened(tmp_path, monkeypatch):
    with Bell() as bell:
        address, number = bell.address, bell._ends[1]
    opened: list[str] = []
    with open(tmp_path / "the user's", "wb") as file:
        os.dup2(file.fileno(), number)
        monkeypatch.setattr(os, "open", lambda path, *flags: opened.append(path))
        assert not Listener(address).hears
        monkeypatch.undo()
    os.close(number)
    assert opened == []


def test_work_that_closes_all_files_gets_nothing_written_into_its_own(tmp_path):
    with Bell() as bell, open(tmp_path / "the user's", "wb") as file:
        number = bell._ends[1]
        for end in bell._ends:
            os.close(end)
        os.dup2(file.fileno(), number)
        bell.ring()
    os.close(number)  # and it is still open: the bell has closed nothing that is not its own
    assert (tmp_path / "the user's").read_bytes() == b""


def test_an_address_of_nowhere_is_a_bell_that_is_not_heard():
    for address in ("", "1", "0:0:0", f"{os.getpid()}:9999:1", "nobody:1:2"):
        assert not Listener(address).hears
