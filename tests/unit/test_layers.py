"""Imports inside the package point only downward. This table is the one place where the levels are written down."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "flytekitplugins_safedist"
SOURCE = Path(__file__).parents[2] / PACKAGE

LEVELS: tuple[tuple[str, ...], ...] = (
    # what needs nothing: values that are handed on in a process; how packages show their names; a container's last word
    ("handoff", "lazy", "termination"),
    # the process itself: its variables, its errors, its signals, its log
    ("envvars", "errors", "log", "stopping"),
    # what is private to torch and flytekit; what a failed process says last
    ("compat", "lastwords"),
    # race-free file-system operations, used by staging and scratch as well as by users
    ("fs",),
    # values: what the user writes, what the operator says, what Flyte says
    ("config", "flyte", "topology"),
    # where nodes meet; what runs on one of them
    ("ranks", "rendezvous"),
    # what a rank keeps of its work
    ("checkpoint",),
    # one node's part of a job
    ("job",),
    # in the pod; on the user's machine
    ("container", "plugin"),
    # the command line
    ("tools",),
    # where a public module was in the last release
    ("migrate",),
)
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}


def imported(source: str, module: str, *, is_package: bool) -> set[str]:
    """The modules of this package that a module imports, anywhere in its text: in functions, under TYPE_CHECKING too.

    Args:
        source: the module's text.
        module: its dotted name.
        is_package: whether it is an ``__init__``; relative imports count from itself then.
    """
    found: set[str] = set()
    parts = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            # `from . import x` may name a module or a value: both are looked at, values match no module's name.
            found |= {target, *(f"{target}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.startswith(f"{PACKAGE}.")}


def part(module: str) -> str:
    """The name in the table that a module belongs to: itself, or its subpackage."""
    return module.split(".")[1]


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """The imports of a module that do not point to a lower level."""
    own = part(module)
    wrong = []
    for name in sorted(imported(source, module, is_package=is_package)):
        other = part(name)
        if other in LEVEL_OF and other != own and LEVEL_OF[other] >= LEVEL_OF[own]:
            wrong.append(f"{module} (level {LEVEL_OF[own]}) imports {other} (level {LEVEL_OF[other]})")
    return sorted(set(wrong))


def modules() -> list[tuple[str, Path]]:
    paths = [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]
    names = [".".join((PACKAGE, *path.relative_to(SOURCE).with_suffix("").parts)) for path in paths]
    return list(zip(names, paths, strict=True))


def test_every_module_has_a_level() -> None:
    assert sorted({part(name) for name, _ in modules()} - set(LEVEL_OF)) == []


@pytest.mark.parametrize(("name", "path"), [pytest.param(name, path, id=name) for name, path in modules()])
def test_imports_point_only_downward(name: str, path: Path) -> None:
    is_package = path.name == "__init__.py"
    module = name.removesuffix(".__init__")
    assert violations(path.read_text(), module, is_package=is_package) == []


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from ..plugin.task import SafeTorch", f"{PACKAGE}.config.options"),
        ("from .. import topology", f"{PACKAGE}.config.options"),
        (f"import {PACKAGE}.job.node_agent", f"{PACKAGE}.ranks.worker"),
        (f"from {PACKAGE}.tools import cli", f"{PACKAGE}.container.entrypoint"),
        ("def f():\n    from ..job.node_agent import run", f"{PACKAGE}.ranks.worker"),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..job.node_agent import Agent",
            f"{PACKAGE}.ranks.worker",
        ),
        ("from ...job.run import main", f"{PACKAGE}.ranks.backends.horovod"),
    ],
)
def test_an_upward_or_sideways_import_would_be_seen(source: str, module: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from ..errors import ConfigError", f"{PACKAGE}.config.options"),
        ("from .base import Backend\nfrom ...envvars import RANK", f"{PACKAGE}.ranks.backends.horovod"),
        ("import torch\nfrom flytekit import task", f"{PACKAGE}.config.options"),
    ],
)
def test_a_downward_import_is_fine(source: str, module: str) -> None:
    assert violations(source, module) == []


def graph() -> dict[str, set[str]]:
    """Which module imports which, type-only imports and those in functions included."""
    files = {name.removesuffix(".__init__"): path for name, path in modules()}
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        parts = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
        found[module] = set()
        for node in (each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.ImportFrom)):
            base = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            # `from .room import module` needs that module, and the room itself only for a value of its own
            found[module] |= {name if (name := f"{origin}.{alias.name}") in files else origin for alias in node.names}
        found[module] &= files.keys() - {module}
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter(graph()).prepare()


def test_a_circle_would_be_seen() -> None:
    edges = graph()
    edges[f"{PACKAGE}.errors"] = {f"{PACKAGE}.job.run"}
    with pytest.raises(CycleError):
        TopologicalSorter(edges).prepare()
