"""This package in another interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flytekitplugins_safedist import own


def test_it_is_found_where_it_is_and_what_lies_beside_it_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    (other / own.NAME).mkdir(parents=True)
    (other / own.NAME / "__init__.py").write_text("raise SystemExit('another copy')")
    home.mkdir()
    (home / own.NAME).symlink_to(Path(own.__file__).parent)
    for name in ("dataclasses", "typing", "copy", "token", "ast"):
        (home / f"{name}.py").write_text("raise SystemExit(f'{__name__} of somebody else')")
    monkeypatch.setattr(own, "_HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", str(other))
    text = f"import {own.NAME}.errors as found; print(found.__file__, sys.argv[1:], home in sys.path)"
    ran = subprocess.run([sys.executable, *own.program(text, "x")], capture_output=True, text=True, check=False)
    assert (ran.stderr, ran.stdout) == ("", f"{home / own.NAME / 'errors.py'} ['x'] False\n")
