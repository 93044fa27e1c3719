"""What a forked rank is compared by with a fresh interpreter, and how many threads its libraries have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from flytekitplugins_safedist.rank.fork import Reads, elsewhere, threads_by
from tests.harness.procs import ROOT
from tests.unit.rank import test_replicas as replicas


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Notes what a module of that source reads as it is imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("WEATHER_HOME", "/home")
    monkeypatch.delenv("RANK", raising=False)

    def noted(source: str) -> Reads:
        (tmp_path / "weather.py").write_text(source)
        reads = Reads()
        with reads.noted():
            import weather  # type: ignore[import-not-found]  # noqa: F401
        return reads

    yield noted
    sys.modules.pop("weather", None)


WAYS = {
    "[]": "os.environ['{}']",
    "get": "os.environ.get('{}')",
    "getenv": "os.getenv('{}')",
    "in": "'{}' in os.environ",
    "bytes": "os.getenvb(b'{}')",
    "setdefault": "os.environ.setdefault('{}', 'x')",
}


FOUND = "weather found as it was imported for all ranks; @task(environment=...) would spare that"


@pytest.mark.parametrize("way", WAYS)
def test_a_variable_that_was_read_must_have_the_same_value(read, way):
    reads = read("import os\n" + WAYS[way].format("WEATHER_HOME"))
    same = dict(os.environ)
    without = {name: value for name, value in same.items() if name != "WEATHER_HOME"}
    other = f"WEATHER_HOME has another value here than {FOUND}"
    found = [reads.difference(each, each) for each in (same, without, {**same, "WEATHER_HOME": "/other"})]
    assert found == [None, other, other]


@pytest.mark.parametrize(
    "source", ["for name in os.environ:\n    pass", "dict(os.environ.items())", "{**os.environ}", "list(os.environb)"]
)
def test_who_goes_through_all_variables_is_taken_to_look_for_those_of_its_own_name(read, source):
    reads, same = read(f"import os\n{source}\n"), dict(os.environ)
    assert reads.difference(same, {**same, "PATH": "/another", "TREE_HOME": "x"}) is None
    for changed in ({"WEATHER_HOME": "/other"}, {"WEATHER_NEW": "1"}):
        found = reads.difference(same, {**same, **changed})
        assert found == f"{next(iter(changed))}: other here than {FOUND}"


def test_what_a_library_has_set_is_what_ranks_have(read):
    reads = read("import os\nos.environ.setdefault('WEATHER_SET', '1')\n")
    reads.sets("WEATHER_SET", "1")
    same = dict(os.environ)
    assert reads.difference(same, same) is None
    assert "WEATHER_SET" in (reads.difference(same, {**same, "WEATHER_SET": "0"}) or "")
    del os.environ["WEATHER_SET"]


def test_each_ranks_own_directories_do_not_count(read):
    reads, same = (
        read("import os, tempfile\nos.environ.get('TMPDIR'), os.environ.get('TRITON_CACHE_DIR')\n"),
        dict(os.environ),
    )
    assert reads.difference(same, {**same, "TMPDIR": "/own", "TRITON_CACHE_DIR": "/own"}) is None


@pytest.mark.parametrize(
    ("name", "counts"),
    [("OMP_NUM_THREADS", True), ("TORCH_DISTRIBUTED_DEBUG", True), ("TORCH_NCCL_TRACE", False), ("NCCL_DEBUG", False)],
)
def test_what_native_libraries_read_as_they_are_loaded_must_not_change_afterwards(name, counts):
    before: Mapping[str, str] = {name: "1"}
    assert Reads().difference(before, before) is None
    found = Reads().difference(before, {name: "2"})
    assert (found is not None) == counts
    assert not found or found.startswith(f"{name} is set here")


def test_the_number_of_blas_threads_is_what_openblas_would_take():
    taken = [
        ({"OPENBLAS_NUM_THREADS": "3", "OMP_NUM_THREADS": "5"}, 3),
        ({"GOTO_NUM_THREADS": "4", "OMP_NUM_THREADS": "5"}, 4),
        ({"OMP_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "1,2"}, 1),
        ({"OMP_NUM_THREADS": " 3 , 2"}, 3),
        ({"OMP_NUM_THREADS": "0"}, len(os.sched_getaffinity(0))),
        ({"OPENBLAS_NUM_THREADS": "many", "OMP_NUM_THREADS": "5"}, 5),
        ({}, len(os.sched_getaffinity(0))),
    ]
    names = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
    assert [(environment, threads_by(environment, names)) for environment, _ in taken] == taken


NEEDED = ("torch", "torch.distributed", "flytekit", "flytekitplugins_safedist.plugin.task", "torch._dynamo")
FORK = """
import gc, json, os, sys
from flytekitplugins_safedist.rank.fork import add_sets, as_fresh
from flytekitplugins_safedist.rank_server.libraries import Libraries
libraries = Libraries()
libraries.take([f"import {name}" for name in sys.argv[1:]], needed=True)
identity = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TMPDIR": "/own", "OMP_NUM_THREADS": "1"}
rank = {**add_sets(os.environ, libraries.sets), **identity}
found = [libraries.unsafe, libraries.failed, libraries.reads.difference(rank, rank)]
print(json.dumps([*found, gc.get_freeze_count() > 100_000]), flush=True)
environment = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "3"}
for imports in (["import numpy"], ["import torchmetrics.utilities.prints"]):
    libraries.take(imports, needed=True)
    if os.fork() == 0:
        why = as_fresh(environment, libraries.reads.draws)
        import threadpoolctl, torch
        blas = [each["num_threads"] for each in threadpoolctl.threadpool_info() if each["internal_api"] == "openblas"]
        print(json.dumps([torch.get_num_threads(), blas, why]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.processes
def test_what_every_rank_needs_is_safe_to_fork_and_a_forked_rank_is_as_fresh_or_says_why_not(tmp_path):
    """It reads nothing of a rank, and each rank has its own numbers of threads. Where a known library is there in a
    version that it does not know, ranks are fresh interpreters. And torch is as it is without what is to look after its
    replicas, which then does."""
    package = tmp_path / "torchmetrics" / "utilities"
    package.mkdir(parents=True)
    for each in (package.parent, package):
        (each / "__init__.py").touch()
    (package / "prints.py").write_text("import os\nRANK = os.getenv('LOCAL_RANK')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    code = replicas.PRELUDE + replicas.BEFORE + FORK + replicas.IMPORTED + replicas.GROUPS
    command = [sys.executable, "-c", code, *NEEDED]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    *found, groups = done.stdout.splitlines()
    needed, first, [*_, why] = map(json.loads, found)
    assert groups == "[True, True]"
    assert needed == [None, {}, None, True]
    # numpy's own OpenBLAS is the one here; a machine whose numpy has none would say [] and fail, rightly
    assert first == [2, [3], None]
    assert str(why).startswith(
        "what torchmetrics.utilities.prints keeps of its process cannot be put right: AttributeError"
    )


@pytest.mark.parametrize(
    ("path", "where"),
    [
        (["yaml.py"], "yaml"),
        (["yaml/__init__.py"], "yaml"),
        (["yaml/other.py"], None),
        (["google/x.py"], None),
        (["flytekitplugins_safedist/__init__.py"], None),
    ],
    ids=["a module", "a package", "a directory", "part of a namespace", "another version of ours"],
)
def test_a_library_that_the_search_path_has_elsewhere_is_named(tmp_path: Path, path: list[str], where: str | None):
    import yaml  # noqa: F401

    for each in path:
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).touch()
    names = {"yaml", "google", "_pytest", "flytekitplugins_safedist"}
    assert elsewhere(names, sys.path) is None
    why = elsewhere(names, [str(tmp_path), *sys.path])
    assert why == (where and f"modules of the task's are named as libraries that are imported already: {where}")
