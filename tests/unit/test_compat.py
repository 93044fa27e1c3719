"""What is private to torch and flytekit: there in the versions tested, and missed with a word where it is not."""

from __future__ import annotations

import pickle
from importlib import metadata
from types import SimpleNamespace

import pytest

from flytekitplugins_safedist.compat import TESTED, gone, lookup
from flytekitplugins_safedist.errors import IncompatibleVersionError


@pytest.mark.parametrize("library", TESTED)
def test_a_name_that_is_gone_is_missed_with_the_version_seen_and_those_tested(library: str) -> None:
    with pytest.raises(IncompatibleVersionError) as caught:
        lookup(SimpleNamespace(there=1), "_not_there", of=library)

    said = str(caught.value)
    assert "SimpleNamespace._not_there" in said
    assert f"seen: {library} {metadata.version(library)}" in said
    assert f"expected: {library} {', '.join(TESTED[library])} (tested)" in said
    assert str(pickle.loads(pickle.dumps(caught.value))) == said


def test_a_name_that_is_there_is_what_it_is_also_when_that_is_nothing() -> None:
    assert lookup(SimpleNamespace(_here=None), "_here", of="flytekit") is None


def test_a_library_without_metadata_is_named_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_of_it(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", none_of_it)
    assert "seen: torch of a version that its metadata do not tell" in str(gone("torch.nothing", of="torch"))
