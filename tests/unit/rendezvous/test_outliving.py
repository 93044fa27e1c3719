"""Places on a store and who may take them; what is said while somebody is waited for; what is kept between stores."""

from __future__ import annotations

import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from flytekitplugins_safedist import errors
from flytekitplugins_safedist.errors import NotReplacedError, StoreLostError
from flytekitplugins_safedist.rendezvous import search
from flytekitplugins_safedist.rendezvous.carried import Carried
from flytekitplugins_safedist.rendezvous.outliving import Outliving
from flytekitplugins_safedist.rendezvous.protocol import SUPERSEDED, End, Hello, Keys, Slot
from flytekitplugins_safedist.rendezvous.search import REFUSED, whereabouts
from flytekitplugins_safedist.rendezvous.vigil import EVERY, Vigil

CLAIMS = st.lists(st.integers(0, 4))


@given(CLAIMS)
def test_each_claim_takes_the_place_under_a_higher_number_and_what_is_older_takes_none(brought):
    slot = Slot()
    for number in brought:
        after = slot.claimed(number)
        if after is None:
            assert number > 0  # a new process always takes its place
            assert slot.new > 0 or number <= slot.brought
        else:
            assert after.number > slot.number
            slot = after


def test_a_survivor_takes_no_place_from_a_new_process():
    assert Slot().claimed(0).claimed(7) is None


def test_a_new_process_takes_the_place_of_a_survivor():
    assert Slot().claimed(3).claimed(0) == Slot(new=1, brought=3)


@given(st.integers(0, 9), st.integers(0, 9))
def test_a_place_is_read_as_it_was_written(new, brought):
    assert Slot.parse(Slot(new, brought).text("x").encode()) == Slot(new, brought)


def test_a_place_that_nobody_claimed_is_nobodys():
    assert Slot.parse(b"").number == 0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_is_said_every_30_s_with_who_since_when_and_what_kubernetes_may_wait_for():
    said, clock = [], Clock()
    vigil = Vigil("node 0 (job-master-0)", 900, said.append, clock=clock)
    for _ in range(61):
        vigil.look(*REFUSED)
        clock.now += 1
    assert said == [
        f"waiting for node 0 (job-master-0) for {waited} s, {900 - waited} s more at most (nothing listens there); "
        "Kubernetes may be waiting for the container's image; or its agent still fetches the code, or imports"
        for waited in (int(EVERY), int(2 * EVERY))
    ]


LOST = StoreLostError("the job's store does not answer", seen="Connection reset by peer")


def test_losses_in_a_row_share_one_deadline_and_a_round_ends_it():
    kept = Outliving("node 0", 900)
    kept.lose(LOST, 4)
    first = kept.deadline()
    kept.lose(LOST, 5)
    assert kept.deadline() == first
    assert kept.carried.round == 5
    kept.settle(Carried().reached(6))
    assert kept.vigil is None
    assert kept.carried.round == 6


def test_the_loss_of_a_store_is_told_with_its_reason():
    kept = Outliving("node 0 (job-master-0)", 900)
    kept.lose(LOST, 4)
    kept.left("s1")
    assert kept.carried.told() == (
        "1 time(s) nodes were lost "
        "(node 0 (job-master-0) was lost: the job's store does not answer: Connection reset by peer)"
    )


def test_an_end_that_was_to_be_uploaded_is_kept_until_a_round_has_begun():
    kept = Outliving("node 0", 900)
    for end in (End("failed", 1, "the cause"), None):
        kept.note(end)
    assert kept.failed == End("failed", 1, "the cause")
    kept.settle(Carried())
    assert kept.failed is None


def test_nodes_that_did_not_come_back_are_told_from_nodes_that_never_came():
    text = "node 1 of 2 did not arrive within 1 s"
    assert type(End("lost", 0, text, (1,)).error(0)) is errors.NotReplacedError
    assert type(End("timeout", 0, text, (1,)).error(0)) is errors.RendezvousTimeoutError


def test_a_store_that_was_left_fences_its_node_0_and_sends_the_others_on():
    end = End("superseded", 2, SUPERSEDED)
    assert type(end.error(0, holds_store=True)) is errors.FencedError
    assert type(end.error(1)) is errors.StoreLostError


def test_node_0_is_looked_for_where_it_is_said_to_have_moved_and_where_it_was(tmp_path):
    moved = tmp_path / "moved"
    assert whereabouts("127.0.0.1", str(moved)) == ("127.0.0.1",)

    moved.write_text("127.0.0.2\n")
    assert whereabouts("127.0.0.1", str(moved)) == ("127.0.0.2", "127.0.0.1")
    assert whereabouts("127.0.0.1", "") == ("127.0.0.1",)


def test_another_jobs_node_under_the_name_of_node_0_is_named_and_not_taken_for_it():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, mine = listening.getsockname()[1], Keys("mine")
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
        store.set(mine.hello, Hello(2, "their store", "theirs").text())
        vigil = Vigil("node 0", 60.0, lambda _: None)

        named = r"^another job's node is at this job's address, and node 0 did not come.*'theirs', not run id 'mine'"
        with pytest.raises(NotReplacedError, match=named):
            search.Search("127.0.0.1", port, mine, 60.0, time.monotonic(), vigil, ()).run()


def test_a_frozen_process_under_the_name_of_node_0_keeps_nobody_from_its_replacement(monkeypatch):
    keys = Keys("job")
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as frozen:
        port = listening.getsockname()[1]
        frozen.bind(("127.0.0.2", port))
        frozen.listen()  # takes connections, and answers nothing
        monkeypatch.setattr(search, "whereabouts", lambda *_: ("127.0.0.2", "127.0.0.1"))
        monkeypatch.setattr(search, "_TURN", 0.0)
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
        store.set(keys.hello, Hello(2, "new", "job").text())
        vigil = Vigil("node 0", 60.0, lambda _: None)

        found = search.Search("node-0", port, keys, 60.0, time.monotonic() + 60, vigil, ()).run()

        assert (found.address, found.hello.store) == ("127.0.0.1", "new")
        found.connection.close()
