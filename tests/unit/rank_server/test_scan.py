"""What is found of the user's imports, by reading alone."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flytekitplugins_safedist.rank_server.launch import NEEDED, is_installed, path_for_libraries
from flytekitplugins_safedist.rank_server.scan import Scan, scan

Project = Callable[..., Scan]
INSTALLED = ("pandas", "transformers", "datasets", "polars", "simplejson", "google.cloud.storage", "docker")
TASK = "@task(task_config=x)\ndef f():\n"
"""The one that is run."""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Scans a project of these files, from ``train.py`` on; some libraries are installed."""
    installed, own = tmp_path / "lib" / "site-packages", tmp_path / "project"
    for name in INSTALLED:
        package = installed.joinpath(*name.split("."))
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise AssertionError('nothing is executed')")
        (package / "part.py").write_text("import nothing_that_is_the_users")

    def found(train: str, *, script: bool = False, **files: str) -> Scan:
        for name, source in {"train": train, **files}.items():
            file = own.joinpath(*name.split("/")).with_suffix(".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("raise AssertionError('nothing is executed')\n" + source)
        path = [str(own), str(installed), *sys.path]
        modules, files = ([], [str(own / "train.py")]) if script else (["train"], [])
        return scan(modules, files, path, "f")

    return found


def test_imports_of_installed_packages_are_found_as_they_stand(project: Project) -> None:
    expected = [
        ("import pandas as pd, datasets", ["import pandas", "import datasets"]),
        ("from transformers import Trainer, AutoModel as A", ["from transformers import Trainer, AutoModel as A"]),
        ("from pandas import *", ["from pandas import *"]),
        ("import google.cloud.storage", ["import google.cloud.storage"]),
        ("import os, sys, json\nfrom __future__ import annotations\nimport no_such_module", []),
        ("if TYPE_CHECKING:\n    import pandas", []),
        ("if not typing.TYPE_CHECKING:\n    import pandas", ["import pandas"]),
        ("if __name__ == '__main__':\n    import pandas", []),
        ("if sys.version_info >= (3, 10):\n    import pandas\nelse:\n    import polars", ["import pandas"]),
        ("if sys.platform == 'win32':\n    import polars", []),
        ("if DEBUG:\n    import polars\nimport pandas", ["import pandas"]),
        ("with suppress(ImportError), warnings.catch_warnings():\n    import pandas", ["import pandas"]),
        ("with patch.dict(os.environ, HF_HOME='/mine'):\n    import polars\nimport pandas", ["import pandas"]),
        ("def f():\n    import polars\nclass C:\n    import polars", []),
        (f"{TASK}    import datasets\n    def g():\n        import polars", ["import datasets"]),
        (f"@flytekit.{TASK[1:]}    import datasets\nimport pandas", ["import pandas", "import datasets"]),
        ("@task(task_config=x)\ndef another():\n    import datasets", []),
        (f"@sets_a_variable\n{TASK}    import datasets", []),
        (f"{TASK}    import datasets".replace("task", "my_task"), ["import datasets"]),
        (f"{TASK}    'text'\n    import os, docker\n    g()\n    import pandas", ["import docker"]),
        (f"{TASK}    os.environ['HF_HOME'] = '/mine'\n    import transformers", []),
        (
            "try:\n    import simplejson as json\nexcept ImportError:\n    import docker",
            ["try:\n import simplejson\nexcept Exception:\n import docker"],
        ),
        (
            "try:\n    import pandas\nexcept ImportError:\n    x = None\nelse:\n    import docker",
            ["import pandas", "import docker"],
        ),
        ("x = '\\", []),
    ]
    assert [(source, list(project(source).steps)) for source, _ in expected] == expected


def test_what_the_users_own_modules_import_comes_where_they_are_imported(project: Project) -> None:
    found = project(
        "import pandas\nimport model\nfrom pack import inner, thing\nimport polars",
        model="import transformers\nimport train",
        **{"pack/__init__": "import docker", "pack/deeper": "import datasets"},
        **{"pack/inner": "from . import deeper\nfrom .. import nowhere"},
    )
    libraries = ["pandas", "transformers", "docker", "datasets", "polars"]
    assert list(found.steps) == [f"import {name}" for name in libraries]


@pytest.mark.parametrize("script", [True, False])
def test_a_task_of_another_file_is_not_the_one_that_is_run_though_it_has_its_name(
    project: Project, script: bool
) -> None:
    train, model = f"import model\n{TASK}    import docker", f"import datasets\n{TASK}    import polars"
    assert list(project(train, script=script, model=model).steps) == ["import datasets", "import docker"]


def test_a_module_of_the_users_comes_before_an_installed_one_of_its_name_as_the_path_has_it(project: Project) -> None:
    assert list(project("import pandas, docker", docker="WHO = 'mine'").steps) == ["import pandas"]


@pytest.mark.parametrize(
    ("source", "step"),
    [
        ("os.environ['HF_HOME'] = '/mine'", ("HF_HOME", "/mine", False)),
        ("environ.setdefault('HF_HOME', '/mine')", ("HF_HOME", "/mine", True)),
        ("if 'HF_HOME' not in os.environ:\n    os.environ['HF_HOME'] = '/mine'", None),
        ("for name in ('vendor',):\n    sys.path.append(name)", None),
        ("os.environ['HF_HOME'] += 'x'", None),
        ("os.environ['HF_HOME'] = str(1)", None),
        ("os.environ.update(HF_HOME='/mine')", None),
        ("os.environ.pop('HF_HOME', None)", None),
        ("del os.environ['HF_HOME']", None),
        ("x = os.environ.setdefault('HF_HOME', '/mine')", None),
        ("os.putenv('HF_HOME', '/mine')", None),
        ("load_dotenv()", None),
        ("gevent.monkey.patch_all()", None),
        ("sys.path.insert(0, 'vendor')", None),
        ("sys.path += ['vendor']", None),
        ("sys.path = []", None),
        ("sys.modules['pandas'] = None", None),
        ("torch = importlib.import_module('torch')", None),
    ],
)
def test_a_constant_variable_is_set_for_what_follows_and_any_other_change_ends_the_reading(
    project: Project, source: str, step: tuple[str, str, bool] | None
) -> None:
    found = project(f"import pandas\n{source}\nimport datasets")
    if step is not None:
        assert list(found.steps) == ["import pandas", step, "import datasets"]
        assert not found.stopped
    else:
        assert list(found.steps) == ["import pandas"]
        assert found.stopped.startswith("train.py, line 3: ")


def test_what_comes_after_a_change_in_a_helper_is_left_to_the_ranks_too(project: Project) -> None:
    found = project(
        "import pandas\nimport helper\nimport datasets", helper="import sys\nsys.path.append('x')\nimport polars"
    )
    assert list(found.steps) == ["import pandas"]
    assert found.stopped.startswith("helper.py, line 3: sys.path is changed")


def test_what_changes_no_import_ends_nothing(project: Project) -> None:
    reads = "HOME = os.environ['HOME'], os.environ.get('X'), os.getenv('Y'), {**os.environ}"
    others = "sys.argv = []\nsys.dont_write_bytecode = True\nx = sys.path[0]"
    later = "def f():\n    os.environ['X'] = '1'\ng = lambda: sys.path.append('x')"
    assert list(project(f"{reads}\n{others}\n{later}\nimport pandas").steps) == ["import pandas"]


def test_a_file_is_read_once_more_where_python_itself_could_not(project: Project, monkeypatch) -> None:
    """Two threads that call tasks have met it: Python 3.11 counts how deep it is in a tree for all of them at once."""
    parse, mismatches = ast.parse, [SystemError("AST constructor recursion depth mismatch (before=45, after=40)")] * 2

    def parsed(source: bytes) -> ast.Module:
        if mismatches:
            raise mismatches.pop()
        return parse(source)

    with monkeypatch.context() as for_now:
        for_now.setattr(ast, "parse", parsed)
        steps = project("import pandas").steps
    assert steps == ("import pandas",)


def test_what_an_installer_has_put_somewhere_is_installed(tmp_path: Path) -> None:
    target, own = tmp_path / "target", tmp_path / "own"
    (target / "weather-1.0.dist-info").mkdir(parents=True)
    own.mkdir()
    assert is_installed(str(target))
    assert not is_installed(str(own))
    assert is_installed(str(Path(sys.executable).parents[1] / "lib" / "python3.11" / "site-packages"))
    path = path_for_libraries(["", str(own), str(target), *sys.path])
    assert path[0] == str(target)
    assert str(own) not in path
    assert "" not in path


def test_the_libraries_that_every_rank_needs_are_found_wherever_they_lie_behind_all_others(
    tmp_path: Path,
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "resource.py").write_text("raise AssertionError('of the user')")
    path = path_for_libraries([str(tmp_path), *sys.path])
    assert "torch" in NEEDED
    assert path.index(str(tmp_path)) > max(at for at, each in enumerate(path) if is_installed(each))
