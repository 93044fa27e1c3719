"""A first copy on the node's own disk: resumed without the store after a restart in place, and not on another node."""

from __future__ import annotations

import pytest

from tests.checkpoint.lives import Kill, Life, lived
from tests.harness.product import near, open_store, points


def resumed(directory, life):
    """The step that rank 0 resumed in a life."""
    lines = [line.split() for line in (directory / "ledger").read_text().splitlines()]
    (step,) = (line[3] for line in lines if line[:3] == ["resumed", str(life), "0"])
    return int(step)


@pytest.fixture
def killed(tmp_path, sharded):
    """A job whose step 1 is committed on its node's disk, and in the store only step 0. Returns its next life."""

    def live(**options):
        return Life(2, "", tmp_path, sharded=sharded, steps=0, **options)

    # It comes by "committed" twice with each save: on the disk, in the store.
    first = Life(
        1, "", tmp_path, sharded=sharded, local=str(tmp_path / "disk"), kill=Kill("all", 0, points.COMMITTED, 3)
    )
    kinds = [one.kind for one in lived(first, [str(tmp_path / "place")] * 2, {})]
    assert kinds[0] == "died"
    return live


@pytest.mark.parametrize("sharded", [False, True])
class TestFirstCopy:
    def test_ranks_that_start_again_in_place_go_on_from_it(self, tmp_path, killed):
        lived(killed(local=str(tmp_path / "disk")), [str(tmp_path / "place")] * 2, {})
        assert resumed(tmp_path, 2) == 1

    def test_a_new_pod_has_an_empty_disk_and_goes_on_from_the_store(self, tmp_path, killed):
        lived(killed(local=str(tmp_path / "another disk")), [str(tmp_path / "place")] * 2, {})
        assert resumed(tmp_path, 2) == 0

    def test_a_damaged_one_is_passed_over(self, tmp_path, killed):
        (part,) = [path for path in (tmp_path / "disk").rglob("*.pt") if "step-000000000001" in str(path)]
        part.write_bytes(part.read_bytes()[:-1])
        lived(killed(local=str(tmp_path / "disk")), [str(tmp_path / "place")] * 2, {})
        assert resumed(tmp_path, 2) == 0

    def test_a_disk_that_cannot_be_written_does_not_fail_the_save(self, tmp_path, sharded):
        (tmp_path / "disk").write_text("a file is in the way")
        life = Life(1, "", tmp_path, sharded=sharded, local=str(tmp_path / "disk"), steps=1)
        (outcome,) = lived(life, [str(tmp_path / "place")], {})
        assert outcome.kind == "value", outcome
        assert "committed 0" in (tmp_path / "ledger").read_text()


def test_it_is_of_one_place_alone(tmp_path):
    one, other = (near(tmp_path, open_store(str(tmp_path / name))) for name in ("one", "other"))
    assert one.url != other.url
