"""What the import of a module may close, and what cannot be had back then."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading

import pytest

from flytekitplugins_safedist.errors import PayloadError
from flytekitplugins_safedist.ranks import users_code


def test_a_closed_socket_is_open_again_and_still_has_its_other_end() -> None:
    here, there = socket.socketpair()
    with here, there:
        with users_code.descriptors_kept():
            os.close(here.fileno())
        there.sendall(b"x")
        assert here.recv(1) == b"x"
        assert not os.get_inheritable(here.fileno())


def test_a_number_that_the_module_has_taken_is_an_error_that_says_so() -> None:
    here, there = socket.socketpair()
    reading, writing = os.pipe()
    with here, there, pytest.raises(PayloadError, match=f"closed: {here.fileno()}"), users_code.descriptors_kept():
        os.dup2(reading, here.fileno())
    os.close(reading)
    os.close(writing)


def test_what_is_left_open_stays_as_it_is_and_no_copy_is_left() -> None:
    here, there = socket.socketpair()
    with here, there:
        before = set(os.listdir("/proc/self/fd"))
        with users_code.descriptors_kept():
            pass
        after = set(os.listdir("/proc/self/fd"))
        assert after <= before, "others of this process may have closed theirs"
        assert {str(here.fileno()), str(there.fileno())} <= after


def test_a_connection_whose_owner_closes_it_meanwhile_is_not_the_modules_doing() -> None:
    """A client's keep-alive runs out while a module is imported, and a log that the module opens gets the number."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        number = client.fileno()
        with users_code.descriptors_kept():
            owner = threading.Thread(target=client.close)
            owner.start()
            owner.join()
            taken = os.open(os.devnull, os.O_RDONLY)
            os.dup2(taken, number)
    for descriptor in {taken, number}:
        os.close(descriptor)


@pytest.mark.parametrize("most", [100, 300])
def test_a_low_limit_of_open_files_is_room_enough(most: int) -> None:
    program = (
        "from flytekitplugins_safedist.ranks import users_code\nwith users_code.descriptors_kept(): print('inside')"
    )

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    ended = subprocess.run(
        [sys.executable, "-c", program], preexec_fn=limited, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "inside\n"), ended.stderr
