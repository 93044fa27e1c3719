"""Rendezvous between processes: nodes are killed, frozen, late, or ghosts. Ordered by pipes; the stores are real."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist import errors
from flytekitplugins_safedist.rendezvous.client import ReservedPort
from flytekitplugins_safedist.rendezvous.connections import Older
from flytekitplugins_safedist.rendezvous.fence import Fence
from flytekitplugins_safedist.rendezvous.protocol import SUPERSEDED, Hello, Keys, supersede
from flytekitplugins_safedist.rendezvous.settings import GroupSettings

PATIENT = 100.0
"""Seconds that mean "never" here: a test that needs it has failed."""

SPAWNER = multiprocessing.get_context("forkserver")
# torch is imported once; each node is a fork of that single-threaded process.
SPAWNER.set_forkserver_preload(["torch.distributed", "flytekitplugins_safedist.rendezvous.handler"])


# --- a node is a process that does what it is told through a pipe --------------------------------------------------


def node_main(pipe: Any, settings: GroupSettings) -> None:
    """Carry out ``(function, args)`` on this process's handler, and answer with ``(ok, value or exception)``."""
    from flytekitplugins_safedist.rendezvous.handler import SafedistHandler

    handler = SafedistHandler(settings)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(handler, pipe, *args)))
        except errors.SafedistError as error:
            pipe.send((False, error))
        except BaseException:
            pipe.send((False, RuntimeError(traceback.format_exc())))
            raise


class Node:
    """One node of the group: a real process."""

    def __init__(self, settings: GroupSettings) -> None:
        self.settings = settings
        self.pipe, theirs = SPAWNER.Pipe()
        self.process = SPAWNER.Process(target=node_main, args=(theirs, settings), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, function: Callable[..., Any], *args: Any) -> Node:
        """Tell, without waiting for the answer."""
        self.pipe.send((function, args))
        return self

    def answer(self) -> Any:
        """The answer; raises the error if it is one."""
        assert self.pipe.poll(PATIENT), f"node {self.settings.node_rank} hangs"
        ok, value = self.pipe.recv()
        if not ok:
            raise value
        return value

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.start(function, *args).answer()

    def error(self) -> errors.SafedistError:
        with pytest.raises(errors.RendezvousError) as caught:
            self.answer()
        return caught.value

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(PATIENT)

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        state = Path(f"/proc/{self.process.pid}/stat")
        while state.read_text().rpartition(")")[2].split()[0] != "T":
            os.sched_yield()  # the signal is delivered asynchronously; the kernel says when it has been

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def recreate(self) -> Node:
        return Node(self.settings)

    def end(self) -> int | None:
        """Let the process leave by itself; its exit code."""
        self.pipe.close()
        self.process.join(PATIENT)
        return self.process.exitcode


class Cluster:
    def __init__(self, port: int) -> None:
        self.base = GroupSettings(
            run_id="job",
            nodes=2,
            node_rank=0,
            host="localhost",
            port=port,
            heartbeat_interval=0.05,
            heartbeat_timeout=PATIENT,
            timeout=PATIENT,
        )
        self.started: list[Node] = []

    def node(self, rank: int, **changes: Any) -> Node:
        node = Node(replace(self.base, node_rank=rank, **changes))
        self.started.append(node)
        return node

    def nodes(self, count: int, **changes: Any) -> list[Node]:
        return [self.node(rank, nodes=count, **changes) for rank in range(count)]

    def again(self, node: Node) -> Node:
        self.started.append(node.recreate())
        return self.started[-1]

    def clean(self) -> None:
        for node in self.started:
            with suppress(ProcessLookupError):
                os.kill(node.process.pid, signal.SIGKILL)
            node.process.join()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    reserved = ReservedPort()
    made = Cluster(reserved.port)
    yield made
    made.clean()
    reserved.close()


# --- what nodes can be told (functions of this module, run in the node's process) -----------------------------------


def join(handler, pipe):
    info = handler.next_rendezvous()
    return handler.round, info.rank, info.world_size, handler.values["MASTER_PORT"]


def until_moved(handler, pipe):
    """What an agent does while its ranks run."""
    pause = threading.Event()
    while not handler.num_nodes_waiting():
        pause.wait(0.01)
    return True


def ask_once(handler, pipe):
    return handler.num_nodes_waiting()


def shutdown(handler, pipe):
    return handler.shutdown()


def close(handler, pipe, outcome):
    return handler.jobs.close("done", outcome)


def fail(handler, pipe, outcome):
    return handler.jobs.close("failed", outcome)


def how_it_ended(handler, pipe):
    return handler.jobs.end()


def outlive(handler, pipe, say=False):
    """What an agent does whose node 0 is lost: notice it while its ranks run, and join the next round."""
    try:
        while True:
            with suppress(errors.GroupClosedError):
                handler.num_nodes_waiting()
            handler.jobs.end()
            threading.Event().wait(0.01)
    except errors.StoreLostError as lost:
        go_over(handler, lost)
    if say:
        pipe.send((True, "node 0 is lost"))
    return join_outliving(handler, pipe)


def join_outliving(handler, pipe):
    """Join, however often node 0 is lost meanwhile."""
    while True:
        try:
            return join(handler, pipe)
        except errors.StoreLostError as lost:
            go_over(handler, lost)


def go_over(handler, lost):
    if not handler.outlive(lost):
        raise lost


def told(handler, pipe):
    known = handler.jobs.known()
    return known.round, sorted(known.restarts), known.lost, known.retaken


def tell_that_it_is_superseded(handler, pipe, port, store):
    """What nodes do that have gone over to a newer store, to the one at ``port``: in their own process."""
    group = handler._group
    older, me = Older(store, ("127.0.0.1",)), handler.node_rank
    Fence(older, port, group.keys, PATIENT, lambda raw: supersede(raw, group.keys, me)).start()


def spend(handler, pipe, limit, number):
    return handler.jobs.spend_restart(limit, round_no=number)


def until_beats(handler, pipe, node, more):
    pause, first = threading.Event(), handler.jobs.beats()[node]
    while handler.jobs.beats()[node] < first + more:
        pause.wait(0.01)


def join_stopping_before_arrival(handler, pipe):
    """Join, but say so and wait for a word before the arrival is counted: the window a ghost can be frozen in."""
    arrive = handler._group._arrive

    def stopping(generation, deadline):
        pipe.send((True, "about to arrive"))
        pipe.recv()
        return arrive(generation, deadline)

    handler._group._arrive = stopping
    return join(handler, pipe)


def go_on():
    """The word that a node which stopped before its arrival waits for."""


def until_arrivals(handler, pipe, generation, count):
    pause, key = threading.Event(), handler._group.keys.count(generation)
    while handler._group.control.call("test", lambda store: store.add(key, 0)) < count:
        pause.wait(0.01)


def move_without_a_wakeup(handler, pipe):
    """What is left of a node that was killed between moving the generation and waking the others."""
    key, number = handler._group.keys.generation, handler.round
    handler._group.control.call("test", lambda store: store.compare_set(key, str(number), str(number + 1)))


def claim_the_verdict(handler, pipe):
    """What is left of a node that was killed after it had undertaken to name the missing."""
    group = handler._group
    key = group.keys.judge(handler.round + 1)
    group.control.call("test", lambda store: store.compare_set(key, "", "77"))


def lose_patience(handler, pipe, seconds):
    """From now on wait no longer than that: a deadline that the first meeting must not have, on a slow machine."""
    group = handler._group
    group.settings = replace(group.settings, timeout=seconds)
    group.kept._seconds = seconds


def join_with_name_unknown_at_first(handler, pipe):
    """A fake: no DNS server can be had here, so the look-up itself is replaced until the name 'exists'."""
    real, asked, created = socket.getaddrinfo, [], threading.Event()

    def look_up(host, *rest, **options):
        asked.append(host)
        if len(asked) == 3:
            created.set()
        if not created.is_set():
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *rest, **options)

    socket.getaddrinfo = look_up
    return join(handler, pipe), len(asked) >= 3


def joined(nodes: list[Node]) -> list[Any]:
    for node in nodes:
        node.start(join)
    return [node.answer() for node in nodes]


def same_round(answers: list[Any]) -> int:
    """Every node is in the same round, with its own rank and the same worker store."""
    numbers, ports = {answer[0] for answer in answers}, {answer[3] for answer in answers}
    assert len(numbers) == len(ports) == 1
    assert [answer[1] for answer in answers] == list(range(len(answers)))
    assert {answer[2] for answer in answers} == {len(answers)}
    return numbers.pop()


# --- arriving -------------------------------------------------------------------------------------------------------


def test_nodes_that_wait_for_node_0_join_when_it_comes_last(cluster):
    others = [cluster.node(rank, nodes=3).start(join) for rank in (1, 2)]
    first = cluster.node(0, nodes=3)
    assert not any(node.pipe.poll() for node in others)
    same_round([first.do(join), *(node.answer() for node in others)])


def test_a_late_node_is_waited_for(cluster):
    first = cluster.node(0).start(join)
    late = cluster.node(1)
    assert not first.pipe.poll()
    answers = [late.do(join), first.answer()]
    same_round(answers[::-1])


def test_a_name_that_is_not_in_the_dns_yet_is_waited_for(cluster):
    first = cluster.node(0).start(join)
    answer, asked_again = cluster.node(1).do(join_with_name_unknown_at_first)
    assert asked_again
    same_round([first.answer(), answer])


def test_each_round_of_many_nodes_is_one_step_whoever_asks_for_it(cluster):
    nodes = cluster.nodes(8)
    number = same_round(joined(nodes))
    for step in range(1, 11):
        # All at once, as after a failed allreduce; each may be the one that moves the generation.
        assert same_round(joined(nodes)) == number + step


def test_only_one_node_asks_and_the_others_follow(cluster):
    nodes = cluster.nodes(4)
    number = same_round(joined(nodes))
    for node in nodes[:3]:
        node.start(until_moved)
    nodes[3].start(join)
    for node in nodes[:3]:
        assert node.answer()
        node.start(join)
    assert same_round([node.answer() for node in nodes]) == number + 1


# --- missing nodes are named everywhere -----------------------------------------------------------------------------


def test_every_node_names_the_missing_one_when_the_deadline_passes(cluster):
    present = [cluster.node(rank, nodes=4, timeout=5.0, names=("a", "b", "c", "d")) for rank in (0, 1, 3)]
    for node in present:
        node.start(join)
    found = [node.error() for node in present]
    assert all(type(error) is errors.RendezvousTimeoutError for error in found), found
    assert [error.what for error in found] == ["node 2 (c) of 4 did not arrive within 5 s"] * 3
    assert [error.where["node"] for error in found] == [0, 1, 3]
    assert all("missing: 2" in str(error) for error in found)


def test_a_missing_node_0_is_named_by_all_others(cluster):
    others = [cluster.node(rank, nodes=3, timeout=1.0).start(join) for rank in (1, 2)]
    for node in others:
        assert "node 0 is missing" in str(node.error())


def test_the_missing_are_named_although_the_node_that_undertook_to_do_so_died(cluster):
    nodes = cluster.nodes(2, shutdown_grace=0.2)
    same_round(joined(nodes))
    nodes[0].do(lose_patience, 1.5)
    nodes[0].do(claim_the_verdict)
    nodes[1].kill()
    assert nodes[0].start(join).error().what == "node 1 of 2 did not arrive within 1.5 s"


def test_a_node_that_comes_after_the_end_is_told_why_it_ended(cluster):
    present = cluster.node(0, nodes=2, timeout=0.5)
    assert "node 1" in str(present.start(join).error())
    late = cluster.node(1)
    assert late.start(join).error().what == "node 1 of 2 did not arrive within 0.5 s"


# --- a node dies and comes back -------------------------------------------------------------------------------------


def test_a_killed_node_is_replaced_and_everyone_starts_a_new_round(cluster):
    first, second, third = nodes = cluster.nodes(3)
    number = same_round(joined(nodes))
    first.start(until_moved)
    third.start(until_moved)
    second.kill()
    back = cluster.again(second).start(join)
    assert first.answer()
    assert third.answer()
    first.start(join)
    third.start(join)
    assert same_round([first.answer(), back.answer(), third.answer()]) > number


def lost_again_and_again(cluster, times, **settings):
    """Node 1 of 2 is killed in each round and comes back; its last process, and node 0, with what they wait for."""
    first, second = cluster.nodes(2, **settings)
    same_round(joined([first, second]))
    for _ in range(times - 1):
        first.start(until_moved)
        second.kill()
        second = cluster.again(second).start(join)
        assert first.answer()
        first.start(join)
        same_round([first.answer(), second.answer()])
    first.start(until_moved)
    second.kill()
    return first, cluster.again(second).start(join)


@pytest.mark.end("the same worker is lost three times, and lives less than ten minutes each time it is back")
def test_a_node_that_dies_soon_after_it_is_back_is_replaced_twice_and_the_job_says_why_it_ends(cluster):
    first, second = lost_again_and_again(cluster, 3, about="Its container's memory is limited to 2.0 GiB.")
    error = second.error()
    assert type(error) is errors.GroupClosedError
    assert str(error).startswith("node 1 was lost 3 times, and lived less than 600 s each time it was back")
    assert error.what.endswith("memory is limited to 2.0 GiB.")
    with pytest.raises(errors.GroupClosedError, match="node 1 was lost 3 times"):
        first.answer()


def test_a_node_that_lives_for_long_between_its_losses_is_replaced_again(cluster):
    first, second = lost_again_and_again(cluster, 3, short_life=0.0)
    assert first.answer()
    first.start(join)
    same_round([first.answer(), second.answer()])


def test_a_node_killed_while_it_waited_is_not_counted(cluster):
    first, second, third = nodes = cluster.nodes(3)
    number = same_round(joined(nodes))
    second.start(join)
    first.do(until_arrivals, number + 1, 1)
    second.kill()
    back = cluster.again(second)
    assert back.do(join_stopping_before_arrival) == "about to arrive"
    # One more arrival and the round of the dead one would have three.
    first.start(join)
    third.start(join)
    back.start(go_on)
    assert same_round([first.answer(), back.answer(), third.answer()]) == number + 2


def test_a_node_that_keeps_coming_back_ends_the_job_for_all(cluster):
    first, second = nodes = cluster.nodes(2, max_replacements=1)
    same_round(joined(nodes))
    second.kill()
    back = cluster.again(second).start(join)
    same_round([first.do(join), back.answer()])
    back.kill()
    again = cluster.again(back).start(join)
    for node in (again, first.start(join)):
        error = node.error()
        assert type(error) is errors.GroupClosedError
        assert "node 1 came back, but 1 replacements are used up" in str(error)


# --- ghosts ---------------------------------------------------------------------------------------------------------


def test_a_ghost_is_fenced_off_and_can_end_nothing(cluster):
    first, ghost = nodes = cluster.nodes(2)
    same_round(joined(nodes))
    ghost.freeze()
    back = cluster.again(ghost).start(join)
    number = same_round([first.do(join), back.answer()])
    ghost.thaw()
    for attempt in (until_moved, join):
        error = ghost.start(attempt).error()
        assert type(error) is errors.FencedError
        assert "process 2 owns the slot" in str(error)
    assert type(ghost.start(close, "by a ghost").error()) is errors.FencedError
    assert ghost.do(shutdown)
    assert first.do(how_it_ended) is None
    assert same_round(joined([first, back])) == number + 1


def test_a_ghost_frozen_on_the_brink_of_arrival_does_not_complete_a_round(cluster):
    first, ghost = nodes = cluster.nodes(2)
    number = same_round(joined(nodes))
    assert ghost.do(join_stopping_before_arrival) == "about to arrive"
    back = cluster.again(ghost)
    assert back.do(join_stopping_before_arrival) == "about to arrive"
    ghost.start(go_on)  # it arrives now, in the round it had seen
    first.start(join)
    back.start(go_on)
    assert same_round([first.answer(), back.answer()]) == number + 2
    assert type(ghost.error()) is errors.FencedError


def test_a_paused_node_that_was_not_replaced_goes_on(cluster):
    first, second = nodes = cluster.nodes(2, heartbeat_timeout=0.3)
    number = same_round(joined(nodes))
    second.start(until_moved)
    second.freeze()
    first.do(until_beats, 0, 20)  # node 0 lives a second: three times the heartbeat timeout of the frozen one
    second.thaw()
    first.start(join)
    assert second.answer()
    assert same_round([second.do(join), first.answer()][::-1]) == number + 1


# --- node 0 is gone or frozen ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("waiting_in", [join, until_moved])
def test_a_frozen_node_0_is_an_error_and_not_a_hang(cluster, waiting_in):
    first, second, third = nodes = cluster.nodes(3, heartbeat_timeout=0.5)
    same_round(joined(nodes))
    third.start(until_moved)
    second.start(waiting_in)
    if waiting_in is join:
        assert third.answer()  # now node 1 has asked for a round and waits in it
        third.start(join)
    first.freeze()
    for node in (second, third):
        error = node.error()
        assert type(error) is errors.StoreLostError
        assert "no reply for 0.5 s" in str(error)
        assert "look at node 0's pod first" in str(error)
        # Nothing that hangs keeps the process from leaving.
        assert node.do(shutdown)
        assert node.end() == 0


@pytest.mark.parametrize("waiting_in", [join, until_moved])
def test_a_killed_node_0_is_known_at_once(cluster, waiting_in):
    first, second = nodes = cluster.nodes(2)
    same_round(joined(nodes))
    second.start(waiting_in)
    if waiting_in is join:
        first.do(until_moved)
    first.kill()
    assert type(second.error()) is errors.StoreLostError
    assert second.do(shutdown)
    assert second.end() == 0


def test_a_whole_group_forms_again_after_node_0_came_back_with_everyone(cluster):
    first, second = nodes = cluster.nodes(2)
    same_round(joined(nodes))
    first.kill()
    assert type(second.start(until_moved).error()) is errors.StoreLostError
    second.kill()
    assert same_round(joined([cluster.again(first), cluster.again(second)])) == 0


def test_those_who_outlive_node_0_meet_its_replacement_in_a_later_round_and_it_knows_the_budgets(cluster):
    first, second, third = nodes = cluster.nodes(3)
    number = same_round(joined(nodes))
    assert second.do(spend, 2, number) == 1
    first.do(until_beats, 0, 1)
    for node in (second, third):
        node.start(outlive)
    first.kill()
    again = cluster.again(first).start(join)
    after = same_round([again.answer(), second.answer(), third.answer()])
    assert after > number
    # The restart that was spent, one loss of node 0 although two nodes tell of it, and no place taken by a worker.
    assert [node.do(told) for node in (again, second, third)] == [(after, [number], 1, 0)] * 3
    assert again.do(spend, 2, after) == 2
    assert again.do(spend, 2, after + 1) is None


def test_node_0_that_is_lost_again_and_again_is_waited_for_each_time(cluster):
    first, second, third = nodes = cluster.nodes(3)
    number = same_round(joined(nodes))
    for losses in (1, 2, 3):
        for node in (second, third):
            node.start(outlive)
        first.kill()
        first = cluster.again(first).start(join)
        after = same_round([first.answer(), second.answer(), third.answer()])
        assert after > number
        number = after
        assert first.do(told) == (number, [], losses, 0)


def test_node_0_that_is_lost_while_the_others_wait_for_its_round_is_waited_for(cluster):
    first, second, third = nodes = cluster.nodes(3)
    number = same_round(joined(nodes))
    for node in (second, third):
        node.start(outlive)
    first.kill()
    between = cluster.again(first).start(join_stopping_before_arrival)
    assert between.answer() == "about to arrive"
    second.kill()  # the round cannot come together
    between.kill()
    last = [cluster.again(first).start(join), cluster.again(second).start(join_outliving)]
    assert same_round([last[0].answer(), last[1].answer(), third.answer()]) > number


def test_another_node_that_is_lost_with_node_0_comes_back_with_it(cluster):
    first, second, third = nodes = cluster.nodes(3)
    number = same_round(joined(nodes))
    third.start(outlive)
    second.kill()
    first.kill()
    back = [cluster.again(second).start(join_outliving), cluster.again(first).start(join)]
    assert same_round([back[1].answer(), back[0].answer(), third.answer()]) > number


def test_node_0_that_is_lost_before_the_first_round_is_waited_for(cluster):
    first = cluster.node(0).start(join)
    second = cluster.node(1, heartbeat_interval=0.05).start(join_stopping_before_arrival)
    assert second.answer() == "about to arrive"
    first.kill()
    second.pipe.send((go_on, ()))
    assert type(second.error()) is errors.StoreLostError
    second.start(outlive)
    again = cluster.again(first).start(join)
    assert second.answer() == "about to arrive"
    second.pipe.send((go_on, ()))
    assert same_round([again.answer(), second.answer()]) >= 1


def test_a_frozen_node_0_that_wakes_before_anybody_took_its_place_goes_on(cluster):
    first, second, third = nodes = cluster.nodes(3, heartbeat_timeout=0.5)
    number = same_round(joined(nodes))
    first.freeze()
    for node in (second, third):
        node.start(outlive, True)
    for node in (second, third):
        assert node.answer() == "node 0 is lost"
    first.thaw()
    assert first.do(until_moved)
    assert same_round([first.do(join), second.answer(), third.answer()]) > number
    assert first.do(told)[2] == 0  # its store was not lost


def test_a_node_0_that_nobody_replaces_is_named_by_all_who_outlived_it(cluster):
    first, second, third = nodes = cluster.nodes(3)
    same_round(joined(nodes))
    for node in (second, third):
        node.do(lose_patience, 2.0)
        node.start(outlive)
    first.kill()
    for node in (second, third):
        error = node.error()
        assert type(error) is errors.NotReplacedError
        assert error.what == "node 0 was lost, and none took its place within 2 s"


def test_a_worker_that_outlived_node_0_takes_no_place_from_its_own_replacement(cluster):
    first, second = nodes = cluster.nodes(2, heartbeat_timeout=0.5)
    number = same_round(joined(nodes))
    second.freeze()  # cut off: it will find neither the loss of node 0 nor its own replacement
    first.kill()
    after = same_round(joined([cluster.again(first), cluster.again(second)]))
    second.thaw()
    ghost = second.start(outlive)
    assert type(ghost.error()) is errors.FencedError
    assert (number, after) == (0, 0)


def test_losses_of_node_0_beyond_the_budget_end_the_job_for_all(cluster):
    first, second, third = nodes = cluster.nodes(3, max_replacements=1)
    same_round(joined(nodes))
    for losses in (1, 2):
        for node in (second, third):
            node.start(outlive)
        first.kill()
        first = cluster.again(first).start(join)
        if losses == 1:
            same_round([first.answer(), second.answer(), third.answer()])
    for node in (first, second, third):
        error = node.error()
        assert type(error) is errors.GroupClosedError
        assert "node 0 was lost, and 1 replacements are used up" in str(error)


def test_a_node_0_that_comes_back_when_the_others_are_on_a_newer_store_ends_itself(cluster):
    older, ghost = nodes = cluster.nodes(2)  # they cannot know of the other two: another run would be another port
    same_round(joined(nodes))
    for node in nodes:
        node.start(until_moved)
    reserved = ReservedPort()
    newer = [cluster.node(rank, port=reserved.port) for rank in (0, 1)]
    same_round(joined(newer))
    newer[1].do(tell_that_it_is_superseded, cluster.base.port, "a store that was there before")
    newer[1].do(tell_that_it_is_superseded, cluster.base.port, store_of(cluster))
    assert type(older.error()) is errors.FencedError
    error = ghost.error()
    assert (type(error), error.seen) == (errors.StoreLostError, SUPERSEDED)
    # Nothing is ended where the others are now.
    assert newer[0].do(ask_once) == newer[1].do(ask_once) == 0
    reserved.close()


def store_of(cluster: Cluster) -> str:
    """The id of the store at the cluster's port."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", cluster.base.port, is_master=False, wait_for_workers=False)
    return Hello.parse(bytes(store.get(Keys("job").hello))).store


def test_an_end_in_failure_that_node_0_did_not_upload_is_brought_to_its_replacement(cluster):
    first, second = nodes = cluster.nodes(2)
    same_round(joined(nodes))
    second.do(fail, "the root cause")
    assert second.do(how_it_ended).text == "the root cause"
    first.kill()
    second.start(outlive)
    again = cluster.again(first).start(join)
    for node in (again, second):
        assert type(node.error()) is errors.GroupClosedError
    assert again.do(how_it_ended).text == "the root cause"


# --- accidents in between -------------------------------------------------------------------------------------------


def test_a_move_whose_author_died_before_waking_the_others_is_noticed(cluster):
    nodes = cluster.nodes(3)
    number = same_round(joined(nodes))
    nodes[2].do(move_without_a_wakeup)
    for node in nodes:
        node.start(until_moved)
    assert all(node.answer() for node in nodes)
    assert same_round(joined(nodes)) == number + 1


def test_restarts_are_spent_once_per_round_by_racing_processes_and_never_beyond_the_limit(cluster):
    nodes = cluster.nodes(4)
    same_round(joined(nodes))
    for number in range(50):
        for node in nodes:
            node.start(spend, 30, number)
        assert [node.answer() for node in nodes] == [number + 1 if number < 30 else None] * 4


# --- the end --------------------------------------------------------------------------------------------------------


def test_node_0_stays_until_the_others_have_read_the_end(cluster):
    first, second = nodes = cluster.nodes(2)
    same_round(joined(nodes))
    first.do(close, "model is uploaded")
    first.start(shutdown)
    # Frozen or slow, the other one still finds the store and the outcome.
    assert second.do(how_it_ended).text == "model is uploaded"
    assert not first.pipe.poll()
    assert second.do(shutdown)
    assert first.answer()
    assert first.end() == 0


def test_node_0_does_not_wait_for_the_dead_longer_than_it_lingers(cluster):
    first, second = nodes = cluster.nodes(2, shutdown_grace=0.5)
    same_round(joined(nodes))
    second.kill()
    assert first.do(shutdown)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", cluster.base.port))
