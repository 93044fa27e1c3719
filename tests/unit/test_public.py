"""What is public is written down in docs/api.md, has docstrings, and stays importable."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist import errors

ROOT = "flytekitplugins_safedist"
DOCS = Path(__file__).parents[2] / "docs"
ERRORS = frozenset(re.findall(r"^\| `(\w+)` \|", (DOCS / "errors.md").read_text(), re.MULTILINE))

# By hand: what a release has shown must not go because a table was regenerated.
SINCE_0_1 = {
    ROOT: "Logs RankContext SafeHorovod SafeTorch Scratch ScratchVolume Timeouts current_rank",
    f"{ROOT}.fs": "Claim Entry Group Identity Progress RankLog SharedScope atomic_dir atomic_path atomic_write barrier "
    "claim default_group download_once ensure_dir exchange file_group horovod_group identity_from_env is_published "
    "merge_logs once_per_job once_per_node publish shared_scope sweep torch_group use_group use_identity wait_for",
    f"{ROOT}.checkpoint": "Checkpoints checkpoints",
    f"{ROOT}.rendezvous": "BACKEND create_handler register torchrun_handler",
    f"{ROOT}.errors": "SafedistError ArchiveError ClaimLostError CodeNotFoundError ConfigError DownloadError "
    "FencedError FsAccessError FsError FsIdentityError FsIoError FsTimeoutError FsUnsupportedError "
    "GroupClosedError IncompatibleVersionError JobInterruptedError LaunchError MigrationError "
    "MissingDependencyError MpiLaunchError NoSpaceError NodeLostError NotInTaskError "
    "OutputTooLargeError PathBlockedError PayloadError Problem PublishError RankFailedError "
    "RankKilledError ReadOnlyFsError RenderError RendezvousError RendezvousTimeoutError "
    "SafedistError ScratchError StagingError StaleHandleError StoreLostError TopologyError "
    "WorkFailedError WorkerLostError",
}


def sections() -> dict[str, set[str]]:
    """The names that docs/api.md lists, by module."""
    found: dict[str, set[str]] = {}
    for part in (DOCS / "api.md").read_text().split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        if title.startswith(f"`{ROOT}"):
            cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
            found[title.strip("`")] = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    found[ROOT] |= ERRORS
    found[f"{ROOT}.errors"] = (ERRORS | {"Problem"}) - {"RecoverableRankFailedError"}
    return found


DOCUMENTED = sections()
EVERY = [
    pytest.param(module, name, id=f"{module}:{name}") for module in DOCUMENTED for name in sorted(DOCUMENTED[module])
]


def test_the_page_names_every_public_module() -> None:
    rooms = ("fs", "checkpoint", "rendezvous", "errors", "tools.migrate")
    assert set(DOCUMENTED) == {ROOT, *(f"{ROOT}.{room}" for room in rooms)}


@pytest.mark.parametrize("module", [ROOT, f"{ROOT}.fs", f"{ROOT}.checkpoint"])
def test_the_page_names_what_the_module_offers(module: str) -> None:
    assert set(importlib.import_module(module).__all__) == DOCUMENTED[module]


def test_the_page_names_every_error_of_the_module_of_errors() -> None:
    assert {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    } == (DOCUMENTED[errors.__name__])


@pytest.mark.parametrize(("module", "name"), EVERY)
def test_what_is_public_says_what_it_is(module: str, name: str) -> None:
    value: Any = getattr(importlib.import_module(module), name)
    if isinstance(value, str):
        return  # a constant: text beside it, which nothing can ask for
    assert value.__doc__
    assert not value.__doc__.startswith(f"{name}("), "made by dataclass, not by us"
    if not inspect.isclass(value):
        return
    public = {key: one for key, one in vars(value).items() if not key.startswith("_")}
    callable_ones = [key for key, one in public.items() if inspect.isroutine(one) or isinstance(one, property)]
    assert [key for key in callable_ones if not inspect.getdoc(getattr(value, key))] == []


@pytest.mark.parametrize(
    "name", ["Kubeflow", "Logs", "SafeHorovod", "SafeTorch", "Scratch", "ScratchVolume", "Timeouts"]
)
def test_every_field_that_a_user_writes_is_explained(name: str) -> None:
    config = getattr(importlib.import_module(ROOT), name)
    text = "\n".join(one.__doc__ or "" for one in config.__mro__ if one.__module__.startswith(ROOT))
    fields = [field.name for field in dataclasses.fields(config)]
    assert [field for field in fields if not re.search(rf"^\s+(\w+, )*{field}(, \w+)*: ", text, re.MULTILINE)] == []


@pytest.mark.parametrize("module", SINCE_0_1)
def test_what_a_release_has_shown_can_still_be_imported(module: str) -> None:
    there = importlib.import_module(module)
    assert [name for name in SINCE_0_1[module].split() if not hasattr(there, name)] == []


@pytest.mark.processes
def test_the_old_place_of_migrate_answers_with_a_warning() -> None:
    code = "from flytekitplugins_safedist.migrate import migrate, Migration; print(migrate.__module__)"
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "flytekitplugins_safedist.tools.migrate\n"
    assert (
        "DeprecationWarning: flytekitplugins_safedist.migrate moved: import flytekitplugins_safedist.tools.migrate"
        in (done.stderr)
    )


@pytest.mark.processes
def test_asking_the_root_for_an_error_imports_neither_torch_nor_flytekit() -> None:
    code = "from flytekitplugins_safedist import FsError; import sys; print({'torch', 'flytekit'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
