"""Importing the package is cheap and harmless, and flytekit finds it."""

from __future__ import annotations

import configparser
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "horovod", "flytekit")


def modules_after(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["", ".config", ".errors", ".envvars"])
def test_importing_it_imports_neither_torch_nor_horovod_nor_flytekit(module: str) -> None:
    assert modules_after(f"import flytekitplugins_safedist{module}").isdisjoint(HEAVY)


def test_the_probe_would_see_a_heavy_import() -> None:
    assert "flytekit" in modules_after("import flytekit")


def test_a_task_config_still_needs_no_torch_and_no_horovod() -> None:
    loaded = modules_after("from flytekitplugins_safedist import SafeHorovod, SafeTorch")
    assert loaded.isdisjoint({"torch", "horovod"})


def test_flytekit_finds_the_task_types_through_its_entry_point() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    declared = dict(
        line.split(" = ", 1) for line in settings["options.entry_points"]["flytekit.plugins"].strip().splitlines()
    )
    assert declared == {"safedist": "flytekitplugins_safedist.plugin.task"}
    module = importlib.import_module(declared["safedist"])
    assert {"SafeHorovod", "SafeTorch"} <= set(dir(module))


def test_every_public_name_can_be_imported() -> None:
    import flytekitplugins_safedist as package

    assert [name for name in package.__all__ if not hasattr(package, name)] == []
