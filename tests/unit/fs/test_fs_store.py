"""A torch store whose host is frozen for a while: who asks then is told, and who asks later is answered. And who does
not know what became of its own word."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from flytekitplugins_safedist.errors import FsIoError, FsTimeoutError
from flytekitplugins_safedist.fs.collective import once
from flytekitplugins_safedist.fs.store import Group, TorchStore, agree
from tests.harness.procs import DEADLINE


class Frozen:
    """A store that answers nothing until it is thawed."""

    def __init__(self) -> None:
        self.thawed, self.asked = threading.Event(), threading.Event()
        self._store = dist.HashStore()

    def __getattr__(self, name: str):
        self.asked.set()
        assert self.thawed.wait(DEADLINE)
        return getattr(self._store, name)


def test_one_late_answer_poisons_nothing(monkeypatch):
    frozen = Frozen()
    store = TorchStore(frozen, "a store", 2)
    with monkeypatch.context() as patched:
        patched.setattr("flytekitplugins_safedist.fs.store._ANSWER_SECONDS", 2.0)  # for its thread to begin with it
        with pytest.raises(FsTimeoutError, match=r"does not answer.*frozen or cut off"):
            store.add("count", 1)
        assert frozen.asked.is_set()
        patched.setattr("flytekitplugins_safedist.fs.store._ANSWER_SECONDS", 0.01)
        with pytest.raises(FsTimeoutError):
            store.add("never begun", 1)
    frozen.thawed.set()
    store.set("key", b"value")
    assert store.wait("key", 0) == b"value"
    assert store.add("count", 0) == 1, "it was begun, and its answer was late"
    assert store.add("never begun", 0) == 0, "who asked has gone"


class Losing(TorchStore):
    """Its answer to one kind of call is lost, once."""

    def __init__(self, lost: str) -> None:
        super().__init__(dist.HashStore(), "a store", 2)
        self.lost = [lost]

    def _call(self, work):
        found = super()._call(work)
        if self.lost and self.lost[0] in work.__qualname__:
            self.lost.clear()
            raise FsTimeoutError("the store does not answer")
        return found


@pytest.mark.parametrize("lost", ["compare_set", "TorchStore.set"], ids=["claim", "result"])
def test_who_does_not_know_whether_its_claim_or_its_result_has_come_there_may_call_again(lost):
    store, done = Losing("nothing"), []
    ranks = [Group(store, rank, 2) for rank in range(2)]
    store.lost = [lost]

    def work() -> int:
        done.append(1)
        return len(done)

    with pytest.raises(FsTimeoutError):
        once(ranks[0], "key", work, DEADLINE)
    assert [once(group, "key", work, DEADLINE) for group in ranks] == [1, 1]
    assert done == [1]


def test_a_process_has_one_thread_for_its_store_however_many_ask():
    def serving() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "safedist-fs-store"}

    before = serving()
    store = TorchStore(dist.HashStore(), "a store", 2)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: store.set(str(number), b"1"), range(100)))
    assert len(serving() - before) == 1


def test_a_store_that_is_gone_is_named():
    class Gone:
        def check(self, _names: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer\nand a stack")

    with pytest.raises(FsIoError, match=r"is gone \[store=a store.*seen: Connection reset by peer\)"):
        TorchStore(Gone(), "a store", 2).wait("key", 0)


def test_what_earlier_lives_have_left_is_no_answer_in_this_one():
    held = dist.HashStore()
    names = []
    for _ in range(5):
        with ThreadPoolExecutor(3) as pool:
            lives = [pool.submit(agree, TorchStore(held, "a store", 3), rank, 3, DEADLINE) for rank in range(3)]
            assert len({life.result() for life in lives}) == 1
        names.append(lives[0].result())
    assert len(set(names)) == 5
