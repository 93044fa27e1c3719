"""What the import of a module may close, and what cannot be had back then."""

from __future__ import annotations

import os
import socket

import pytest

from flytekitplugins_safedist.errors import PayloadError
from flytekitplugins_safedist.ranks import descriptors


def test_a_closed_socket_is_open_again_and_still_has_its_other_end() -> None:
    here, there = socket.socketpair()
    with here, there:
        with descriptors.kept():
            os.close(here.fileno())
        there.sendall(b"x")
        assert here.recv(1) == b"x"
        assert not os.get_inheritable(here.fileno())


def test_a_number_that_the_module_has_taken_is_an_error_that_says_so() -> None:
    here, there = socket.socketpair()
    reading, writing = os.pipe()
    with here, there, pytest.raises(PayloadError, match=f"closed: {here.fileno()}"), descriptors.kept():
        os.dup2(reading, here.fileno())
    os.close(reading)
    os.close(writing)


def test_what_is_left_open_stays_as_it_is_and_no_copy_is_left() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with descriptors.kept():
        pass
    assert sorted(os.listdir("/proc/self/fd")) == before
