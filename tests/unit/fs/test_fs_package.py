from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import flytekitplugins_safedist.fs as fs
from flytekitplugins_safedist import errors


def _subclasses(cls: type) -> list[type]:
    return [cls, *(sub for child in cls.__subclasses__() for sub in _subclasses(child))]


@pytest.mark.parametrize("cls", _subclasses(errors.FsError))
def test_every_error_survives_pickling_with_its_facts(cls):
    error = cls("what", where={"path": "p"}, seen=1, expected=2, hint="next")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == str(error)
    assert (again.where, again.seen, again.hint) == (error.where, 1, "next")


RESULTS = [
    fs.Identity(rank=1, world_size=2, local_rank=1, local_world_size=2),
    fs.SharedScope("node", ((0, 1), (2, 3)), Path("/data"), 2),
    fs.Entry(1, 0, 7, {"loss": 0.5}),
    fs.Progress(1, None, 0.5),
]


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: type(result).__name__)
def test_every_result_survives_pickling(result):
    assert pickle.loads(pickle.dumps(result)) == result


@pytest.mark.parametrize("name", fs.__all__)
def test_every_public_name_is_there_and_has_a_docstring(name):
    value = getattr(fs, name)
    assert value.__doc__
    assert value.__name__ == name, "a function, not the module of the same name"


def test_importing_all_of_it_imports_neither_torch_nor_horovod_nor_flytekit():
    code = (
        "import sys; from flytekitplugins_safedist.fs import *; "
        "print([m for m in ('torch', 'horovod', 'flytekit', 'fsspec', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("ask", [fs.sweep, lambda place: list(fs.merge_logs(place))], ids=["sweep", "merge_logs"])
def test_a_directory_that_cannot_be_listed_is_our_error(tmp_path, ask):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.PathBlockedError):
        ask(tmp_path / "file")
