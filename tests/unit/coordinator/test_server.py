"""The coordinator's server against peers that are none of the job's, broken, or slow; and the way to it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from flytekitplugins_safedist import frames
from flytekitplugins_safedist.agent import link as link_module
from flytekitplugins_safedist.agent.leader_store import NoStore
from flytekitplugins_safedist.agent.link import Link, LinkLost
from flytekitplugins_safedist.agent.meeting_place import MeetingPlace
from flytekitplugins_safedist.coordinator import inquiry, wire
from flytekitplugins_safedist.coordinator import server as server_module
from flytekitplugins_safedist.coordinator import sign as sign_module
from flytekitplugins_safedist.coordinator.books import Leader
from flytekitplugins_safedist.coordinator.kv import OVER
from flytekitplugins_safedist.coordinator.messages import Offer, Status, Want
from flytekitplugins_safedist.coordinator.ports import ReservedPort
from flytekitplugins_safedist.coordinator.rules import Rules
from flytekitplugins_safedist.coordinator.server import Server
from flytekitplugins_safedist.coordinator.sign import Sign
from flytekitplugins_safedist.coordinator.wire import HangEvidence, Note, RankPicture, Refusal
from flytekitplugins_safedist.errors import MeetingLostError, RendezvousError
from flytekitplugins_safedist.hangs.processes import Process
from flytekitplugins_safedist.hangs.snapshot import Snapshot
from flytekitplugins_safedist.hangs.stacks import Frame
from flytekitplugins_safedist.hangs.waits import Wait
from flytekitplugins_safedist.meeting import Meeting, end_of
from flytekitplugins_safedist.topology import Endpoint
from tests.harness.procs import until
from tests.harness.proxy import Proxy

RULES = Rules("job", 2, 2, heartbeat=6, grace=60)


def heard(inbox: queue.SimpleQueue[object], kind: type, is_it: Callable[[Any], bool] = lambda _: True) -> Any:
    """The next of a kind that comes."""
    while True:
        found = inbox.get(timeout=30)
        assert not isinstance(found, BaseException) or kind is type(found), found
        if isinstance(found, kind) and is_it(found):
            return found


class Node:
    """A node of two, with its link."""

    def __init__(self, port: int, status: Status, own: Any = None) -> None:
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.link = Link(RULES, Endpoint("127.0.0.1", port), inbox=self.inbox, own=own)
        self.status = status
        self.link.begin(status)

    def say(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)
        self.link.tell(self.status)


class Node0(Node):
    """Node 0, with its server."""

    def __init__(self, process: str = "0a", port: int = 0, store: Any = None) -> None:
        self.server = Server(RULES, process, queue.SimpleQueue(), store=store or NoStore())
        self.port = self.server.listen(Endpoint("127.0.0.1", port))
        offer = Offer(status().round, {"MASTER_PORT": "1"})
        super().__init__(self.port, Status("job", process, 0, 1.0, "host0", offer=offer), self.server.connect)

    def close(self) -> None:
        self.link.close()
        self.server.close()
        assert "safedist coordinator" not in [each.name for each in threading.enumerate()], "whoever is connected"


class Node1(Node):
    """The other one."""

    def __init__(self, port: int, **facts: Any) -> None:
        super().__init__(port, status(**facts))

    def begins(self) -> Want:
        """Its ranks run, and those of node 0."""
        want: Want = heard(self.inbox, Want, lambda want: want.runs)
        self.say(leader=want.course.leader, round=want.course.round, node_rank=1, phase="running")
        return want

    cut: Callable[[], object]
    """Of its connection."""

    def reset(self) -> None:
        self.cut()
        heard(self.inbox, LinkLost)
        self.link.begin(self.status)


def status(**facts: Any) -> Status:
    return Status(**{"job": "job", "process": "1a", "node": 1, "started": 1.0, "host": "host1", **facts})


@pytest.fixture
def node_0() -> Iterator[Node0]:
    node = Node0()
    yield node
    node.close()


@pytest.fixture
def node_1(node_0) -> Iterator[Node1]:
    way = Proxy(node_0.port)
    node = Node1(way.port)
    node.cut = way.cut
    node.begins()
    yield node
    node.link.close()
    way.close()


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
        wire.beat(1.0),
    ],
    ids=["http, too long", "no json", "no status"],
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


OF_ANOTHER = status(process="0a", leaving="told to stop").dump()


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (wire.frame(wire.CALL, frames.call({"op": "add", "key": "came"})), "not a call: KeyError: 'id'"),
        (wire.frame(wire.CALL, b"[1]\n"), "the head of a call is no object: b'[1]'"),
        (wire.frame(wire.STATUS, OF_ANOTHER), "the status of '0a' on the connection of '1a'"),
    ],
    ids=["no id", "no object", "for another process"],
)
def test_what_is_no_call_or_no_word_of_ones_own_loses_its_connection_and_is_named(
    node_0, node_1, caplog, frame, why
) -> None:
    with caplog.at_level(logging.WARNING):
        node_1.link.put(frame)
        heard(node_1.inbox, LinkLost)
        node_1.link.begin(node_1.status)
        assert heard(node_1.inbox, Want).runs, "node 0 has not left"
    assert why in caplog.text


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


def test_a_reset_connection_comes_back_and_ends_no_round_when_its_node_knows_what_to_say(node_0, node_1) -> None:
    """What it says on a new connection has all that it knows of the job: the one before may have taken it along."""
    node_1.cut()
    heard(node_1.inbox, LinkLost)
    with pytest.raises(queue.Empty):
        node_1.inbox.get(timeout=0.5)
    node_1.link.begin(node_1.status)
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


@pytest.fixture
def looks_often(monkeypatch) -> None:
    """For node 0."""
    monkeypatch.setattr(link_module, "_PAUSE", 0.02)


@pytest.mark.usefixtures("looks_often")
def test_a_leader_that_dies_as_it_answers_is_lost_like_any_other() -> None:
    """What is unread when a process dies makes the kernel reset its connections."""
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as leader:
        link = Link(RULES, Endpoint(*leader.getsockname()), inbox=inbox)
        for _ in range(8):
            link.begin(status())
            connection, _ = leader.accept()
            connection.recv(1)
            connection.sendall(wire.beat(1.0))
            connection.close()
            assert isinstance(inbox.get(timeout=30), LinkLost)
        link.close()


@pytest.mark.parametrize("it", ["is the job's no more", "is frozen, and replaced", "is frozen, and one of two"])
def test_a_leader_that_is_none_any_more_is_left_for_where_the_name_leads(monkeypatch, it) -> None:
    for name in ("_LONGEST_PAUSE", "_TURN"):
        monkeypatch.setattr(link_module, name, 0.02)
    monkeypatch.setattr(link_module, "whereabouts", lambda _: there)
    there, inbox = ("127.0.0.1", "127.0.0.2"), queue.SimpleQueue[object]()
    with socket.create_server((there[0], 0)) as old, socket.create_server((there[1], old.getsockname()[1])) as new:
        old.settimeout(30)
        new.settimeout(30)
        link = Link(replace(RULES, heartbeat=600), Endpoint("node-0", old.getsockname()[1]), inbox=inbox)
        link.begin(status())
        connection, _ = old.accept()
        if it != "is frozen, and one of two":
            there = ("127.0.0.2",)
        if it == "is the job's no more":
            connection.sendall(wire.beat(1.0))
            while frames.receive(connection, frames.NODE_BYTES)[:1] != wire.BEAT:
                continue  # with which it goes on once it has heard of the leader
            link.drop()
            heard(inbox, LinkLost)
            link.begin(status())
        found, _ = new.accept()
        if it == "is the job's no more":
            # Where it leads is known again: a reset there is no reason to wait for DNS.
            found.sendall(wire.beat(1.0))
            there = ()
            found.close()
            heard(inbox, LinkLost)
            link.begin(status())
            found, _ = new.accept()
        link.close()
        old.settimeout(0)
        with pytest.raises(BlockingIOError):
            old.accept()
        for each in (connection, found):
            each.close()


@pytest.mark.usefixtures("looks_often")
def test_that_dns_fails_is_no_word_of_where_a_leader_is_that_is_slow_to_answer(monkeypatch) -> None:
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    failed, ask = threading.Semaphore(0), socket.getaddrinfo
    with socket.create_server(("127.0.0.1", 0)) as leader:
        link = Link(RULES, Endpoint("localhost", leader.getsockname()[1]), inbox=inbox)
        link.begin(status())
        connection, _ = leader.accept()

        def down(*_: object, **__: object) -> None:
            failed.release()
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

        monkeypatch.setattr(socket, "getaddrinfo", down)
        for _ in range(2):
            assert failed.acquire(timeout=30)
        connection.sendall(wire.beat(1.0))
        leader.settimeout(0.5)
        monkeypatch.setattr(socket, "getaddrinfo", ask)
        with pytest.raises(TimeoutError):
            leader.accept()
        link.close()


def test_a_leader_that_reads_nothing_holds_up_no_agent_and_hears_what_was_said_last() -> None:
    """It is frozen, or its machine is slow: the loop that ends ranks and hears signals does not wait for it."""
    mine, theirs = socket.socketpair()
    link = Link(RULES, Endpoint("localhost", 0), inbox=queue.SimpleQueue(), own=lambda: theirs)
    link.begin(status())
    assert frames.receive(mine, frames.NODE_BYTES)[:1] == wire.STATUS
    call(lambda: link.put(Note("x" * (4 << 20)).frame())).result(30)
    call(lambda: link.tell(status(leaving="told to stop"))).result(30)
    read = call(lambda: [frames.receive(mine, frames.NODE_BYTES) for _ in range(3)])
    link.close()
    beat, note, last = read.result(30)
    assert (beat[:1], note[:1]) == (wire.BEAT, wire.NOTE)
    assert Status.parse(last[1:]).leaving == "told to stop"


def test_a_link_that_cannot_go_on_says_so() -> None:
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    link = Link(RULES, Endpoint("a..b", 9), inbox=inbox)  # Python's codec for names refuses it
    link.begin(status())
    assert isinstance(inbox.get(timeout=30), UnicodeError)
    link.close()


def test_pauses_between_looks_for_node_0_grow_when_it_takes_minutes() -> None:
    assert 0.18 < link_module.pause_after(0.0) < 0.32
    assert 0.18 < link_module.pause_after(9.0) < 0.32
    assert 1.4 < link_module.pause_after(600.0) < 2.6


def test_a_link_finds_the_leader_that_takes_the_place_of_the_one_before() -> None:
    reserved = ReservedPort()
    first = Node0(port=reserved.port)
    node = Node1(first.port)
    node.begins()
    first.close()
    heard(node.inbox, LinkLost)
    second = Node0("0b", first.port)
    node.link.begin(replace(node.status, phase="idle", books=node.status.books))
    assert heard(node.inbox, Want).course.leader.process == "0b"
    second.close()
    node.link.close()
    reserved.close()


def test_a_leader_that_hears_of_a_newer_one_turns_nodes_away_when_it_has_looked() -> None:
    """It was frozen or cut off; meanwhile another one has put its sign."""
    signs = threading.Semaphore(0)

    class Store(NoStore):
        def put(self, sign: Any) -> None:
            super().put(sign)
            signs.release()

    store = Store()
    older = Node0(store=store)
    node = Node1(older.port)
    node.begins()
    for _ in range(2):  # the one that is read back, and its renewal then: the next comes in a minute
        assert signs.acquire(timeout=30)
    newer = Leader(5, "0b")
    store.put(Sign(newer, 1))
    node.say(leader=newer)
    assert heard(older.inbox, Want, lambda want: bool(want.leave)).leave == "another process leads this job"
    heard(node.inbox, LinkLost)
    older.close()
    node.link.close()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConnectionError("https://store/sign?sig=secret refused"), "ConnectionError: https://store/sign?... refused"),
        (PermissionError("Forbidden"), "PermissionError: Forbidden (pods have to get, put and list there)"),
    ],
    ids=["away", "refused"],
)
def test_a_store_that_is_away_is_told_once_and_nothing_begins(error, told, monkeypatch) -> None:
    monkeypatch.setattr(sign_module, "_DOUBT_SECONDS", 0.1)
    looks = threading.Semaphore(0)
    said: list[str] = []

    class Away:
        def look(self) -> Any:
            looks.release()
            raise error

        def put(self, sign: Any) -> None:
            raise AssertionError

    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    server = Server(RULES, "0a", inbox, store=Away(), say=said.append)
    node = Node(0, Status("job", "0a", 0, 1.0), server.connect)
    for _ in range(3):
        assert looks.acquire(timeout=60)
    node.link.close()
    server.close()
    assert [line.endswith(f": {told}; nothing begins or ends meanwhile, for 3600 s at most") for line in said] == [True]
    assert inbox.empty()


def test_where_node_0_alone_cannot_reach_the_store_the_others_say_that_it_does_not_lead() -> None:
    """They are connected to it all the while, and give the job up when their time is over."""

    class Away(NoStore):
        def look(self) -> Any:
            raise ConnectionError("refused")

    leader = Node0(store=Away())
    node = Node1(leader.port)
    until(lambda: leader.server.others, "they have met")
    there = "node 0 is there, and has not begun to lead the job within 900 s"
    until(lambda: there in str(node.link.missing_error()), "and node 1 knows")
    leader.close()
    heard(node.inbox, LinkLost)
    assert "node 0 was lost, and none took its place within 900 s" in str(node.link.missing_error())
    node.link.close()


def test_who_cannot_listen_leaves_no_sign_for_it_never_led(node_0, monkeypatch) -> None:
    """Of several agents on one machine each tries; the sign of the one that leads stays."""
    monkeypatch.setattr(server_module, "_TICK_SECONDS", 0.0)  # time, if it were told, would be told in each turn
    store = NoStore()
    server = Server(RULES, "0b", queue.SimpleQueue(), store=store)
    with pytest.raises(RendezvousError):
        server.listen(Endpoint("127.0.0.1", node_0.port))
    for _ in range(20):  # the loop has had its turn, and then the thread that speaks with the store
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), server._loop).result()
        server._stores.submit(lambda: None).result()
    server.close()
    assert store.look().sign is None


STOPPED_SERVER = """
import os, queue, resource, signal
from flytekitplugins_safedist.coordinator.rules import Rules
from flytekitplugins_safedist.coordinator.server import Server, allow_open_files
from flytekitplugins_safedist.topology import Endpoint
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
allow_open_files(300)
server = Server(Rules("job", 2, 2), "0a", queue.SimpleQueue())
print(server.listen(Endpoint("127.0.0.1", 0)), *resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_hundreds_of_nodes_connect_while_the_server_has_accepted_none_yet_with_as_many_files_as_may_be_open() -> None:
    somaxconn = int(Path("/proc/sys/net/core/somaxconn").read_text())
    with subprocess.Popen([sys.executable, "-c", STOPPED_SERVER], stdout=subprocess.PIPE) as node_0:
        try:
            port, *limits = map(int, node_0.stdout.readline().split())
            assert limits == [4096, 4096]
            os.waitid(os.P_PID, node_0.pid, os.WSTOPPED)
            with ExitStack() as connections:
                for _ in range(min(400, somaxconn)):
                    connections.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        finally:
            node_0.kill()


# --- what is put beside statuses --------------------------------------------------------------------------------------
def test_notes_of_other_nodes_are_kept_with_how_their_clocks_differ(node_0, node_1) -> None:
    node_1.link.put(Note("the record", 0.1).frame())
    until(node_0.server.notes, "the note has come")
    node_1.reset()
    heard(node_1.inbox, Want)
    ((text, offset),) = node_0.server.notes()
    assert text == "the record"
    assert abs(offset.seconds) < 60


def snapshot(rank: int, *, waits: bool, threads: Any = ()) -> Snapshot:
    wait = Wait(rank, "0", "0-1", "all_reduce", 4, 3200.0, "gloo", 1800.0, limit=1770.0, age=1800.0)
    facts = {"waits": (wait,) if waits else (), "begun": {wait.key: 4 if waits else 3}, "is_whole": True}
    return Snapshot(rank, Process(rank, "S"), threads, **facts)


@pytest.fixture
def confirmed_at_once(monkeypatch) -> None:
    """The next picture is taken as soon as the one before is judged."""
    monkeypatch.setattr(inquiry, "CONFIRM_SECONDS", 0.0)


@pytest.mark.usefixtures("confirmed_at_once")
def test_what_two_pictures_show_is_told_to_all_and_the_node_at_fault_has_all_evidence_before_it(node_0, node_1) -> None:
    threads = tuple((Frame("/app/train.py", number, "ε" * 4000),) for number in range(200))
    node_0.say(round=node_1.status.round, node_rank=0, phase="running", leader=node_1.status.leader, offer=None)
    node_1.say(stall=1800.0)
    for _ in range(2):
        want = heard(node_1.inbox, Want, lambda want: want.course.look > node_1.status.looked)
        key, look = str(want.course.round), want.course.look
        node_0.link.put(RankPicture(key, look, (snapshot(0, waits=True),)).frame())
        node_0.say(looked=look)
        node_1.link.put(RankPicture(key, look, (snapshot(1, waits=False, threads=threads),)).frame())
        node_1.say(looked=look)
    evidence = heard(node_1.inbox, HangEvidence)
    assert evidence.text.endswith(" characters in all]")
    assert len(evidence.frame()) < frames.NODE_BYTES
    notice = heard(node_1.inbox, Want, lambda want: want.course.hang is not None).course.hang
    assert (notice.rank, notice.seconds) == (1, 1800)
    shown = json.loads(notice.text)
    assert shown["kind"] == "missing"
    assert "rank 1 (1 of 2)" in shown["picture"]
    assert heard(node_0.inbox, Want, lambda want: want.course.hang is not None).course.hang == notice


@pytest.mark.usefixtures("confirmed_at_once")
def test_what_no_thread_could_judge_is_judged_at_the_next_look(node_0, node_1, monkeypatch) -> None:
    start, failed = threading.Thread.start, []

    def fail_once(thread: threading.Thread) -> None:
        if thread.name.startswith("asyncio_") and not failed:
            failed.append(1)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    node_0.say(round=node_1.status.round, node_rank=0, phase="running", leader=node_1.status.leader, offer=None)
    for look in (1, 2, 3):
        until(lambda look=look: failed or look == 1, "the first is judged")
        node_1.say(stall=1800.0 + look)
        key = str(heard(node_1.inbox, Want, lambda want, look=look: want.course.look == look).course.round)
        for rank, node in enumerate((node_0, node_1)):
            node.link.put(RankPicture(key, look, (snapshot(rank, waits=node is node_0),)).frame())
            node.say(looked=look)
    assert heard(node_1.inbox, Want, lambda want: want.course.hang is not None).course.hang.rank == 1


# --- where ranks meet -------------------------------------------------------------------------------------------------
@contextmanager
def place_of(node: Node, tmp_path: Path) -> Iterator[Meeting]:
    """How a rank of a node that runs calls its agent."""
    path = tmp_path / node.status.process
    node.link.place = MeetingPlace(path, "job", node.link.put)
    node.link.place.open(node.status.round, 0)
    yield Meeting(str(path), "job", 0)
    node.link.place.close()


@pytest.fixture
def keys(node_1, tmp_path) -> Iterator[Meeting]:
    with place_of(node_1, tmp_path) as meeting:
        yield meeting


@pytest.fixture
def leaders_keys(node_0, node_1, tmp_path) -> Iterator[Meeting]:
    node_0.say(round=node_1.status.round, node_rank=0, phase="running", leader=node_1.status.leader, offer=None)
    with place_of(node_0, tmp_path) as meeting:
        yield meeting


def waiting(keys: Meeting, key: str) -> Future[bytes | None]:
    return call(lambda: keys.wait(key, 60))


def call(work: Callable[[], Any]) -> Future[Any]:
    """A rank's thread, which waits for an answer."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def test_ranks_of_several_nodes_set_wait_add_and_compare_keys_of_their_round(keys, leaders_keys) -> None:
    assert keys.wait("key", 0) is None
    waits = waiting(keys, "key")
    leaders_keys.set("key", b"\0value\n")
    assert waits.result(30) == b"\0value\n"
    assert [keys.add("count", 2), leaders_keys.add("count", -1)] == [2, 1]
    assert keys.compare_set("one", b"", b"first") == b"first"
    assert leaders_keys.compare_set("one", b"", b"second") == b"first"
    keys.delete("key")
    assert keys.wait("key", 0.01) is None
    assert keys.wait("one", 0) == b"first"  # a late answer has poisoned nothing


def test_the_end_of_a_rank_is_told_in_each_round_that_it_ends_in(keys, node_1) -> None:
    node_1.link.place.note_ends([0])
    assert keys.wait(end_of(0), 30) == b"1"
    keys.delete(end_of(0))  # as in the corner of another round
    node_1.link.place.open(node_1.status.round, 1)
    keys = Meeting(keys.where, "job", 1)
    assert keys.wait(end_of(0), 0) is None
    node_1.link.place.note_ends([0])
    assert keys.wait(end_of(0), 30) == b"1"


def test_a_signals_handler_that_meets_others_takes_no_answer_of_the_call_that_it_interrupts(keys, monkeypatch) -> None:
    """A save at SIGUSR1, say, while the rank waits at a barrier."""
    keys.set("key", b"mine")
    receive, counts = frames.receive, list[int]()

    def interrupted(*arguments: Any) -> bytes:
        monkeypatch.setattr(frames, "receive", receive)
        signal.raise_signal(signal.SIGUSR1)
        return receive(*arguments)

    before = signal.signal(signal.SIGUSR1, lambda *_: counts.append(keys.add("count", 2)))
    try:
        monkeypatch.setattr(frames, "receive", interrupted)
        assert (keys.wait("key", 0), counts) == (b"mine", [2])
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_descriptor_that_others_have_closed_is_a_place_that_is_gone_and_the_next_call_opens_another(keys) -> None:
    """A task that makes itself a daemon closes all that it has open."""
    keys.set("key", b"value")
    os.close(keys._of_thread.mine[1].fileno())
    with pytest.raises(MeetingLostError, match="Bad file descriptor"):
        keys.wait("key", 0)
    assert keys.wait("key", 0) == b"value"


def test_a_rank_of_another_round_or_job_is_told_so(keys) -> None:
    with pytest.raises(MeetingLostError, match="round 3 is over: this node is in round 0"):
        Meeting(keys.where, "job", 3).wait("key", 0)
    with pytest.raises(MeetingLostError, match="this agent is of run id 'job', and the rank of 'other'"):
        Meeting(keys.where, "other", 0).wait("key", 0)


def test_a_rank_that_waits_does_not_notice_that_the_link_of_its_node_was_lost(node_1, keys, leaders_keys) -> None:
    waits = waiting(keys, "key")
    assert keys.add("there", 1) == 1  # the call before has gone out
    node_1.reset()
    heard(node_1.inbox, Want)
    leaders_keys.set("key", b"value")
    assert waits.result(30) == b"value"


def test_what_was_done_and_not_answered_before_the_link_was_lost_is_done_once(node_0, node_1, keys) -> None:
    """The answer gets lost on the way back: the leader has counted, and the rank cannot know."""
    send, lost = node_0.server._send_answer, threading.Event()

    def lose(process: str, *answer: Any) -> bytes:
        if lost.is_set():
            return bytes(send(process, *answer))
        lost.set()
        way, frame = node_0.server._ways.pop(process), send(process, *answer)
        node_0.server._ways[process] = way
        way.drop()
        return bytes(frame)

    node_0.server._send_answer = lose
    counts = call(lambda: keys.add("count", 1))
    heard(node_1.inbox, LinkLost)
    node_1.link.begin(node_1.status)
    assert counts.result(30) == 1
    assert keys.add("count", 1) == 2


def test_what_a_rank_calls_as_its_round_ends_is_none_of_the_next_ones(node_0, node_1) -> None:
    """Both are read before the call is answered where node 0 is busy: a barrier of the next round counted it."""
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    node_1.link.place = Mock(take=answers.put)
    over = node_1.status.round
    node_0.say(leader=over.leader, round=over, node_rank=0, offer=Offer(over, {"MASTER_PORT": "2"}))
    heard(node_1.inbox, Want, lambda want: not want.runs)
    call = frames.call({"op": "add", "key": "came", "amount": 1, "id": 0, "oldest": 0, "round": str(over)})
    ended = replace(node_1.status, phase="idle")
    node_1.link.put(wire.frame(wire.CALL, call) + wire.frame(wire.STATUS, ended.dump()))
    heard(node_1.inbox, Want, lambda want: want.runs and want.course.round > over)
    assert frames.parsed_call(answers.get(timeout=30)) == ({**OVER, "id": 0}, b"")


def test_a_rank_that_calls_while_no_leader_is_there_is_answered_when_there_is_one(node_1, keys) -> None:
    node_1.cut()
    heard(node_1.inbox, LinkLost)
    counts = call(lambda: keys.add("count", 1))
    until(lambda: node_1.link.place._calls, "the call is on its way")
    node_1.link.begin(node_1.status)
    assert counts.result(30) == 1


def test_a_rank_that_waits_hears_that_its_round_is_over_and_that_its_agent_has_ended(node_1, keys) -> None:
    place = node_1.link.place
    waits = waiting(keys, "key")
    until(lambda: place._calls, "the call is on its way")
    place.open(node_1.status.round, 1)
    with pytest.raises(MeetingLostError, match="the round of this rank is over"):
        waits.result(30)
    keys = Meeting(keys.where, "job", 1)
    waits = waiting(keys, "key")
    until(lambda: place._calls, "the call is on its way")
    place.close()
    with pytest.raises(MeetingLostError, match="see why this node's agent has ended"):
        waits.result(30)
