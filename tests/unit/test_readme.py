"""What the README has people install, and what it says shorter than the docs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from flytekit.image_spec.default_builder import create_docker_context
from packaging.requirements import Requirement

from tests.harness.procs import ROOT

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


def test_the_extras_of_the_install_lines_are_there() -> None:
    extras = ",".join(re.findall(r"pip install '\.\[([\w,]+)\]'", README))
    assert extras
    setup = (ROOT / "setup.cfg").read_text().partition("[options.extras_require]")[2].partition("\n[")[0]
    assert set(extras.split(",")) <= set(re.findall(r"^(\w+) =", setup, re.MULTILINE))


FAILURES = (ROOT / "docs" / "failures.md").read_text()


def cells(text: str) -> list[list[str]]:
    """The rows of all tables of a page."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]


def test_a_newcomer_reads_the_readme_in_ten_minutes() -> None:
    assert len(README.split()) <= 1500


def test_what_a_failure_costs_is_what_the_table_of_failures_says() -> None:
    whole = {row[0]: (row[2], row[3]) for row in cells(FAILURES) if len(row) == 4}
    short = [
        row for row in cells(README.partition("## What a failure costs")[2].partition("\n## ")[0]) if len(row) == 3
    ]
    assert len(short) == 9, "a title and eight rows"
    assert [row[0] for row in short[1:] if whole.get(row[0]) != (row[1], row[2])] == []


def test_the_image_of_the_readme_has_the_torch_that_is_named_in_one_place() -> None:
    newest = re.findall(r"^torch==([\d.]+)", (ROOT / "requirements" / "torch.txt").read_text(), re.MULTILINE)
    assert re.findall(r"torch==([\d.]+)", README) == newest[:1]
    for place in ("Makefile", "Dockerfile", "noxfile.py", "scripts/build_image.py"):
        assert not re.findall(r"\b2\.1[45]\.\d", (ROOT / place).read_text()), place
