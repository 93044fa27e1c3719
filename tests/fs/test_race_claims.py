"""Who holds a claim holds it alone, also when owners are killed and when the file system drops locks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flytekitplugins_safedist.errors import FsTimeoutError
from flytekitplugins_safedist.fs import claim
from tests.fs.ranks import Process, pause, processes, together
from tests.harness.fusefs import FuseMount, require


def _count_up(index: int, roots: list[Path], counter: Path, times: int) -> None:
    """Read, add one, write: wrong at once if two are ever in here together."""
    root = roots[index % len(roots)]
    for _ in range(times):
        with claim(root / "counter.lock"):
            inside = os.open(counter.parent / "inside", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            value = int(counter.read_text())
            counter.write_text(str(value + 1))
            os.close(inside)
            os.unlink(counter.parent / "inside")


def test_a_read_add_write_under_a_claim_loses_nothing(tmp_path):
    counter = tmp_path / "counter"
    counter.write_text("0")
    for outcome in together(16, _count_up, [tmp_path], counter, 25):
        outcome.get()
    assert counter.read_text() == "400"
    assert sorted(os.listdir(tmp_path)) == ["counter"], "claims and their drafts are gone"


def test_it_holds_on_clients_that_drop_locks_see_late_and_lose_replies(tmp_path):
    require()
    local = tmp_path / "local"
    local.mkdir()
    counter = local / "counter"
    counter.write_text("0")
    faults = [
        {"op": op, "errno": code, "chance": 0.02, "when": when}
        for op in ("link", "unlink", "open", "create", "opendir")
        for code, when in (("EIO", "before"), ("EIO", "after"), ("ESTALE", "before"), ("EINTR", "after"))
        if not (op in ("open", "create", "opendir") and when == "after")  # would leak handles of the test's own server
    ]
    mounts = [
        FuseMount(tmp_path / "server", tmp_path / f"c{index}", late=[0, 0.2], seed=index, locks="dropped")
        for index in range(3)
    ]
    try:
        for mount in mounts:
            mount.set(faults=faults)
        outcomes = together(9, _count_up, [mount.path for mount in mounts], counter, 8)
    finally:
        for mount in mounts:
            mount.close()
    for outcome in outcomes:
        outcome.get()
    assert counter.read_text() == "72"


def _hold(path: Path) -> None:
    with claim(path):
        pause("held")


def _take(index: int, path: Path, log: Path) -> str:
    with claim(path, timeout=60) as held:
        assert held.owner is not None
        token = held.owner.token
        handle = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.write(handle, f"in {token}\n".encode())
        os.write(handle, f"out {token}\n".encode())
        os.close(handle)
    return token


@pytest.mark.parametrize("round_", range(5))
def test_many_waiters_break_a_killed_owners_claim_and_still_enter_one_by_one(tmp_path, round_):
    lock, log = tmp_path / "lock", tmp_path / "log"
    with processes([(_hold, lock)]) as (owner,):
        owner.until("held")
        owner.kill()
        outcomes = together(12, _take, lock, log)
    tokens = {outcome.get() for outcome in outcomes}
    lines = log.read_text().split("\n")[:-1]
    assert len(tokens) == 12
    assert [line.split()[0] for line in lines] == ["in", "out"] * 12
    assert all(lines[at].split()[1] == lines[at + 1].split()[1] for at in range(0, len(lines), 2))
    assert sorted(os.listdir(tmp_path)) == ["log"]


def test_a_breaker_killed_before_it_removes_the_lock_is_itself_overcome(tmp_path):
    from tests.harness.product import claims

    lock, log = tmp_path / "lock", tmp_path / "log"

    def die_while_breaking() -> None:
        original = claims.Claim._remove

        def stop(self, owner):
            if self.path == lock:
                pause("about to remove")
            return original(self, owner)

        claims.Claim._remove = stop
        claim(lock)

    with processes([(_hold, lock)]) as (owner,):
        owner.until("held")
        owner.kill()
    breaker = Process(die_while_breaking)
    breaker.until("about to remove")
    breaker.kill()
    for outcome in together(6, _take, lock, log):
        outcome.get()
    assert sorted(name for name in os.listdir(tmp_path) if "safedist-" not in name) == ["log"]


def test_a_breaker_that_slept_does_not_remove_the_next_owners_lock(tmp_path):
    from tests.harness.product import claims

    lock = tmp_path / "lock"

    def break_slowly() -> None:
        original = claims.Claim._break

        def slow(self, dead, left):
            pause("found the owner dead")
            original(self, dead, left)

        claims.Claim._break = slow
        with claim(lock, timeout=1):
            pass

    with processes([(_hold, lock)]) as (owner,):
        owner.until("held")
        owner.kill()
    with processes([(break_slowly,)]) as (slow,):
        slow.until("found the owner dead")
        with claim(lock) as second:
            slow.resume()
            assert isinstance(slow.outcome().error(), FsTimeoutError)
            assert claims._read_record(lock).token == second.owner.token


def test_nobody_takes_the_claim_of_a_dead_owner_while_another_removes_it(tmp_path):
    """Who looks, sleeps and then removes would remove the lock of whoever was faster."""
    lock = tmp_path / "lock"

    def remove_slowly() -> str:
        unlink = Path.unlink

        def slow(self, missing_ok=False):
            if self == lock:
                Path.unlink = unlink  # type: ignore[method-assign]
                pause("about to remove")
            unlink(self, missing_ok=missing_ok)

        Path.unlink = slow  # type: ignore[method-assign]
        with claim(lock) as held:
            assert held.owner is not None
            return held.owner.token

    with processes([(_hold, lock)]) as (owner,):
        owner.until("held")
        owner.kill()
    with processes([(remove_slowly,)]) as (slow,):
        slow.until("about to remove")
        with pytest.raises(FsTimeoutError):
            claim(lock, timeout=0.01)
        slow.resume()
        assert slow.outcome().get()
