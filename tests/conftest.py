"""Fixtures and settings shared by all tests."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.harness import needs, nvml
from tests.harness.moto_s3 import S3
from tests.harness.procs import TO_TRAIN, Gate, Warm, gate, listening_for_workers
from tests.harness.shared import directory_of_all_workers, shared

# A loaded machine is slow, not wrong: no test of this project fails because of the time that an example took.
settings.register_profile("safedist", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("safedist")

# torch's store asks for the name of each address that connects. Loopback as IPv6 sees it (::ffff:127.0.0.1) is in no
# hosts file, so the question goes to a name server, which may not answer: five seconds each without this (resolv.conf).
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Threads of torch that have nothing to do sleep: by default they spin, and take the cores from those that have.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Milliseconds between two looks of Horovod's thread: at 1, its default, each rank that stands somewhere, as most of
# these tests have them do, takes a seventh of a core from the others.
os.environ.setdefault("HOROVOD_CYCLE_TIME", "5")


# Much of the time in which a worker collects thousands of tests would be Python's collector's, over what is there to
# stay; it looks at none of that again while tests run.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    """Each process that imports flytekit leaves two directories of temporary files, for good: hundreds in a session.
    All of them go where they end with it. Workers and what they start inherit it; pytest's own directories stay."""
    if hasattr(config, "workerinput"):
        return
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    own = tempfile.mkdtemp(prefix="sd-")  # short: sockets live in it, too
    os.environ["TMPDIR"] = tempfile.tempdir = own
    Path(own).chmod(0o1777)  # some tests start processes of another user
    config.add_cleanup(_remove_links)
    config.add_cleanup(lambda: shutil.rmtree(own, ignore_errors=True))  # whatever tempfile.tempdir is by then


def _remove_links() -> None:
    """Short names of directories that are gone, and were a test's that has left them. All others may be in use, by a
    session beside this one."""
    for link in Path("/tmp").glob("s-??????"):
        with suppress(OSError):
            if link.is_symlink() and not link.exists():
                link.unlink()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "warm" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)


LEFT_OUT = "left out"


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    return (LEFT_OUT, "s", "LEFT OUT") if needs.left_out(report) else None


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in needs.in_one_line_each(terminalreporter.stats.get(LEFT_OUT, [])):
        terminalreporter.write_line(line, yellow=True)


@pytest.fixture(scope="session")
def nvml_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in for NVIDIA's driver library."""
    return nvml.build(tmp_path_factory.mktemp("driver"))


@contextmanager
def warmed(factory: pytest.TempPathFactory, name: str, further: Sequence[str] = ()) -> Iterator[Warm]:
    directory = directory_of_all_workers(factory)
    with shared(directory, name, lambda: listening_for_workers(directory, name, further)) as path:
        process = Warm(path)
        yield process
        process.close()


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """A process that has imported torch, Horovod and flytekit, and forks real jobs for the tests of all workers."""
    with warmed(tmp_path_factory, "warm") as process:
        yield process


@pytest.fixture(scope="session")
def warm_to_train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """Another one, for ranks that train and save; a module whose jobs do makes this its ``warm``."""
    with warmed(tmp_path_factory, "warm-to-train", TO_TRAIN) as process:
        yield process


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """An S3 API with a bucket, for all tests of a worker: each has keys of its own."""
    server = S3(tmp_path_factory.mktemp("s3"))
    server.put("there", b"")
    yield server
    server.close()


@pytest.fixture
def ranks_gate(tmp_path: Path) -> Iterator[Gate]:
    """A FIFO by which ranks and the test wait for each other."""
    with gate(tmp_path / "gate") as made:
        yield made
