"""What installers make of the wheel beside flytekit: an answer, and soon.

The requirements of flytekit, of what it brings (s3fs, aiobotocore, botocore) and ours meet in few versions of some
packages. An installer that begins elsewhere goes back through hundreds of releases: minutes, and no end in sight.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.harness import needs

pytestmark = [pytest.mark.wheel, pytest.mark.processes, pytest.mark.timeout(1800)]

PIPS_SECONDS, UVS_SECONDS = 800, 240
"""pip says that it goes back, and needs 10 to 40 s on a calm machine, 213 on a very busy one. uv does not say it: going
back took from two minutes to more than seven."""

PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
PATIENT = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}
"""For a network that is there: the tests' own resolver gives up after one lost packet."""
RETRIES = "5" if os.environ.get("SAFEDIST_CI") else "0"
"""Without an index this is left out, and soon; but where it must not be."""


def python_with(pip: str, place: Path) -> str:
    """An interpreter of an environment with nothing but this pip."""
    venv.create(place, with_pip=False)
    python = str(place / "bin" / "python")
    install = [*PIP, "--python", python, "install", "--upgrade", "--retries", RETRIES, "--timeout", "20", pip]
    done = subprocess.run(install, capture_output=True, text=True, check=False, env=PATIENT)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        needs.missing(f"no package index gives {pip} ({reason})", bring="make wheel, with a network")
    return python


def test_pip_finds_versions_that_go_together(wheel: Path, tmp_path: Path) -> None:
    """An old one: those since then go back less."""
    python = python_with("pip==23.2", tmp_path / "env")
    command = [python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "flytekit", str(wheel)]

    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PIPS_SECONDS, env=PATIENT)

    assert done.returncode == 0, done.stderr
    # How long it goes back depends on the index of the day; that it does is what makes the minutes.
    assert "This is taking longer than usual" not in done.stdout


def test_uv_finds_versions_that_go_together(wheel: Path, tmp_path: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    python = python_with("pip", tmp_path / "env")
    command = [str(uv), "pip", "install", "--dry-run", "--quiet", "--python", python, "flytekit", str(wheel)]

    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=UVS_SECONDS, env=PATIENT)

    assert done.returncode == 0, done.stderr
