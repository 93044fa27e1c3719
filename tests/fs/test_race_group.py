"""once_*, barrier, shared_scope, publish and download_once among real processes, over files and over a torch store.

"Nodes" are simulated here: groups of processes of one machine with different GROUP_RANK, and FUSE mounts as their
file systems. The containers tests do it with machines' worth of isolation.
"""

from __future__ import annotations

import hashlib
import http.server
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from flytekitplugins_safedist.errors import (
    DownloadError,
    FsError,
    FsTimeoutError,
    PublishError,
    WorkerLostError,
    WorkFailedError,
)
from flytekitplugins_safedist.fs import (
    atomic_dir,
    barrier,
    default_group,
    download_once,
    exchange,
    file_group,
    identity_from_env,
    is_published,
    once_per_job,
    once_per_node,
    publish,
    shared_scope,
    sweep,
    torch_group,
    use_group,
    wait_for,
)
from tests.fs.ranks import pause, processes, rank_env
from tests.harness.fusefs import FuseMount, require
from tests.harness.procs import until
from tests.harness.product import fs_context as context
from tests.harness.product import once, process
from tests.harness.product import process_tree as descendants

LONG = 3600.0  # no test waits for this: an outcome within its own bound shows that nothing waited for a time-out


@pytest.fixture(params=["files", "store"])
def meet(request, tmp_path):
    """A function that gives the calling rank its group."""
    if request.param == "files":
        yield lambda: use_group(file_group(tmp_path / "notes", identity=identity_from_env(os.environ)))
        return
    import torch.distributed as dist

    def serve() -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
        pause(str(store.port))

    # In a process of its own: to fork one that has the store's threads can deadlock the child.
    with processes([(serve,)]) as (server,):
        port = int(str(server.next_message()))

        def connect() -> None:
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
            use_group(torch_group(store, identity=identity_from_env(os.environ)))

        yield connect


@contextmanager
def ranks(count, work, *, meet=None, per_node=None):
    """``work(rank)`` in ``count`` processes with torchrun's environment."""

    def start(rank):
        if meet is not None:
            meet()
        return work(rank)

    envs = [rank_env(rank, count, per_node) for rank in range(count)]
    with processes([(start, rank) for rank in range(count)], envs) as started:
        yield started


def _values(started):
    return [one.outcome(within=60).get() for one in started]


def _note(place: Path, text: str) -> None:
    handle = os.open(place, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.write(handle, text.encode() + b"\n")
    os.close(handle)


# --- once ----------------------------------------------------------------------------------------------------------
def test_one_of_16_works_and_all_have_its_result(meet, tmp_path):
    def work(rank):
        def once_only():
            _note(tmp_path / "worked", str(rank))
            return {"path": tmp_path / "model", "bytes": b"\0", "by": rank}

        return once_per_job("load", once_only, timeout=LONG), once_per_job("load", once_only, timeout=LONG)

    with ranks(16, work, meet=meet) as started:
        results = _values(started)
    (worked,) = (tmp_path / "worked").read_text().split()
    assert all(result == ({"path": tmp_path / "model", "bytes": b"\0", "by": int(worked)},) * 2 for result in results)


def test_once_per_node_works_once_on_each_node(meet, tmp_path):
    def work(rank):
        return once_per_node("load", lambda: _note(tmp_path / "worked", str(rank)) or rank // 2, timeout=LONG)

    with ranks(4, work, meet=meet, per_node=2) as started:
        assert _values(started) == [0, 0, 1, 1]
    assert sorted(int(rank) // 2 for rank in (tmp_path / "worked").read_text().split()) == [0, 1]


@pytest.mark.parametrize(("places", "times"), [("shared", 1), ("one each", 2)])
def test_once_per_node_for_a_path_works_once_for_each_file_system_there(meet, tmp_path, places, times):
    def work(rank):
        place = tmp_path / ("volume" if places == "shared" else f"volume{rank // 2}")
        first = once_per_node("fill", lambda: _note(tmp_path / "worked", str(rank)) or rank, path=place)
        return first, once_per_node("fill", lambda: "again", path=place)

    with ranks(4, work, meet=meet, per_node=2) as started:
        results = _values(started)
    worked = [int(rank) for rank in (tmp_path / "worked").read_text().split()]
    assert len(worked) == times
    who = {0: worked[0], 1: worked[-1]} if times == 1 else {rank // 2: rank for rank in worked}
    assert results == [(who[rank // 2],) * 2 for rank in range(4)]


def test_an_error_reaches_everyone_with_its_traceback(meet):
    def work(rank):
        def fails():
            raise FileNotFoundError("no such bucket")

        return once_per_job("load", fails, timeout=LONG)

    with ranks(4, work, meet=meet) as started:
        errors = [one.outcome(within=60).error() for one in started]
    assert {type(error) for error in errors} == {WorkFailedError}
    assert all("FileNotFoundError: no such bucket" in str(error) and "in fails" in str(error) for error in errors)
    assert len({str(error) for error in errors}) == 1


def _stopping_work(rank):
    pause("working")
    return rank


@pytest.mark.parametrize("on_death", ["fail", "takeover"])
def test_a_worker_killed_in_the_middle_is_noticed_by_all(meet, on_death):
    def work(rank):
        if rank != 0:
            pause("ready")
        return once_per_job("load", lambda: _stopping_work(rank), on_death=on_death, timeout=LONG)

    with ranks(4, work, meet=meet) as started:
        started[0].until("working")
        for other in started[1:]:
            other.until("ready")
            other.resume()
        started[0].kill()
        if on_death == "fail":
            errors = [other.outcome(within=60).error() for other in started[1:]]
            assert {type(error) for error in errors} == {WorkerLostError}
            assert all("rank 0 (pid" in str(error) and "has died" in str(error) for error in errors)
        else:
            heir = next(other for other in _whoever_is_at(started[1:], "working"))
            heir.resume()
            values = _values(started[1:])
            assert len(set(values)) == 1
            assert values[0] in (1, 2, 3)


@pytest.mark.parametrize("end", ["works on", "fails", "is killed"])
def test_who_waits_on_the_workers_machine_is_woken_and_need_not_look(meet, end):
    """The looks are an hour apart here: without being woken, nobody would be done in this test's time."""

    def work(rank):
        once.LOOK_S = LONG

        def load():
            if end == "works on" and os.fork() == 0:
                parent = os.getppid()  # the child holds all that its parent has open, and ends with it
                descendants.die_with_parent(signal.SIGKILL)
                while os.getppid() == parent:
                    signal.pause()
                os._exit(0)
            pause("at work")
            if end == "fails":
                raise ValueError("no such bucket")
            return rank

        if rank != 0:
            pause("ready")
        return once_per_node("load", load, timeout=2 * LONG)

    with ranks(4, work, meet=meet) as started:
        started[0].until("at work")
        for other in started[1:]:
            other.until("ready")
            other.resume()
        for other in started[1:]:
            _until_it_rests(other.pid)
        if end == "is killed":
            started[0].kill()
            assert {type(other.outcome(within=60).error()) for other in started[1:]} == {WorkerLostError}
            return
        started[0].resume()
        if end == "fails":
            assert {type(one.outcome(within=60).error()) for one in started} == {WorkFailedError}
        else:
            assert _values(started) == [0] * 4


def test_work_that_kills_three_workers_is_not_begun_by_a_fourth(meet):
    with ranks(
        4,
        lambda rank: once_per_job("load", lambda: _stopping_work(rank), on_death="takeover", timeout=LONG),
        meet=meet,
    ) as started:
        left = list(started)
        for _ in range(3):
            worker = next(_whoever_is_at(left, "working"))
            worker.kill()
            left.remove(worker)
        assert isinstance(left[0].outcome(within=60).error(), WorkerLostError)


def _until_it_rests(pid: int) -> None:
    """Until a process sleeps in poll(2), as who waits for a wake-up does (proc(5), wchan)."""
    until(lambda: "poll" in Path(f"/proc/{pid}/wchan").read_text(), "a process that waits for a wake-up")


def _whoever_is_at(started, point):
    from multiprocessing.connection import wait

    for channel in wait([one._here for one in started], timeout=60):
        one = next(one for one in started if one._here is channel)
        one.until(point)
        yield one


def test_a_worker_killed_before_the_work_and_one_killed_after_it(meet):
    """Before: another one works. After: the result stands."""

    def work(rank):
        pause("before")
        value = once_per_job("load", lambda: rank, timeout=LONG)
        pause("after")
        return value

    with ranks(3, work, meet=meet) as started:
        for one in started:
            one.until("before")
        started[0].kill()
        started[1].resume()
        started[1].until("after")
        started[1].kill()
        started[2].resume()
        started[2].until("after")
        started[2].resume()
        assert started[2].outcome(within=60).get() == 1


def test_a_frozen_worker_elsewhere_is_given_up_after_the_lease_and_its_late_result_is_void(meet):
    def work(rank):
        from flytekitplugins_safedist.fs import default_group

        default_group().coordination.lease_s = 0.3
        once.LOOK_S, once.PULSE_S = 0.05, 0.05
        process.boot_id = once.boot_id = lambda: f"machine-{rank}"  # nobody can judge anybody: another machine
        if rank == 1:
            pause("ready")
        return once_per_job("load", lambda: _stopping_work(rank), timeout=LONG)

    with ranks(2, work, meet=meet) as started:
        started[0].until("working")
        started[1].until("ready")
        os.kill(started[0].pid, signal.SIGSTOP)
        started[1].resume()
        error = started[1].outcome(within=60).error()
        assert isinstance(error, WorkerLostError)
        assert "no sign of life" in str(error)
        os.kill(started[0].pid, signal.SIGCONT)
        started[0].resume()
        late = started[0].outcome(within=60).error()
        assert isinstance(late, WorkerLostError)
        assert "its result is void" in str(late)


def test_work_that_waits_for_itself_is_told_so(meet):
    with ranks(2, lambda rank: once_per_job("k", lambda: once_per_job("k", int), timeout=LONG), meet=meet) as started:
        errors = [one.outcome(within=60).error() for one in started]
    assert all("waits for itself" in str(error) for error in errors)


def test_work_that_failed_can_be_tried_again_by_all(meet, tmp_path):
    def work(rank):
        def first_fails():
            _note(tmp_path / "tries", str(rank))
            if len((tmp_path / "tries").read_text().split()) == 1:
                raise OSError("the server is starting")
            return "loaded"

        with pytest.raises(WorkFailedError, match="the server is starting"):
            once_per_job("load", first_fails, timeout=LONG)
        barrier("all have had the error", timeout=LONG)
        return once_per_job("load", first_fails, timeout=LONG)

    with ranks(3, work, meet=meet) as started:
        assert _values(started) == ["loaded"] * 3
    assert len((tmp_path / "tries").read_text().split()) == 2


def test_a_worker_that_is_alive_is_waited_for_unless_somebody_has_said_how_long(meet, monkeypatch):
    monkeypatch.setattr(context, "DEFAULT_TIMEOUT_S", 0.2)

    def work(rank):
        if rank == 0:
            return once_per_job("load", lambda: pause("at work") or "loaded")
        pause("ready")
        with pytest.raises(FsTimeoutError):
            once_per_job("load", lambda: "mine", timeout=0.2)
        pause("has given up")  # whoever said so; the next call has waited five times as long as nobody would
        return once_per_job("load", lambda: "mine")

    with ranks(2, work, meet=meet) as (worker, waiter):
        worker.until("at work")
        waiter.until("ready")
        waiter.resume()
        waiter.until("has given up")
        waiter.resume()
        assert not waiter._here.poll(1.0)
        worker.resume()
        assert _values([worker, waiter]) == ["loaded"] * 2


# --- barrier -------------------------------------------------------------------------------------------------------
def test_nobody_passes_a_barrier_before_all_have_come(meet, tmp_path):
    def work(rank):
        for turn in range(20):
            _note(tmp_path / f"came-{turn}", str(rank))
            barrier(timeout=LONG)
            if len((tmp_path / f"came-{turn}").read_text().split()) != 8:
                return f"turn {turn}"
            barrier("second", timeout=LONG)
        return exchange("names", f"rank {rank}", timeout=LONG)

    with ranks(8, work, meet=meet) as started:
        assert _values(started) == [[f"rank {rank}" for rank in range(8)]] * 8


def test_the_missing_are_named_to_all_who_came_and_to_who_comes_later(meet):
    def work(rank):
        if rank in (0, 1, 3):
            pause("absent")
        if rank == 2:
            wait = type(default_group().coordination).wait

            def come(*args):
                type(default_group().coordination).wait = wait
                pause("has come")
                return wait(*args)

            type(default_group().coordination).wait = come
        barrier(timeout=LONG if rank == 2 else 0.2)

    with ranks(4, work, meet=meet) as started:
        started[2].until("has come")
        started[2].resume()
        started[0].until("absent")
        started[0].resume()
        errors = [started[rank].outcome(within=60).error() for rank in (0, 2)]
        started[1].until("absent")
        started[1].resume()
        errors.append(started[1].outcome(within=60).error())
    for error in errors:
        assert isinstance(error, FsTimeoutError)
        assert "did not come to the meeting point: 1, 3" in str(error)


def test_rank_0_that_holds_the_store_does_not_leave_before_all_have_read_that_all_have_come(tmp_path):
    """A process group's store, and Horovod's, end with rank 0, and the last meeting would look like a fault."""

    def work(rank):
        import torch.distributed as dist

        from tests.harness.product import barriers, torch_coordination

        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
            (tmp_path / "port.new").write_text(str(store.port))
            (tmp_path / "port.new").rename(tmp_path / "port")
            pause("holds the store")
            see_off = barriers._see_off
            barriers._see_off = lambda *args: pause("all have come") or see_off(*args)
        else:
            port = int(wait_for(tmp_path / "port").read_text())
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
            look = torch_coordination.TorchCoordinationStore.wait
            torch_coordination.TorchCoordinationStore.wait = lambda *args: pause("looks") or look(*args)
        use_group(torch_group(store, identity=identity_from_env(os.environ)))
        barrier(timeout=LONG)
        return rank

    with ranks(2, work) as started:
        started[0].until("holds the store")
        started[1].until("looks")
        started[0].resume()
        started[0].until("all have come")
        started[0].resume()
        started[1].resume()
        assert _values(started) == [0, 1]


# --- shared_scope --------------------------------------------------------------------------------------------------
def _scopes(count, per_node, places, meet, **options):
    def work(rank):
        found = shared_scope(places[rank], timeout=LONG, **options)
        return found.kind, found.parts, found.leader

    with ranks(count, work, meet=meet, per_node=per_node) as started:
        found = _values(started)
    for place in places:
        assert [name for name in os.listdir(place) if "safedist" in name] == []
    assert len({(kind, parts) for kind, parts, _ in found}) == 1
    return found[0][0], [leader for _, _, leader in found]


def test_one_directory_for_all_is_the_jobs(meet, tmp_path):
    assert _scopes(4, 2, [tmp_path / "d"] * 4, meet) == ("job", [0, 0, 0, 0])


def test_a_directory_for_each_node_is_the_nodes(meet, tmp_path):
    places = [tmp_path / f"node{rank // 2}" for rank in range(4)]
    assert _scopes(4, 2, places, meet) == ("node", [0, 0, 2, 2])


def test_a_directory_for_each_rank_is_the_ranks(meet, tmp_path):
    assert _scopes(4, 2, [tmp_path / f"rank{rank}" for rank in range(4)], meet) == ("rank", [0, 1, 2, 3])


def test_the_users_word_wins_and_nothing_is_probed(meet, tmp_path):
    (tmp_path / "d").mkdir()
    assert _scopes(4, 2, [tmp_path / "d"] * 4, meet, declared="node") == ("node", [0, 0, 2, 2])


def test_one_slow_file_system_is_still_known_as_one(tmp_path):
    require()
    with ExitStack() as stack:
        # The directory itself is seen at once, so that nobody is kept back until the others' probes are old.
        late = {"late": [0.5, 2], "late_match": "data/*"}
        mounts = [
            stack.enter_context(FuseMount(tmp_path / "server", tmp_path / f"node{node}", seed=node, **late))
            for node in range(2)
        ]
        meet = lambda: use_group(file_group(tmp_path / "notes", identity=identity_from_env(os.environ)))  # noqa: E731
        places = [mounts[rank // 2].path / "data" for rank in range(4)]
        assert _scopes(4, 2, places, meet)[0] == "job"


def test_two_network_file_systems_are_told_apart_after_the_grace(tmp_path):
    require()
    with ExitStack() as stack:
        mounts = [
            stack.enter_context(FuseMount(tmp_path / f"server{node}", tmp_path / f"node{node}")) for node in range(2)
        ]
        meet = lambda: use_group(file_group(tmp_path / "notes", identity=identity_from_env(os.environ)))  # noqa: E731
        places = [mounts[rank // 2].path / "data" for rank in range(4)]
        assert _scopes(4, 2, places, meet, grace=0.5) == ("node", [0, 0, 2, 2])


def test_a_disk_and_a_network_file_system_are_told_apart_without_waiting(meet, tmp_path):
    """What lies on one kernel's disk no other file system will ever show: the grace, an hour here, is not spent."""
    require()
    with FuseMount(tmp_path / "server", tmp_path / "volume") as volume:
        places = [tmp_path / "disk", volume.path / "data"]
        assert _scopes(2, 1, places, meet, grace=LONG) == ("node", [0, 1])


def test_a_rank_that_cannot_write_there_is_named_to_all(meet, tmp_path):
    (tmp_path / "blocked").write_text("a file")

    def work(rank):
        shared_scope(tmp_path / ("blocked" if rank == 1 else "fine"), timeout=LONG)

    with ranks(3, work, meet=meet) as started:
        errors = [one.outcome(within=60).error() for one in started]
    assert all(isinstance(error, FsError) and "rank 1 cannot use the directory" in str(error) for error in errors)


# --- publish -------------------------------------------------------------------------------------------------------
def _publish_part(target, rank, **options):
    with publish(target, timeout=LONG, **options) as part:
        (part / f"shard-{rank}").write_text("whole")
        (part / "meta").mkdir(exist_ok=True)
        (part / "meta" / f"{rank}.json").write_text("{}")
    return sorted(os.listdir(target)), len(os.listdir(target / "meta"))


@pytest.mark.parametrize("commit", ["rename", "marker"])
def test_parts_of_all_ranks_become_one_directory(meet, tmp_path, commit):
    target = tmp_path / "out" / "ckpt"
    with ranks(6, lambda rank: _publish_part(target, rank, commit=commit), meet=meet) as started:
        seen = _values(started)
    names = ["meta", *(f"shard-{rank}" for rank in range(6))]
    assert seen == [((names if commit == "rename" else [".safedist-published", *names]), 6)] * 6
    assert is_published(target) == (commit == "marker")
    assert os.listdir(tmp_path / "out") == ["ckpt"]


def test_a_rank_that_dawdles_after_all_are_ready_finds_it_published(meet, tmp_path):
    def work(rank):
        from tests.harness.product import Occasion

        everyone_ready = Occasion.exchange

        def dawdle(call, point, text):
            reports = everyone_ready(call, point, text)
            if rank == 1 and point == "end":
                pause("all are ready")
            return reports

        Occasion.exchange = dawdle
        return _publish_part(tmp_path / "ckpt", rank)

    with ranks(2, work, meet=meet) as started:
        started[1].until("all are ready")
        assert started[0].outcome(within=60).get() == (["meta", "shard-0", "shard-1"], 2)
        started[1].resume()
        assert started[1].outcome(within=60).get() == (["meta", "shard-0", "shard-1"], 2)


@pytest.mark.parametrize("exists", ["fail", "replace"])
def test_a_committer_killed_after_its_rename_has_published_and_its_heir_leaves_it_so(meet, tmp_path, exists):
    target = tmp_path / "ckpt"
    if exists == "replace":
        with atomic_dir(target) as draft:
            (draft / "old").touch()

    def work(rank):
        from tests.harness.product import publishing

        publish_dir = publishing.publish_dir
        publishing.publish_dir = lambda *args, **how: publish_dir(*args, **how) or pause("renamed")
        with publish(target, exists=exists, shared="yes", timeout=LONG) as part:
            (part / str(rank)).touch()
        return sorted(os.listdir(target))

    with ranks(2, work, meet=meet) as started:
        committer = next(_whoever_is_at(started, "renamed"))
        committer.kill()
        (heir,) = (one for one in started if one is not committer)
        assert heir.outcome(within=60).get() == ["0", "1"]
    assert [name for name in os.listdir(tmp_path) if "ckpt" in name] == ["ckpt"]


def test_one_failing_rank_keeps_everything_back_and_is_named(meet, tmp_path):
    target = tmp_path / "ckpt"

    def work(rank):
        with publish(target, timeout=LONG) as part:
            (part / f"shard-{rank}").write_text("whole")
            if rank == 2:
                raise ValueError("nan in the weights")

    with ranks(4, work, meet=meet) as started:
        errors = [one.outcome(within=60).error() for one in started]
    assert isinstance(errors[2], ValueError)
    others = [error for rank, error in enumerate(errors) if rank != 2]
    assert {type(error) for error in others} == {PublishError}
    assert all("first_failed_rank=2" in str(error) and "nan in the weights" in str(error) for error in others)
    assert not target.exists()
    assert [name for name in os.listdir(tmp_path) if "ckpt" in name] == []


def test_two_ranks_with_the_same_file_name_are_told(meet, tmp_path):
    def work(rank):
        with publish(tmp_path / "ckpt", timeout=LONG) as part:
            (part / "model.pt").write_text(str(rank))

    with ranks(2, work, meet=meet) as started:
        errors = [one.outcome(within=60).error() for one in started]
    assert any("same name" in str(error) and "model.pt" in str(error) for error in errors)
    assert not (tmp_path / "ckpt").exists()


def test_separate_file_systems_are_refused_before_anything_is_written(meet, tmp_path):
    with ranks(2, lambda rank: _publish_part(tmp_path / f"r{rank}" / "ckpt", rank), meet=meet) as started:
        errors = [one.outcome(within=60).error() for one in started]
    assert all(isinstance(error, PublishError) and "do not share" in str(error) for error in errors)


def test_a_rank_killed_while_it_writes_leaves_nothing_visible(meet, tmp_path):
    def work(rank):
        with publish(tmp_path / "ckpt", timeout=1, shared="yes") as part:
            (part / f"shard-{rank}").write_text("half")
            if rank == 1:
                pause("writing")

    with ranks(3, work, meet=meet) as started:
        started[1].until("writing")
        started[1].kill()
        errors = [started[rank].outcome(within=60).error() for rank in (0, 2)]
    assert all(isinstance(error, FsTimeoutError) and "meeting point: 1 [" in str(error) for error in errors)
    assert not (tmp_path / "ckpt").exists()


def test_threads_that_publish_at_once_publish_each_their_own(meet, tmp_path):
    def work(rank):
        opened = threading.Barrier(2, timeout=60)

        def one(name):
            with publish(tmp_path / name, timeout=60) as part:
                (part / f"{name}-{rank}").touch()
                opened.wait()

        # Each rank's threads begin in another order.
        names = ["model", "optimizer"][:: 1 if rank else -1]
        with ThreadPoolExecutor(2) as pool:
            for name, ended in [(name, pool.submit(one, name)) for name in names]:
                assert ended.exception() is None, name
        return True

    with ranks(2, work, meet=meet) as started:
        assert _values(started) == [True, True]
    for name in ("model", "optimizer"):
        assert sorted(os.listdir(tmp_path / name)) == [f"{name}-0", f"{name}-1"]


def test_ranks_that_mean_places_of_one_name_are_told_and_publish_nothing(meet, tmp_path):
    def work(rank):
        with publish(tmp_path / f"place{rank}" / "ckpt", shared="yes", timeout=1) as part:
            (part / str(rank)).touch()

    with ranks(2, work, meet=meet) as started:
        errors = [str(one.outcome(within=60).error()) for one in started]
    # One gives up first, and the other hears that; on a slow machine both give up.
    assert any("say key=" in error for error in errors), errors
    assert not any((tmp_path / f"place{rank}" / "ckpt").exists() for rank in range(2))


def test_a_rank_that_fails_before_it_begins_tells_the_others_and_is_not_behind_afterwards(meet, tmp_path):
    (tmp_path / "file").touch()

    def work(rank):
        first = tmp_path / ("file" if rank == 1 else "place") / "ckpt"
        with pytest.raises(FsError) as caught, publish(first, key="ckpt", shared="yes", timeout=LONG):
            pass
        with publish(tmp_path / "place" / "ckpt", key="ckpt", shared="yes", timeout=60) as part:
            (part / str(rank)).touch()
        return str(caught.value)

    with ranks(2, work, meet=meet) as started:
        other, failed = _values(started)
    assert "a file is in the way" in failed
    assert "first_failed_rank=1" in other
    assert "a file is in the way" in other
    assert sorted(os.listdir(tmp_path / "place" / "ckpt")) == ["0", "1"]


def test_ranks_that_mean_different_things_publish_nothing(meet, tmp_path):
    def work(rank):
        with publish(tmp_path / "ckpt", exists="replace" if rank else "keep", timeout=LONG) as part:
            (part / str(rank)).touch()

    with ranks(2, work, meet=meet) as started:
        errors = [str(one.outcome(within=60).error()) for one in started]
    assert all("mean different things" in error and "rank 1: ckpt, commit='rename'" in error for error in errors)
    assert not (tmp_path / "ckpt").exists()


def test_sweep_spares_what_a_living_group_writes_when_the_rank_that_named_it_is_dead(meet, tmp_path):
    def work(rank):
        with publish(tmp_path / "ckpt", shared="yes", timeout=LONG) as part:
            (part / str(rank)).touch()
            pause("writing")

    with ranks(2, work, meet=meet) as started:
        started[0].until("writing")
        (draft,) = (name for name in os.listdir(tmp_path) if "ckpt" in name)
        started[1].until("writing")
        proposer = next(one for one in started if f"-{one.pid}-" in draft)
        (other,) = (one for one in started if one is not proposer)
        proposer.kill()
        assert sweep(tmp_path) == []
        other.kill()
        assert sweep(tmp_path) == [tmp_path / draft]
    assert not (tmp_path / draft).exists()


def test_sweep_takes_the_probes_of_the_dead(meet, tmp_path):
    place = tmp_path / "place"

    def work(rank):
        if rank == 0:
            shared_scope(place, timeout=LONG)
        pause("not coming")

    with ranks(2, work, meet=meet) as started:
        started[1].until("not coming")
        until(lambda: place.exists() and os.listdir(place), "a probe")
        started[0].kill()
        (probe,) = os.listdir(place)
        assert sweep(place) == [place / probe]


# --- download_once -------------------------------------------------------------------------------------------------
def test_a_directory_is_fetched_once_per_shared_file_system(meet, tmp_path):
    with atomic_dir(tmp_path / "bucket") as source:
        (source / "a").write_text("1")
        (source / "sub").mkdir()
        (source / "sub" / "b").write_text("2")

    def work(rank):
        from tests.harness.product import downloads

        plain = downloads._by_fsspec
        downloads._by_fsspec = lambda *args, **kw: _note(tmp_path / "fetched", str(rank)) or plain(*args, **kw)
        place = download_once(tmp_path / "bucket", tmp_path / f"node{rank // 2}" / "data")
        return (place / "a").read_text() + (place / "sub" / "b").read_text()

    with ranks(4, work, meet=meet, per_node=2) as started:
        assert _values(started) == ["12"] * 4
    assert sorted(int(rank) // 2 for rank in (tmp_path / "fetched").read_text().split()) == [0, 1]


class _Server(http.server.BaseHTTPRequestHandler):
    body, promised = b"x" * 200_000, 200_000

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(self.promised))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *args):
        pass


@pytest.fixture
def web():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/model?signature=secret"
    server.shutdown()
    server.server_close()


def test_a_file_with_another_digest_than_asked_for_is_fetched_anew(tmp_path, web):
    (tmp_path / "model").write_bytes(b"of last week")
    assert download_once(web, tmp_path / "model").read_bytes() == b"of last week"
    digest = hashlib.sha256(_Server.body).hexdigest()
    assert download_once(web, tmp_path / "model", sha256=digest).read_bytes() == _Server.body


def test_a_digest_of_a_directory_is_refused(tmp_path):
    with pytest.raises(DownloadError, match="a directory has no digest"):
        download_once(f"{tmp_path}/", tmp_path / "copy", sha256="0" * 64)


def test_a_url_is_fetched_whole_with_progress_and_no_secrets_in_names(tmp_path, web):
    seen = []
    digest = hashlib.sha256(_Server.body).hexdigest()
    place = download_once(web, tmp_path / "model", sha256=digest, progress=seen.append)
    assert place.read_bytes() == _Server.body
    assert (seen[-1].done, seen[-1].total) == (200_000, 200_000)
    with pytest.raises(WorkFailedError) as caught:
        download_once(web, tmp_path / "other", sha256="0" * 64)
    assert "not what was expected" in str(caught.value)
    assert isinstance(caught.value.__cause__, DownloadError)
    assert "secret" not in str(caught.value)
    assert os.listdir(tmp_path) == ["model"]


def test_a_connection_that_ends_early_is_an_error_not_a_short_file(tmp_path, web, monkeypatch):
    monkeypatch.setattr(_Server, "promised", 300_000)
    with pytest.raises(WorkFailedError, match="download"):
        download_once(web, tmp_path / "model")
    assert os.listdir(tmp_path) == []


def test_a_fetching_rank_that_is_killed_is_replaced_and_no_half_file_is_seen(meet, tmp_path):
    (tmp_path / "source").write_bytes(b"y" * 100_000)

    def work(rank):
        from tests.harness.product import downloads

        def half_then_stop(uri, draft, *, is_dir):
            draft.write_bytes(b"y" * 50_000)
            pause("half")
            draft.write_bytes(Path(uri).read_bytes())

        downloads._by_fsspec = half_then_stop
        return len(download_once(tmp_path / "source", tmp_path / "data" / "copy", scope="job").read_bytes())

    with ranks(3, work, meet=meet) as started:
        (first,) = _whoever_is_at(started, "half")
        assert os.path.exists(tmp_path / "data")
        assert not (tmp_path / "data" / "copy").exists()
        first.kill()
        (second,) = _whoever_is_at([one for one in started if one is not first], "half")
        second.resume()
        assert _values([one for one in started if one is not first]) == [100_000] * 2
