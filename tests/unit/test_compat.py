"""What is private to torch and flytekit: there in the versions tested, and missed with a word where it is not."""

from __future__ import annotations

import ast
import pickle
import re
import warnings
from importlib import metadata
from types import SimpleNamespace

import pytest

from flytekitplugins_safedist.compat import TESTED, gone, lookup
from flytekitplugins_safedist.compat import flytekit as flytekit_inside
from flytekitplugins_safedist.errors import IncompatibleVersionError, SafedistError
from tests.unit.test_house import MODULES, SOURCE, nodes

LIBRARIES = ["flytekit", "torch", "horovod"]  # those of the modules in compat


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_name_that_is_gone_is_missed_with_the_version_seen_and_those_tested(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: f"99 of {name}")  # not each is installed everywhere
    with pytest.raises(IncompatibleVersionError) as caught:
        lookup(SimpleNamespace(there=1), "_not_there", of=library)

    said = str(caught.value)
    assert "SimpleNamespace._not_there" in said
    assert f"seen: {library} 99 of {library}" in said
    assert f"expected: {library} {', '.join(TESTED[library])} (tested)" in said
    assert str(pickle.loads(pickle.dumps(caught.value))) == said


def test_a_name_that_is_there_is_what_it_is_also_when_that_is_nothing() -> None:
    assert lookup(SimpleNamespace(_here=None), "_here", of="flytekit") is None


def test_a_library_without_metadata_is_named_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_of_it(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", none_of_it)
    assert "seen: torch of an unknown version" in str(gone("torch.nothing", of="torch"))


# --- and nowhere else -----------------------------------------------------------------------------------------------
ELSEWHERE = [path for path in MODULES if path.parent.name != "compat"]


def passed_over(source: str) -> list[str]:
    """Private names that a module takes from an object, or gives up, without a word."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            name = node.args[1]
            if isinstance(name, ast.Constant) and re.match("_(?!_)", str(name.value)):  # two: Python's own
                found.append(str(name.value))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in TESTED:
            found += [alias.name for alias in node.names if alias.name.startswith("_")]
    return found


def looked_up() -> set[str]:
    """The private names that the two modules look up, those that we override apart."""
    names = set()
    for path in (SOURCE / "compat").glob("*.py"):
        for node in nodes(path.read_text()):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "lookup":
                names |= {str(each.value) for each in node.args if isinstance(each, ast.Constant)}
    return {name for name in names if name.startswith("_") and name != "_put"}


def test_a_private_name_that_is_passed_over_would_be_seen() -> None:
    source = 'from torch.x import _y, z\nfrom os import _exit\na = getattr(b, "_c", None)\nd = getattr(e, "f", None)\n'
    assert passed_over(source) == ["_y", "_c"]
    assert {"_checkpoint", "_dispatch_execute"} <= looked_up()


def test_no_other_module_takes_private_names_of_torch_or_flytekit() -> None:
    wrong = {path.name: passed_over(path.read_text()) for path in ELSEWHERE}
    assert {name: names for name, names in wrong.items() if names} == {}
    names = looked_up()
    used = {
        (path.name, node.attr)
        for path in ELSEWHERE
        for node in nodes(path.read_text())
        if isinstance(node, ast.Attribute) and node.attr in names
    }
    assert used == set()


def test_what_we_override_is_there_and_missed_when_it_is_not() -> None:
    from flytekit.core.python_function_task import PythonFunctionTask

    flytekit_inside.require_hooks(PythonFunctionTask)
    with pytest.raises(IncompatibleVersionError, match="no longer has something that safedist relies on"):
        flytekit_inside.require_hooks(SafedistError)


def test_a_context_without_its_private_names_is_no_context_without_a_checkpoint() -> None:
    assert flytekit_inside.checkpoint_places(SimpleNamespace(_checkpoint=None)) == (None, None)
    whole = SimpleNamespace(_checkpoint_dest="s3://to", _checkpoint_src=None)
    assert flytekit_inside.checkpoint_places(SimpleNamespace(_checkpoint=whole)) == ("s3://to", None)
    for less in (SimpleNamespace(), SimpleNamespace(_checkpoint=SimpleNamespace(_checkpoint_dest="s3://to"))):
        with pytest.raises(IncompatibleVersionError, match="_checkpoint"):
            flytekit_inside.checkpoint_places(less)
    with pytest.raises(IncompatibleVersionError, match="_execution_metadata"):
        flytekit_inside.execution_metadata(SimpleNamespace())


def test_of_the_users_filters_for_warnings_only_those_that_make_errors_change() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="not this one")
        flytekit_inside.no_warning_is_an_error()
        warnings.warn("not this one", UserWarning, stacklevel=1)
        warnings.warn("this one", UserWarning, stacklevel=1)
    assert [str(each.message) for each in shown] == ["this one"]
