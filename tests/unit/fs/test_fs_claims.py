from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flytekitplugins_safedist.errors import (
    ClaimLostError,
    FsError,
    FsTimeoutError,
    FsUnsupportedError,
    PathBlockedError,
)
from flytekitplugins_safedist.fs import claim, claims, mount_info, process
from flytekitplugins_safedist.fs.claims import Claim, Owner
from flytekitplugins_safedist.fs.process import ProcessRecord, is_provably_dead, this_process
from tests.harness.fusefs import FuseMount, require


def test_a_claim_leaves_nothing_behind(tmp_path):
    with claim(tmp_path / "lock") as held:
        assert held.owner is not None
        assert held.owner.process == this_process()
        assert Owner.from_text((tmp_path / "lock").read_text()).token == held.owner.token
    assert os.listdir(tmp_path) == []


def test_names_are_cut_by_bytes_not_characters(tmp_path):
    # An owner that is provably dead: this pid, started before the kernel was.
    lock = tmp_path / ("錠" * 80)
    dead = replace(this_process(), started=0)
    lock.write_text(Owner(dead, 0.0, "t" * 32).to_text())
    with claim(lock, timeout=60):
        assert Owner.from_text(lock.read_text()).process == this_process()


def test_another_thread_waits_and_the_timeout_names_the_owner(tmp_path):
    with claim(tmp_path / "lock"):
        caught: list[FsError] = []

        def take() -> None:
            try:
                claim(tmp_path / "lock", timeout=0.05)
            except FsError as error:
                caught.append(error)

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
    assert isinstance(caught[0], FsTimeoutError)
    assert f"held by pid {os.getpid()} on " in str(caught[0])
    assert str(tmp_path / "lock") in caught[0].hint


def test_an_owner_on_another_machine_or_container_is_never_judged(tmp_path):
    mine = this_process()
    gone = replace(mine, pid=2**22 + 1)  # above the kernel's largest pid: dead if it is ours to judge
    assert is_provably_dead(gone)
    for foreign in (replace(gone, boot_id="another"), replace(gone, pid_ns="pid:[1]"), replace(gone, started=-1)):
        assert not is_provably_dead(foreign)
        (tmp_path / "lock").write_text(Owner(foreign, 0.0, "token").to_text())
        with pytest.raises(FsTimeoutError):
            claim(tmp_path / "lock", timeout=0.02)
        assert (tmp_path / "lock").exists()


def test_a_dead_container_on_this_machine_is_known_by_the_lock_it_no_longer_holds(tmp_path):
    other = replace(this_process(), pid_ns="pid:[1]")
    (tmp_path / "lock").write_text(Owner(other, 0.0, "token", locked=True).to_text())
    with claim(tmp_path / "lock", timeout=5) as held:
        assert held.owner is not None


def test_a_dead_owners_claim_is_broken_also_when_the_time_is_up(tmp_path):
    (tmp_path / "lock").write_text(Owner(replace(this_process(), started=0), 0.0, "token").to_text())
    with claim(tmp_path / "lock", timeout=1e-9) as held:
        assert held.owner is not None
    assert os.listdir(tmp_path) == []


def test_a_free_lock_says_nothing_of_an_owner_of_another_boot_or_of_one_that_never_had_a_lock(tmp_path):
    other = replace(this_process(), pid_ns="pid:[1]")
    for owner in (Owner(replace(other, boot_id="another"), 0.0, "token", locked=True), Owner(other, 0.0, "token")):
        (tmp_path / "lock").write_text(owner.to_text())
        assert not Claim(tmp_path / "lock")._is_dead(owner)


def test_a_free_lock_on_a_network_file_system_says_nothing(tmp_path, monkeypatch):
    owner = Owner(replace(this_process(), pid_ns="pid:[1]"), 0.0, "token", locked=True)
    (tmp_path / "lock").write_text(owner.to_text())
    assert Claim(tmp_path / "lock")._is_dead(owner)
    monkeypatch.setattr(mount_info, "mount_of", lambda path: mount_info.Mount("/", "nfs4", "server:/", "rw"))
    assert not Claim(tmp_path / "lock")._is_dead(owner)


def test_a_lock_that_is_free_on_somebody_elses_record_is_no_proof(tmp_path):
    """Between the look at the record and the look at its lock, another may have taken the claim, without a lock."""
    other = replace(this_process(), pid_ns="pid:[1]")
    dead = Owner(other, 0.0, "of the dead", locked=True)
    for lies_there, proof in ((dead, True), (replace(dead, token="of the next"), False)):
        (tmp_path / "lock").write_text(lies_there.to_text())
        assert Claim(tmp_path / "lock")._is_dead(dead) is proof


def test_a_used_pid_with_another_start_time_is_dead():
    mine = this_process()
    assert not is_provably_dead(mine)
    assert is_provably_dead(replace(mine, started=mine.started + 1))


def test_a_process_that_ended_is_dead_also_as_a_zombie():
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.read(reading, 1)
        os._exit(0)
    record = replace(this_process(), pid=child, started=_started(child))
    assert not is_provably_dead(record)
    os.write(writing, b"x")
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert is_provably_dead(record), "a zombie"
    os.waitpid(child, 0)
    assert is_provably_dead(record)
    os.close(reading)
    os.close(writing)


def test_a_process_whose_first_thread_has_ended_lives_as_long_as_the_others(monkeypatch):
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    record = replace(this_process(), pid=child, started=_started(child))
    with monkeypatch.context() as patched:
        patched.setattr(process, "_threads", lambda pid: 2)
        assert not is_provably_dead(record)
    assert is_provably_dead(record)
    os.waitpid(child, 0)


def test_a_proc_that_does_not_show_a_process_is_no_proof_of_its_death(monkeypatch):
    mine = this_process()
    gone = replace(mine, pid=2**22 + 1)
    shown = process._stat(mine.pid)
    monkeypatch.setattr(process, "_stat", lambda pid: None)
    assert not is_provably_dead(gone), "it shows nobody"
    monkeypatch.setattr(process, "_stat", lambda pid: None if pid != mine.pid else shown)
    assert is_provably_dead(gone)
    assert not is_provably_dead(replace(mine, pid=os.getppid())), "it hides others"


def _started(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rsplit(")", 1)[1].split()[19])


def test_what_a_client_remembers_of_a_lock_is_not_believed_when_it_is_removed(tmp_path, monkeypatch):
    lock, read = tmp_path / "lock", claims._read_record
    dead = Owner(this_process(), 0.0, "of the dead")
    lock.write_text(replace(dead, token="of the next").to_text())
    # As from a cache: only under a name that was never asked for does the client read what is there now.
    monkeypatch.setattr(claims, "_read_record", lambda path: dead if path == lock else read(path))
    Claim(lock)._remove(dead)
    assert Owner.from_text(lock.read_text()).token == "of the next"
    assert os.listdir(tmp_path) == ["lock"]


def test_who_is_interrupted_right_after_taking_it_leaves_no_lock_behind(tmp_path, monkeypatch):
    link = os.link

    def interrupted(source, target, **options):
        link(source, target, **options)
        monkeypatch.setattr(os, "link", link)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", interrupted)
    with pytest.raises(KeyboardInterrupt):
        claim(tmp_path / "lock")
    assert os.listdir(tmp_path) == []


def test_a_claim_that_is_let_go_or_not_had_leaves_no_file_open(tmp_path):
    def files() -> int:
        return sum(os.path.islink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))

    before = files()
    with claim(tmp_path / "lock"), pytest.raises(FsTimeoutError):
        claim(tmp_path / "lock", timeout=0.001)
    assert files() == before


def test_a_link_to_somebodys_claim_is_no_claim(tmp_path):
    with claim(tmp_path / "theirs"):
        (tmp_path / "lock").symlink_to("theirs")
        with pytest.raises(PathBlockedError, match="symbolic links"):
            claim(tmp_path / "lock", timeout=0.05)
        assert (tmp_path / "theirs").exists()


def test_a_foreign_file_in_the_way_is_not_touched(tmp_path):
    (tmp_path / "lock").write_text("my notes")
    with pytest.raises(PathBlockedError):
        claim(tmp_path / "lock", timeout=0.05)
    assert (tmp_path / "lock").read_text() == "my notes"
    assert os.listdir(tmp_path) == ["lock"]


def test_who_lost_its_claim_by_hand_is_told(tmp_path):
    held = claim(tmp_path / "lock")
    (tmp_path / "lock").unlink()
    with pytest.raises(ClaimLostError):
        held.release()
    held = claim(tmp_path / "lock")
    (tmp_path / "lock").unlink()
    other = claim(tmp_path / "lock")
    with pytest.raises(ClaimLostError):
        held.release()
    assert Owner.from_text((tmp_path / "lock").read_text()) == replace(other.owner, locked=True)
    other.release()


def test_the_blocks_own_error_is_not_hidden(tmp_path):
    with pytest.raises(ZeroDivisionError), claim(tmp_path / "lock"):
        _ = (tmp_path / "lock").unlink() or 1 / 0


def test_a_forked_child_does_not_release_its_parents_claim(tmp_path):
    with claim(tmp_path / "lock") as held:
        child = os.fork()
        if not child:
            held.release()
            os._exit(0)
        os.waitpid(child, 0)
        assert (tmp_path / "lock").exists()


def test_without_hard_links_it_refuses(tmp_path):
    require()
    with FuseMount(tmp_path / "server", tmp_path / "client", links=False) as client:
        with pytest.raises(FsUnsupportedError, match="hard links"):
            claim(client.path / "lock")
        assert os.listdir(client.path) == []


def test_a_missing_directory_is_our_error(tmp_path):
    with pytest.raises(FsError, match="ensure_dir"):
        claim(tmp_path / "none" / "lock")


@given(
    st.builds(
        Owner,
        st.builds(ProcessRecord, st.text(), st.text(), st.text(), st.integers(), st.integers()),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(),
        st.booleans(),
    )
)
def test_owner_records_survive_the_file(owner):
    assert Owner.from_text(owner.to_text()) == owner


@given(st.text())
def test_anything_else_is_a_value_error(text):
    try:
        Owner.from_text(text)
    except ValueError:
        return
    raise AssertionError(f"{text!r} was taken for an owner")


def test_a_claim_that_is_held_already_is_told_what_to_do(tmp_path):
    with claim(tmp_path / "lock") as held, pytest.raises(FsError) as caught:
        held.acquire()
    assert str(caught.value) == (
        f"this claim is held already [path={tmp_path}/lock]. Next step: make a new one with claim()"
    )
