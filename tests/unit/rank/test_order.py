"""What all ranks of a job are told, and the task by name or by value."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from flytekit import task
from hypothesis import given
from hypothesis import strategies as st

from flytekitplugins_safedist.errors import PayloadError
from flytekitplugins_safedist.plugin.task import SafeTorch
from flytekitplugins_safedist.rank.order import FlyteSnapshot, JobOrder, TaskSource
from flytekitplugins_safedist.rank.task import load, search_path, source_by, source_of

pytestmark = pytest.mark.processes

SNAPSHOT = FlyteSnapshot(
    mode="LOCAL_TASK_EXECUTION",
    raw_output_prefix="/raw/",
    users_raw_output_prefix="/raw",
    output_metadata_prefix=None,
    execution_id=("p", "d", "n"),
    task_id=("proj", "dev", "wf.train", "v7"),
    execution_date="2026-01-02T03:04:05",
    checkpoint_dest=None,
    checkpoint_src=None,
    enable_deck=False,
    serialization=None,
    metadata={},
)


@task(task_config=SafeTorch())
def train(lr: float, epochs: int) -> tuple[float, str]:
    return lr * epochs, "done"


def any_of(kind: type, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Values of a dataclass: all its fields by their types, but for those that are given."""
    return st.builds(kind, **{**dict.fromkeys((each.name for each in dataclasses.fields(kind)), ...), **fields})


PATHS = st.just(Path("/scratch/orders/inputs.pb"))
SECONDS = st.floats(min_value=0, max_value=1e6)


@given(
    any_of(
        JobOrder,
        source=any_of(TaskSource),
        flyte=any_of(FlyteSnapshot),
        cwd=PATHS,
        inputs=PATHS,
        shared_inputs=st.none() | PATHS,
        upload_timeout=SECONDS,
    )
)
def test_an_order_reads_back_equal(original: JobOrder) -> None:
    assert JobOrder.from_dict(json.loads(json.dumps(original.to_dict()))) == original


# --- by name ---------------------------------------------------------------------------------------------------------
def test_a_task_at_module_level_travels_by_name() -> None:
    assert source_of(train, sys.modules) == TaskSource("train", module=__name__)
    assert load(source_of(train, sys.modules)) is train


def test_where_the_working_directory_is_gone_the_error_says_so_and_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(PayloadError, match=r"working directory of this process.*os\.chdir"):
        source_of(train, sys.modules)


def test_a_task_that_its_name_does_not_lead_to_any_more_travels_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    module, renamed = sys.modules[__name__], train
    monkeypatch.setattr(module, "renamed", renamed, raising=False)
    monkeypatch.setattr(module, "train", object())
    assert source_of(renamed, sys.modules).pickled
    monkeypatch.delattr(module, "train")
    assert source_of(renamed, sys.modules).pickled


def test_a_module_that_lacks_the_task_when_a_rank_imports_it_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conditional_tasks.py").write_text("import os\nif os.environ.get('AGENT'):\n    train = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PayloadError) as caught:
        load(TaskSource("train", module="conditional_tasks"))
    assert str(caught.value) == (
        "the task is not in its module when a rank imports it [module=conditional_tasks, task=train, "
        f"file={tmp_path}/conditional_tasks.py] (expected: the same code in the agent and in its ranks). Fix: "
        "do not define the task under a condition that differs between processes"
    )


def test_what_has_the_tasks_name_and_is_none_is_a_clear_error() -> None:
    """Of ``made = task(task_config=...)(body)`` flytekit writes the function's name into a pod's command."""
    source = source_by(FLYTEKITS, ["task-module", __name__, "task-name", "body"], mapped=False)
    with pytest.raises(PayloadError, match=r"is not the task .*task=body\] \(seen: a function\)\. Fix: make @task"):
        load(source)


def body(lr: float, epochs: int) -> float:
    return lr * epochs


def test_what_the_users_module_raises_on_import_comes_through_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_tasks.py").write_text("object().of_mine")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(AttributeError, match="of_mine"):
        load(TaskSource("train", module="broken_tasks"))


# --- by value --------------------------------------------------------------------------------------------------------
def test_flytekit_refuses_nested_functions_outside_test_modules_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nested_users.py").write_text("def make():\n    def inner() -> int: return 1\n    return inner\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    make = importlib.import_module("nested_users").make
    with pytest.raises(ValueError, match="cannot be a nested/inner or local function"):
        task(task_config=SafeTorch())(make())


SCRIPT = """
import json, sys
from pathlib import Path
from flytekit import task
from flytekitplugins_safedist.plugin.task import SafeTorch
from flytekitplugins_safedist.rank.task import search_path, source_of
sys.path.insert(0, sys.argv[1] + "/project")
from test_users import nested_one, anonymous, plain
sys.path.pop(0)  # as pyflyte run does once the user's file is imported

OFFSET = 100

@task(task_config=SafeTorch())
def main(x: int) -> int:
    return helper(x) + OFFSET

def helper(x: int) -> int:
    return 2 * x

if __name__ == "__main__":
    for each, name in ((main, "main"), (nested_one, "nested"), (anonymous, "anonymous"), (plain, "plain")):
        path = search_path(each.task_function.__module__, sys.modules, sys.path)
        Path(sys.argv[1], name).write_text(json.dumps([source_of(each, sys.modules).to_dict(), path]))
"""

USERS = """
from flytekit import task
from flytekitplugins_safedist.plugin.task import SafeTorch
import dataclasses
import users_helper

class Model:
    def value(self, x): return users_helper.twice(x)

def make(offset):
    @dataclasses.dataclass
    class Local:
        size: int

    @task(task_config=SafeTorch())
    def nested(x: int) -> int:
        assert dataclasses.fields(Local)[0].default is dataclasses.MISSING
        return Model().value(x) + offset
    return nested

nested_one = make(1000)
anonymous = task(task_config=SafeTorch())(lambda: Model().value(21) + 7)

@task(task_config=SafeTorch())
def plain(x: int) -> int:
    return Model().value(x)
"""

# One process for each: what one of them leaves in sys.modules must not help the next.
RANKS = """
import json, os, sys
from pathlib import Path
from flytekitplugins_safedist.rank.order import TaskSource
from flytekitplugins_safedist.rank.task import load
import flytekitplugins_safedist.plugin.task
for name in sys.argv[2:]:
    pid = os.fork()
    if pid:
        assert os.waitpid(pid, 0)[1] == 0, name
        continue
    told, path = json.loads(Path(sys.argv[1], name).read_text())
    source = TaskSource.from_dict(told)
    sys.path[:] = path
    how = next(each for each in ("module", "script", "pickled") if getattr(source, each) is not None)
    function = load(source).task_function
    print(json.dumps([name, how, function(*([21] if name != "anonymous" else [])), function.__module__]), flush=True)
    os._exit(0)
"""


def test_tasks_of_main_nested_ones_and_lambdas_work_in_another_process(warm, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "test_users.py").write_text(USERS)
    (tmp_path / "project" / "users_helper.py").write_text("def twice(x): return 2 * x\n")

    def python(name: str, code: str, *arguments: str) -> str:
        (tmp_path / name).write_text(code)
        options = {"kind": "main", "libraries": False, "arguments": [str(tmp_path), *arguments]}
        done = warm.run(f"{tmp_path / name}:__main__", tmp_path / f"of-{name}", **options)
        assert done.code == 0, done.err
        return done.out

    python("script.py", SCRIPT)
    names = ["main", "nested", "anonymous", "plain"]
    said = [json.loads(line) for line in python("ranks.py", RANKS, *names).splitlines()]
    by = {name: (how, found, module) for name, how, found, module in said}
    assert by == {
        "main": ("script", 142, "__mp_main__"),
        "nested": ("pickled", 1042, "test_users"),
        "anonymous": ("pickled", 49, "test_users"),
        "plain": ("module", 42, "test_users"),
    }


def test_a_function_that_is_not_from_mains_file_travels_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interactive session has run a script before: what comes after is not in it."""
    main = types.ModuleType("__main__")
    main.train = train  # type: ignore[attr-defined]
    monkeypatch.setattr(train.task_function, "__module__", "__main__")
    for file, travels in ((__file__, False), ("/ran/before.py", True)):
        main.__file__ = file
        assert (source_of(train, {**sys.modules, "__main__": main}).pickled is not None) == travels


# --- in a pod --------------------------------------------------------------------------------------------------------
FLYTEKITS = "flytekit.core.python_auto_container.default_task_resolver"


def test_in_a_pod_flytekits_resolver_finds_the_task() -> None:
    source = source_by(FLYTEKITS, ["task-module", __name__, "task-name", "train"], mapped=False)
    assert load(source) is train
    assert (source.imports, source.shown) == ((__name__,), __name__)


@task(task_config=SafeTorch())
def scaled(lr: float, epochs: int) -> float:
    return lr * epochs


def test_in_a_pod_a_mapped_task_is_found_with_what_is_bound_of_it() -> None:
    inner = ["task-module", __name__, "task-name", "scaled"]
    arguments = ["vars", "lr", "resolver", FLYTEKITS, *inner]
    source = source_by("flytekit.core.array_node_map_task.ArrayNodeMapTaskResolver", arguments, mapped=True)
    entity = load(source)
    assert entity.python_function_task is scaled
    assert entity.bound_inputs == {"lr"}
    assert source.imports == (__name__,)


def test_a_resolver_of_the_users_is_scanned_for_its_imports_too() -> None:
    source = source_by("my.resolvers.find", ["task-module", "train"], mapped=False)
    assert source.imports == ("train", "my.resolvers")


def test_a_closure_that_cannot_be_pickled_is_named_with_the_repair() -> None:
    value = threading.Lock()

    @task(task_config=SafeTorch())
    def inner() -> None:
        print(value)

    with pytest.raises(PayloadError) as caught:
        source_of(inner, sys.modules)
    text = str(caught.value)
    assert text.startswith(
        f"the task function can neither be imported by its ranks nor pickled for them [task={inner.name}, "
        f"module={__name__}] (seen: "
    )
    assert "cannot pickle '_thread.lock' object" in text
    assert text.endswith(
        "expected: a function at module level, in a module that ranks can import). Fix: move the task (or what "
        "its closure holds: locks, sockets, open files) to module level"
    )


# --- search path -----------------------------------------------------------------------------------------------------
def module_at(path: Path) -> types.ModuleType:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    module = types.ModuleType("any")
    module.__file__ = str(path)
    return module


@pytest.mark.parametrize(
    ("name", "file"),
    [
        *[("wf", "wf.py"), ("pkg.wf", "pkg/wf.py"), ("pkg", "pkg/__init__.py"), ("pkg.sub", "pkg/sub/__init__.py")],
        ("pkg.__init__", "pkg/__init__.py"),  # as pyflyte run has it
    ],
)
def test_the_directory_that_a_module_came_from_is_put_in_front_where_it_is_missing(
    tmp_path: Path, name: str, file: str
) -> None:
    modules = {name: module_at(tmp_path / file)}
    root = str(tmp_path.resolve())
    assert search_path(name, modules, ["/elsewhere"]) == (root, "/elsewhere")
    assert search_path(name, modules, ["/elsewhere", root]) == ("/elsewhere", root)


def test_a_directory_that_is_there_under_another_name_is_not_put_in_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {"wf": module_at(tmp_path / "real" / "wf.py")}
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert search_path("wf", modules, [str(tmp_path / "link")]) == (str(tmp_path / "link"),)
    monkeypatch.chdir(tmp_path / "real")
    assert search_path("wf", modules, [""]) == ("",)


def test_modules_without_a_file_leave_the_path_as_it_is() -> None:
    assert search_path(None, {}, ["/a"]) == ("/a",)
    assert search_path("missing", {}, ["/a"]) == ("/a",)
    assert search_path("ns", {"ns": types.ModuleType("ns")}, ["/a"]) == ("/a",)
