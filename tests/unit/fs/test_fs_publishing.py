"""Publishing together, with threads as ranks: what each of them is told. Processes that die are in the race tests."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flytekitplugins_safedist.errors import FsError, FsUnsupportedError, PathBlockedError, PublishError
from flytekitplugins_safedist.fs import Identity, file_group, is_published, publish, publishing, shared_scope

RANKS = 2


@pytest.fixture
def groups(tmp_path):
    return [file_group(tmp_path / "notes", identity=Identity(rank, RANKS, rank, RANKS)) for rank in range(RANKS)]


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path / "out"


def each(groups, work) -> list[Any]:
    """Run ``work(rank, group)`` in every rank; what each returned or raised."""
    with ThreadPoolExecutor(len(groups)) as pool:
        futures = [pool.submit(work, rank, group) for rank, group in enumerate(groups)]
        return [future.exception() or future.result() for future in futures]


def parts(place: Path, **options: Any):
    def work(rank, group):
        with publish(place / "ckpt", group=group, timeout=60, **options) as part:
            (part / f"shard-{rank}").write_text("whole")
            (part / "meta").mkdir()
            (part / "meta" / str(rank)).touch()
        return sorted(os.listdir(place / "ckpt"))

    return work


@pytest.mark.parametrize("shared", ["probe", "yes"])
@pytest.mark.parametrize("durable", [True, False])
def test_the_parts_of_all_ranks_become_one_directory(groups, place, shared, durable):
    assert each(groups, parts(place, shared=shared, durable=durable)) == [["meta", "shard-0", "shard-1"]] * 2
    assert len(os.listdir(place / "ckpt" / "meta")) == RANKS
    assert os.listdir(place) == ["ckpt"]


def test_a_directory_with_a_marker_is_complete_when_the_marker_is_there(groups, place):
    def work(rank, group):
        with publish(place / "ckpt", commit="marker", group=group, timeout=60) as part:
            (part / str(rank)).touch()
            before = is_published(place / "ckpt")
        return before, is_published(place / "ckpt"), sorted(os.listdir(place / "ckpt"))

    assert each(groups, work) == [(False, True, [".safedist-published", "0", "1"])] * RANKS
    assert os.listdir(place) == ["ckpt"]


def test_one_rank_that_fails_keeps_everything_back_and_the_others_learn_why(groups, place):
    def work(rank, group):
        with publish(place / "ckpt", group=group, timeout=60) as part:
            (part / f"shard-{rank}").touch()
            if rank == 1:
                raise ValueError("nan in the weights")

    other, own = each(groups, work)
    assert isinstance(own, ValueError)
    assert str(other) == (
        f"nothing was published: 1 of 2 ranks failed [path={place}/ckpt, first_failed_rank=1] "
        "(seen: ValueError: nan in the weights). Next step: see that rank's own error"
    )
    assert os.listdir(place) == []


def test_ranks_that_mean_different_things_are_told_which(groups, place):
    def work(rank, group):
        with publish(place / "ckpt", exists="replace" if rank else "keep", group=group, timeout=60):
            pass

    text = (
        f"nothing was published: the ranks mean different things [path={place}/ckpt] (seen: "
        "rank 0: ckpt, commit='rename', exists='keep'; rank 1: ckpt, commit='rename', exists='replace'). Next step: "
        "call publish with the same name and options in all ranks, and with one key for one directory"
    )
    assert [str(error) for error in each(groups, work)] == [text, text]
    assert os.listdir(place) == []


def test_two_ranks_that_leave_a_file_of_one_name_are_told_to_put_the_rank_into_it(groups, place):
    def work(rank, group):
        with publish(place / "ckpt", group=group, timeout=60) as part:
            (part / "model.pt").write_text(str(rank))

    errors = each(groups, work)
    (own,) = (error for error in errors if isinstance(error, PathBlockedError))
    assert str(own) == ("two ranks left a file of the same name [path=model.pt]. Next step: put the rank into the name")
    assert isinstance(errors[1 - errors.index(own)], PublishError)
    assert os.listdir(place) == []


@pytest.mark.parametrize(("exists", "left"), [("keep", ["old"]), ("replace", ["meta", "shard-0", "shard-1"])])
def test_what_exists_is_kept_or_replaced_as_it_is_said(groups, place, exists, left):
    (place / "ckpt").mkdir(parents=True)
    (place / "ckpt" / "old").touch()
    assert each(groups, parts(place, exists=exists)) == [left, left]
    assert os.listdir(place) == ["ckpt"]


def test_what_exists_is_in_the_way_by_default(groups, place):
    make(place / "ckpt" / "old")
    errors = each(groups, parts(place))
    assert all(isinstance(error, FsError) and f"{place}/ckpt" in str(error) for error in errors)
    assert os.listdir(place / "ckpt") == ["old"]
    assert os.listdir(place) == ["ckpt"]


@pytest.mark.parametrize(("exists", "published"), [("fail", True), ("replace", False), ("keep", False)])
def test_a_directory_with_a_marker_is_published_once(groups, place, exists, published):
    (place / "ckpt").mkdir(parents=True)
    if published:
        (place / "ckpt" / ".safedist-published").touch()
    errors = each(groups, parts(place, commit="marker", exists=exists))
    assert [str(error) for error in errors if isinstance(error, PathBlockedError)] == [
        f"a directory that is committed by marker cannot be published again [path={place}/ckpt]. "
        "Next step: publish under a new name"
    ] * 2


def test_ranks_that_do_not_share_the_place_are_told_what_to_do(groups, place, monkeypatch):
    asked: list[tuple[Any, ...]] = []

    def shared(where, *, timeout, key, group):
        asked.append((where, timeout, key))
        where.mkdir(exist_ok=True)
        return SimpleNamespace(kind="node")

    monkeypatch.setattr(publishing, "shared_scope", shared)
    errors = each(groups, parts(place))
    assert asked == [(place, 60, "publish/ckpt")] * 2
    for error in errors:
        assert str(error).startswith(
            f"the ranks do not share the file system to publish on [path={place}/ckpt, file_system="
        )
        assert str(error).endswith(
            "] (seen: one per node). Next step: publish on a shared volume, or let each node publish its own directory "
            "with atomic_dir; threads that publish directories of one name at once must each say a key="
        )


def test_ranks_that_begin_in_different_places_are_told_that_they_do(groups, tmp_path):
    def work(rank, group):
        with publish(tmp_path / f"place{rank}" / "ckpt", shared="yes", timeout=1, group=group):
            pass

    told = [error for error in each(groups, work) if "does not see what the rank that began" in str(error)]
    error = told[0]  # both, where both give up before they hear of each other
    assert "Next step: it may mean another directory of this name (say key=), or see another file system" in str(error)
    assert "(shared='probe')" in str(error)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_links_between_directories_is_told_with_the_way_out(place, monkeypatch, number):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(publishing.os, "link", refuse)
    error = raised(lambda: publishing._link(make(place / "a"), place / "b", 0))
    assert isinstance(error, FsUnsupportedError)
    assert str(error).startswith(
        "this file system has no hard links between directories, which keep two ranks from overwriting each "
        f"other's files [path={place}/b, file_system="
    )
    assert str(error).endswith(f'(seen: {errno.errorcode[number]}). Next step: use commit="marker"')


def make(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def raised(call) -> BaseException:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def test_another_trouble_with_a_link_is_the_systems_own(place, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(publishing.os, "link", refuse)
    assert raised(lambda: publishing._link(make(place / "a"), place / "b", 0)).errno == errno.ENOSPC


def test_a_rank_that_is_interrupted_tells_the_others_before_it_goes(groups, place):
    def work(rank, group):
        with publish(place / "ckpt", group=group, timeout=60):
            if rank:
                raise KeyboardInterrupt

    errors = each(groups, work)
    assert isinstance(errors[1], KeyboardInterrupt)
    assert "KeyboardInterrupt" in str(errors[0])
    assert isinstance(errors[0], PublishError)
    assert not (place / "ckpt").exists()


@pytest.mark.parametrize(("commit", "name"), [("rename", "."), ("marker", publishing.MARKER)])
def test_every_rank_sees_it_before_it_goes_on(groups, place, monkeypatch, commit, name):
    waited, wait_for = [], publishing.wait_for
    monkeypatch.setattr(publishing, "wait_for", lambda path, **how: waited.append(path) or wait_for(path, **how))
    each(groups, parts(place, commit=commit) if commit == "rename" else marked(place))
    assert waited.count(place / "ckpt" / name) == RANKS


def marked(place):
    def work(rank, group):
        with publish(place / "ckpt", commit="marker", group=group, timeout=60) as part:
            (part / str(rank)).touch()

    return work


def test_nothing_is_left_in_the_store_of_what_nobody_will_ask_for_again(groups, place, tmp_path):
    each(groups, parts(place))
    assert (tmp_path / "notes" / "publish").is_dir()
    assert [*(tmp_path / "notes" / "publish").rglob("*.note")] == []
    assert [*(tmp_path / "notes" / "scope").rglob("*.note")] == []


def test_directories_of_one_name_are_told_apart_by_their_keys_whatever_their_order(groups, place, monkeypatch):
    begun = {(rank, key): threading.Event() for rank in range(RANKS) for key in "ab"}
    here, occasion = threading.local(), publishing.Occasion

    def counted(*args):
        call = occasion(*args)
        here.begun.set()
        return call

    monkeypatch.setattr(publishing, "Occasion", counted)

    def work(rank, group, key):
        here.begun = begun[rank, key]
        if key == "ab"[1 - rank]:  # the other one is first in the other rank
            assert begun[rank, "ab"[rank]].wait(60)
        with publish(place / key / "ckpt", key=key, group=group, timeout=60) as part:
            (part / f"{key}{rank}").touch()

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, rank, group, key) for rank, group in enumerate(groups) for key in "ab"]:
            future.result()
    assert {key: sorted(os.listdir(place / key / "ckpt")) for key in "ab"} == {"a": ["a0", "a1"], "b": ["b0", "b1"]}


def test_a_link_whose_reply_was_lost_is_no_second_file(place):
    mine = make(place / "a")
    os.link(mine, place / "b")
    publishing._link(mine, place / "b", mine.stat().st_ino)


def test_a_second_committer_finds_the_deed_done_and_leaves_it_so(place):
    how = publishing._How("rename", "replace", durable=True, timeout=1)
    draft = place / "draft"
    make(draft / "new")
    (draft / publishing.PROOF).touch()
    inode = draft.stat().st_ino
    publishing._commit(place / "ckpt", draft, inode, how)
    assert os.listdir(place / "ckpt") == ["new"]
    publishing._commit(place / "ckpt", draft, inode, how)
    assert os.listdir(place / "ckpt") == ["new"]
    assert os.listdir(place) == ["ckpt"]


def test_ranks_that_are_durable_have_everything_on_the_disk_before_it_has_its_name(groups, place, monkeypatch):
    synced: list[str] = []
    lock = threading.Lock()

    def note(name):
        def call(path):
            with lock:
                synced.append(f"{name} {path.name if path.name in ('out',) else 'draft'}")

        return call

    monkeypatch.setattr(publishing, "fsync_tree", note("tree"))
    monkeypatch.setattr(publishing, "fsync_dir", note("dir"))
    monkeypatch.setattr(
        publishing, "publish_dir", lambda draft, target, **_: (synced.append("rename"), os.rename(draft, target))
    )
    each(groups, parts(place, durable=True))
    assert synced.count("tree draft") == RANKS
    assert synced.count("dir draft") >= RANKS
    assert synced[-2:] == ["rename", "dir out"]
    synced.clear()
    each(groups, lambda rank, group: publish_empty(place / "other", group))
    assert synced == ["rename"]


def publish_empty(place, group):
    with publish(place, group=group, durable=False, timeout=60):
        pass


# --- who shares a place -----------------------------------------------------------------------------------------------


def test_ranks_that_see_each_others_files_share_the_place_and_leave_nothing_there(groups, place):
    scopes = each(groups, lambda rank, group: shared_scope(place, timeout=60, group=group))
    assert [(one.kind, one.parts, one.rank, one.path) for one in scopes] == [
        ("job", ((0, 1),), 0, place),
        ("job", ((0, 1),), 1, place),
    ]
    assert os.listdir(place) == []


def test_ranks_in_different_places_are_each_on_their_own(groups, place):
    scopes = each(groups, lambda rank, group: shared_scope(place / str(rank), timeout=60, grace=0, group=group))
    assert [(one.kind, one.parts) for one in scopes] == [("rank", ((0,), (1,)))] * 2


@pytest.mark.parametrize(("declared", "found"), [("job", ((0, 1),)), ("rank", ((0,), (1,))), ("node", ((0, 1),))])
def test_the_users_word_wins_and_nothing_is_probed(groups, place, declared, found):
    scopes = each(
        groups, lambda rank, group: shared_scope(place / str(rank), declared=declared, timeout=60, group=group)
    )
    assert [(one.kind, one.parts, one.rank) for one in scopes] == [(declared, found, 0), (declared, found, 1)]


def test_a_node_is_declared_by_the_nodes_of_the_ranks(tmp_path, place):
    groups = [file_group(tmp_path / "notes", identity=Identity(r, 4, r % 2, 2, r // 2, 2)) for r in range(4)]
    scopes = each(groups, lambda rank, group: shared_scope(place, declared="node", timeout=60, group=group))
    assert {one.parts for one in scopes} == {((0, 1), (2, 3))}


def test_a_rank_that_cannot_use_the_place_is_named_to_all(groups, place):
    make(place / "file")

    def work(rank, group):
        return shared_scope(place / "file" / "below" if rank else place / "free", timeout=60, group=group)

    errors = [str(error) for error in each(groups, work)]
    assert errors[0].startswith(f"rank 1 cannot use the directory [path={place}/free] (seen: ")
    assert errors[1].startswith(f"rank 1 cannot use the directory [path={place}/file/below] (seen: ")


def test_of_several_ranks_that_cannot_use_the_place_the_first_is_named_and_the_others_counted(groups, place):
    make(place / "file")
    errors = each(groups, lambda rank, group: shared_scope(place / "file" / "x", timeout=60, group=group))
    assert [str(one).startswith("rank 0 (and 1 more ranks) cannot use the directory") for one in errors] == [True] * 2
