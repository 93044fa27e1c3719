"""What every container test stands on: a docker daemon and the project's image, built from this checkout.

On a machine without docker these tests skip, saying so. Where they are required (``SAFEDIST_REQUIRE_CONTAINERS=1``, as
in CI) the same condition fails them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
BUILD_DEADLINE_S = 2400  # the compile of Horovod on two busy cores; seconds when the layers are cached
EXTRA_PACKAGES = "scikit-learn"  # the examples' data set

sys.path.insert(0, str(SCRIPTS))

import build_image  # noqa: E402  (scripts/build_image.py)

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.container)
            # The image's build has its own deadline: it happens in whichever test comes first.
            item.add_marker(pytest.mark.timeout(600, func_only=True))


def unavailable(reason: str) -> None:
    """Skip, or fail where container tests are required."""
    if os.environ.get("SAFEDIST_REQUIRE_CONTAINERS") == "1":
        pytest.fail(f"container tests are required here, but {reason}", pytrace=False)
    pytest.skip(f"container tests need docker: {reason}")


@pytest.fixture(scope="session")
def docker() -> str:
    """The docker client; a daemon answers it."""
    try:
        client = build_image.find_docker()
    except build_image.ImageError as error:
        unavailable(str(error))
    done = subprocess.run([client, "version"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        unavailable(f"no docker daemon answers ({done.stderr.strip()}); scripts/dockerd.sh start")
    return str(client)


@pytest.fixture(scope="session")
def image(docker: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tag of the image built from this checkout; ``SAFEDIST_IMAGE`` names one that is built already."""
    if ready := os.environ.get("SAFEDIST_IMAGE"):
        return ready
    log = tmp_path_factory.mktemp("image") / "build.log"
    command = [sys.executable, str(SCRIPTS / "build_image.py"), "--extra-packages", EXTRA_PACKAGES]
    with log.open("w") as stream:
        done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=False, timeout=BUILD_DEADLINE_S)
    if done.returncode != 0:
        end = "\n".join(log.read_text().splitlines()[-40:])
        pytest.fail(f"the image does not build; the end of the output:\n{end}", pytrace=False)
    return str(build_image.TAG)


@pytest.fixture(scope="session")
def run_in_image(docker: str, image: str) -> Run:
    """Run a command in a container of its own, without a network unless ``options`` say otherwise."""

    def run(*command: str, options: tuple[str, ...] = ("--network", "none")) -> subprocess.CompletedProcess[str]:
        whole = [docker, "run", "--rm", "--init", *options, image, *command]
        return subprocess.run(whole, capture_output=True, text=True, check=False)

    return run
