"""What every container test stands on: a docker daemon and the project's image, built from this checkout.

On a machine without docker these tests are left out, saying so. Where they are required
(``SAFEDIST_REQUIRE_CONTAINERS=1``, as in CI) the same condition fails them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from docker.errors import DockerException
from flyteidl.core.tasks_pb2 import TaskTemplate

from tests.containers import network
from tests.containers.cluster import Cluster, Job, report
from tests.containers.engine import DEADLINE, NOTHING, S3, Docker, Options, Ran, start_s3
from tests.contracts.cli.clis import pyflyte
from tests.contracts.cli.flyteadmin import serving
from tests.harness import needs
from tests.harness.procs import Gate, gate
from tests.harness.shared import directory_of_all_workers, shared

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
BUILD_DEADLINE_S = 2400  # the compile of Horovod on two busy cores; seconds when the layers are cached
REQUIRED = "SAFEDIST_REQUIRE_CONTAINERS"
EXTRA_PACKAGES = "scikit-learn"  # the examples' data set
S3_PACKAGES = "flask flask-cors moto[s3]"  # moto's "server" extra would bring 30 more packages that S3 does not use

sys.path.insert(0, str(SCRIPTS))

import build_image  # noqa: E402  (scripts/build_image.py)

Run = Callable[..., Ran]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.container)
            # The image's build has its own deadline: it happens in whichever test comes first.
            item.add_marker(pytest.mark.timeout(1200, func_only=True))


@pytest.fixture(scope="session")
def docker(testrun_uid: str) -> Iterator[Docker]:
    """The docker daemon, and a client that can build; what this worker made there by itself goes with it."""
    try:
        build_image.find_docker()
        daemon = Docker(testrun_uid[:8])
    except (build_image.ImageError, DockerException) as error:
        what = f"container tests need docker: {error}"
        needs.missing(what, bring="scripts/dockerd.sh start && make test-container", required=REQUIRED)
    yield daemon
    daemon.client.close()


@pytest.fixture(scope="session")
def image(docker: Docker, everywhere: Path) -> Iterator[str]:
    """The tag of the image built from this checkout; ``SAFEDIST_IMAGE`` names one that is built already."""
    with shared(everywhere, "image", partial(built, "SAFEDIST_IMAGE", str(build_image.TAG))) as tag:
        yield tag


@pytest.fixture(scope="session")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all workers have."""
    return directory_of_all_workers(tmp_path_factory)


def built(ready: str, tag: str, packages: str = EXTRA_PACKAGES) -> str:
    """Build the project's image with further packages, if no variable *ready* names one; quiet unless it fails."""
    if named := os.environ.get(ready):
        return named
    command = [sys.executable, str(SCRIPTS / "build_image.py"), "--tag", tag, "--extra-packages", packages]
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    done = subprocess.run(command, check=False, timeout=BUILD_DEADLINE_S, **how)
    if done.returncode != 0:  # a download may have failed; the layers that are there are not made again
        done = subprocess.run(command, check=False, timeout=BUILD_DEADLINE_S, **how)
    if done.returncode != 0:
        end = "\n".join(done.stdout.splitlines()[-40:])
        pytest.fail(f"the image does not build; the end of the output:\n{end}", pytrace=False)
    return tag


@pytest.fixture(scope="session")
def run_in_image(docker: Docker, image: str) -> Run:
    """Run a command in a container of its own, without a network."""
    alone = Options(more={"init": True, "network_mode": "none"})
    return lambda *command, options=NOTHING: docker.once(image, command, alone + options)


def registered(image: str, directory: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What the real ``pyflyte register`` sends for ``project/``: task templates by function, and archives by location.

    It sends them to a stand-in (:mod:`tests.contracts.cli.flyteadmin`), because no Flyte backend can run here.
    """
    shutil.copytree(Path(__file__).parent / "project", directory / "project")
    version = ("--version", "v1", "--project", "flytesnacks", "--domain", "development")
    with serving() as (endpoint, received):
        pyflyte("register", *version, "--image", image, "project", cwd=directory, endpoint=endpoint)
    return {name.rsplit(".", 1)[1]: sent.spec.template for name, sent in received.tasks.items()}, received.uploads


@pytest.fixture(scope="session")
def cluster(docker: Docker, image: str, everywhere: Path) -> Iterator[Cluster]:
    """A network with an S3 server, where every task of ``project/`` is registered; one for all workers."""
    make = partial(started, docker, image, everywhere)
    with shared(everywhere, "cluster", make, lambda _: docker.remove_everything()) as made:
        s3, network, sent = made
        templates = {name: TaskTemplate.FromString(template) for name, template in sent.items()}
        yield Cluster(docker, s3, network, templates)


def started(docker: Docker, image: str, directory: Path) -> tuple[S3, str, dict[str, bytes]]:
    """What a :class:`Cluster` is made of, in every worker."""
    name = f"safedist-{docker.session}"
    try:
        network.make(docker, name)
        s3 = start_s3(docker, built("SAFEDIST_S3_IMAGE", "flytekitplugins-safedist-s3:test", S3_PACKAGES), name)
        templates, uploads = registered(image, directory / "registered")
        for location, content in uploads.items():
            s3.upload(location, content)
    except BaseException:
        docker.remove_everything()
        raise
    return s3, name, {task: template.SerializeToString() for task, template in templates.items()}


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
    with gate(tmp_path / "gate", DEADLINE) as made:
        (tmp_path / "gate").chmod(0o777)
        for end in (made.said, made.word):
            end.chmod(0o666)
        yield made
