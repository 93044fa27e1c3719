"""once_*, barrier, rank_zero_first and download_once among real processes, over the corner and over torch's stores.

"Nodes" are groups of processes of one machine with different GROUP_RANK; the containers tests have real ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import multiprocessing
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
import torch.distributed as dist  # once, and not in every rank

from flytekitplugins_safedist.errors import DownloadError, FsError, FsIdentityError, FsTimeoutError, WorkFailedError
from flytekitplugins_safedist.fs import barrier, download_once, once_per_job, once_per_node, rank_zero_first
from tests.fs.ranks import agents_store, corner, faults_of, meeting_point, pause, processes, rank_env
from tests.harness.procs import until
from tests.harness.product import TorchStore, collective, ranks_met
from tests.harness.shared import directory_of_all_workers, shared

LONG = 3600.0  # no test waits for this: an outcome within its own bound shows that nothing waited for a time-out
PLACES = {"corner": corner, "torchrun": agents_store}
"""Where ranks meet."""
RANKS, NODES = int(os.environ.get("TEST_RANKS", "8")), int(os.environ.get("TEST_NODES", "2"))
PER_NODE = RANKS // NODES
WORKS = {}
"""What ranks do one after the other at each place to meet; each is a test. Those of Horovod do it too."""


def by_ranks(work):
    """Have :data:`RANKS` do it, in a directory of its own. Whatever it asserts, each rank does."""
    WORKS[work.__name__] = lambda directory, *more: work(_made(directory / work.__name__), *more)
    return work


def _made(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return directory


@pytest.fixture(scope="session")
def wrong(tmp_path_factory):
    """By the place to meet what has gone wrong in each rank: done once for the tests of all workers."""

    def at(place):
        directory, gate = tmp_path_factory.mktemp("ranks"), multiprocessing.get_context("fork").Barrier(RANKS)

        def work(rank):
            return faults_of(WORKS, gate.wait, directory, rank, web)

        with PLACES[place]() as meet, serving() as web, ranks(RANKS, work, meet, PER_NODE) as started:
            return _values(started)

    def make():
        return {place: at(place) for place in PLACES}

    with shared(directory_of_all_workers(tmp_path_factory), "race-group", make) as found:
        yield found


@pytest.fixture(params=PLACES)
def meet(request) -> Iterator[dict[str, str]]:
    """The variables by which ranks find the place to meet."""
    with PLACES[request.param]() as variables:
        yield variables


@contextmanager
def ranks(count, work, meet, per_node=None):
    """``work(rank)`` in ``count`` processes with torchrun's environment."""
    envs = [rank_env(rank, count, per_node, **meet) for rank in range(count)]
    with processes([(work, rank) for rank in range(count)], envs) as started:
        yield started


def _values(started):
    return [one.outcome().get() for one in started]


def _errors(started):
    return [one.outcome().error() for one in started]


def _note(place: Path, text: str) -> None:
    handle = os.open(place, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.write(handle, text.encode() + b"\n")
    os.close(handle)


def _failed(work, *arguments, **options):
    """The error that it ends with."""
    with pytest.raises((FsError, PermissionError, SystemExit)) as caught:
        work(*arguments, **options)
    return caught.value


def _of_all(place: Path, text: str) -> list[str]:
    """The texts of all ranks, in any order."""
    _note(place, text)
    barrier(str(place), timeout=LONG)
    return place.read_text().splitlines()


# --- once ----------------------------------------------------------------------------------------------------------
@by_ranks
def one_works_and_all_have_its_result(directory, rank, *_):
    def once_only():
        _note(directory / "worked", str(rank))
        return {"path": directory / "model", "bytes": b"\0", "by": rank, "pair": (1, 2)}

    found = [once_per_job("load", once_only, timeout=LONG) for _ in range(2)]
    (worked,) = (directory / "worked").read_text().split()
    assert found == [{"path": directory / "model", "bytes": b"\0", "by": int(worked), "pair": (1, 2)}] * 2


@by_ranks
def once_per_node_works_once_on_each_node(directory, rank, *_):
    def work():
        _note(directory / "worked", str(rank))
        return rank // PER_NODE

    assert once_per_node("load", work, timeout=LONG) == rank // PER_NODE
    barrier("all have worked", timeout=LONG)
    assert sorted(int(rank) // PER_NODE for rank in (directory / "worked").read_text().split()) == [*range(NODES)]


class MuteError(Exception):
    """An error that cannot say what it is."""

    def __str__(self):
        raise AttributeError("no text")


@by_ranks
def an_error_reaches_everyone_at_once_with_its_traceback_whatever_it_can_say(directory, *_):
    of_bucket = (FileNotFoundError("no such bucket"), "FileNotFoundError: no such bucket")
    mute = (MuteError(), "MuteError: <no message: str() of it raised AttributeError: no text>")
    for number, (raised, said) in enumerate([of_bucket, mute]):

        def fails(raised=raised):
            raise raised

        error = _failed(once_per_job, f"load {number}", fails, timeout=LONG)
        assert type(error) is WorkFailedError
        assert said in str(error)
        assert "in fails" in str(error)
        assert len({*_of_all(directory / str(number), repr(str(error)))}) == 1


@by_ranks
def who_is_told_to_end_while_it_works_ends_so_and_the_others_are_told(directory, *_):
    def ends():
        raise SystemExit(3)

    error = _failed(once_per_job, "ends", ends, timeout=LONG)
    ended = _of_all(directory / "ended", type(error).__name__)
    assert sorted(ended) == ["SystemExit", *["WorkFailedError"] * (RANKS - 1)]


@by_ranks
def work_that_waits_for_itself_is_told_so(*_):
    error = _failed(once_per_job, "itself", lambda: once_per_job("itself", int), timeout=LONG)
    assert "waits for itself" in str(error)


@by_ranks
def work_that_failed_can_be_tried_again_by_all(directory, rank, *_):
    def first_fails():
        _note(directory / "tries", str(rank))
        if len((directory / "tries").read_text().split()) == 1:
            raise OSError("the server is starting")
        return "loaded"

    assert "the server is starting" in str(_failed(once_per_job, "again", first_fails, timeout=LONG))
    assert once_per_job("again", first_fails, timeout=LONG) == "loaded"
    assert len((directory / "tries").read_text().split()) == 2


@by_ranks
def threads_of_one_rank_work_once_too(directory, rank, *_):
    from concurrent.futures import ThreadPoolExecutor

    def once_only():
        _note(directory / "worked", str(rank))
        return rank

    with ThreadPoolExecutor(4) as pool:
        (by,) = {one.result() for one in [pool.submit(once_per_job, "threads", once_only) for _ in range(4)]}
    assert (directory / "worked").read_text().split() == [str(by)]


def test_who_waits_for_a_worker_that_was_killed_names_it_at_the_deadline(meet):
    def work(rank):
        once_per_job("all are there", int, timeout=240)
        if rank != 0:
            pause("ready")
        return once_per_job("load", lambda: pause("working"), timeout=0.2)

    with ranks(3, work, meet) as started:
        started[0].until("working")
        for other in started[1:]:
            other.until("ready")
        started[0].kill()
        for other in started[1:]:
            other.resume()
        errors = _errors(started[1:])
    assert {type(error) for error in errors} == {FsTimeoutError}
    assert all("worker=rank 0 of 3" in str(error) for error in errors)


# --- barrier -------------------------------------------------------------------------------------------------------
@by_ranks
def nobody_passes_a_barrier_before_all_have_come(directory, rank, *_):
    for turn in range(20):
        _note(directory / f"came-{turn}", str(rank))
        barrier(timeout=LONG)
        assert len((directory / f"came-{turn}").read_text().split()) == RANKS, turn
        barrier("second", timeout=LONG)


@by_ranks
def a_barriers_name_may_begin_with_anothers(directory, rank, *_):
    for _ in range(2):
        barrier("epoch", timeout=LONG)
    _note(directory / "there", str(rank))
    if rank == 0:
        until(lambda: len((directory / "there").read_text().split()) == RANKS, "all are there")
        _note(directory / "came", "0")
    barrier("epoch/came", timeout=LONG)
    assert (directory / "came").exists()


def test_the_missing_are_named_to_all_who_came_and_to_who_comes_later(meet):
    def work(rank):
        once_per_job("all are there", int, timeout=240)
        if rank == 2:
            place = ranks_met().meeting
            wait = place.wait
            place.wait = lambda *args: pause("has come") or wait(*args)
        else:
            pause("absent")
        barrier(timeout=LONG if rank == 2 else 0.2)

    with ranks(4, work, meet) as started:
        for rank in (0, 1, 3):
            started[rank].until("absent")
        started[2].until("has come")
        started[2].resume()
        started[0].resume()
        errors = _errors([started[0], started[2]])
        started[1].resume()
        errors += _errors([started[1]])
    for error in errors:
        assert isinstance(error, FsTimeoutError)
        assert "did not come to the meeting point: 1, 3 [" in str(error)


def test_ranks_that_do_not_come_to_the_first_meeting_over_torchs_store_are_named(tmp_path):
    def work(rank):
        pause("not yet")
        barrier(timeout=3)

    with agents_store() as meet, ranks(4, work, meet) as started:
        for one in started:
            one.until("not yet")
        for one in started[1::2]:
            one.resume()
        # By the end of its time, the one that began first may not have seen the other.
        named = re.compile(r"did not come to their first meeting: 0,( 1,)? 2(, 3)? \[")
        assert all(named.search(str(error)) for error in _errors(started[1::2]))
        started[0].resume()
        (error,) = _errors(started[:1])
    assert "did not come to their first meeting: 2 [" in str(error)


def test_rank_0_that_holds_the_store_does_not_leave_before_all_have_read_that_all_have_come(tmp_path):
    """A process group's store, and Horovod's, end with rank 0, and the last meeting would look like a fault."""

    def work(rank):
        dist.init_process_group("gloo")
        once_per_job("all are there", int)
        if rank == 0:
            see_off = collective.see_off
            collective.see_off = lambda *args: pause("all have come") or see_off(*args)
            pause("before the barrier")
        else:
            look = TorchStore.wait
            TorchStore.wait = lambda *args: pause("looks") or look(*args)
        barrier(timeout=LONG)
        return rank

    with ranks(2, work, meeting_point()) as started:
        started[0].until("before the barrier")
        started[1].until("looks")
        started[0].resume()
        started[0].until("all have come")
        started[0].resume()
        started[1].resume()
        assert _values(started) == [0, 1]


@by_ranks
def a_process_that_a_rank_has_started_does_not_come_in_its_place(_directory, rank, *_):
    """A worker of a DataLoader has its rank's variables: its coming would let a barrier pass without another rank."""
    if "SAFEDIST_MEETING" not in os.environ:
        return  # a store does not know which process asks
    for call in (barrier, rank_zero_first):
        here, there = os.pipe()
        worker = os.fork()
        if worker == 0:
            said = "passed"
            try:
                with call(timeout=LONG) or contextlib.nullcontext():
                    pass
            except FsError as error:
                said = str(error)
            finally:
                os.write(there, said.encode())
                os._exit(0)
        os.waitpid(worker, 0)
        said = os.read(here, 10_000).decode()
        assert "another process has come as this rank" in said
        assert f"rank {rank} of {RANKS}" in said
        assert "a DataLoader's worker" in said


# --- rank_zero_first -------------------------------------------------------------------------------------------------
@by_ranks
def the_first_rank_is_first_and_the_others_follow(directory, rank, *_):
    for per, leaders in (("job", {0}), ("node", {0, PER_NODE})):
        for turn in range(3):
            place = directory / f"{turn}-{rank // PER_NODE if per == 'node' else 'all'}"
            with rank_zero_first(per=per, timeout=LONG):
                assert place.exists() is (rank not in leaders), per
                place.touch()


@by_ranks
def the_error_of_the_first_is_told_to_the_others_at_once_and_their_blocks_do_not_run(directory, rank, *_):
    def work():
        with rank_zero_first(timeout=LONG):
            (directory / f"ran-{rank}").touch()
            raise PermissionError("no such licence")

    error = _failed(work)
    assert type(error) is (WorkFailedError if rank else PermissionError)
    assert rank == 0 or "PermissionError: no such licence" in str(error)
    barrier("all have failed", timeout=LONG)
    assert os.listdir(directory) == ["ran-0"]


def test_a_first_rank_that_does_not_come_is_not_waited_for_for_ever(meet):
    def work(rank):
        once_per_job("all are there", int, timeout=240)
        if rank == 0:
            pause("elsewhere")
        with rank_zero_first(timeout=0.2):
            pass

    with ranks(2, work, meet) as started:
        started[0].until("elsewhere")
        (error,) = _errors(started[1:])
    assert isinstance(error, FsTimeoutError)
    assert "the first rank of the job did not come" in str(error)


# --- who the ranks are -----------------------------------------------------------------------------------------------
def _group_of(rank: int, size: int, store: Path):
    dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)


def test_ranks_that_the_program_started_itself_are_counted_by_their_process_groups_one_after_the_other(tmp_path):
    """Where nothing says which rank is the first of its node, that is an error."""

    def work(rank):
        found = []
        for life in range(3):
            _group_of(rank, 2, tmp_path / f"store-{life}")
            found.append(once_per_job("which", lambda life=life: (life, rank), timeout=240))
            found.append(once_per_node("node", lambda: rank))
            barrier(timeout=240)
            dist.destroy_process_group()
        _group_of(rank, 2, tmp_path / "store")
        with pytest.raises(FsError, match="set LOCAL_RANK"), rank_zero_first(per="node", timeout=LONG):
            (tmp_path / "made").touch()
        return found

    with processes([(work, rank) for rank in range(2)]) as started:
        one, other = _values(started)
    assert one == other
    assert [life for life, _ in one[::2]] == [0, 1, 2]
    assert not (tmp_path / "made").exists()


def test_three_variables_are_enough_where_a_process_group_is_initialised(tmp_path):
    def work(rank):
        _group_of(rank, 2, tmp_path / "store")
        with rank_zero_first(per="node", timeout=LONG):
            found = (tmp_path / "made").exists()
            (tmp_path / "made").touch()
        return found

    envs = [{"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)} for rank in range(2)]
    with processes([(work, rank) for rank in range(2)], envs) as started:
        assert _values(started) == [False, True]


def test_a_process_group_that_counts_other_ranks_than_the_environment_is_not_believed(tmp_path):
    def work(rank):
        _group_of(rank, 2, tmp_path / "store")
        barrier(timeout=LONG)

    envs = [rank_env(1 - rank, 2) for rank in range(2)]
    with processes([(work, rank) for rank in range(2)], envs) as started:
        assert all(isinstance(error, FsIdentityError) for error in _errors(started))


# --- download_once -------------------------------------------------------------------------------------------------
BODY = b"x" * 200_000


class _Server(http.server.BaseHTTPRequestHandler):
    promised = len(BODY)
    failures: list[int] = []  # noqa: RUF012
    silent = threading.Event()

    def do_GET(self):
        if self.path.startswith("/silent"):
            self.silent.wait()
        if self.failures:
            self.send_error(self.failures.pop())
            return
        self.send_response(200)
        self.send_header("Content-Length", str(self.promised))
        self.end_headers()
        self.wfile.write(BODY)

    def log_message(self, *args):
        pass


@contextmanager
def serving() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    _Server.silent.set()
    server.shutdown()
    server.server_close()
    _Server.silent = threading.Event()


@by_ranks
def a_directory_is_fetched_once_where_it_is_shared_and_once_per_node_where_not(directory, rank, *_):
    for name, text in {"a": "1", "sub/b": "2"}.items():
        once_per_job(f"bucket/{name}", lambda name=name, text=text: _write(directory / "bucket" / name, text))
    for shared_ in (True, False, None):

        class Counted(fsspec.callbacks.Callback):
            def set_size(self, size, name=f"fetched-{shared_}"):
                _note(directory / name, str(rank // PER_NODE))

        target = directory / ("volume" if shared_ else f"node{rank // PER_NODE}-{shared_}") / "data"
        place = download_once(directory / "bucket", target, shared=shared_, callback=Counted())
        assert (place / "a").read_text() + (place / "sub" / "b").read_text() == "12"
        barrier("all have fetched", timeout=LONG)
        fetched = (directory / f"fetched-{shared_}").read_text().split()
        assert len(fetched) == 1 if shared_ else sorted(fetched) == [*map(str, range(NODES))]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _one_fetches(directory: Path, *arguments: object, shared: bool) -> list[str]:
    """All ranks fetch what only one of them, or of each node, can have; the errors of the others."""
    try:
        download_once(*arguments, shared=shared, timeout=LONG)
        said = ""
    except FsError as error:
        said = str(error)
    return [each for each in _of_all(directory / "said", said) if each]


@by_ranks
def ranks_of_a_node_that_name_places_of_their_own_are_told_at_once_not_after_an_hour(directory, rank, *_):
    once_per_job("source", lambda: _write(directory / "source", "1"))
    errors = _one_fetches(directory, directory / "source", directory / str(rank) / "model", shared=False)
    assert len(errors) == RANKS - NODES
    assert all(re.search(r"different places.*/\d/model.*/\d/model", error) for error in errors)


@by_ranks
def of_ranks_that_name_queries_of_one_address_none_has_what_another_asked_for(directory, rank, web, _):
    errors = _one_fetches(directory, f"{web}/model?version={rank}", directory / "model", shared=True)
    assert len(errors) == RANKS - 1
    assert all("where the download is to be" in error and "/model with another query" in error for error in errors)


@by_ranks
def all_ranks_have_the_one_error_of_a_download_and_no_secret_is_told(directory, _rank, web, _):
    address, target = f"{web}/model?signature=secret", directory / "model"
    error = _failed(download_once, address, target, sha256="0" * 64, shared=True)
    assert type(error) is WorkFailedError
    assert "the download is not what was expected" in str(error)
    assert "secret" not in str(error)
    assert os.listdir(directory) == []


@by_ranks
def a_server_that_says_nothing_is_given_up_at_the_deadline_by_all(directory, _rank, web, _):
    error = _failed(download_once, f"{web}/silent", directory / "model", timeout=2, shared=True)
    assert isinstance(error, (FsTimeoutError, WorkFailedError))
    barrier("all have given up", timeout=LONG)
    assert os.listdir(directory) == []


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("place", PLACES)
def test_by_ranks(wrong, place, name):
    texts = [of_rank[name] for of_rank in wrong[place] if of_rank[name]]
    assert not texts, "\n".join(texts)


@pytest.fixture
def web() -> Iterator[str]:
    with serving() as address:
        yield address


def test_a_file_is_fetched_whole_with_progress(tmp_path, web):
    seen = fsspec.callbacks.Callback()
    digest = hashlib.sha256(BODY).hexdigest()
    place = download_once(f"{web}/model?signature=secret", tmp_path / "model", sha256=digest, callback=seen)
    assert place.read_bytes() == BODY
    assert (seen.value, seen.size) == (200_000, 200_000)
    assert "secret" not in (tmp_path / ".model.safedist-source").read_text()


def test_a_server_that_fails_for_a_moment_is_asked_again(tmp_path, web, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    _Server.failures[:] = [500, 503]
    assert download_once(f"{web}/model", tmp_path / "model").read_bytes() == BODY


def test_a_connection_that_ends_early_is_an_error_not_a_short_file(tmp_path, web, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    monkeypatch.setattr(_Server, "promised", 300_000)
    with pytest.raises(DownloadError, match="download"):
        download_once(f"{web}/model", tmp_path / "model")
    assert os.listdir(tmp_path) == []
