"""What the README has people type."""

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


def test_the_extras_of_the_install_line_are_there() -> None:
    (extras,) = re.findall(r"pip install '\.\[([\w,]+)\]'", README)
    setup = (ROOT / "setup.cfg").read_text().partition("[options.extras_require]")[2].partition("\n[")[0]
    assert set(extras.split(",")) <= set(re.findall(r"^(\w+) =", setup, re.MULTILINE))
