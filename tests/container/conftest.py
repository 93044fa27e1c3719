"""What every container test stands on: a docker daemon and the project's image, built from this checkout.

On a machine without docker these tests skip, saying so. Where they are required (``SAFEDIST_REQUIRE_CONTAINERS=1``, as
in CI) the same condition fails them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.clis import pyflyte
from tests.cli.flyteadmin import serving
from tests.container.cluster import Cluster, Job, report
from tests.container.engine import S3, Docker
from tests.procs import Gate, gate

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
def image(docker: str) -> str:
    """The tag of the image built from this checkout; ``SAFEDIST_IMAGE`` names one that is built already."""
    return os.environ.get("SAFEDIST_IMAGE") or built(str(build_image.TAG), EXTRA_PACKAGES)


@pytest.fixture(scope="session")
def mpi_image(docker: str) -> str:
    """The tag of the Dockerfile's ``mpi`` stage: the same image, with ssh; ``SAFEDIST_MPI_IMAGE`` names a ready one."""
    return os.environ.get("SAFEDIST_MPI_IMAGE") or built("flytekitplugins-safedist:mpi", EXTRA_PACKAGES, target="mpi")


def built(tag: str, packages: str, target: str = "final") -> str:
    """Build the project's image with further packages; quiet unless it fails."""
    command = [sys.executable, str(SCRIPTS / "build_image.py"), "--tag", tag, "--extra-packages", packages]
    command += ["--target", target]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        timeout=BUILD_DEADLINE_S,
    )
    if done.returncode != 0:
        end = "\n".join(done.stdout.splitlines()[-40:])
        pytest.fail(f"the image does not build; the end of the output:\n{end}", pytrace=False)
    return tag


@pytest.fixture(scope="session")
def run_in_image(docker: str, image: str) -> Run:
    """Run a command in a container of its own, without a network unless ``options`` say otherwise."""

    def run(*command: str, options: tuple[str, ...] = ("--network", "none")) -> subprocess.CompletedProcess[str]:
        whole = [docker, "run", "--rm", "--init", *options, image, *command]
        return subprocess.run(whole, capture_output=True, text=True, check=False)

    return run


@pytest.fixture(scope="session")
def s3_image(docker: str) -> str:
    """The tag of an image with moto's server: the project's, and one package more."""
    if ready := os.environ.get("SAFEDIST_S3_IMAGE"):
        return ready
    return built("flytekitplugins-safedist-s3:test", "moto[s3,server]")


def registered(image: str, directory: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What the real ``pyflyte register`` sends for ``project/``: task templates by function, and archives by location.

    It sends them to a stand-in (:mod:`tests.cli.flyteadmin`), because no Flyte backend can run here.
    """
    shutil.copytree(Path(__file__).parent / "project", directory / "project")
    version = ("--version", "v1", "--project", "flytesnacks", "--domain", "development")
    with serving() as (endpoint, received):
        pyflyte("register", *version, "--image", image, "project", cwd=directory, endpoint=endpoint)
    return {name.rsplit(".", 1)[1]: sent.spec.template for name, sent in received.tasks.items()}, received.uploads


@pytest.fixture(scope="session")
def cluster(docker: str, image: str, s3_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A network with an S3 server, where every task of ``project/`` is registered."""
    client = Docker(docker)
    network = f"safedist-{client.session}"
    try:
        client("network", "create", "--label", client.label, network)
        s3 = S3(client, s3_image, network)
        templates, uploads = registered(image, tmp_path_factory.mktemp("project"))
        for location, content in uploads.items():
            s3.upload(location, content)
        yield Cluster(client, s3, network, templates)
    finally:
        client.remove_everything()


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Make jobs; what their pods said is shown when the test fails, and they are removed with it."""
    made: list[Job] = []

    def make(task: str, **how: Any) -> Job:
        made.append(cluster.job(task, tmp_path, **how))
        return made[-1]

    yield make
    for one in made:
        print(report(one))
        one.remove()


@pytest.fixture
def pods_gate(tmp_path: Path) -> Iterator[Gate]:
    """A FIFO by which ranks in pods and the test wait for each other; ``**gated(pods_gate)`` of a job leads to it."""
    with gate(tmp_path / "gate") as made:
        (tmp_path / "gate").chmod(0o777)
        for end in (made.said, made.word):
            end.chmod(0o666)
        yield made
