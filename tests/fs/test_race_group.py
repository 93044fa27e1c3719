"""once_*, barrier, rank_zero_first and download_once among real processes, over the corner and over torch's stores.

"Nodes" are groups of processes of one machine with different GROUP_RANK; the containers tests have real ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed  # noqa: F401  (once, and not in every rank)

from flytekitplugins_safedist.errors import FsError, FsIdentityError, FsTimeoutError, WorkFailedError
from flytekitplugins_safedist.fs import barrier, download_once, once_per_job, once_per_node, rank_zero_first
from tests.fs.ranks import agents_store, corner, meeting_point, pause, processes, rank_env
from tests.harness.product import TorchStore, collective, ranks_met

LONG = 3600.0  # no test waits for this: an outcome within its own bound shows that nothing waited for a time-out


@pytest.fixture(params=[corner, agents_store], ids=["corner", "torchrun"])
def meet(request) -> Iterator[dict[str, str]]:
    """The variables by which ranks find the place to meet."""
    with request.param() as variables:
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


# --- once ----------------------------------------------------------------------------------------------------------
def test_one_of_16_works_and_all_have_its_result(meet, tmp_path):
    def work(rank):
        def once_only():
            _note(tmp_path / "worked", str(rank))
            return {"path": tmp_path / "model", "bytes": b"\0", "by": rank, "pair": (1, 2)}

        return once_per_job("load", once_only, timeout=LONG), once_per_job("load", once_only, timeout=LONG)

    with ranks(16, work, meet) as started:
        results = _values(started)
    (worked,) = (tmp_path / "worked").read_text().split()
    expected = {"path": tmp_path / "model", "bytes": b"\0", "by": int(worked), "pair": (1, 2)}
    assert results == [(expected, expected)] * 16


def test_once_per_node_works_once_on_each_node(meet, tmp_path):
    def work(rank):
        return once_per_node("load", lambda: _note(tmp_path / "worked", str(rank)) or rank // 2, timeout=LONG)

    with ranks(4, work, meet, per_node=2) as started:
        assert _values(started) == [0, 0, 1, 1]
    assert sorted(int(rank) // 2 for rank in (tmp_path / "worked").read_text().split()) == [0, 1]


def test_an_error_reaches_everyone_at_once_with_its_traceback(meet):
    def work(rank):
        def fails():
            raise FileNotFoundError("no such bucket")

        return once_per_job("load", fails, timeout=LONG)

    with ranks(4, work, meet) as started:
        errors = _errors(started)
    assert {type(error) for error in errors} == {WorkFailedError}
    assert all("FileNotFoundError: no such bucket" in str(error) for error in errors)
    assert all("in fails" in str(error) for error in errors)
    assert len({str(error) for error in errors}) == 1


class MuteError(Exception):
    def __str__(self):
        raise AttributeError("no text")


def test_an_error_that_cannot_say_what_it_is_reaches_everyone_as_well(meet):
    def work(rank):
        def fails():
            raise MuteError

        return once_per_job("load", fails, timeout=LONG)

    with ranks(2, work, meet) as started:
        errors = _errors(started)
    assert {type(error) for error in errors} == {WorkFailedError}
    assert all("MuteError: <no message: str() of it raised AttributeError: no text>" in str(error) for error in errors)


def test_who_is_told_to_end_while_it_works_ends_so_and_the_others_are_told(meet):
    def work(rank):
        def ends():
            raise SystemExit(3)

        return once_per_job("load", ends, timeout=LONG)

    with ranks(3, work, meet) as started:
        errors = _errors(started)
    assert sorted(type(error).__name__ for error in errors) == ["SystemExit", "WorkFailedError", "WorkFailedError"]


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


def test_work_that_waits_for_itself_is_told_so(meet):
    with ranks(2, lambda rank: once_per_job("k", lambda: once_per_job("k", int), timeout=LONG), meet) as started:
        assert all("waits for itself" in str(error) for error in _errors(started))


def test_work_that_failed_can_be_tried_again_by_all(meet, tmp_path):
    def work(rank):
        def first_fails():
            _note(tmp_path / "tries", str(rank))
            if len((tmp_path / "tries").read_text().split()) == 1:
                raise OSError("the server is starting")
            return "loaded"

        with pytest.raises(WorkFailedError, match="the server is starting"):
            once_per_job("load", first_fails, timeout=LONG)
        return once_per_job("load", first_fails, timeout=LONG)

    with ranks(3, work, meet) as started:
        assert _values(started) == ["loaded"] * 3
    assert len((tmp_path / "tries").read_text().split()) == 2


def test_threads_of_one_rank_work_once_too(meet, tmp_path):
    def work(rank):
        from concurrent.futures import ThreadPoolExecutor

        def once_only():
            _note(tmp_path / "worked", str(rank))
            return rank

        with ThreadPoolExecutor(4) as pool:
            return {one.result() for one in [pool.submit(once_per_job, "k", once_only) for _ in range(4)]}

    with ranks(2, work, meet) as started:
        assert len(set.union(*_values(started))) == 1
    assert len((tmp_path / "worked").read_text().split()) == 1


# --- barrier -------------------------------------------------------------------------------------------------------
def test_nobody_passes_a_barrier_before_all_have_come(meet, tmp_path):
    def work(rank):
        for turn in range(20):
            _note(tmp_path / f"came-{turn}", str(rank))
            barrier(timeout=LONG)
            if len((tmp_path / f"came-{turn}").read_text().split()) != 8:
                return f"turn {turn}"
            barrier("second", timeout=LONG)
        return "all"

    with ranks(8, work, meet) as started:
        assert _values(started) == ["all"] * 8


def test_a_barriers_name_may_begin_with_anothers(meet, tmp_path):
    def work(rank):
        for _ in range(2):
            barrier("epoch", timeout=LONG)
        if rank == 0:
            pause("last")
            _note(tmp_path / "came", "0")
        barrier("epoch/came", timeout=LONG)
        return (tmp_path / "came").exists()

    with ranks(3, work, meet) as started:
        started[0].until("last")
        started[0].resume()
        assert _values(started) == [True] * 3


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
        import torch.distributed as dist

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


@pytest.mark.parametrize("call", [barrier, rank_zero_first])
def test_a_process_that_a_rank_has_started_does_not_come_in_its_place(call):
    """A worker of a DataLoader has its rank's variables: its coming would let a barrier pass without another rank."""

    def work(rank):
        barrier(timeout=LONG)
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
        barrier(timeout=LONG)
        return os.read(here, 10_000).decode()

    with corner() as meet, ranks(2, work, meet) as started:
        for rank, said in enumerate(_values(started)):
            assert "another process has come as this rank" in said
            assert f"rank {rank} of 2" in said
            assert "a DataLoader's worker" in said


# --- rank_zero_first -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("per", "leaders"), [("job", {0}), ("node", {0, 2})])
def test_the_first_rank_is_first_and_the_others_follow(meet, tmp_path, per, leaders):
    def work(rank):
        found = []
        for turn in range(3):
            place = tmp_path / f"{turn}-{rank // 2 if per == 'node' else 'all'}"
            with rank_zero_first(per=per, timeout=LONG):
                found.append(place.exists())
                place.touch()
        return found

    with ranks(4, work, meet, per_node=2) as started:
        assert _values(started) == [[rank not in leaders] * 3 for rank in range(4)]


def test_the_error_of_the_first_is_told_to_the_others_at_once_and_their_blocks_do_not_run(meet, tmp_path):
    def work(rank):
        with rank_zero_first(timeout=LONG):
            (tmp_path / f"ran-{rank}").touch()
            raise PermissionError("no such licence")

    with ranks(3, work, meet) as started:
        first, *others = _errors(started)
    assert isinstance(first, PermissionError)
    assert {type(error) for error in others} == {WorkFailedError}
    assert all("PermissionError: no such licence" in str(error) for error in others)
    assert os.listdir(tmp_path) == ["ran-0"]


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
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)


def test_ranks_that_the_program_started_itself_are_counted_by_their_process_group(tmp_path):
    def work(rank):
        _group_of(rank, 3, tmp_path / "store")
        barrier(timeout=LONG)
        return once_per_job("who", lambda: rank), once_per_node("node", lambda: rank)

    with processes([(work, rank) for rank in range(3)]) as started:
        assert len(set(_values(started))) == 1


def test_where_nothing_says_which_rank_is_the_first_of_its_node_that_is_an_error(tmp_path):
    def work(rank):
        _group_of(rank, 2, tmp_path / "store")
        with rank_zero_first(per="node", timeout=LONG):
            (tmp_path / "made").touch()

    with processes([(work, rank) for rank in range(2)]) as started:
        assert all("set LOCAL_RANK" in str(error) for error in _errors(started))
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


def test_a_process_group_that_follows_another_is_a_meeting_of_its_own(tmp_path):
    def work(rank):
        import torch.distributed as dist

        seen = []
        for life in range(3):
            _group_of(rank, 2, tmp_path / f"store-{life}")
            seen.append(once_per_job("which", lambda life=life: life, timeout=240))
            barrier(timeout=240)
            dist.destroy_process_group()
        return seen

    with processes([(work, rank) for rank in range(2)]) as started:
        assert _values(started) == [[0, 1, 2]] * 2


# --- download_once -------------------------------------------------------------------------------------------------
@pytest.fixture
def a_corner() -> Iterator[dict[str, str]]:
    """One for all of these: what ranks tell each other of a download is of :func:`once_per_job`, which has both."""
    with corner() as variables:
        yield variables


@pytest.mark.parametrize("shared", [True, False, None])
def test_a_directory_is_fetched_once_where_it_is_shared_and_once_per_node_where_not(a_corner, tmp_path, shared):
    import fsspec

    (tmp_path / "bucket" / "sub").mkdir(parents=True)
    (tmp_path / "bucket" / "a").write_text("1")
    (tmp_path / "bucket" / "sub" / "b").write_text("2")

    def work(rank):
        class Counted(fsspec.callbacks.Callback):
            def set_size(self, size):
                _note(tmp_path / "fetched", str(rank))

        target = tmp_path / ("volume" if shared else f"node{rank // 2}") / "data"
        place = download_once(tmp_path / "bucket", target, shared=shared, callback=Counted())
        return (place / "a").read_text() + (place / "sub" / "b").read_text()

    with ranks(4, work, a_corner, per_node=2) as started:
        assert _values(started) == ["12"] * 4
    fetched = [int(rank) // 2 for rank in (tmp_path / "fetched").read_text().split()]
    assert len(fetched) == 1 if shared else sorted(fetched) == [0, 1]


def test_ranks_of_a_node_that_name_places_of_their_own_are_told_at_once_not_after_an_hour(a_corner, tmp_path):
    (tmp_path / "source").write_text("1")

    def work(rank):
        return download_once(tmp_path / "source", tmp_path / str(rank) / "model", shared=True, timeout=LONG)

    with ranks(2, work, a_corner) as started:
        outcomes = [one.outcome() for one in started]
    (error,) = [one.error() for one in outcomes if one.kind == "error"]
    assert re.search(r"different places.*/0/model.*/1/model|different places.*/1/model.*/0/model", str(error))


def test_of_two_ranks_that_name_two_queries_of_one_address_none_has_what_the_other_asked_for(a_corner, tmp_path, web):
    def work(rank):
        return download_once(f"{web}/model?version={rank}", tmp_path / "model", shared=True)

    with ranks(2, work, a_corner) as started:
        outcomes = [one.outcome() for one in started]
    (error,) = [one.error() for one in outcomes if one.kind == "error"]
    assert re.search("something else is where the download is to be.*/model with another query", str(error))


class _Server(http.server.BaseHTTPRequestHandler):
    body, promised = b"x" * 200_000, 200_000
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
        self.wfile.write(self.body)

    def log_message(self, *args):
        pass


@pytest.fixture
def web(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(_Server, "silent", threading.Event())
    yield f"http://127.0.0.1:{server.server_port}"
    _Server.silent.set()
    server.shutdown()
    server.server_close()


def test_all_ranks_have_the_one_error_of_a_download_and_no_secret_is_told(a_corner, tmp_path, web):
    def work(rank):
        return download_once(f"{web}/model?signature=secret", tmp_path / "model", sha256="0" * 64, shared=True)

    with ranks(3, work, a_corner) as started:
        errors = _errors(started)
    assert {type(error) for error in errors} == {WorkFailedError}
    assert all("the download is not what was expected" in str(error) for error in errors)
    assert not any("secret" in str(error) for error in errors)
    assert os.listdir(tmp_path) == []


def test_a_file_is_fetched_whole_with_progress(tmp_path, web):
    import fsspec

    seen = fsspec.callbacks.Callback()
    digest = hashlib.sha256(_Server.body).hexdigest()
    place = download_once(f"{web}/model?signature=secret", tmp_path / "model", sha256=digest, callback=seen)
    assert place.read_bytes() == _Server.body
    assert (seen.value, seen.size) == (200_000, 200_000)
    assert "secret" not in (tmp_path / ".model.safedist-source").read_text()


def test_a_server_that_fails_for_a_moment_is_asked_again(tmp_path, web, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    _Server.failures[:] = [500, 503]
    assert download_once(f"{web}/model", tmp_path / "model").read_bytes() == _Server.body


def test_a_connection_that_ends_early_is_an_error_not_a_short_file(tmp_path, web, monkeypatch):
    from flytekitplugins_safedist.errors import DownloadError

    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    monkeypatch.setattr(_Server, "promised", 300_000)
    with pytest.raises(DownloadError, match="download"):
        download_once(f"{web}/model", tmp_path / "model")
    assert os.listdir(tmp_path) == []


def test_a_server_that_says_nothing_is_given_up_at_the_deadline_by_all(a_corner, tmp_path, web):
    def work(rank):
        return download_once(f"{web}/silent", tmp_path / "model", timeout=2, shared=True)

    with ranks(2, work, a_corner) as started:
        assert all(isinstance(error, (FsTimeoutError, WorkFailedError)) for error in _errors(started))
    assert os.listdir(tmp_path) == []
