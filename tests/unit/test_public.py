"""What is public is written down in docs/api.md, has docstrings, and stays importable."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

ROOT = "flytekitplugins_safedist"
DOCS = Path(__file__).parents[2] / "docs"
ERRORS = frozenset(re.findall(r"^\| `(\w+)` \|", (DOCS / "errors.md").read_text(), re.MULTILINE))


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


def test_the_page_names_every_public_module() -> None:
    rooms = ("fs", "checkpoint", "errors")
    assert set(DOCUMENTED) == {ROOT, *(f"{ROOT}.{room}" for room in rooms)}


def test_the_page_names_what_each_module_offers() -> None:
    for module in (ROOT, f"{ROOT}.fs", f"{ROOT}.checkpoint"):
        assert set(importlib.import_module(module).__all__) == DOCUMENTED[module]


def unexplained(value: Any, name: str) -> list[str]:
    """What of a public name has no text of ours: itself, or methods and properties of a class."""
    if isinstance(value, str):
        return []  # a constant: text beside it, which nothing can ask for
    made_by_dataclass = (value.__doc__ or "").startswith(f"{name}(")
    found = [name] if made_by_dataclass or not value.__doc__ else []
    public = {key: one for key, one in vars(value).items() if not key.startswith("_")} if inspect.isclass(value) else {}
    asked = [key for key, one in public.items() if inspect.isroutine(one) or isinstance(one, property)]
    return found + [f"{name}.{key}" for key in asked if not inspect.getdoc(getattr(value, key))]


def test_what_is_public_says_what_it_is() -> None:
    there = [(importlib.import_module(module), name) for module, names in DOCUMENTED.items() for name in names]
    assert [gap for module, name in there for gap in unexplained(getattr(module, name), name)] == []


def test_what_is_not_explained_would_be_seen() -> None:
    @dataclasses.dataclass
    class Bare:
        x: int

        def method(self) -> None: ...

    Bare.__doc__ = "Bare(x: int)"
    assert unexplained(Bare, "Bare") == ["Bare", "Bare.method"]


def test_every_field_that_a_user_writes_is_explained() -> None:
    for name in ("Logs", "Metrics", "Profile", "SafeHorovod", "SafeTorch", "Scratch", "Timeouts"):
        config = getattr(importlib.import_module(ROOT), name)
        text = "\n".join(one.__doc__ or "" for one in config.__mro__ if one.__module__.startswith(ROOT))
        fields = [field.name for field in dataclasses.fields(config)]
        assert [one for one in fields if not re.search(rf"^\s+(\w+, )*{one}(, \w+)*: ", text, re.MULTILINE)] == []
