from __future__ import annotations

import pickle
import subprocess
import sys

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
