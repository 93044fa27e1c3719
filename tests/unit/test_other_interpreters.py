"""This package in another interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flytekitplugins_safedist import package
from flytekitplugins_safedist.tools import doctor


def test_it_is_found_where_it_is_and_what_lies_beside_it_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    (other / package.NAME).mkdir(parents=True)
    (other / package.NAME / "__init__.py").write_text("raise SystemExit('another copy')")
    home.mkdir()
    (home / package.NAME).symlink_to(Path(package.__file__).parent)
    for name in ("dataclasses", "typing", "copy", "token", "ast"):
        (home / f"{name}.py").write_text("raise SystemExit(f'{__name__} of somebody else')")
    monkeypatch.setattr(package, "_HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", str(other))
    text = f"import {package.NAME}.errors as found; print(found.__file__, sys.argv[1:], home in sys.path)"
    ran = subprocess.run([sys.executable, *package.program(text, "x")], capture_output=True, text=True, check=False)
    assert (ran.stderr, ran.stdout) == ("", f"{home / package.NAME / 'errors.py'} ['x'] False\n")


def test_what_doctor_starts_is_the_package_that_it_is_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / package.NAME).mkdir()
    (tmp_path / package.NAME / "__init__.py").write_text("raise ImportError('a part of another version')")
    monkeypatch.chdir(tmp_path)
    program = f"""
import json
from {package.NAME} import errors
print(json.dumps({{"from": errors.__file__}}))
"""
    assert doctor.output_of(program) == {"from": str(Path(package.__file__).with_name("errors.py"))}
