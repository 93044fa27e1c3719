"""The wheel as it would be published, built once."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.harness.procs import ROOT
from tests.harness.shared import directory_of_all_workers, shared


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = directory_of_all_workers(tmp_path_factory)
    with shared(directory, "wheel", partial(built, directory)) as made:
        yield made


def built(directory: Path) -> Path:
    place = Path(tempfile.mkdtemp(dir=directory))
    (place / "source").mkdir()
    for name in ("flytekitplugins_safedist", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        (place / "source" / name).symlink_to(ROOT / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(place)]
    subprocess.run([*pip, *options, str(place / "source")], check=True)
    (wheel,) = place.glob("*.whl")
    return wheel
