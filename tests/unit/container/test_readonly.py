"""Directories on the scratch volume for what cannot be where it belongs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from flytekitplugins_safedist.container.readonly import destination, temporary_directory


@pytest.fixture
def scratch(tmp_path: Path) -> dict[str, str]:
    root = tmp_path / "scratch"
    root.mkdir()
    return {"SAFEDIST_SCRATCH_ROOT": str(root)}


@pytest.fixture
def no_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)


def test_where_there_is_a_usual_directory_nothing_is_made(scratch: dict[str, str], tmp_path: Path) -> None:
    assert temporary_directory(scratch) is None
    assert destination(tmp_path / "code", scratch) == tmp_path / "code"
    assert list(Path(scratch["SAFEDIST_SCRATCH_ROOT"]).iterdir()) == []


@pytest.mark.usefixtures("no_temporary_directory")
def test_temporary_files_go_to_the_scratch_volume_where_there_is_nothing_else(scratch: dict[str, str]) -> None:
    found = temporary_directory(scratch)

    assert found is not None
    assert found.is_dir()
    assert found.parent == Path(scratch["SAFEDIST_SCRATCH_ROOT"])
    assert temporary_directory({}) is None


def test_code_goes_to_the_scratch_volume_where_its_destination_cannot_be_written(
    scratch: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)  # tests may run as root

    assert destination(tmp_path / "root", scratch).parent == Path(scratch["SAFEDIST_SCRATCH_ROOT"])
    assert destination(tmp_path / "root", {}) == tmp_path / "root"
