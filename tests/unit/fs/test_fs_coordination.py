"""Every coordination store keeps the same promises: memory, files, and a torch store (a real TCPStore on loopback)."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from flytekitplugins_safedist.errors import FsError, FsIoError, FsTimeoutError, FsUnsupportedError
from flytekitplugins_safedist.fs import Group, Identity, barrier, file_coordination
from flytekitplugins_safedist.fs.coordination import MemoryCoordinationStore
from flytekitplugins_safedist.fs.file_coordination import FileCoordinationStore
from flytekitplugins_safedist.fs.mount_info import Mount
from flytekitplugins_safedist.fs.torch_coordination import TorchCoordinationStore
from tests.harness.fusefs import FuseMount, require


def _tcp_store():
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


@pytest.fixture(params=["memory", "files", "store"])
def coordination(request, tmp_path):
    if request.param == "memory":
        return MemoryCoordinationStore()
    if request.param == "files":
        return FileCoordinationStore(tmp_path / "notes")
    return TorchCoordinationStore(_tcp_store(), "a store")


def test_a_note_is_there_after_it_was_left(coordination):
    assert coordination.get("a/b") is None
    coordination.put("a/b", "x\n÷")
    assert coordination.get("a/b") == "x\n÷"
    coordination.put("a/b", "y")
    assert coordination.get("a/b") == "y"
    assert coordination.wait("a/b", 0.001) == "y"
    assert coordination.wait("a/c", 0.01) is None


def test_keys_of_any_shape_are_apart(coordination):
    keys = ["a", "a/b", "a.note", "a.note/b", "..", "a/../b", "A", "", "x" * 400, "x" * 401, "a b", "\u00fc"]
    for number, key in enumerate(keys):
        coordination.put(f"k/{key}", str(number))
    assert [coordination.get(f"k/{key}") for key in keys] == [str(number) for number in range(len(keys))]


def test_the_first_wins_and_all_are_told_who(coordination):
    told: list[str] = []
    threads = [
        threading.Thread(target=lambda i=i: told.append(coordination.put_once("k", f"by {i}"))) for i in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 16
    assert set(told) == {coordination.get("k")}


def test_a_waiter_is_woken(coordination):
    got: list[str | None] = []
    thread = threading.Thread(target=lambda: got.append(coordination.wait("k", 60)))
    thread.start()
    coordination.put("k", "v")
    thread.join()
    assert got == ["v"]


def test_arrivals_count_each_member_once(coordination):
    assert coordination.count("b") == 0
    assert [coordination.arrive("b", 3), coordination.arrive("b", 0), coordination.arrive("b", 3)] == [1, 2, 2]
    assert coordination.count("b") == 2
    assert coordination.members("b", range(5)) == {0, 3}
    coordination.put("b/end", "ok")
    for member in (3, 0):
        coordination.forget("b", member)
    assert coordination.count("b") == 0
    assert coordination.get("b/end") is None


def test_rank_0_whose_process_holds_the_store_stays_until_all_have_read_that_all_have_come():
    class Held(MemoryCoordinationStore):
        held_by_rank_0 = True
        looks = 0

        def count(self, key: str, *, within: float = 30.0) -> int:
            if key.endswith("/left"):
                self.looks += 1
                if self.looks == 3:
                    self.arrive(key, 1)
            return super().count(key)

    coordination = Held()
    coordination.arrive("barrier//0", 1)
    barrier(group=Group(coordination, Identity(0, 2, 0, 2)), timeout=60)
    assert coordination.looks == 3


def test_who_sees_that_all_have_come_says_so_for_the_last_one_who_died_before_it_could():
    class Last(MemoryCoordinationStore):
        def wait(self, key: str, seconds: float) -> str | None:
            self.arrive(key.removesuffix("/end"), 1)
            return super().wait(key, 0.0)

    barrier(group=Group(Last(), Identity(0, 2, 0, 2)), timeout=5)


def test_a_worker_may_be_silent_for_longer_where_notes_are_slow_to_show(tmp_path, monkeypatch):
    assert FileCoordinationStore(tmp_path).lease_s == 30.0
    monkeypatch.setattr(file_coordination, "mount_of", lambda path: Mount("/", "nfs4", "server:/", "rw"))
    assert FileCoordinationStore(tmp_path).lease_s == 180.0


def test_a_note_that_could_not_be_left_for_a_moment_is_left_and_nothing_else_stays(tmp_path, monkeypatch):
    link, failures = os.link, [errno.EIO, errno.ESTALE]

    def fail(*args, **options):
        if failures:
            raise OSError(failures.pop(), "for a moment")
        link(*args, **options)

    monkeypatch.setattr(os, "link", fail)
    coordination = FileCoordinationStore(tmp_path)
    assert coordination.put_once("key", "mine") == "mine"
    assert coordination.put_once("key", "another") == "mine"
    assert os.listdir(tmp_path) == ["key.note"]


def test_a_meeting_that_all_have_left_leaves_nothing_in_the_store(tmp_path):
    groups = [Group(FileCoordinationStore(tmp_path, 2), Identity(rank, 2, rank, 2)) for rank in range(2)]

    def meet(group: Group) -> None:
        for _ in range(3):
            barrier(group=group, timeout=60)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(meet, group) for group in groups]:
            done.result()
    notes = {path.relative_to(tmp_path).parts[2].partition(".")[0] for path in tmp_path.rglob("*.note")}
    assert notes == {"2"}, "only the last one, which a rank might still be asking for"


def test_files_without_hard_links_are_refused(tmp_path):
    require()
    with FuseMount(tmp_path / "server", tmp_path / "client", links=False) as client:
        coordination = FileCoordinationStore(client.path / "notes")
        with pytest.raises(FsUnsupportedError, match="SAFEDIST_COORDINATION_DIR"):
            coordination.put_once("k", "v")


class _Frozen:
    """A store whose host is frozen: no call returns. (A fake: freezing a real host would freeze this test too.)"""

    def __init__(self) -> None:
        self.thaw = threading.Event()

    def check(self, keys):
        self.thaw.wait()
        return False


def test_a_frozen_store_is_an_error_and_the_next_call_does_not_wait_again():
    store = _Frozen()
    coordination = TorchCoordinationStore(store, "node 0")
    with pytest.raises(FsTimeoutError, match="does not answer"):
        coordination.get("k", within=0.01)
    with pytest.raises(FsTimeoutError, match="frozen or cut off"):
        coordination.get("k", within=3600)
    store.thaw.set()


def test_a_store_that_is_gone_is_our_error():
    import torch.distributed as dist

    server = _tcp_store()
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=2))
    coordination = TorchCoordinationStore(client, "node 0")
    coordination.put("k", "v")
    del server
    with pytest.raises(FsError) as caught:
        coordination.put_once("k2", "v")
    assert isinstance(caught.value, (FsIoError, FsTimeoutError))


def test_a_draft_of_a_note_is_no_member_that_has_come(tmp_path):
    coordination = FileCoordinationStore(tmp_path)
    coordination.arrive("point", 3)
    came = next(path for path in tmp_path.rglob("3.note")).parent
    (came / ".4.note").touch()
    (came / ".5.note.safedist-draft").touch()
    (came / "6.part").touch()
    assert coordination.members("point", range(10)) == {3}
    assert coordination.count("point") == 1


def test_a_file_system_that_cannot_arbitrate_between_ranks_is_told_with_what_it_said(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, "no links")

    coordination = FileCoordinationStore(tmp_path)
    monkeypatch.setattr("os.link", refuse)
    with pytest.raises(FsUnsupportedError) as caught:
        coordination.put_once("key", "text")
    assert str(caught.value).startswith(
        f"this file system has no hard links, so nothing on it can arbitrate between ranks [path={tmp_path}, "
    )
    assert str(caught.value).endswith(
        "(seen: EPERM). Next step: point SAFEDIST_COORDINATION_DIR at another file system, or use a torch or Horovod "
        "group"
    )


def test_a_store_that_is_gone_is_told_with_its_first_word_and_where_to_look():
    class Gone:
        def check(self, keys):
            raise RuntimeError("Connection reset by peer\nstack")

        get = set = compare_set = add = check

    with pytest.raises(FsIoError) as caught:
        TorchCoordinationStore(Gone(), "a store").get("key")
    assert str(caught.value).startswith("the store that the ranks talk through is gone [store=a store, host=")
    assert str(caught.value).endswith(
        "(seen: Connection reset by peer). Next step: see why the process that holds it (rank 0, or node 0's agent) "
        "has ended"
    )


def test_what_nobody_will_ask_for_again_leaves_the_store():
    store = _tcp_store()
    coordination = TorchCoordinationStore(store, "a store")
    coordination.put("point/text/0", "left")
    coordination.arrive("point", 0)
    before = store.num_keys()
    coordination.clear("point", 1)
    assert store.num_keys() < before
    assert coordination.get("point/text/0") is None
    assert coordination.count("point") == 0
