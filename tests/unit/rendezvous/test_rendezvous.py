"""Rendezvous: stored values, parameters, one and two nodes, job-wide counters; real TCPStores on loopback."""

from __future__ import annotations

import os
import pickle
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry

from flytekitplugins_safedist import errors
from flytekitplugins_safedist.rendezvous import BACKEND, client, register, torchrun_handler
from flytekitplugins_safedist.rendezvous.client import ReservedPort, takes_listening_socket
from flytekitplugins_safedist.rendezvous.connections import allow_open_files
from flytekitplugins_safedist.rendezvous.failure import Failure
from flytekitplugins_safedist.rendezvous.handler import SafedistHandler, handler_from_parameters
from flytekitplugins_safedist.rendezvous.heartbeat import Heartbeat
from flytekitplugins_safedist.rendezvous.jobstore import TEXT_LIMIT
from flytekitplugins_safedist.rendezvous.protocol import End, Go, Hello, Keys, State, describe_nodes
from flytekitplugins_safedist.rendezvous.rangelinks import RangeLinks
from flytekitplugins_safedist.rendezvous.settings import GroupSettings, RangeSettings
from tests.harness.procs import DEADLINE, until
from tests.harness.two_nodes import ALONE, one_node, reserved_port, together, two_nodes


@pytest.fixture
def alone() -> Iterator[SafedistHandler]:
    with one_node() as handler:
        yield handler


@pytest.fixture
def pair() -> Iterator[tuple[SafedistHandler, SafedistHandler]]:
    with two_nodes() as both:
        yield both


def until_moved(handler: SafedistHandler) -> None:
    """Ask as an agent asks: num_nodes_waiting is a poll and never blocks."""
    pause = threading.Event()
    while not handler.num_nodes_waiting():
        pause.wait(0.01)


# --- values in the store ------------------------------------------------------------------------------------------


def test_values_survive_the_store_as_text():
    go = Go(go=True, values={"MASTER_ADDR": "job-master-0", "MASTER_PORT": "1234"})
    assert Go.parse(go.text().encode()) == go
    hello = Hello(nodes=4, store="abc", run="job")
    assert Hello.parse(hello.text().encode()) == hello
    end = End("timeout", 0, "node 3 did not arrive", (3,))
    assert State.parse(end.text_value().encode(), b"1 1 x") == State(-1, end, 2)
    assert State.parse(b"7", b"1 0 x") == State(7, None, 1)


def test_state_of_a_ghost_is_fenced_even_when_the_group_has_ended():
    ended = State(-1, End("done", 0, "over"), owner=2)
    with pytest.raises(errors.FencedError, match=r"node=1.*process 2 owns the slot.*process 1, which is this one"):
        ended.check(node=1, incarnation=1)


def test_missing_nodes_are_named_and_counted():
    assert describe_nodes((2,), ("a", "b", "c")) == "node 2 (c)"
    assert describe_nodes((0, 3), ("a",)) == "nodes 0 (a), 3"
    assert describe_nodes(tuple(range(40)), ()).endswith("15 and 24 more")


def test_errors_of_the_end_pickle_with_their_facts():
    error = End("timeout", 0, "node 3 of 4 did not arrive within 5 s", (3,)).error(node=1)
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, errors.RendezvousTimeoutError)
    assert str(copy) == str(error)
    assert "missing: 3" in str(copy)


# --- registration -------------------------------------------------------------------------------------------------


def test_entry_point_module_imports_no_torch():
    code = (
        "import sys, flytekitplugins_safedist.rendezvous as r; r.torchrun_handler();"
        "sys.exit(any(m == 'torch' or m.startswith('torch.') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_entry_point_and_register_agree():
    register()
    register()
    params = RendezvousParameters(BACKEND, "localhost:0", "job", 1, 1, node_rank=0)
    assert isinstance(rendezvous_handler_registry.create_handler(params), SafedistHandler)
    # What torch elastic does with the entry point: register again, which it refuses for another creator.
    rendezvous_handler_registry.register(BACKEND, torchrun_handler())


def test_parameters_with_problems_list_all_of_them():
    with pytest.raises(errors.ConfigError) as caught:
        handler_from_parameters(RendezvousParameters(BACKEND, " ", "job", 2, 4))
    assert [problem.field for problem in caught.value.problems] == ["nnodes", "node_rank", "endpoint"]


@pytest.mark.parametrize("node_rank", [-1, 2, "5"])
def test_parameters_with_an_impossible_node_rank_are_refused(node_rank):
    with pytest.raises(errors.ConfigError, match=r"node_rank=.*is not in 0\.\.1"):
        handler_from_parameters(RendezvousParameters(BACKEND, "h:1", "job", 2, 2, node_rank=node_rank))


def test_parameters_that_are_not_numbers_are_refused_together():
    params = RendezvousParameters(BACKEND, "h:1", "job", 2, 2, node_rank="one", timeout="soon", max_replacements=-1)
    with pytest.raises(errors.ConfigError) as caught:
        handler_from_parameters(params)
    assert [problem.field for problem in caught.value.problems] == ["node_rank", "timeout", "max_replacements"]


def test_parameters_from_torchrun_become_settings():
    params = RendezvousParameters(
        BACKEND, "node0:1234", "job", 2, 2, node_rank="1", timeout=900, heartbeat_timeout="30", max_replacements="3"
    )
    assert handler_from_parameters(params).settings == GroupSettings(
        run_id="job",
        nodes=2,
        node_rank=1,
        host="node0",
        port=1234,
        timeout=900,
        heartbeat_timeout=30,
        max_replacements=3,
    )


@pytest.mark.parametrize(("heartbeat_timeout", "heartbeat_interval"), [(600, 5.0), (6, 1.0)])
def test_hearts_beat_several_times_within_the_time_that_counts_as_lost(heartbeat_timeout, heartbeat_interval):
    params = RendezvousParameters(BACKEND, "h:1", "job", 2, 2, node_rank=0, heartbeat_timeout=heartbeat_timeout)
    assert handler_from_parameters(params).settings.heartbeat_interval == heartbeat_interval


def test_the_older_names_of_the_times_still_count_and_the_new_ones_first():
    older = {"silence": "9", "beat": "2", "linger": "3"}
    settings = handler_from_parameters(
        RendezvousParameters(BACKEND, "h:1", "job", 2, 2, node_rank=0, heartbeat_interval="1", **older)
    ).settings
    assert (settings.heartbeat_timeout, settings.heartbeat_interval, settings.shutdown_grace) == (9.0, 1.0, 3.0)
    with pytest.raises(errors.ConfigError, match="silence='soon' is not a number"):
        handler_from_parameters(RendezvousParameters(BACKEND, "h:1", "job", 2, 2, node_rank=0, silence="soon"))


# --- connections ---------------------------------------------------------------------------------------------------


def test_a_closed_connection_has_let_go_of_its_store_before_the_interpreter_ends():
    program = """
import threading
from flytekitplugins_safedist.rendezvous.client import Connection
leaving, may_go = threading.Event(), threading.Event()
class Store:  # as torch's: what it does when it is dropped takes a while, outside of the interpreter's lock
    def __del__(self):
        leaving.set()
        may_go.wait()
        print("dropped", flush=True)
connection = Connection.within(Store(), heartbeat_timeout=60, label="control")
connection.close()
leaving.wait()
threading.Timer(0.2, may_go.set).start()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "dropped\n"


# --- one node -----------------------------------------------------------------------------------------------------


def test_a_single_node_forms_round_after_round_with_a_fresh_port(alone):
    number, port = alone.round, alone.values["MASTER_PORT"]
    info = alone.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert alone.round == number + 1
    assert alone.values["MASTER_PORT"] != port
    assert info.bootstrap_store_info.master_addr == "127.0.0.1"
    assert info.bootstrap_store_info.master_port == int(alone.values["MASTER_PORT"])


def test_a_single_node_listens_nowhere():
    before = listening()
    handler = SafedistHandler(ALONE)
    handler.next_rendezvous()
    assert listening() == before
    handler.shutdown()


@pytest.mark.parametrize("leave", [SafedistHandler.shutdown, SafedistHandler.leave])
def test_a_single_node_that_left_keeps_no_thread(leave):
    before = set(threading.enumerate())
    handler = SafedistHandler(ALONE)
    handler.next_rendezvous()
    started = set(threading.enumerate()) - before
    assert len(started) == 4
    leave(handler)
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()


def test_node_0_listens_as_long_as_the_job_and_no_longer():
    before = listening()
    with reserved_port() as port:
        settings = replace(ALONE, nodes=2, port=port)
        nodes = SafedistHandler(settings), SafedistHandler(replace(settings, node_rank=1))
        together(*(node.next_rendezvous for node in nodes))
        assert {address.split(":")[1] for address in listening() - before} == {f"{port:04X}"}
        together(*(node.shutdown for node in nodes))
        assert listening() == before


def listening() -> set[str]:
    """Local addresses of this process's listening sockets (state 0A in /proc/net/tcp*), as hex."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            rows = [line.split() for line in lines][1:]
        found |= {row[1] for row in rows if row[3] == "0A" and row[9] in inodes}
    return found


def test_the_round_is_unknown_before_there_is_one():
    with pytest.raises(errors.RendezvousError, match="no round has come together"):
        _ = SafedistHandler(ALONE).round


@pytest.mark.parametrize(
    ("version", "takes"),
    [("2.5.1", False), ("2.7.1+cu126", False), ("2.8.0+cpu", True), ("2.13.0", True), ("3.0.0a0", True)],
)
def test_torch_takes_a_listening_socket_from_2_8_on(version, takes):
    assert takes_listening_socket(version) is takes


def test_the_store_also_serves_where_torch_must_bind_the_port_itself(monkeypatch):
    """Stands in for torch 2.5 to 2.7, by taking their branch with the torch that is here."""
    monkeypatch.setattr(client, "takes_listening_socket", lambda version: False)
    with reserved_port() as port:
        settings = replace(ALONE, nodes=2, port=port)
        nodes = SafedistHandler(settings), SafedistHandler(replace(settings, node_rank=1))
        together(*(node.next_rendezvous for node in nodes))
        with pytest.raises(errors.RendezvousError, match="cannot listen"):
            SafedistHandler(settings).next_rendezvous()
        together(*(node.shutdown for node in nodes))


def test_a_taken_port_is_one_clear_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        handler = SafedistHandler(replace(ALONE, nodes=2, port=taken.getsockname()[1]))
        with pytest.raises(errors.RendezvousError, match=r"cannot listen \[port=\d+\] \(seen: Address already in use"):
            handler.next_rendezvous()


def test_a_reserved_port_is_kept_from_others_and_free_for_torch():
    from torch.distributed import TCPStore

    reserved = ReservedPort()
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind(("", reserved.port))
    for use_libuv in (True, False):
        store = TCPStore("127.0.0.1", reserved.port, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
        assert store.port == reserved.port
        del store
    reserved.close()


def test_too_few_open_files_for_the_group_are_known_before_anybody_waits():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[0], 512), limits[1]))
        allow_open_files(600)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (600, limits[1])
        with pytest.raises(errors.RendezvousError, match=rf"seen: {limits[1]} open files at most.*ulimit -Hn"):
            allow_open_files(limits[1] + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# --- two nodes ----------------------------------------------------------------------------------------------------


def test_both_nodes_get_their_own_rank_and_the_same_worker_store(pair):
    infos = together(*(node.next_rendezvous for node in pair))
    assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2)]
    assert len({info.bootstrap_store_info.master_port for info in infos}) == 1
    assert pair[0].use_agent_store is False


def test_what_node_0_leads_with_reaches_every_node_of_the_round(pair):
    first, second = pair
    first.prepare_round = lambda generation: {"horovod": f"10.0.0.1:{generation}"}
    together(first.next_rendezvous, second.next_rendezvous)
    assert second.values["horovod"] == f"10.0.0.1:{first.round}"
    assert dict(second.values) == dict(first.values)
    assert second.round == first.round


def test_the_store_given_to_the_agent_is_shared_within_a_round_and_fresh_in_the_next(pair):
    old = together(*(node.next_rendezvous for node in pair))
    old[0].store.set("key", "of the old round")
    assert old[1].store.get("key") == b"of the old round"
    new = together(*(node.next_rendezvous for node in pair))
    assert not new[1].store.check(["key"])


def test_rounds_form_even_when_the_connection_that_waits_hears_nothing_any_more(pair):
    first, second = pair
    before = first.round
    second._group.links.wakeup.wait_for_key("a key that nobody writes")
    for step in (1, 2):
        first.request_round()
        until_moved(second)
        together(first.next_rendezvous, second.next_rendezvous)
        assert (first.round, second.round) == (before + step, before + step)


def test_asking_for_a_new_round_is_seen_by_the_other_node_and_moves_once(pair):
    first, second = pair
    before = first.round
    together(first.request_round, second.request_round)
    until_moved(second)
    until_moved(first)
    together(first.next_rendezvous, second.next_rendezvous)
    assert (first.round, second.round) == (before + 1, before + 1)
    assert first.num_nodes_waiting() == 0


def test_a_closed_group_is_raised_from_num_nodes_waiting_and_join(pair):
    first, second = pair
    first.jobs.close("failed", "rank 3 raised ValueError")
    with pytest.raises(errors.GroupClosedError, match=r"closed by node=0.*failed: rank 3 raised ValueError"):
        until_moved(second)
    assert second.is_closed()
    with pytest.raises(errors.GroupClosedError):
        second.next_rendezvous()


def test_the_first_one_to_close_gives_the_reason(pair):
    ends = together(lambda: pair[0].jobs.close("done", "by 0"), lambda: pair[1].jobs.close("failed", "by 1"))
    assert ends[0] == ends[1]
    assert pair[0].jobs.end() == ends[0]


def test_leaving_without_closing_keeps_the_group_open(pair):
    first, second = pair
    second.leave()
    assert first.jobs.end() is None
    with pytest.raises(errors.RendezvousError, match="not in the group"):
        second.jobs.end()


def test_a_group_of_another_size_is_refused():
    with reserved_port() as port, ThreadPoolExecutor(1) as pool:
        settings = replace(ALONE, nodes=2, port=port)
        leader, second = SafedistHandler(settings), SafedistHandler(replace(settings, node_rank=1))
        waiting = pool.submit(leader.next_rendezvous)
        with pytest.raises(errors.RendezvousError, match=r"another group.*seen: 2 nodes.*expected: 3 nodes"):
            SafedistHandler(replace(settings, nodes=3, node_rank=2)).next_rendezvous()
        second.next_rendezvous()
        waiting.result()
        together(leader.shutdown, second.shutdown)


def test_another_jobs_store_is_called_that_by_the_node_that_comes_and_by_the_host(pair, caplog):
    settings = replace(pair[0].settings, run_id="other", node_rank=1, timeout=2)
    seen = rf"\[store=localhost:{settings.port}, host=.*seen: run id 'job'; expected: run id 'other'.*which pod"
    with pytest.raises(errors.StoreLostError, match=rf"^another job's node answers at this job's address {seen}"):
        SafedistHandler(settings).next_rendezvous()
    until(lambda: "of run id 'other'" in caplog.text, "the host says who came")
    assert "a node of another job came to this job's store and was turned away" in caplog.text
    in_a_range = RangeSettings(run_id="third", min_nodes=1, max_nodes=2, host="localhost", port=settings.port)
    with pytest.raises(errors.StoreLostError, match=r"^another job's node answers.*expected: run id 'third'"):
        RangeLinks(in_a_range, Keys("third")).open(time.monotonic() + 2, None)


# --- the job store ------------------------------------------------------------------------------------------------


def test_a_round_that_fails_on_both_nodes_spends_one_restart(pair):
    spent = together(*(lambda node=node: node.jobs.spend_restart(3, round_no=0) for node in pair))
    assert spent == [1, 1]
    assert len(pair[1].jobs.known().restarts) == 1


def test_the_budget_is_for_the_job_and_ends(pair):
    first, second = pair
    assert first.jobs.spend_restart(2, round_no=0) == 1
    assert second.jobs.spend_restart(2, round_no=1) == 2
    assert first.jobs.spend_restart(2, round_no=2) is None
    assert second.jobs.spend_restart(2, round_no=2) is None


def test_losing_nodes_has_a_budget_of_its_own(pair):
    assert pair[0].jobs.spend_restart(1, round_no=0) == 1
    assert not pair[0].jobs.replaced(1)
    assert pair[0].jobs.spend_replacement(1, round_no=1) == 1
    assert pair[0].jobs.spend_replacement(1, round_no=2) is None
    assert [pair[1].jobs.replaced(number) for number in (0, 1, 2)] == [False, True, False]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_cause_wins_over_consequences_whoever_reports_first(pair, order):
    torn = Failure(node=0, rank=1, time_ns=1_000, consequence=2, text="HorovodInternalError")
    cause = Failure(node=1, rank=5, time_ns=2_000, consequence=0, text="ValueError")
    for node in order:
        pair[node].jobs.report(0, (torn, cause)[node])
    assert pair[0].jobs.wait_reports(0, timeout=60) == (cause, ())
    assert pair[1].jobs.root_cause(0) == cause
    assert pair[1].jobs.root_cause(1) is None


def test_two_failures_in_one_second_are_ordered_by_nanoseconds(pair):
    early, late = (Failure(n, n * 2, 1_000_000_000 + n, consequence=0, text="") for n in (0, 1))
    assert pair[1].jobs.report(0, late) == late
    assert pair[0].jobs.report(0, early) == early
    assert pair[1].jobs.report(0, late) == early


def test_a_node_that_does_not_report_is_named(pair):
    pair[0].jobs.report(4, None)
    assert pair[0].jobs.wait_reports(4, timeout=0.05) == (None, (1,))


def test_a_node_that_leaves_is_named_and_not_waited_for(pair):
    first, second = pair
    second.jobs.leave_round(second.round, "told to stop")
    first.jobs.report(first.round, None)
    assert first.jobs.wait_reports(first.round, timeout=600) == (None, (1,))
    assert first.jobs.left(first.round) == {1: "told to stop"}


def test_a_node_that_has_reported_before_it_leaves_is_not_named(pair):
    first, second = pair
    for node in pair:
        node.jobs.report(node.round, None)
    second.jobs.leave_round(second.round, "told to stop")
    assert first.jobs.wait_reports(first.round, timeout=600) == (None, ())


def successor(node: SafedistHandler, pool: ThreadPoolExecutor) -> tuple[SafedistHandler, Future[object]]:
    """A new process in a node's place, on its way into the next round."""
    new = SafedistHandler(node.settings)
    return new, pool.submit(new.next_rendezvous)


def test_a_new_process_ends_the_wait_for_the_word_of_the_one_before_it(pair):
    first, lost = pair
    with ThreadPoolExecutor(1) as pool:
        new, joining = successor(lost, pool)
        first.jobs.report(first.round, None)
        first.request_round()
        assert first.jobs.wait_reports(first.round, timeout=600) == (None, (1,))
        first.next_rendezvous()
        joining.result()
        assert new.round == first.round
        new.leave()


def test_a_new_process_for_a_node_whose_ranks_had_succeeded_ends_no_round_and_learns_the_end(pair):
    first, lost = pair
    lost.jobs.mark_done(lost.round)
    with ThreadPoolExecutor(1) as pool:
        new, joining = successor(lost, pool)
        until_claimed(lost)
        assert not first.num_nodes_waiting()
        first.jobs.mark_done(first.round)
        assert first.jobs.all_done(first.round)
        assert first.jobs.finish(first.round)
        with pytest.raises(errors.GroupClosedError, match="seen: done"):
            joining.result()
        new.leave()


def test_a_new_process_for_a_node_whose_ranks_had_succeeded_takes_part_in_the_next_round(pair):
    first, lost = pair
    lost.jobs.mark_done(lost.round)
    with ThreadPoolExecutor(1) as pool:
        new, joining = successor(lost, pool)
        until_claimed(lost)
        first.next_rendezvous()
        joining.result()
        assert new.round == first.round
        new.leave()


def until_claimed(lost: SafedistHandler) -> None:
    """Until another process has taken a node's place, as its agent learns it."""
    with pytest.raises(errors.FencedError):
        until_moved(lost)


def test_that_it_is_uploaded_is_written_once_and_waited_for(pair):
    first, second = pair
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.jobs.wait_uploaded, 60)
        first.jobs.set_uploaded("a")
        assert waiting.result() == "a"
    second.jobs.set_uploaded("b")
    assert first.jobs.wait_uploaded(60) == "a"


def test_uploaded_is_seen_even_when_the_group_is_closed_right_after(pair):
    first, second = pair
    first.jobs.set_uploaded("outputs.pb")
    first.jobs.close("done", "")
    assert second.jobs.wait_uploaded(60) == "outputs.pb"


def test_waiting_for_an_upload_goes_on_past_the_end_until_node_0_says_that_there_is_none(pair, monkeypatch):
    first, second = pair
    looked, call = threading.Event(), second.jobs._call
    jobs = second.jobs
    monkeypatch.setattr(jobs, "_call", lambda what, op: looked.set() or call(what, op))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(jobs.wait_uploaded, 600)
        first.jobs.close("failed", "")
        for _ in range(2):  # it looks again, although the job has ended
            looked.clear()
            assert looked.wait(DEADLINE)
        first.jobs.set_not_uploaded("storage outage")
        with pytest.raises(errors.GroupClosedError, match="storage outage"):
            waiting.result()


def test_waiting_for_an_upload_ends_when_node_0_sends_no_heartbeat_while_another_holds_the_store(pair, monkeypatch):
    group = pair[1]._group
    monkeypatch.setattr(type(group), "uploader_beat", lambda _: "the beat of a node that is gone")
    monkeypatch.setattr(type(group), "heartbeat_timeout", property(lambda _: 0.01))
    with pytest.raises(errors.NodeLostError, match="node 0 sends no heartbeat, and has not reported its upload"):
        pair[1].jobs.wait_uploaded(DEADLINE)


def test_who_was_woken_rests_again_after_one_look():
    class Beat(Heartbeat):
        looks = 0

        def moved(self) -> bool:
            return False

        def _look(self) -> None:
            self.looks += 1

    beat = Beat(3600.0)
    beat.begin()
    until(lambda: beat.looks == 1, "the first look")
    beat._wake.set()
    until(lambda: beat.looks >= 2 and not beat._wake.is_set(), "rest after the second look")
    assert beat.looks == 2
    beat.stop()


def test_waiting_for_an_upload_has_a_deadline(pair):
    with pytest.raises(
        errors.RendezvousTimeoutError, match=r"without success for node 0 to upload.*nothing for 0\.05 s"
    ):
        pair[1].jobs.wait_uploaded(0.05)


@pytest.mark.parametrize("letter", ["x", "語", "😀", '"', "\udce9"])
def test_of_a_note_that_is_too_long_both_ends_are_sent(pair, letter):
    pair[1].jobs.close("failed", f"start {letter * TEXT_LIMIT} end")
    end = pair[0].jobs.end()
    assert end.text.startswith("start ")
    assert end.text.endswith(" end")
    assert len(end.text.encode()) <= TEXT_LIMIT


def test_heartbeats_count_up_for_every_node(pair):
    pause = threading.Event()
    while min(pair[0].jobs.beats()) < 3:
        pause.wait(0.01)
