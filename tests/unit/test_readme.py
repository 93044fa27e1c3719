"""What the README and the docs have people type, and what the README says shorter than the docs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import pytest
from flytekit.image_spec.default_builder import create_docker_context
from packaging.requirements import Requirement

from flytekitplugins_safedist import SafeTorch
from tests.harness.procs import ROOT
from tests.harness.product import main

README = (ROOT / "README.md").read_text()


def test_the_image_of_the_readme_installs_the_wheels_that_its_commands_make(tmp_path: Path, monkeypatch: Any) -> None:
    """As flytekit's own builder would build it, less the building."""
    (source,) = re.findall(r"```python\n(from flytekit import ImageSpec\n.*?\n\)\n)", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("dist").mkdir()
    Path("dist", "flytekitplugins_safedist-0.1.0-py3-none-any.whl").touch()
    names: dict[str, Any] = {}
    exec(source, names)
    image = names["image"]
    context = tmp_path / "context"
    context.mkdir()

    create_docker_context(image, context)

    text = (context / "Dockerfile").read_text()
    copied, installed = (
        text.index("COPY --chown=flytekit dist /root/dist/"),
        text.index("uv pip install /root/dist/*.whl"),
    )
    assert copied < installed, "what is installed is there"
    assert list((context / "dist").iterdir()), "the wheels are handed to the build"
    assert {Requirement(package).name for package in image.packages} == {"torch", "numpy"}
    assert README.count("--wheel-dir dist") == 2, "the package's wheel, and Horovod's"


def test_the_extras_of_the_install_line_are_there() -> None:
    (extras,) = re.findall(r"pip install '\.\[([\w,]+)\]'", README)
    setup = (ROOT / "setup.cfg").read_text().partition("[options.extras_require]")[2].partition("\n[")[0]
    assert set(extras.split(",")) <= set(re.findall(r"^(\w+) =", setup, re.MULTILINE))


FAILURES = (ROOT / "docs" / "failures.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAMS = {"make", "pip", "python", "pyflyte", "safedist", "kubectl", "flytectl", "torchrun"}


def cells(text: str) -> list[list[str]]:
    """The rows of all tables of a page."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]


def commands(page: Path) -> list[str]:
    """The lines of a page's blocks without a language, and its code spans, that call a program; without comments."""
    text = page.read_text()
    blocks = [block for language, block in BLOCKS.findall(text) if not language]
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", BLOCKS.sub("", text))
    called = [part.strip() for line in [*lines, *spans] for part in re.split(r"&&|[|>]", line)]
    return [line for line in called if line.partition(" ")[0] in PROGRAMS and " " in line]


def test_a_newcomer_reads_the_readme_in_ten_minutes() -> None:
    assert len(README.split()) <= 2300


def test_what_a_failure_costs_is_what_the_table_of_failures_says() -> None:
    whole = {row[0]: (row[2], row[3]) for row in cells(FAILURES) if len(row) == 4}
    short = [
        row for row in cells(README.partition("## What a failure costs")[2].partition("\n## ")[0]) if len(row) == 3
    ]
    assert len(short) == 9, "a title and eight rows"
    assert [row[0] for row in short[1:] if whole.get(row[0]) != (row[1], row[2])] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_of_a_page_is_there_with_its_options(page: Path) -> None:
    assert [command for command in commands(page) if not is_there(command)] == []


@pytest.mark.parametrize(
    "command",
    ["make nowhere", "python scripts/nowhere.py", "python benchmarks/restart.py --nowhere", "safedist nowhere"],
)
def test_a_command_that_is_not_there_is_seen(command: str) -> None:
    assert not is_there(command)


def is_there(command: str) -> bool:
    """Whether the target of make, or the script or subcommand of ours with these options, is there."""
    program, first, *others = command.replace("`", "").split()
    options = {word.partition("=")[0] for word in others if word.startswith("--")}
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        return first in targets or "=" in first
    if program == "python" and first.startswith(("scripts/", "benchmarks/", "examples/", "horovod_build/")):
        if not (ROOT / first).is_file():
            return False
        sources = [*(ROOT / first).parent.glob("*.py")]
        return all(any(f'"{option}"' in source.read_text() for source in sources) for option in options)
    if program == "safedist":
        said = io.StringIO()
        with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main([first, "--help"])
        return ended.value.code == 0 and all(option in said.getvalue() for option in options - {"--help"})
    return True


def test_all_places_name_one_newest_torch() -> None:
    """noxfile.py's newest is the one that is tried; what people install by default is that one."""
    newest = re.findall(r'^TORCHES = .*"([\d.]+)"\)$', (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    places = ("Makefile", "Dockerfile", "scripts/build_image.py", "README.md")
    found = {place: set(re.findall(r"torch==([\d.]+)", (ROOT / place).read_text())) for place in places}
    found["Makefile"] -= set(re.findall(r'"3.10": "([\d.]+)"', (ROOT / "noxfile.py").read_text()))
    assert found == {place: set(newest) for place in places}


def test_the_tables_of_the_configuration_have_every_field() -> None:
    fields = {field.name for field in dataclasses.fields(SafeTorch)}
    page = (ROOT / "docs" / "configuration.md").read_text()
    for text in (README.partition("\n## Configuration")[2].partition("\n## ")[0], page.partition("\n## ")[0]):
        assert {name for row in cells(text) for name in re.findall(r"`(\w+)`", row[0])} == fields
