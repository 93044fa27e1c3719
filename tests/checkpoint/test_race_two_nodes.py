"""A place that two nodes see differently: what one has saved, the other one finds; what one cannot do ends for both."""

from __future__ import annotations

import pytest

from flytekitplugins_safedist.errors import FsIoError
from tests.checkpoint import points
from tests.checkpoint.lives import Kill, Life, faults, lived
from tests.harness.fusefs import FuseMount, require
from tests.harness.product import Store, store


@pytest.fixture
def nodes(tmp_path):
    require()
    with (
        FuseMount(tmp_path / "server", tmp_path / "one", not_there=60) as one,
        FuseMount(tmp_path / "server", tmp_path / "two", not_there=60) as two,
    ):
        yield one, two


def test_what_a_node_did_not_find_before_is_found_when_it_is_there(nodes):
    one, two = (Store(str(client.path / "place")) for client in nodes)
    assert (two.saves(), two.get("step-1/manifest.json")) == ({}, None)
    one.make("step-1")
    assert two.get("step-1/manifest.json") is None
    one.put("step-1/manifest.json", b"whole")
    assert two.saves() == {"step-1": {"manifest.json"}}
    assert two.get("step-1/manifest.json") == b"whole"


def test_a_part_that_is_late_is_waited_for(nodes):
    one, two = (Store(str(client.path)) for client in nodes)
    nodes[1].set(late=[1, 1], late_match="*part")
    one.make("step-1")
    with one.part("step-1/part") as file:
        file.write(b"whole")
    assert list(two.read("step-1", {"part": 5}, [("part", 3, 2), ("part", 0, 3)])) == [b"le", b"who"]


@pytest.mark.parametrize(
    ("op", "match", "code"),
    [
        ("readdir", "*", "EIO"),
        ("open", "*manifest.json", "ESTALE"),
        ("read", "*manifest.json", "EIO"),
        ("read", "*part", "ESTALE"),
    ],
)
def test_what_fails_for_a_moment_is_read_again(nodes, op, match, code):
    one, save = Store(str(nodes[0].path)), "step-1"
    one.make(save)
    with one.part(f"{save}/part") as file:
        file.write(b"whole")
    one.put(f"{save}/manifest.json", b"of it")
    nodes[0].set(faults=[{"op": op, "errno": code, "first": 2, "match": match}])
    assert one.saves() == {save: {"part", "manifest.json"}}
    assert one.get(f"{save}/manifest.json") == b"of it"
    assert list(one.read(save, {"part": 5}, [("part", 0, 3), ("part", 3, 2)])) == [b"who", b"le"]


def test_what_cannot_be_read_is_an_error_that_names_it(nodes):
    one = Store(str(nodes[0].path))
    one.make("step-1")
    with one.part("step-1/part") as file:
        file.write(b"whole")
    nodes[0].set(faults=[{"op": "read", "errno": "EIO", "match": "*part"}])
    with pytest.raises(FsIoError, match=r"path=.*step-1/part"):
        list(one.read("step-1", {"part": 5}, [("part", 0, 5)]))
    nodes[0].set(faults=[{"op": "readdir", "errno": "EIO", "match": "*"}])
    with pytest.raises(FsIoError, match=r"cannot list it.*look at the kernel log"):
        one.saves()


@pytest.mark.parametrize(("rank", "arrival"), [(0, 2), (1, 2)])
def test_a_node_that_loses_the_place_holds_no_other_node_up(nodes, tmp_path, rank, arrival, monkeypatch):
    """In the second save."""
    monkeypatch.setattr(store, "LATE_SECONDS", 1.0)
    (tmp_path / "store.pid").write_text(str(nodes[rank]._server.pid))
    place = tmp_path / "server" / "place"
    places = [str(nodes[0].path / "place"), str(nodes[1].path / "place")]
    life = Life(1, "", tmp_path, sharded=True, kill=Kill("store", rank, points.PART_WRITTEN, arrival))
    ended = lived(life, places, {})
    assert [one.kind for one in ended] == ["error", "error"], ended
    nodes[rank].close()
    (after,) = lived(Life(2, "", tmp_path, steps=0), [str(place)], {})
    assert after.kind == "value", after
    ledger = (tmp_path / "ledger").read_text()
    assert faults(ledger) == []
    assert "committed 0" in ledger
