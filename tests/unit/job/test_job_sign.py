"""The leader's sign in the store, by which those who cannot reach the leader see whether it lives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist.job.sign import RENEWALS, Renewal, Sign, SignPlace, SignWatch
from tests.harness.moto_s3 import BUCKET, S3

RENEW = 60.0


class Access:
    """flytekit's way to a store, as far as it is used."""

    def __init__(self, filesystem: Any = None) -> None:
        self._filesystem = filesystem

    def get_filesystem_for_path(self, _address: str) -> Any:
        return self._filesystem


def place_of(directory: Path | str, access: Any = None, heartbeat: float = 300.0) -> SignPlace:
    return SignPlace.of(str(directory), access or Access(), heartbeat)


def put_twice_and_read(place: SignPlace) -> None:
    assert place.read() is None
    for beat in (1, 2):
        place.put(Sign("node 0", beat))
        assert place.read() == Sign("node 0", beat)


def test_a_sign_is_put_over_the_one_before_in_a_directory(tmp_path: Path) -> None:
    put_twice_and_read(place_of(tmp_path / "not" / "there"))
    assert len(list((tmp_path / "not" / "there").iterdir())) == 1


def test_a_sign_is_put_over_the_one_before_in_s3(s3: S3) -> None:
    import s3fs

    s3.put("something", b"")  # the bucket is there
    store = s3fs.S3FileSystem(key="test", secret="test", endpoint_url=s3.endpoint)
    put_twice_and_read(place_of(f"s3://{BUCKET}/attempt-0/", Access(store)))


@pytest.mark.parametrize(("heartbeat", "renew"), [(300.0, 60.0), (5.0, 5.0)])
def test_it_is_renewed_each_minute_or_as_often_as_nodes_notice_a_loss(
    tmp_path: Path, heartbeat: float, renew: float
) -> None:
    assert place_of(tmp_path, heartbeat=heartbeat).renew == renew


def test_a_leader_renews_its_sign_until_it_leaves_and_begins_also_where_the_store_is_away(tmp_path: Path) -> None:
    put = threading.Semaphore(0)
    said: list[str] = []

    class Store:
        def pipe_file(self, _address: str, _data: bytes) -> None:
            put.release()
            raise ConnectionError("refused")

    renewal = Renewal(place_of("s3://bucket/attempt-0", Access(Store()), heartbeat=0.01), "node 0", said.append)
    for _ in range(3):
        assert put.acquire(timeout=60)
    renewal.close()
    assert len(said) == 1
    assert "refused" in said[0]


class Reader:
    """Watches a sign, in virtual time."""

    def __init__(self, directory: Path) -> None:
        self.now = 0.0
        self.place = place_of(directory)
        self.watch = SignWatch(self.place, lambda: self.now)
        self.beats = False

    def finds(self, decided: Callable[[], bool] = lambda: False) -> str:
        return self.watch.wait(decided, 3600.0, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.beats and self.now % RENEW < seconds:
            self.place.put(Sign("node 0", int(self.now)))


def test_without_a_sign_nobody_leads(tmp_path: Path) -> None:
    assert Reader(tmp_path).finds() == "nobody"


def test_a_sign_that_changes_is_of_one_who_lives(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.place.put(Sign("node 0", 1))
    reader.beats = True
    assert reader.finds() == "led"
    assert reader.now <= 2 * RENEW


def test_a_sign_that_does_not_change_for_three_renewals_is_nobodys(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.place.put(Sign("node 0", 1))
    assert reader.finds() == "nobody"
    assert reader.now >= RENEWALS * RENEW


def test_who_has_watched_it_before_waits_no_longer(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.place.put(Sign("node 0", 1))
    reader.watch.look()
    reader.now += RENEWALS * RENEW
    began = reader.now
    assert (reader.finds(), reader.now) == ("nobody", began)


def test_a_change_that_was_seen_before_the_leader_was_lost_says_nothing_of_it(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for beat in (1, 2):
        reader.place.put(Sign("node 0", beat))
        reader.watch.look()
    assert reader.finds() == "nobody"


def test_a_verdict_ends_the_wait(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.place.put(Sign("node 0", 1))
    assert reader.finds(lambda: True) == "decided"


def test_a_store_that_cannot_be_read_is_no_sign_of_anything(tmp_path: Path) -> None:
    reader = Reader(tmp_path)

    def down() -> bool:
        raise ConnectionError("refused")

    assert reader.finds(down) == "unknown"
    assert reader.now >= 3600.0
