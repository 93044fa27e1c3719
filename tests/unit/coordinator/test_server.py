"""The coordinator's server against peers that are none of the job's, broken, or slow; and the way to it."""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist import frames
from flytekitplugins_safedist.agent import link as link_module
from flytekitplugins_safedist.agent.leader_store import NoStore
from flytekitplugins_safedist.agent.link import Link, LinkLost
from flytekitplugins_safedist.coordinator import wire
from flytekitplugins_safedist.coordinator.messages import Offer, Status, Want
from flytekitplugins_safedist.coordinator.ports import ReservedPort
from flytekitplugins_safedist.coordinator.rules import Rules
from flytekitplugins_safedist.coordinator.server import Server
from flytekitplugins_safedist.coordinator.wire import HangEvidence, Note, RankPicture, Refusal
from flytekitplugins_safedist.errors import FsIoError, RendezvousError
from flytekitplugins_safedist.hangs.processes import Process
from flytekitplugins_safedist.hangs.recorders import RankRecord
from flytekitplugins_safedist.hangs.snapshot import Snapshot
from flytekitplugins_safedist.hangs.stacks import Frame
from flytekitplugins_safedist.hangs.waits import Wait
from flytekitplugins_safedist.meeting import Meeting
from flytekitplugins_safedist.topology import Endpoint

RULES = Rules("job", 2, 2, heartbeat=6, grace=60)


def heard(inbox: queue.SimpleQueue[object], kind: type, is_it: Callable[[Any], bool] = lambda _: True) -> Any:
    """The next of a kind that comes."""
    while True:
        found = inbox.get(timeout=30)
        assert not isinstance(found, BaseException) or kind is type(found), found
        if isinstance(found, kind) and is_it(found):
            return found


class Node0:
    """Node 0 of two, with its server."""

    def __init__(self, process: str = "0a", port: int = 0) -> None:
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.server = Server(RULES, process, self.inbox, store=NoStore())
        self.port = self.server.listen(Endpoint("127.0.0.1", port))
        self.status = Status("job", process, 0, 1.0, "host0")
        self.say(offer=Offer(self.status.round, {"MASTER_PORT": "1"}))

    def say(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)
        self.server.hear(self.status)


class Node1:
    """The other one, with its link."""

    def __init__(self, port: int, **facts: Any) -> None:
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.link = Link(RULES, Endpoint("127.0.0.1", port), inbox=self.inbox, say=lambda _: None)
        self.status = status(**facts)
        self.link.begin(self.status)

    def say(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)
        self.link.tell(self.status)

    def begins(self) -> Want:
        """Its ranks run, and those of node 0."""
        want: Want = heard(self.inbox, Want, lambda want: want.runs)
        self.say(leader=want.course.leader, round=want.course.round, node_rank=1, phase="running")
        return want

    def reset(self) -> None:
        self.link._shut()
        heard(self.inbox, LinkLost)
        self.link.begin(self.status)


def status(**facts: Any) -> Status:
    return Status(**{"job": "job", "process": "1a", "node": 1, "started": 1.0, "host": "host1", **facts})


@pytest.fixture
def node_0() -> Iterator[Node0]:
    node = Node0()
    yield node
    node.server.close()


@pytest.fixture
def node_1(node_0) -> Iterator[Node1]:
    node = Node1(node_0.port)
    node.begins()
    yield node
    node.link.close()


def called(port: int, sent: bytes) -> bytes | None:
    """The first answer to what is sent; None where the connection is closed instead."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(sent)
        try:
            return frames.receive(sock, frames.NODE_BYTES)
        except ConnectionResetError:
            return None


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        frames.packed(b"not json"),
        wire.frame(wire.STATUS, b"[" * 100_000),
        wire.frame(wire.STATUS, json.dumps({"job": 3}).encode()),
        wire.beat(1.0),
        (1 << 31).to_bytes(4, "big"),
    ],
    ids=["http", "no json", "deep json", "wrong types", "no status", "too long"],
)
def test_what_is_no_message_loses_its_connection_is_named_once_and_harms_nobody(node_0, caplog, sent) -> None:
    with caplog.at_level(logging.WARNING):
        assert called(node_0.port, sent) is None
        assert called(node_0.port, sent) is None
        answer = called(node_0.port, wire.frame(wire.STATUS, status().dump()))
        assert answer is not None
        assert answer[:1] == wire.BEAT
    assert caplog.text.count("127.0.0.1, what it sent is no message") == 1


@pytest.mark.parametrize(("facts", "is_stranger"), [({"job": "other"}, True), ({"protocol": 99}, False)])
def test_a_node_of_another_job_or_version_is_told_so(node_0, facts, is_stranger) -> None:
    answer = called(node_0.port, wire.frame(wire.STATUS, status(**facts).dump()))
    assert answer is not None
    assert answer[:1] == wire.REFUSAL
    assert Refusal.parse(answer[1:]).is_stranger == is_stranger


def test_a_node_of_another_version_gives_up_and_one_that_there_is_no_place_for_leaves(node_0) -> None:
    other = Node1(node_0.port, protocol=99)
    assert "other images" in str(heard(other.inbox, RendezvousError))
    seventh = Node1(node_0.port, node=7)
    assert heard(seventh.inbox, Want).leave == "the job has 2 nodes, and none is node 7"
    for each in (other, seventh):
        each.link.close()


def test_nobody_speaks_for_another_process(node_0, node_1) -> None:
    node_1.link.put(wire.frame(wire.STATUS, status(process="0a", leaving="told to stop").dump()))
    heard(node_1.inbox, LinkLost)
    assert not node_0.server._coordinator.is_retired


def test_connections_that_say_nothing_keep_nobody_from_the_job(node_0) -> None:
    silent = [socket.create_connection(("127.0.0.1", node_0.port), timeout=30) for _ in range(100)]
    for sock in silent[::2]:
        sock.sendall(b"\0\0")
    node = Node1(node_0.port)
    node.begins()
    node.link.close()
    for sock in silent:
        sock.close()


def test_at_the_end_who_has_not_come_is_waited_for_and_who_has_until_it_leaves(node_0) -> None:
    gone = node_0.server._others_gone
    node_0.server._note_departure()
    assert not gone.is_set(), "nobody has come yet"
    node = Node1(node_0.port)
    node.begins()
    node_0.server._note_departure()
    assert not gone.is_set()
    node.link.close()
    assert gone.wait(30)


def test_a_reset_connection_comes_back_and_ends_no_round(node_0, node_1) -> None:
    node_1.reset()
    want = heard(node_1.inbox, Want)
    assert want.runs
    assert want.course.books.outcomes == ()
    assert node_0.server.others == 1


def test_a_reset_connection_comes_back_though_dns_does_not_answer(node_1, monkeypatch) -> None:
    answers = threading.Event()
    ask = link_module.whereabouts
    monkeypatch.setattr(link_module, "whereabouts", lambda endpoint: answers.wait(60) and ask(endpoint))
    node_1.reset()
    heard(node_1.inbox, Want)
    assert not answers.is_set()
    answers.set()


def test_who_was_lost_looks_for_nobody_before_it_knows_what_to_say(node_0, node_1) -> None:
    """What it says on a new connection has all that it knows of the job: the one before may have taken it along."""
    node_1.link._shut()
    heard(node_1.inbox, LinkLost)
    with pytest.raises(queue.Empty):
        node_1.inbox.get(timeout=0.5)
    node_1.link.begin(node_1.status)
    heard(node_1.inbox, Want)


def test_a_link_that_cannot_go_on_says_so() -> None:
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    link = Link(RULES, Endpoint("a..b", 9), inbox=inbox, say=lambda _: None)  # Python's codec for names refuses it
    link.begin(status())
    assert isinstance(inbox.get(timeout=30), UnicodeError)
    link.close()


def test_pauses_between_looks_for_node_0_grow_when_it_takes_minutes() -> None:
    assert 0.18 < link_module.pause_after(0.0) < 0.32
    assert 0.18 < link_module.pause_after(9.0) < 0.32
    assert 1.4 < link_module.pause_after(600.0) < 2.6


LIMITS = """
import resource
from flytekitplugins_safedist.coordinator.server import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
allow_open_files(300)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_as_many_files_may_be_open_as_the_container_allows_for_ranks_connect_here_too() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4096", "4096"]


def test_a_link_finds_the_leader_that_takes_the_place_of_the_one_before() -> None:
    reserved = ReservedPort()
    first = Node0(port=reserved.port)
    node = Node1(first.port)
    node.begins()
    first.server.close()
    heard(node.inbox, LinkLost)
    second = Node0("0b", first.port)
    node.link.begin(replace(node.status, phase="idle", books=node.status.books))
    assert heard(node.inbox, Want).course.leader.process == "0b"
    second.server.close()
    node.link.close()
    reserved.close()


def test_a_leader_that_hears_of_a_newer_one_turns_nodes_away_when_it_has_looked() -> None:
    """It was frozen or cut off; meanwhile another one has put its sign."""
    store = NoStore()
    older, newer = Node0(), Node0("0b")
    for each in (older, newer):
        each.server._store = store
    node = Node1(older.port)
    node.begins()
    leader = newer.server._coordinator.lead.leader
    store.put(wire_sign(leader.term + 5))
    node.say(leader=replace(leader, term=leader.term + 5))
    assert heard(older.inbox, Want, lambda want: bool(want.leave)).leave == "another process leads this job"
    heard(node.inbox, LinkLost)
    for server in (older.server, newer.server):
        server.close()
    node.link.close()


def wire_sign(term: int) -> Any:
    from flytekitplugins_safedist.coordinator.books import Leader
    from flytekitplugins_safedist.coordinator.sign import Sign

    return Sign(Leader(term, "0b"), 1)


def test_a_store_that_is_away_is_told_once_and_nothing_begins(caplog) -> None:
    looks = threading.Semaphore(0)
    said: list[str] = []

    class Away:
        def look(self) -> Any:
            looks.release()
            raise ConnectionError("refused")

        def put(self, sign: Any) -> None:
            raise AssertionError

    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    server = Server(RULES, "0a", inbox, store=Away(), say=said.append)
    server.hear(Status("job", "0a", 0, 1.0))
    for _ in range(3):
        assert looks.acquire(timeout=60)
    server.close()
    assert [line.endswith("ConnectionError: refused") for line in said] == [True]
    assert inbox.empty()


def test_who_cannot_listen_leaves_no_sign_for_it_never_led(node_0) -> None:
    """Of several agents on one machine each tries; the sign of the one that leads stays."""
    store = NoStore()
    server = Server(RULES, "0b", queue.SimpleQueue(), store=store)
    with pytest.raises(RendezvousError):
        server.listen(Endpoint("127.0.0.1", node_0.port))
    time.sleep(1.0)  # several times that a coordinator is told of time
    server.close()
    assert store.look().sign is None


STOPPED_SERVER = """
import os, queue, signal
from flytekitplugins_safedist.coordinator.rules import Rules
from flytekitplugins_safedist.coordinator.server import Server
from flytekitplugins_safedist.topology import Endpoint
server = Server(Rules("job", 2, 2), "0a", queue.SimpleQueue())
print(server.listen(Endpoint("127.0.0.1", 0)), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_hundreds_of_nodes_connect_while_the_server_has_accepted_none_yet() -> None:
    somaxconn = int(Path("/proc/sys/net/core/somaxconn").read_text())
    with subprocess.Popen([sys.executable, "-c", STOPPED_SERVER], stdout=subprocess.PIPE) as node_0:
        try:
            port = int(node_0.stdout.readline())
            os.waitid(os.P_PID, node_0.pid, os.WSTOPPED)
            with ExitStack() as connections:
                for _ in range(min(400, somaxconn)):
                    connections.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        finally:
            node_0.kill()


# --- what is put beside statuses --------------------------------------------------------------------------------------
def test_notes_of_other_nodes_are_kept_with_how_their_clocks_differ(node_0, node_1) -> None:
    node_1.link.put(Note("the record", 0.1).frame())
    node_1.reset()
    heard(node_1.inbox, Want)
    ((text, offset),) = node_0.server.notes()
    assert text == "the record"
    assert abs(offset.seconds) < 60


def snapshot(rank: int, *, waits: bool, threads: Any = ()) -> Snapshot:
    wait = Wait(rank, "0", "0-1", "all_reduce", 4, 3200.0, "gloo", 1800.0, limit=1770.0)
    record = RankRecord((wait,) if waits else (), {wait.key: 4 if waits else 3}, is_whole=True)
    return Snapshot(rank, Process(rank, "S"), threads, time=5000.0, record=record)


def test_what_two_pictures_show_is_told_to_all_and_the_node_at_fault_has_all_evidence_before_it(node_0, node_1) -> None:
    threads = tuple((Frame("/app/train.py", number, "ε" * 4000),) for number in range(200))
    course = node_1.begins().course if node_1.status.round.number < 0 else None
    assert course is None
    node_0.say(round=node_1.status.round, node_rank=0, phase="running", leader=node_1.status.leader, offer=None)
    node_1.say(stall=1800.0)
    for _ in range(2):
        want = heard(node_1.inbox, Want, lambda want: want.course.look > node_1.status.looked)
        key, look = str(want.course.round), want.course.look
        node_0.server.take(RankPicture(key, look, (snapshot(0, waits=True),)))
        node_0.say(looked=look)
        node_1.link.put(RankPicture(key, look, (snapshot(1, waits=False, threads=threads),)).frame())
        node_1.say(looked=look)
    evidence = heard(node_1.inbox, HangEvidence)
    assert evidence.text.endswith(" characters in all]")
    assert len(evidence.frame()) < frames.NODE_BYTES
    notice = heard(node_1.inbox, Want, lambda want: want.course.hang is not None).course.hang
    assert (notice.rank, notice.seconds) == (1, 1800)
    shown = json.loads(notice.text)
    assert (shown["kind"], shown["evidence"]) == ("missing", "")
    assert "rank 1 (1 of 2)" in shown["picture"]
    assert heard(node_0.inbox, Want, lambda want: want.course.hang is not None).course.hang == notice


# --- where ranks meet -------------------------------------------------------------------------------------------------
@pytest.fixture
def keys(node_0, node_1) -> Meeting:
    return Meeting(f"127.0.0.1:{node_0.port}", "job", 0)


def test_ranks_set_wait_add_and_compare_keys_of_their_round(keys) -> None:
    assert keys.wait("key", 0) is None
    waiting: list[bytes | None] = []
    thread = threading.Thread(target=lambda: waiting.append(keys.wait("key", 30)))
    thread.start()
    keys.set("key", b"\0value\n")
    thread.join()
    assert waiting == [b"\0value\n"]
    assert [keys.add("count", 2), keys.add("count", -1)] == [2, 1]
    assert keys.compare_set("one", b"", b"first") == b"first"
    assert keys.compare_set("one", b"", b"second") == b"first"
    keys.delete("key")
    assert keys.wait("key", 0.01) is None
    assert keys.wait("one", 0) == b"first"  # a late answer has poisoned nothing


def test_a_rank_of_another_round_is_told_that_it_is_over(keys) -> None:
    with pytest.raises(FsIoError, match="round 3 is over: the job is in round 0"):
        Meeting(keys.where, "job", 3).wait("key", 0)


def test_what_an_agent_runs_imports_no_torch() -> None:
    program = "import sys, flytekitplugins_safedist.agent.run; assert 'torch' not in sys.modules, 'torch'"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
