"""The leader's sign in the store, by which those who cannot reach the leader see whether it lives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist.agent import leader_store
from flytekitplugins_safedist.agent.leader_store import LeaderStore
from flytekitplugins_safedist.coordinator.books import NO_LEADER, Leader
from flytekitplugins_safedist.coordinator.sign import Sign
from tests.harness.moto_s3 import BUCKET, S3


class Access:
    """flytekit's way to a store, as far as it is used."""

    def __init__(self, filesystem: Any = None, *, is_decided: bool = False) -> None:
        self._filesystem, self._is_decided = filesystem, is_decided

    def exists(self, _address: str) -> bool:
        return self._is_decided

    def get_filesystem_for_path(self, _address: str) -> Any:
        return self._filesystem


def put_twice_and_read(place: LeaderStore) -> None:
    assert place.look().sign is None
    for beat in (1, 2):
        place.put(Sign(Leader(1, "node 0"), beat))
        assert place.look().sign == Sign(Leader(1, "node 0"), beat)


def test_a_sign_is_put_over_the_one_before_in_a_directory(tmp_path: Path) -> None:
    put_twice_and_read(LeaderStore(str(tmp_path / "not" / "there"), Access()))  # type: ignore[arg-type]
    assert len(list((tmp_path / "not" / "there").iterdir())) == 1


def test_a_sign_is_put_over_the_one_before_in_s3(s3: S3) -> None:
    import s3fs

    s3.put("something", b"")  # the bucket is there
    store = s3fs.S3FileSystem(key="test", secret="test", endpoint_url=s3.endpoint)
    put_twice_and_read(LeaderStore(f"s3://{BUCKET}/attempt-0/", Access(store)))  # type: ignore[arg-type]


@pytest.mark.parametrize("content", [b"", b"\x00" * 100])
def test_what_is_no_sign_is_nobodys_and_told_and_put_over(tmp_path: Path, content: bytes, caplog: Any) -> None:
    place = LeaderStore(str(tmp_path), Access(is_decided=True))  # type: ignore[arg-type]
    Path(place.address).write_bytes(content)
    place.look()
    look = place.look()
    assert (look.sign, look.is_decided) == (Sign(NO_LEADER), True), "somebody has led the job"
    [said] = caplog.messages
    assert place.address in said
    assert repr(content)[:50] in said
    place.put(Sign(Leader(1, "node 0"), 1))
    assert place.look().sign == Sign(Leader(1, "node 0"), 1)


def test_a_store_that_never_answers_is_an_error_and_the_next_look_another_one(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(leader_store, "ANSWER_SECONDS", 0.1)
    place = LeaderStore(str(tmp_path), Access())  # type: ignore[arg-type]
    sign = Path(place.address)
    os.mkfifo(sign)  # to read it does not return
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        place.look()
    with sign.open("wb"):  # whoever still reads is let go
        sign.unlink()
    monkeypatch.setattr(leader_store, "ANSWER_SECONDS", 60.0)  # on a busy machine this look is not over at once
    assert place.look().sign is None
