"""A benchmark whose jobs are started pod by pod, as no other test does: a fault ends as it asks."""

from __future__ import annotations

import importlib
import sys

from tests.harness.procs import ROOT
from tests.harness.shared import directory_of_all_workers


def test_a_fault_of_the_soak_ends_as_the_soak_asks(warm, tmp_path_factory, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    soaking, soak = (importlib.import_module(name) for name in ("soaking", "soak"))
    imported = directory_of_all_workers(tmp_path_factory) / "warm.socket"  # what a soak imports takes seconds
    monkeypatch.setattr(soaking, "listening_for_workers", lambda _: imported)
    monkeypatch.setattr(sys, "argv", ["soak.py", "--seed", "7", "--only", "1"])
    status = soaking.main(soak.__doc__, soak.drawn, soak.carried_out)
    said = capsys.readouterr()
    assert status == 0, said.out + said.err
    assert "failed: []" in said.out
