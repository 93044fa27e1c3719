"""Importing the package is cheap and harmless, and flytekit finds it."""

from __future__ import annotations

import configparser
import os
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


def test_importing_it_and_asking_it_for_an_error_imports_neither_torch_nor_horovod_nor_flytekit() -> None:
    modules = ", ".join(f"flytekitplugins_safedist.{name}" for name in ("config", "errors", "envvars"))
    assert modules_after(f"import {modules}; from flytekitplugins_safedist import FsError").isdisjoint(HEAVY)


def test_a_task_config_and_an_agent_need_flytekit_and_still_no_torch_and_no_horovod() -> None:
    configs = "from flytekitplugins_safedist import SafeHorovod, SafeTorch"
    loaded = modules_after(f"{configs}; import flytekitplugins_safedist.agent.run")
    assert loaded.isdisjoint({"torch", "horovod"})
    assert "flytekit" in loaded, "a heavy import would be seen"


def test_what_flytekit_loads_of_every_installed_plugin_is_only_the_packages_table_of_names() -> None:
    """Everybody pays for it who imports flytekit where this is installed, whether their tasks are ours or not."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    declared = settings["options.entry_points"]["flytekit.plugins"].strip()
    assert declared == "safedist = flytekitplugins_safedist"
    code = "import sys, flytekitplugins_safedist; print(*[name for name in sys.modules if 'safedist' in name])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    ours = {name for name in done.stdout.split() if name.startswith("flytekitplugins_safedist.")}
    assert ours == {f"flytekitplugins_safedist.{name}" for name in ("errors", "lazy")}


def test_what_goes_wrong_below_the_import_of_a_public_name_is_told_with_its_cause(tmp_path: Path) -> None:
    """``from package import name`` forgets an AttributeError, which is what two versions that do not fit raise."""
    (tmp_path / "mashumaro.py").write_text("import os\nos.no_such_name_in_this_version\n")
    code = "from flytekitplugins_safedist import SafeTorch"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert "AttributeError: module 'os' has no attribute 'no_such_name_in_this_version'" in done.stderr
    assert "ImportError: SafeTorch of flytekitplugins_safedist cannot be imported: module 'os' has no" in done.stderr


def test_a_config_that_is_asked_for_is_known_to_flytekit() -> None:
    code = """
from flytekitplugins_safedist import SafeHorovod, SafeTorch
from flytekit.core.task import TaskPlugins
print(*(TaskPlugins.find_pythontask_plugin(each).__name__ for each in (SafeHorovod, SafeTorch)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["SafeTask", "SafeTask"]


def test_every_public_name_can_be_imported() -> None:
    import flytekitplugins_safedist as package

    assert [name for name in package.__all__ if not hasattr(package, name)] == []
