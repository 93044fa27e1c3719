"""The house's measures: modules that can be read in one go, functions that fit a screen, one meaning for each name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "flytekitplugins_safedist"
MODULES = sorted(SOURCE.rglob("*.py"))

MODULE_LINES = 350
FUNCTION_LINES = 40
"""Of code, from ``def`` to the last line, without the docstring."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(function: Function) -> int:
    """Lines of a function without its docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines


def too_long(source: str) -> list[str]:
    """Functions of a module that have more lines than they may, nested ones and methods included."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, Function)]
    return [f"{at.name}: {code_lines(at)}" for at in functions if code_lines(at) > FUNCTION_LINES]


def public_classes(source: str) -> Iterator[str]:
    """Names of a module's public classes."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def told_twice(sources: dict[str, str]) -> dict[str, list[str]]:
    """Names that two modules give to a public class, with the modules."""
    homes: dict[str, list[str]] = {}
    for module, source in sources.items():
        for name in public_classes(source):
            homes.setdefault(name, []).append(module)
    return {name: modules for name, modules in homes.items() if len(modules) > 1}


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(SOURCE))) for path in MODULES])
def test_a_module_can_be_read_in_one_go(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= MODULE_LINES
    assert too_long(source) == []


def test_no_two_public_classes_have_one_name() -> None:
    assert told_twice({str(path.relative_to(SOURCE)): path.read_text() for path in MODULES}) == {}


def test_a_docstring_does_not_count_and_code_does() -> None:
    docstring, statement = '    """What it is.\n' + "    More.\n" * 50 + '    """\n', "    x = 1\n"
    assert too_long("def f():\n" + docstring + 39 * statement) == []
    assert too_long("def f():\n" + docstring + 40 * statement) == ["f: 41"]
    assert too_long("class C:\n    async def m(self):\n" + 40 * f"    {statement}") == ["m: 41"]


def test_a_name_given_twice_would_be_seen() -> None:
    sources = {"a": "class Group: pass", "b": "class Group: pass\nclass _Own: pass", "c": "class _Own: pass"}
    assert told_twice(sources) == {"Group": ["a", "b"]}
