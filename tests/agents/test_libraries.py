"""Libraries are imported once for all ranks of a node; what must not be shared of one costs nobody else that."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.harness.procs import ROOT, Ended, Gate, Warm, uploaded_output

Told = list[dict[str, Any]]
Looks = Callable[..., tuple[Ended, Told]]
OWN_NAMES = """
from flytekit import task
from flytekitplugins_safedist import SafeTorch

@task(task_config=SafeTorch())
def who() -> str:
    import yaml
    return yaml.WHO
"""
IN_ITS_REPOSITORY = """
from flytekit import task
from flytekitplugins_safedist import Preflight, SafeTorch

@task(task_config=SafeTorch(start_method="spawn", preflight=Preflight()))
def who() -> str:
    import flytekitplugins_safedist
    return flytekitplugins_safedist.__file__
"""
QUIET = "import os\nPID = os.getpid()\nSAW = None\n"
THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='forecast').start()\n"
WHY = "starts 1 thread(s) (forecast), and a forked copy of their locks can hang"
LOCK = "import multiprocessing\nLOCK = multiprocessing.Lock()\n"
READS = "SAW = os.environ.get('WEATHER_HOME')\n"

NUMEXPR = """
import os
threads = None

def _init_num_threads():
    global threads
    threads = os.environ.get("OMP_NUM_THREADS")
"""


DRAWS = """
import random
import numpy as np
MADE = random.Random(), np.random.RandomState(), np.random.default_rng()
SEEDED = random.Random(7), np.random.RandomState(7), np.random.default_rng(7)

def __getattr__(name):  # SAW is drawn as it is asked for: by each rank
    if name != "SAW":
        raise AttributeError(name)
    return [[float(each.random()) for each in some] for some in (MADE, SEEDED)]
"""


@pytest.fixture
def looks(warm: Warm, tmp_path: Path, ranks_gate: Gate) -> Looks:
    """Runs a job whose module imports the library ``weather``, of that source; what each of two ranks tells of it."""

    def run(source: str, task: str = "looks", **environment: str) -> tuple[Ended, Told]:
        installed = tmp_path / "site-packages"
        installed.mkdir(exist_ok=True)
        (installed / "weather.py").write_text(source)
        options = {"kind": "execute", "environment": {**ranks_gate.environment, **environment}, "path": [installed]}
        ended = warm.run(f"job_libraries:{task}", tmp_path / "job", **options)
        assert ended.code == 0, ended.err
        assert ended.uploaded == ["outputs.pb"], ended.err
        return ended, [json.loads(line) for line in ranks_gate.heard(2)]

    return run


def are_forked(ranks: Told) -> bool:
    (forked,) = {each["forked"] for each in ranks}
    return bool(forked)


def sets(**variables: str) -> Mapping[str, str]:
    return {"TEST_SETS": json.dumps(variables)}


def test_what_the_users_files_import_is_imported_once_for_all_ranks(looks):
    ended, ranks = looks(QUIET)
    assert are_forked(ranks)
    assert {each["imported by"] for each in ranks} == {ranks[0]["server"]}
    assert [line for line in ended.err.splitlines() if "warning" in line and "each of the 2 ranks" not in line] == []


@pytest.mark.parametrize(("does", "why"), [(THREAD, WHY), (LOCK, "makes a lock or memory that forked processes share")])
def test_a_library_that_no_fork_may_copy_is_left_to_each_rank_by_name_and_the_others_stay_forked(looks, does, why):
    ended, ranks = looks(QUIET + does)
    assert are_forked(ranks)
    assert all(each["imported by"] == each["here"] for each in ranks)
    assert f"`import weather` {why}: each rank imports it by itself" in ended.err
    assert "start_method preload" in ended.err


def test_a_variable_that_the_module_sets_before_an_import_has_its_effect_in_each_round(looks):
    ended, ranks = looks(QUIET + READS, "looks_again", **sets(WEATHER_HOME="/mine"))
    assert [each["saw"] for each in ranks] == ["/mine", "/mine"]
    assert not are_forked(ranks)
    (line,) = [line for line in ended.out.splitlines() if "start again, as fresh interpreters" in line]
    assert line.startswith("[rank 0] [safedist] warning: ")
    assert "WEATHER_HOME" in line
    assert "weather" in line
    assert line.endswith("; @task(environment=...) would spare that")
    assert "/mine" not in line, "values may be secrets"


def test_variables_that_a_library_does_not_read_change_nothing(looks):
    ended, ranks = looks(QUIET + READS, **sets(ANOTHER="1", PATH=os.environ["PATH"] + ":/more"))
    assert are_forked(ranks)
    assert "start again" not in ended.out


def test_a_library_that_reads_what_is_each_ranks_own_finds_it_whatever_a_task_sets(looks):
    reads = "SAW = [os.environ.get(name) for name in ('LOCAL_RANK', 'OMP_NUM_THREADS')]\n"
    ended, ranks = looks(QUIET + reads, OMP_NUM_THREADS="3")
    assert sorted(each["saw"] for each in ranks) == [["0", "3"], ["1", "3"]]
    why = "LOCAL_RANK has another value here than weather found as it was imported for all ranks; "
    assert f'{why}start_method="spawn" would spare that' in ended.out


def test_numexpr_has_the_threads_of_each_rank_which_need_not_be_a_fresh_interpreter_for_that(looks, tmp_path):
    (tmp_path / "site-packages" / "numexpr").mkdir(parents=True)
    (tmp_path / "site-packages" / "numexpr" / "utils.py").write_text(NUMEXPR)
    saw = "import numexpr.utils\nnumexpr.utils._init_num_threads()\n__getattr__ = lambda _: numexpr.utils.threads\n"
    _, ranks = looks(QUIET.replace("SAW = None", saw), OMP_NUM_THREADS="3")
    assert are_forked(ranks)
    assert [each["saw"] for each in ranks] == ["3", "3"]


def test_what_a_library_sets_is_set_in_ranks_too(looks):
    _, ranks = looks(QUIET + "os.environ['WEATHER_SET'] = 'by it'\n")
    assert are_forked(ranks)
    assert {each["WEATHER_SET"] for each in ranks} == {"by it"}


def test_what_a_library_adds_to_a_variable_is_no_other_value_than_it_has_found(looks):
    """As OpenCV does with LD_LIBRARY_PATH, which images for GPUs set."""
    adds = "os.environ['WEATHER_SET'] = 'by it:' + os.environ.get('WEATHER_SET', '')\n"
    ended, ranks = looks(QUIET + adds, WEATHER_SET="by the image")
    assert are_forked(ranks)
    assert "start again" not in ended.out
    assert {each["WEATHER_SET"] for each in ranks} == {"by it:by the image"}


def test_a_librarys_random_numbers_are_each_ranks_own_unless_it_has_seeded_them(looks):
    _, ranks = looks(QUIET.replace("SAW = None", DRAWS))
    assert are_forked(ranks)
    (made, seeded), (others_made, others_seeded) = (each["saw"] for each in ranks)
    assert [own == other for own, other in zip(made, others_made, strict=True)] == [False] * 3
    assert seeded == others_seeded


def test_what_a_library_does_at_an_interpreters_end_is_done_at_each_ranks_but_what_all_have_is_not_removed(looks):
    """A tracker ends its run so. A directory that a library has made as it was imported is of all ranks."""
    at_exit = "import atexit, shutil, tempfile\nMADE = tempfile.mkdtemp()\natexit.register(shutil.rmtree, MADE)\n"
    ends = "atexit.register(lambda: print('the run has ended; its files', *map(os.path.exists, [MADE])))\n"
    first = "atexit.register(lambda: os.path.exists(MADE) or print('removed'))\n"
    ended, ranks = looks(QUIET + first.join(["import atexit\n", at_exit]) + ends)
    assert are_forked(ranks)
    assert ended.out.count("the run has ended; its files True\n") == 2
    assert "removed" not in ended.out


def test_a_module_of_the_users_that_has_a_librarys_name_is_the_users_in_each_rank(warm, tmp_path):
    (tmp_path / "yaml.py").write_text("WHO = 'mine'\n")  # flytekit imports the installed one
    (tmp_path / "own_names.py").write_text(OWN_NAMES)
    ended = warm.run("own_names:who", tmp_path / "job", kind="execute", path=[tmp_path])
    assert uploaded_output(ended) == "mine"
    assert "modules of the task's are named as libraries that are imported already: yaml" in ended.err


def test_a_copy_of_this_package_among_the_users_code_is_not_what_ranks_and_checks_run(warm, tmp_path):
    """What is registered from a repository that has one holds the part of it that registration has imported."""
    (tmp_path / "flytekitplugins_safedist").mkdir()
    (tmp_path / "flytekitplugins_safedist" / "__init__.py").write_text("raise ImportError('a part of another version')")
    (tmp_path / "in_its_repository.py").write_text(IN_ITS_REPOSITORY)
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    ended = warm.run("in_its_repository:who", tmp_path / "job", kind="execute", path=[tmp_path], environment=path)
    assert uploaded_output(ended) == str(ROOT / "flytekitplugins_safedist" / "__init__.py")
    assert re.search(r"preflight: .* 1 node\(s\): ", ended.err), ended.err
