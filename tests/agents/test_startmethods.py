"""Ranks forked from a preloaded process, and ranks as fresh interpreters, are alike to the user's function."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.harness.procs import ROOT, uploaded_error


def test_preload_and_spawn_give_the_same_results(warm, tmp_path):
    """And what a module puts in the place of the standard streams, with only a ``write``, takes what ranks say."""
    values = []
    for method in ("preloaded", "spawned"):
        ended = warm.run(f"job_alike:same_{method}", tmp_path / method, inputs={"x": [0.5, 1.5]})
        values.append(ended.value)
        assert values[-1].pop("cwd") == str(ended.files)
        assert f"start_method {'preload' if method == 'preloaded' else 'spawn'}" in ended.err
        # Once more by who has called, as it passes.
        noted = {f"[rank {rank}] noted: noted: seen by {rank}" for rank in (0, 1)}
        assert noted <= set(ended.out.splitlines()), ended.out
    assert values[0] == values[1]
    assert values[0]["sum"] == "2.0"
    assert values[0]["replicas guarded"] == "True"
    assert values[0]["OPENBLAS_NUM_THREADS"] == "unset", "what importing needed is not the rank's"


@pytest.mark.parametrize("how", ["ignores", "asyncio"])
def test_a_module_that_takes_signals_for_itself_does_not_hide_the_end_of_its_ranks(warm, tmp_path, how):
    ended = warm.run("job_signals:still_ends", tmp_path / "job", environment={"TEST_HOW": how})
    assert ended.value == "rank 0"
    assert "start_method preload" in ended.err


@pytest.mark.end("not ready", "USER:RanksNotReady")
def test_an_import_that_does_not_end_is_told_with_where_it_stands(warm, tmp_path, as_promised):
    ended = warm.run("job_late:never_begins", tmp_path / "job", kind="execute")
    as_promised(ended)
    text = uploaded_error(ended).message
    assert "have not begun the task's function in time" in text
    assert "still importing job_late after 6 s" in text
    assert "threading.Event().wait()  # for ever" in text or re.search(r"job_late.py\", line 13", text), text
    assert "rank(s) 0, 1 import job_late: 5 s so far" in ended.err
    assert ended.scratch == []


SCRIPT = """
import os
from dataclasses import dataclass, fields, MISSING
from enum import Enum
from typing import Optional
from flytekit import task
from flytekitplugins_safedist import SafeTorch, current_rank

with open("imported", "a") as noted:
    noted.write(f"{__name__} ")

class Kind(Enum):
    A = "a"
    B = "b"

@dataclass
class Model:
    kind: Optional[Kind]
    width: int = 3

@dataclass
class Config:
    model: Model

@task(task_config=SafeTorch(nproc_per_node=2))
def train(config: Config) -> int:
    assert [each.default is MISSING for each in fields(Model)] == [True, False]
    assert config.model.kind is Kind.B
    return config.model.width

"""


@pytest.mark.parametrize(
    ("call", "ends"),
    [
        ("if __name__ == '__main__':\n    print('found', train(config=Config(Model(Kind.B))))\n", 0),
        ("print('found', train(config=Config(Model(Kind.B))))\nraise SystemExit(3)\n", 3),
    ],
    ids=["below its guard", "anywhere"],
)
def test_a_script_is_run_by_each_rank_up_to_the_call_of_its_task(warm, tmp_path, call, ends):
    (tmp_path / "script.py").write_text(SCRIPT + call)
    ended = warm.run(f"{tmp_path}/script.py:__main__", tmp_path / "job", kind="main", cwd=tmp_path)
    assert ended.code == ends, ended.err
    assert "found 3" in ended.out
    assert sorted((tmp_path / "imported").read_text().split()) == ["__main__", "__mp_main__", "__mp_main__"]


FLAGS = """
import sys
from flytekit import task
from flytekitplugins_safedist import SafeTorch

def flags() -> str:
    return str((sys.flags.bytes_warning, sys.warnoptions))

@task(task_config=SafeTorch())
def forked() -> str:
    return flags()

@task(task_config=SafeTorch(start_method="spawn"))
def spawned() -> str:
    return flags()

if __name__ == "__main__":
    print(forked() == spawned() == flags())
"""


def test_ranks_have_the_interpreters_own_options(tmp_path):
    (tmp_path / "script.py").write_text(FLAGS)
    options = ["-b", "-W", "ignore::FutureWarning"]  # not -O, for which all of torch would be compiled anew
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *options, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "True\n" in done.stdout, done.stdout + done.stderr


BY_VALUE = """
import linecache
source = open("cells.py").read()
linecache.cache["<cell 1>"] = len(source), None, source.splitlines(True), "<cell 1>"
exec(compile(source, "<cell 1>", "exec"))
del __file__
print("found", train(config=Config(Model(Kind.B))))
train(config=Config(Model(Kind.A)))
"""


@pytest.mark.parametrize("first", ["", "from __future__ import annotations"])
def test_without_a_file_all_classes_of_main_travel_by_value(warm, tmp_path, first):
    """As in a notebook: what the function names, and what its types name in turn, be it as text."""
    (tmp_path / "cells.py").write_text(first + SCRIPT)
    (tmp_path / "notebook.py").write_text(BY_VALUE)
    ended = warm.run(f"{tmp_path}/notebook.py:__main__", tmp_path / "job", kind="main", cwd=tmp_path)
    assert "found 3" in ended.out, ended.err
    assert "    assert config.model.kind is Kind.B\n" in ended.out, "a traceback of a rank has the cell's lines"
    assert (tmp_path / "imported").read_text().split() == ["__main__"]


LARGE = """
from flytekit import task
from flytekitplugins_safedist import SafeTorch

DATA = bytes(60_000_000)

def size() -> int:
    return len(DATA)

train = task(size, task_config=SafeTorch(nproc_per_node=1))
print("found", train())
"""


def test_a_task_travels_by_value_with_large_globals(warm, tmp_path):
    (tmp_path / "large.py").write_text(LARGE)
    ended = warm.run(f"{tmp_path}/large.py:__main__", tmp_path / "job", kind="main", cwd=tmp_path)
    assert "found 60000000" in ended.out, ended.err


@pytest.mark.parametrize(
    ("does", "last", "said", "to_do"),
    [
        ("1", "FOUND = train()", "called as a rank imports its module [module=calls]", "below: if __name__ =="),
        ("other()", "", "called in a rank [rank=0]", "call it from a workflow, beside this task; or its function"),
    ],
    ids=["as it is imported", "in a rank"],
)
def test_a_task_that_is_called_where_ranks_run_is_told_so(warm, tmp_path, does, last, said, to_do):
    source = "from flytekit import task\nfrom flytekitplugins_safedist import SafeTorch\n"
    for name, body in (("other", "1"), ("train", does)):
        source += f"@task(task_config=SafeTorch())\ndef {name}() -> int:\n    return {body}\n"
    (tmp_path / "calls.py").write_text(f"{source}{last}\n")
    ended = warm.run("calls:train", tmp_path / "job", path=[tmp_path])
    assert said in ended.err
    assert to_do in ended.err


SPAWNING = """
import multiprocessing
from flytekit import task
from flytekitplugins_safedist import SafeTorch

def square(number: int) -> int:
    return number ** 2

@task(task_config=SafeTorch(nproc_per_node=1))
def train() -> int:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return sum(pool.map(square, range(4)))

if __name__ == "__main__":
    print("found", train())
"""


def test_processes_that_a_rank_spawns_find_what_a_module_defines_that_is_run_as_a_script(warm, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").touch()
    # What only the module finds: a spawned process that took it for a file would not.
    (tmp_path / "package/tool.py").write_text(f"from . import __name__ as here\n{SPAWNING}")
    ended = warm.run("package.tool:__main__", tmp_path / "job", kind="module", cwd=tmp_path, path=[tmp_path])
    assert ended.code == 0, ended.err
    assert "found 14" in ended.out
