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
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from flytekitplugins_safedist import frames
from flytekitplugins_safedist.errors import FsIoError
from flytekitplugins_safedist.job import link as link_module
from flytekitplugins_safedist.job import messages
from flytekitplugins_safedist.job import server as server_module
from flytekitplugins_safedist.job.facts import Rules
from flytekitplugins_safedist.job.link import GivenUp, Link, LinkLost
from flytekitplugins_safedist.job.messages import Go, Hello, Leaves, Message, Refused, Stop, Waits, Welcome
from flytekitplugins_safedist.job.ports import ReservedPort
from flytekitplugins_safedist.job.server import Server
from flytekitplugins_safedist.meeting import Meeting
from flytekitplugins_safedist.topology import Endpoint


class Node0:
    """Node 0 of two or more, with its server."""

    def __init__(self, process: str = "0a", port: int = 0, prepare=lambda _: {}, nodes: int = 2) -> None:
        rules = Rules("job", nodes, nodes, fixed=True, heartbeat=6, grace=60)
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.server = Server(rules, process, self.inbox, prepare)
        self.port = self.server.listen(Endpoint("127.0.0.1", port))
        self.say = self.server.say
        self.say(Hello("job", process, 0, 1, "host0"))

    def hears(self, kind: type) -> object:
        while not isinstance(found := self.inbox.get(timeout=30), kind):
            pass
        return found


@pytest.fixture
def node_0() -> Iterator[Node0]:
    node = Node0()
    yield node
    node.server.close()


def hello(**facts: object) -> Hello:
    return Hello(**{"run": "job", "process": "1a", "node": 1, "started_ns": 1, "host": "host1", **facts})  # type: ignore[arg-type]


def called(port: int, sent: bytes) -> Message | None:
    """The first answer to what is sent; None where the connection is closed instead."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(sent)
        try:
            return messages.parse(frames.receive(sock, frames.NODE_BYTES))
        except ConnectionResetError:
            return None


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        frames.packed(b"not json"),
        frames.packed(b"[" * 100_000),
        frames.packed(json.dumps({"kind": "Hello", "run": 3}).encode()),
        frames.packed(json.dumps({"kind": "Uploaded", "ok": True}).encode()),
        (1 << 31).to_bytes(4, "big"),
    ],
    ids=["http", "no json", "deep json", "wrong types", "no hello", "too long"],
)
def test_what_is_no_message_loses_its_connection_is_named_once_and_harms_nobody(node_0, caplog, sent) -> None:
    with caplog.at_level(logging.WARNING):
        assert called(node_0.port, sent) is None
        assert called(node_0.port, sent) is None
        assert isinstance(called(node_0.port, frames.packed(hello().dump())), Welcome)
    assert caplog.text.count("127.0.0.1, what it sent is no message") == 1


@pytest.mark.parametrize(
    ("facts", "why"),
    [({"run": "other"}, "stranger"), ({"protocol": 99}, "version"), ({"node": 7}, "range"), ({"node": -1}, "range")],
)
def test_a_node_that_has_no_part_in_the_job_is_told_why(node_0, facts, why) -> None:
    with socket.create_connection(("127.0.0.1", node_0.port), timeout=30) as sock:
        sock.sendall(frames.packed(hello(**facts).dump()))
        found = None
        while not isinstance(found, Refused):
            found = messages.parse(frames.receive(sock, frames.NODE_BYTES))
    assert found.why == why


def test_connections_that_say_nothing_keep_nobody_from_the_job(node_0) -> None:
    silent = [socket.create_connection(("127.0.0.1", node_0.port), timeout=30) for _ in range(100)]
    for sock in silent[::2]:
        sock.sendall(b"\0\0")
    link, inbox = linked(node_0.port)
    assert isinstance(heard(inbox, Go), Go)
    link.close()
    for sock in silent:
        sock.close()


def linked(port: int, **facts: object) -> tuple[Link, queue.SimpleQueue[object]]:
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    at = Endpoint("127.0.0.1", port)
    say = lambda _: None  # noqa: E731
    me = hello(**facts)
    rules = Rules("job", 2, 2, fixed=True, timeout=30, heartbeat=6)
    return Link(rules, at, hello=lambda: me, inbox=inbox, say=say), inbox


def heard(inbox: queue.SimpleQueue[object], kind: type) -> object:
    while not isinstance(found := inbox.get(timeout=30), kind):
        assert not isinstance(found, GivenUp), found
    return found


def test_at_the_end_who_has_not_come_is_waited_for_and_who_has_until_it_leaves(node_0) -> None:
    gone = node_0.server._others_gone
    node_0.server._note_departure()
    assert not gone.is_set(), "nobody has come yet"
    link, inbox = linked(node_0.port)
    heard(inbox, Go)
    node_0.server._note_departure()
    assert not gone.is_set()
    link.close()
    assert gone.wait(30)


def test_a_reset_connection_comes_back_and_ends_no_round(node_0) -> None:
    link, inbox = linked(node_0.port)
    heard(inbox, Go)
    link._sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    heard(inbox, LinkLost)
    heard(inbox, Welcome)
    assert node_0.server.others == 1
    assert node_0.server._coordinator.history.losses == ()
    link.close()


def test_a_reset_connection_comes_back_though_dns_does_not_answer(node_0, monkeypatch) -> None:
    link, inbox = linked(node_0.port)
    heard(inbox, Go)
    answers = threading.Event()
    ask = link_module.whereabouts
    monkeypatch.setattr(link_module, "whereabouts", lambda endpoint: answers.wait(60) and ask(endpoint))
    link._sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    heard(inbox, LinkLost)
    heard(inbox, Welcome)
    assert not answers.is_set()
    answers.set()
    link.close()


def test_a_link_that_cannot_go_on_says_so() -> None:
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    endpoint = Endpoint("a..b", 9)  # no name at all: Python's codec for names refuses it
    link = Link(Rules("job", 2, 2, fixed=True), endpoint, hello=hello, inbox=inbox, say=lambda _: None)
    assert isinstance(inbox.get(timeout=30), UnicodeError)
    link.close()


def test_pauses_between_looks_for_node_0_grow_when_it_takes_minutes() -> None:
    assert 0.18 < link_module.pause_after(0.0) < 0.32
    assert 0.18 < link_module.pause_after(9.0) < 0.32
    assert 1.4 < link_module.pause_after(600.0) < 2.6


def test_a_search_is_over_when_the_leader_was_found_though_no_round_begins_here() -> None:
    """Of a node that waits on purpose: its next search has all its time."""
    node = Node0(nodes=3)  # the third never comes
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    rules = Rules("job", 3, 3, fixed=True, heartbeat=0.5, timeout=2)
    link = Link(rules, Endpoint("127.0.0.1", node.port), hello=hello, inbox=inbox, say=lambda _: None)
    for _ in range(2):
        heard(inbox, Welcome)
        began = time.monotonic()
        while time.monotonic() - began < 2 * rules.timeout:  # as long as it is connected, nothing is searched for
            time.sleep(0.1)
            node.server._ways["1a"].send(Waits("nobody has moved"))
        link._sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        heard(inbox, LinkLost)
    heard(inbox, Welcome)
    link.close()
    node.server.close()


def test_whatever_fails_as_time_passes_the_coordinator_is_told_of_time(node_0, monkeypatch) -> None:
    """No further thread may be started, as under a limit of processes: nobody looks for a newer node 0 then."""
    link, inbox = linked(node_0.port)
    heard(inbox, Go)
    tried = threading.Semaphore(0)

    class Thread(threading.Thread):
        def start(self) -> None:
            tried.release()
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(server_module.threading, "Thread", Thread)
    link.close()
    for _ in range(3):
        assert tried.acquire(timeout=60)


LIMITS = """
import resource
from flytekitplugins_safedist.job.connections import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
allow_open_files(300)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_as_many_files_may_be_open_as_the_container_allows_for_ranks_connect_here_too() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4096", "4096"]


def test_a_process_that_leaves_says_so_and_does_not_come_back_when_its_connection_is_lost(node_0) -> None:
    link, inbox = linked(node_0.port)
    heard(inbox, Go)
    link.say(Leaves("told to stop"))
    assert node_0.hears(Stop).left == {"node 1": "told to stop"}  # type: ignore[attr-defined]
    link._sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    heard(inbox, LinkLost)
    for thread in threading.enumerate():
        if thread.name == "safedist link":
            thread.join(30)
            assert not thread.is_alive()
    assert inbox.empty()


def test_a_link_finds_the_coordinator_that_takes_the_place_of_the_one_before() -> None:
    reserved = ReservedPort()
    first = Node0(port=reserved.port)
    link, inbox = linked(first.port)
    heard(inbox, Go)
    first.server.close()
    heard(inbox, LinkLost)
    second = Node0("0b", first.port)
    assert heard(inbox, Welcome).coordinator == "0b"  # type: ignore[attr-defined]
    assert link.lost == ("0a",)
    second.server.close()
    link.close()
    reserved.close()


def test_a_coordinator_whose_name_leads_to_a_newer_one_ends_itself() -> None:
    older = Node0()
    link, inbox = linked(older.port)
    heard(inbox, Go)
    newer = Node0("0b")
    older.server._endpoint = Endpoint("127.0.0.1", newer.port)
    link.close()
    refused = older.hears(Refused)
    assert (refused.why, refused.text[:48]) == ("fenced", "a newer node 0 answers under this node's name, a")  # type: ignore[attr-defined]
    older.server.close()
    newer.server.close()


def test_a_node_that_waits_goes_over_to_the_newer_coordinator_that_its_name_leads_to() -> None:
    older, newer = Node0(nodes=3), Node0("0b", nodes=3)
    link, inbox = linked(older.port)
    heard(inbox, Welcome)
    way = older.server._ways["1a"]
    way.send(Waits("nobody has moved"))
    heard(inbox, Waits)
    link._endpoint = Endpoint("127.0.0.1", newer.port)
    way.send(Waits("a newer one is there"))  # or it has looked late, and goes there by itself
    heard(inbox, LinkLost)
    assert heard(inbox, Welcome).coordinator == "0b"  # type: ignore[attr-defined]
    assert link.lost == ("0a",)
    for each in (link, older.server, newer.server):
        each.close()


def test_what_a_round_cannot_open_is_the_agents_error() -> None:
    def prepare(*_: object) -> dict[str, str]:
        raise OSError("no port")

    node = Node0(prepare=prepare)
    link, _ = linked(node.port)
    assert "no port" in str(node.hears(OSError))
    link.close()
    node.server.close()


STOPPED_SERVER = """
import os, queue, signal
from flytekitplugins_safedist.job.facts import Rules
from flytekitplugins_safedist.job.server import Server
from flytekitplugins_safedist.topology import Endpoint
server = Server(Rules("job", 2, 2, fixed=True), "0a", queue.SimpleQueue(), lambda _: {})
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


@pytest.fixture
def corner(node_0) -> Iterator[Meeting]:
    link, inbox = linked(node_0.port)
    heard(inbox, Go)
    yield Meeting(f"127.0.0.1:{node_0.port}", "job", 0)
    link.close()


def test_ranks_set_wait_add_and_compare_in_the_corner_of_their_round(corner) -> None:
    assert corner.wait("key", 0) is None
    waiting: list[bytes | None] = []
    thread = threading.Thread(target=lambda: waiting.append(corner.wait("key", 30)))
    thread.start()
    corner.set("key", b"\0value\n")
    thread.join()
    assert waiting == [b"\0value\n"]
    assert [corner.add("count", 2), corner.add("count", -1)] == [2, 1]
    assert corner.compare_set("one", b"", b"first") == b"first"
    assert corner.compare_set("one", b"", b"second") == b"first"
    corner.delete("key")
    assert corner.wait("key", 0.01) is None
    assert corner.wait("one", 0) == b"first"  # a late answer has poisoned nothing


def test_a_rank_of_another_round_is_told_that_it_is_over(node_0, corner) -> None:
    with pytest.raises(FsIoError, match="round 3 is over: the job is in round 0"):
        Meeting(corner.where, "job", 3).wait("key", 0)


def test_what_an_agent_runs_imports_no_torch() -> None:
    program = "import sys, flytekitplugins_safedist.job.run; assert 'torch' not in sys.modules, 'torch'"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
